"""Columns as tensors: NumPy and pyarrow on the host, CUDA on a stand-in for its driver."""

import ctypes as c
import gc
import os
import subprocess
import sys
import textwrap
import unittest

import array_api_strict
import arrow_device as ad
import numpy as np
import pyarrow as pa
from capsules import api
from test_capsules import Balanced

FIXED = [np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64, np.float16, np.float32, np.float64]


def bool8(values):
    return pa.ExtensionArray.from_storage(pa.bool8(), pa.array(values, pa.bool_()).cast(pa.int8()))


class BeforeVersions:
    """An object as of DLPack before 1.0."""

    def __init__(self, inner):
        self.inner = inner

    def __dlpack_device__(self):
        return self.inner.__dlpack_device__()

    def __dlpack__(self, stream=None):
        return self.inner.__dlpack__(stream=stream)


class Out(Balanced):
    def test_numpy_reads_every_fixed_type(self):
        for kind in FIXED:
            values = np.arange(10).astype(kind)
            column = ad.Array(pa.array(values))
            for tensor, expected in ((column, values), (column.slice(3, 4), values[3:7]), (column.slice(10, 0), values[:0])):
                for form in (tensor, BeforeVersions(tensor)):
                    seen = np.from_dlpack(form)
                    self.assertEqual(seen.dtype, values.dtype)
                    np.testing.assert_array_equal(seen, expected)
                    del seen

    def test_other_types(self):
        times = pa.array([1, 2, 3], pa.timestamp("us"))
        np.testing.assert_array_equal(np.from_dlpack(ad.Array(times)), [1, 2, 3])
        pairs = pa.FixedSizeListArray.from_arrays(pa.array(range(6), pa.int16()), 2)
        np.testing.assert_array_equal(np.from_dlpack(ad.Array(pairs)), [[0, 1], [2, 3], [4, 5]])
        np.testing.assert_array_equal(np.from_dlpack(ad.Array(pairs).slice(1, 2)), [[2, 3], [4, 5]])

    def test_nothing_is_copied_nor_writable(self):
        sent = pa.array([1, 2, 3])
        seen = np.from_dlpack(ad.Array(sent))
        self.assertEqual(seen.ctypes.data, sent.buffers()[1].address)
        self.assertFalse(seen.flags.writeable)

    def test_a_copy_is_writable(self):
        sent = pa.array([1, 2, 3])
        seen = np.from_dlpack(ad.Array(sent).slice(1, 2), copy=True)
        seen[0] = 7
        self.assertEqual((seen.tolist(), sent.to_pylist()), ([7, 3], [1, 2, 3]))
        again = array_api_strict.from_dlpack(ad.Array(sent), copy=True)
        again[0] = 7
        self.assertEqual((int(again[0]), sent.to_pylist()), (7, [1, 2, 3]))
        for version, name in ((None, b"dltensor"), ((1, 0), b"dltensor_versioned")):
            for there in (ad.Array(sent), ad.Array(sent).to("sim")):
                self.assertEqual(api.PyCapsule_GetName(there.__dlpack__(max_version=version, copy=True)), name)

    def test_booleans_of_a_byte(self):
        column = ad.Array(bool8([True, False, True]))
        seen = np.from_dlpack(column.slice(1, 2))
        self.assertEqual((seen.dtype, seen.tolist()), (np.bool_, [False, True]))
        self.assertEqual(np.from_dlpack(column, copy=True).dtype, np.bool_)
        there = ad.Array.from_dlpack(column.to("sim"))
        self.assertTrue(pa.array(there.to("cpu")).equals(bool8([True, False, True])))
        pairs = pa.FixedSizeListArray.from_arrays(bool8([True, False, True, True]), 2)
        np.testing.assert_array_equal(np.from_dlpack(ad.Array(pairs)), np.array([[True, False], [True, True]]))

    def test_the_memory_lives_as_long_as_the_tensor(self):
        seen = np.from_dlpack(ad.Array(pa.array([1, 2, 3])))
        gc.collect()
        self.assertGreater(pa.total_allocated_bytes(), self.host)
        self.assertEqual(seen.tolist(), [1, 2, 3])

    def test_capsules(self):
        column = ad.Array(pa.array([1, 2, 3]))
        self.assertEqual(column.__dlpack_device__(), (1, 0))
        for version, name in ((None, b"dltensor"), ((0, 8), b"dltensor"), ((1, 0), b"dltensor_versioned")):
            # Nobody takes it: its destructor deletes the tensor.
            self.assertEqual(api.PyCapsule_GetName(column.__dlpack__(max_version=version)), name)

    def test_what_is_refused(self):
        column = ad.Array(pa.array([1, 2, 3]))
        with self.assertRaisesRegex(BufferError, "is on cpu"):
            column.__dlpack__(dl_device=(2, 0))
        with self.assertRaisesRegex(ValueError, "on the CPU only None"):
            column.__dlpack__(stream=1)
        for copy in (None, True):
            for wrong, text in (
                (pa.array([1, None]), "null"),
                (pa.array([True, False]), "booleans"),
                (pa.array(["a"]), "Utf8 has no type in DLPack"),
                (pa.array([1], pa.decimal128(5, 0)), "Decimal128.* has no type"),
                (pa.nulls(1), "Null has no type"),
            ):
                # Consumers take another way then.
                with self.assertRaisesRegex(BufferError, text):
                    ad.Array(wrong).__dlpack__(copy=copy)
        column.__dlpack__(copy=False, dl_device=(1, 0))
        self.assertFalse(hasattr(column, "__cuda_array_interface__"))

    def test_a_device_that_numpy_does_not_know(self):
        column = ad.Array(pa.array([1, 2, 3])).to("sim")
        self.assertEqual(column.__dlpack_device__(), (12, 0))
        with self.assertRaises((BufferError, RuntimeError)):
            np.from_dlpack(column)
        again = ad.Array.from_dlpack(column)
        self.assertEqual(pa.array(again.to("cpu")).to_pylist(), [1, 2, 3])


class In(Balanced):
    def test_numpy_gives_every_fixed_type(self):
        for kind in FIXED:
            values = np.arange(10).astype(kind)
            for sent in (values, values[2:7], values[:0], BeforeVersions(values)):
                column = ad.Array.from_dlpack(sent)
                self.assertTrue(pa.array(ad.Array.from_dlpack(sent, copy=False)).equals(pa.array(column)), kind)
                expected = sent.inner if isinstance(sent, BeforeVersions) else sent
                self.assertTrue(pa.array(column).equals(pa.array(expected)), kind)

    def test_other_shapes(self):
        table = np.arange(6, dtype=np.int32).reshape(3, 2)
        self.assertEqual(pa.array(ad.Array.from_dlpack(table)).to_pylist(), [[0, 1], [2, 3], [4, 5]])
        sent = np.array([[True, False], [False, True]])
        self.assertTrue(pa.array(ad.Array.from_dlpack(sent[0])).equals(bool8([True, False])))
        self.assertEqual(pa.array(ad.Array.from_dlpack(sent)).type.value_type, pa.bool8())
        np.testing.assert_array_equal(np.from_dlpack(ad.Array.from_dlpack(sent)), sent)

    def test_pyarrow(self):
        for sent in (pa.array([1, 2, 3]), pa.array([1.5, 2.5, 3.5], pa.float32()).slice(1), pa.array([], pa.int8())):
            self.assertTrue(pa.array(ad.Array.from_dlpack(sent)).equals(sent))

    def test_what_is_written_later_is_not_seen(self):
        base = np.arange(10)
        view = base[:]
        view.flags.writeable = False
        before = sys.getrefcount(base), sys.getrefcount(view)
        columns = [ad.Array.from_dlpack(sent) for sent in (base, view, BeforeVersions(base), base.reshape(5, 2))]
        # The copy is all that is kept.
        self.assertEqual((sys.getrefcount(base), sys.getrefcount(view)), before)
        seen = [pa.array(column) for column in columns]
        base[:] = -1
        for array in seen[:3]:
            self.assertEqual(array.to_pylist(), list(range(10)))
        self.assertEqual(seen[3].to_pylist(), [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]])

    def test_a_copy_of_the_producers_is_not_copied_again(self):
        sent = Copied(np.arange(10))
        seen = pa.array(ad.Array.from_dlpack(sent))
        self.assertEqual(seen.buffers()[1].address, sent.address)
        self.assertNotEqual(sent.address, sent.inner.ctypes.data)
        self.assertEqual(seen.to_pylist(), list(range(10)))

    def test_nothing_is_copied_without_leave(self):
        sent = np.arange(10)
        for form in (sent, BeforeVersions(sent)):
            seen = pa.array(ad.Array.from_dlpack(form, copy=False))
            self.assertEqual(seen.buffers()[1].address, sent.ctypes.data)

    def test_the_object_lives_as_long_as_the_column_that_shares_its_memory(self):
        sent = np.arange(10)
        before = sys.getrefcount(sent)
        column = ad.Array.from_dlpack(sent, copy=False)
        self.assertGreater(sys.getrefcount(sent), before)
        slice = column.slice(1, 2)
        del column
        self.assertGreater(sys.getrefcount(sent), before)
        del slice
        self.assertEqual(sys.getrefcount(sent), before)

    def test_what_is_refused(self):
        values = np.arange(12).reshape(3, 4)
        for wrong, text in (
            (values.T, "strides"),
            (values[:, 1:], "strides"),
            (np.arange(6)[::2], "strides"),
            (np.arange(6)[::-1], "strides"),
            (np.array([1j]), "dtype"),
        ):
            before = sys.getrefcount(wrong)
            with self.assertRaisesRegex(ValueError, text):
                ad.Array.from_dlpack(wrong)
            self.assertEqual(sys.getrefcount(wrong), before)
        with self.assertRaisesRegex(TypeError, "__dlpack_device__"):
            ad.Array.from_dlpack([1, 2])

    def test_answers_that_are_no_tensors(self):
        used = np.arange(3).__dlpack__()
        np.from_dlpack(Answers(used))
        for wrong in (None, 3, used, pa.array([1]).__arrow_c_array__()[1]):
            with self.assertRaisesRegex(TypeError, "__dlpack__ returned"):
                ad.Array.from_dlpack(Answers(wrong))
        with self.assertRaisesRegex(NotImplementedError, "rocm:3 is not available"):
            ad.Array.from_dlpack(Answers(None, device=(10, 3)))


class Copied:
    """An object that gives out a copy of its own, and says so."""

    def __init__(self, inner):
        self.inner = inner

    def __dlpack_device__(self):
        return self.inner.__dlpack_device__()

    def __dlpack__(self, **arguments):
        capsule = self.inner.__dlpack__(copy=True, **arguments)
        tensor = api.PyCapsule_GetPointer(capsule, b"dltensor_versioned")
        # `dl_tensor.data` lies behind version, manager_ctx, deleter and flags.
        self.address = c.c_void_p.from_address(tensor + 32).value
        return capsule


class Answers:
    def __init__(self, answer, device=(1, 0)):
        self.answer, self.device = answer, device

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, **_):
        return self.answer


def on_a_stand_in_for_cuda(test: unittest.TestCase, program: str):
    """Runs a program, which prints "done", in a process of its own with a stand-in for the driver library: no GPU takes
    part."""
    environment = dict(os.environ, LD_LIBRARY_PATH=os.environ["ARROW_DEVICE_FAKE_CUDA"])
    program = "import faulthandler; faulthandler.enable()\n" + textwrap.dedent(program)
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=environment
    )
    test.assertEqual((done.returncode, done.stdout, done.stderr), (0, "done\n", ""))


class Cuda(unittest.TestCase):
    def test_on_the_stand_in(self):
        program = """
        import arrow_device as ad, pyarrow as pa
        values = pa.array([1.5, 2.5, 3.5], pa.float32())
        for name, code in (("cuda", 2), ("cuda-managed", 13)):
            column = ad.Array(values).to(name)
            assert column.__dlpack_device__() == (code, 0), column.__dlpack_device__()
            face = column.slice(1, 2).__cuda_array_interface__
            whole = column.__cuda_array_interface__
            assert face["version"] == 3 and face["shape"] == (2,) and face["typestr"] == "<f4", face
            assert face["data"][0] == whole["data"][0] + 4 and face["data"][1] is True, (face, whole)
            assert face["stream"] > 0, face
            for stream in (None, -1, 1, 2, face["stream"]):
                column.__dlpack__(stream=stream, max_version=(1, 0))
            try:
                column.__dlpack__(stream=0)
                raise AssertionError("stream 0 was accepted")
            except ValueError as e:
                assert "either default stream" in str(e), e
            again = ad.Array.from_dlpack(column)
            del column
            assert pa.array(again.to("cpu")).equals(values)
            for wrong in (pa.array([1, None]), pa.array([True]), pa.array(["a"])):
                assert not hasattr(ad.Array(wrong).to(name), "__cuda_array_interface__"), wrong
            assert ad.Array(pa.array([1], pa.uint8())).to(name).__cuda_array_interface__["typestr"] == "|u1"
            flags = pa.ExtensionArray.from_storage(pa.bool8(), pa.array([1, 0], pa.int8()))
            assert ad.Array(flags).to(name).__cuda_array_interface__["typestr"] == "|b1"
            again.__dlpack__(copy=True, stream=face["stream"])
        assert not hasattr(ad.Array(values).to("cuda-host"), "__cuda_array_interface__")
        print("done")
        """
        on_a_stand_in_for_cuda(self, program)

