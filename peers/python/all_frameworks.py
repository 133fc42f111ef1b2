"""Tensors of frameworks whose wheels are large: jax on the CPU, and tvm-ffi, which kernels for GPUs use."""

import importlib.metadata

import arrow_device as ad
import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import tvm_ffi
from test_capsules import Balanced

print(", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("jax", "apache-tvm-ffi")), flush=True)

# jax has 64 bits only if it is asked for them.
jax.config.update("jax_enable_x64", True)
KINDS = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64, np.float16, np.float32, np.float64, np.bool_]


def values(kind):
    flat = (np.arange(12) % 5).astype(kind)
    return flat, flat.reshape(6, 2), flat[:0]


class Jax(Balanced):
    def test_to_it(self):
        for kind in KINDS:
            for sent in values(kind):
                for copy in (None, True):
                    got = jnp.from_dlpack(ad.Array.from_dlpack(sent), copy=copy)
                    self.assertEqual((got.dtype, got.shape), (sent.dtype, sent.shape))
                    np.testing.assert_array_equal(np.asarray(got), sent)

    def test_from_it(self):
        for kind in KINDS:
            for sent in values(kind):
                column = ad.Array.from_dlpack(jnp.asarray(sent)).to("sim").to_host()
                back = np.from_dlpack(column)
                self.assertEqual(back.dtype, sent.dtype)
                np.testing.assert_array_equal(back, sent)

    def test_nulls_are_refused(self):
        with self.assertRaisesRegex(BufferError, "null"):
            jnp.from_dlpack(ad.Array(pa.array([1, None])))


class TvmFfi(Balanced):
    def test_both_ways(self):
        for kind in KINDS:
            for sent in values(kind):
                tensor = tvm_ffi.from_dlpack(ad.Array.from_dlpack(sent))
                self.assertEqual(tuple(tensor.shape), sent.shape)
                np.testing.assert_array_equal(np.from_dlpack(tensor), sent)
                back = ad.Array.from_dlpack(tensor).to("sim").to_host()
                np.testing.assert_array_equal(np.from_dlpack(back), sent)

    def test_a_simulated_device_stays_one(self):
        there = ad.Array(pa.array([1, 2, 3])).to("sim")
        tensor = tvm_ffi.from_dlpack(there)
        back = ad.Array.from_dlpack(tensor)
        self.assertEqual((str(back.device), pa.array(back.to_host()).to_pylist()), ("sim", [1, 2, 3]))
