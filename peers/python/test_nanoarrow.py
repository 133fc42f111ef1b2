"""nanoarrow as a peer for devices that are not here: it takes any device type and gives it on as it is. It never moves
a struct out of its capsule, where pyarrow always does."""

import ctypes as c
import errno
import gc
import re

import nanoarrow as na
import nanoarrow.device as na_device
import pyarrow as pa

import rust
from abi import (
    CPU, CUDA, CUDA_HOST, CUDA_MANAGED, EXT_DEV, HEXAGON, METAL, ONEAPI, OPENCL, ROCM, ROCM_HOST, VPI, VULKAN, WEBGPU, ArrowArray,
)  # fmt: skip
from capsules import Exporter, opened
from peer_case import Given, PeerCase, array_in, array_out, release, released
from rust import ALL, CASES, INT, STRUCT, TYPES

NAMES = {
    CPU: "cpu", CUDA: "cuda", CUDA_HOST: "cuda-host", OPENCL: "opencl", VULKAN: "vulkan", METAL: "metal", VPI: "vpi",
    ROCM: "rocm", ROCM_HOST: "rocm-host", EXT_DEV: "sim", CUDA_MANAGED: "cuda-managed", ONEAPI: "oneapi",
    WEBGPU: "webgpu", HEXAGON: "hexagon",
}  # fmt: skip
UNNAMED = [0, 5, 99, -5, 2**31 - 1, -(2**31)]
# No machine has as many.
ID = 77
# What Metal calls a GPU of Apple's.
REGISTRY_ID = 0x1_0000_03A4
# nanoarrow 0.9.0 ends the process when it gives view arrays out again: it takes the array for one of its own making and
# looks for the variadic buffers there. It reads their structs without harm.
CANNOT_EXPORT = re.compile(r"(?i)(utf8|binary)_?view")


def tree(array: ArrowArray) -> tuple:
    """Everything that an array's structs say, addresses included."""
    return (
        (array.length, array.null_count, array.offset),
        [array.buffers[i] for i in range(array.n_buffers)],
        [tree(array.children[i].contents) for i in range(array.n_children)],
        tree(array.dictionary.contents) if array.dictionary else None,
    )


def seen_by_nanoarrow(array) -> tuple:
    """The same, as nanoarrow shows it."""
    return (
        (array.length, array.null_count, array.offset),
        [buffer or None for buffer in array.buffers],
        [seen_by_nanoarrow(array.child(i)) for i in range(array.n_children)],
        seen_by_nanoarrow(array.dictionary) if array.dictionary else None,
    )


class NanoarrowCase(PeerCase):
    def through(self, given, check):
        """An array as nanoarrow gives it on, for `check`, which consumes it or not."""
        out, schema = given
        before, event = tree(out.array), out.sync_event
        there = na_device.c_device_array(Exporter(out, schema))
        self.assertEqual((there.device_type_id, there.device_id), (out.device_type, out.device_id))
        self.assertEqual(seen_by_nanoarrow(there.array), before)
        again = opened(there)
        self.assertEqual((again[0].device_type, again[0].device_id), (out.device_type, out.device_id))
        self.assertEqual((tree(again[0].array), again[0].sync_event), (before, event))
        del there
        check(again)
        del again
        for struct in given:
            release(struct)


class Values(PeerCase):
    def test_null_values_of_a_dictionary(self):
        """It goes by the schema: what that says is never null it reads as a value, whatever the bitmap says."""
        for values, keys in [(["a", None], [0, 1, None, 1]), ([{"x": 1}, None], [0, 1, 0, 1])]:
            array = pa.DictionaryArray.from_arrays(pa.array(keys, pa.int8()), pa.array(values))
            given = rust.passed(array_out(array))
            there = na_device.c_device_array(Exporter(*given))
            self.assertEqual(na.Array(there.array).to_pylist(), array.to_pylist())
            del there
            for struct in given:
                release(struct)


class PassesThrough(NanoarrowCase):
    def test_every_device_type(self):
        """Type, id, event and buffers arrive as they were; ours has zeros in `reserved`."""
        event = c.c_uint64(42)
        for number in [*NAMES, *UNNAMED]:
            for device_id in (ID, -1, 2**40):
                with self.subTest(device_type=number, device_id=device_id):
                    out, schema = rust.array(STRUCT, 22)
                    out.device_type, out.device_id, out.sync_event = number, device_id, c.addressof(event)
                    self.assertEqual(list(out.reserved), [0, 0, 0])
                    self.through((out, schema), lambda again: None)

    def test_every_type(self):
        """All cases through nanoarrow as it gives them on, compared here: on the CPU, on the simulated device with its
        event, and in Metal's pages."""
        for t in ALL:
            for case in range(CASES[t]):
                for device in ("cpu", "sim", "metal") if case == 22 else ("cpu",):
                    with self.subTest(TYPES[t], case=case, device=device):
                        given = rust.array(t, case, device)
                        if not CANNOT_EXPORT.search(TYPES[t]):
                            self.through(given, lambda again: rust.check_array(again, t, case))
                            continue
                        there = na_device.c_device_array(Exporter(*given))
                        self.assertEqual(seen_by_nanoarrow(there.array), tree(given[0].array))
                        del there
                        for struct in given:
                            release(struct)

    def test_values(self):
        """What nanoarrow reads itself on the CPU is what pyarrow reads."""
        for name in ("Boolean", "Int32", "UInt64", "Utf8", "LargeBinary", "list<i32>", "struct<i32, utf8, bool>"):
            t = TYPES.index(name)
            for case in (3, 5, 13, 22):
                with self.subTest(name, case=case):
                    given = rust.array(t, case)
                    values = list(na.Array(na_device.c_device_array(Exporter(*given))).to_pylist())
                    self.assertEqual(values, array_in(*rust.array(t, case)).to_pylist())
                    for struct in given:
                        release(struct)


class FromNanoarrow(NanoarrowCase):
    def test_its_own_memory(self):
        """Under its own label and under that which it gives on a Mac. It leaves `reserved` as the memory was; garbage is
        put there, to be sure of it."""
        for values, na_type, pa_type in [
            ([1, None, -3], na.int32(), pa.int32()),
            ([], na.int64(), pa.int64()),
            ([True, None, False] * 7, na.bool_(), pa.bool_()),
            ([1.5, None, -0.0], na.float64(), pa.float64()),
            (["", None, "ünicode 𝄞", "x" * 100], na.string(), pa.utf8()),
            ([b"", b"\0\xff", None], na.binary(), pa.binary()),
            (["a", None], na.large_string(), pa.large_utf8()),
            ([b"abc", None], na.fixed_size_binary(3), pa.binary(3)),
        ]:
            for label in ((CPU, -1), (METAL, REGISTRY_ID)):
                with self.subTest(pa_type, label=label):
                    out, schema = opened(na_device.c_device_array(na.c_array(values, na_type)))
                    self.assertEqual((out.device_type, out.sync_event), (CPU, None))
                    out.device_type, out.device_id = label
                    c.memset(c.addressof(out.reserved), 0xAB, 24)
                    held = rust.passed((out, schema))
                    del out, schema
                    gc.collect()
                    self.assertEqual((held[0].device_type, held[0].device_id), label)
                    self.assertEqual(list(held[0].reserved), [0, 0, 0])
                    there = rust.passed(held, "sim")
                    self.same(pa.array(values, pa_type), array_in(*rust.passed(there, "cpu")))

    def test_memory_that_the_host_can_read(self):
        """Page-locked memory without an event needs no backend, nor does Metal's."""
        for number in (CUDA_HOST, ROCM_HOST, METAL):
            for device_id in (ID, -1, REGISTRY_ID):
                with self.subTest(device_type=number, device_id=device_id):

                    def check(again):
                        # Out again as it is labelled, and from there to the CPU.
                        held = rust.passed(again)
                        self.assertEqual((held[0].device_type, held[0].device_id), (number, device_id))
                        self.same(array_in(*rust.array(STRUCT, 22)), array_in(*rust.passed(held, "cpu")))

                    out, schema = rust.array(STRUCT, 22)
                    out.device_type, out.device_id = number, device_id
                    self.through((out, schema), check)

    def test_what_cannot_be_read(self):
        """A clear error that names the device and what to do; everything is released, once."""
        event = c.c_uint64(0)
        texts = {
            EXT_DEV: "no extension device with this id is registered; simulated devices are added with Devices::add",
            CUDA: "", CUDA_HOST: "", CUDA_MANAGED: "", ROCM: "", ROCM_HOST: "",  # depends on features and the machine's driver
            **dict.fromkeys(UNNAMED, "the specification does not name this device type"),
        }  # fmt: skip
        for number in [*NAMES, *UNNAMED]:
            for has_event in (False, True):
                if number in (CPU, METAL) or number in (CUDA_HOST, ROCM_HOST) and not has_event:
                    continue
                with self.subTest(device_type=number, event=has_event):

                    def check(again):
                        name = NAMES.get(number, f"unknown device type ({number})")
                        text = f"device {name}:{ID} is not available: "
                        no_backend = "no backend is registered for this device type; see Devices::register"
                        self.assert_fails(errno.ENOTSUP, text + texts.get(number, no_backend), rust.passed, again)
                        self.assertTrue(released(again[0]) and released(again[1]))

                    inner, schema = rust.array(STRUCT, 5)
                    given = Given(inner)
                    given.out.device_type, given.out.device_id = number, ID
                    given.out.sync_event = c.addressof(event) if has_event else None
                    self.through((given.out, schema), check)
                    self.assertEqual(given.releases, 1)

    def test_events_and_memory_of_others(self):
        """The CPU and Metal have no event that this crate could wait for; host memory that is called the simulated
        device's is told by its address."""
        event = c.c_uint64(0)
        for label, on, text in [
            ((CPU, -1), event, "sync_event: cpu has no events, so this one cannot be waited for"),
            ((METAL, REGISTRY_ID), event, f"sync_event: metal:{REGISTRY_ID} has no events"),
            ((EXT_DEV, 0), None, "array.buffers["),
        ]:
            with self.subTest(text):
                out, schema = rust.array(INT, 5)
                out.device_type, out.device_id = label
                out.sync_event = None if on is None else c.addressof(on)
                self.through((out, schema), lambda again: self.assert_fails(errno.EINVAL, text, rust.passed, again))
