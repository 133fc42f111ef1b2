"""nanoarrow as a peer for devices that are not here: it takes any device type and gives it on as it is. It never moves
a struct out of its capsule, where pyarrow always does."""

import ctypes as c
import errno
import gc

import nanoarrow as na
import nanoarrow.device as na_device
import pyarrow as pa

import cases
import known
from abi import (
    CPU,
    CUDA,
    CUDA_HOST,
    CUDA_MANAGED,
    EXT_DEV,
    HEXAGON,
    METAL,
    ONEAPI,
    OPENCL,
    ROCM,
    ROCM_HOST,
    VPI,
    VULKAN,
    WEBGPU,
    ArrowArray,
)
from capsule import Exporter, open_capsules, opened
from cases import TYPES
from peer_case import COMPARED, Given, PeerCase, array_in, batch_in, release, released
from rust import RustError

NAMES = {
    CPU: "cpu", CUDA: "cuda", CUDA_HOST: "cuda-host", OPENCL: "opencl", VULKAN: "vulkan", METAL: "metal", VPI: "vpi",
    ROCM: "rocm", ROCM_HOST: "rocm-host", EXT_DEV: "sim", CUDA_MANAGED: "cuda-managed", ONEAPI: "oneapi",
    WEBGPU: "webgpu", HEXAGON: "hexagon",
}  # fmt: skip
UNNAMED = [0, 5, 6, 17, 18, 99, -5, 2**31 - 1, -(2**31)]
# No machine has as many.
ID = 77
# What Metal calls a GPU of Apple's.
REGISTRY_ID = 0x1_0000_03A4
PAGE = 16 << 10


def tree(array: ArrowArray) -> tuple:
    """Everything that an array's structs say, addresses included."""
    return (
        (array.length, array.null_count, array.offset),
        [array.buffers[i] for i in range(array.n_buffers)],
        [tree(array.children[i].contents) for i in range(array.n_children)],
        tree(array.dictionary.contents) if array.dictionary else None,
    )


def addresses(node: tuple) -> set[int]:
    """All buffers of a tree."""
    _, buffers, children, dictionary = node
    found = {buffer for buffer in buffers if buffer}
    return found.union(*map(addresses, children), addresses(dictionary) if dictionary else set())


def seen_by_nanoarrow(array) -> tuple:
    """The same, as nanoarrow shows it."""
    return (
        (array.length, array.null_count, array.offset),
        [buffer or None for buffer in array.buffers],
        [seen_by_nanoarrow(array.child(i)) for i in range(array.n_children)],
        seen_by_nanoarrow(array.dictionary) if array.dictionary else None,
    )


class NanoarrowCase(PeerCase):
    def tearDown(self):
        gc.collect()
        self.assertEqual(open_capsules(), 0)


class PassesThrough(NanoarrowCase):
    def test_every_device_type(self):
        """Type, id, event and buffers arrive as they were; ours has zeros in `reserved`."""
        t = TYPES.index("struct<struct<struct<i32, utf8>, bool>>")
        event = c.c_uint64(42)
        for number in [*NAMES, *UNNAMED]:
            for device_id in (ID, 0, -1, 2**40):
                with self.subTest(device_type=number, device_id=device_id):
                    out, schema = cases.array(t, 22)
                    out.device_type, out.device_id, out.sync_event = number, device_id, c.addressof(event)
                    self.assertEqual(list(out.reserved), [0, 0, 0])
                    before = tree(out.array)
                    given = Exporter(out, schema)
                    there = na_device.c_device_array(given)
                    self.assertEqual(given.asked, [(None, {})])
                    self.assertEqual((there.device_type_id, there.device_id), (number, device_id))
                    self.assertEqual(there.schema.format, "+s")
                    self.assertEqual(seen_by_nanoarrow(there.array), before)
                    if number in NAMES:
                        self.assertEqual(there.device_type.value, number)
                    else:
                        with self.assertRaisesRegex(ValueError, "is not a valid DeviceType"):
                            there.device_type
                    # It reads the struct where it is.
                    self.assertFalse(released(out))
                    again, again_schema = opened(there)
                    self.assertNotEqual(c.addressof(again), c.addressof(out))
                    self.assertEqual((again.device_type, again.device_id), (number, device_id))
                    self.assertEqual(again.sync_event, c.addressof(event))
                    self.assertEqual(tree(again.array), before)
                    self.assertEqual(again_schema.format, b"+s")
                    # Nobody has moved anything: the capsules release it.
                    del there, again, again_schema, given
                    gc.collect()
                    self.assertTrue(released(out) and released(schema))
                    COMPARED.value += 1

    def test_every_type_comes_back(self):
        """All cases through nanoarrow as it gives them on, compared here."""
        for t, name in enumerate(TYPES):
            for case, case_name in enumerate(cases.case_names(t)):
                with self.subTest(type=name, case=case_name):
                    out, schema = cases.array(t, case)
                    before = tree(out.array)
                    there = na_device.c_device_array(Exporter(out, schema))
                    if name in known.NANOARROW_CANNOT_EXPORT:
                        self.assertEqual(seen_by_nanoarrow(there.array), before)
                        continue
                    again = opened(there)
                    self.assertEqual(tree(again[0].array), before)
                    cases.check_array(*again, t, case)
                    COMPARED.value += 1

    def test_views_of_the_values(self):
        """What nanoarrow reads itself on the CPU is what pyarrow reads."""
        for name in ("Boolean", "Int32", "UInt64", "Float64", "Utf8", "LargeBinary", "list<i32>", "FixedSizeBinary(3)",
                     "struct<i32, utf8, bool>", "fixed_list<i16, 3>"):  # fmt: skip
            t = TYPES.index(name)
            for case in (3, 5, 13, 22):
                with self.subTest(type=name, case=case):
                    out, schema = cases.array(t, case)
                    there = na.Array(na_device.c_device_array(Exporter(out, schema)))
                    values = there.to_pylist()
                    expected = array_in(*cases.array(t, case)).to_pylist()
                    if name in known.NANOARROW_MISREADS_OFFSETS and case == 22:
                        self.assertNotEqual(values, expected)
                        continue
                    if name == "Float64":
                        values, expected = map(repr, values), map(repr, expected)
                    self.assertEqual(list(values), list(expected))

    def test_a_misread_offset(self):
        """Not ours: of pyarrow's own array, too, nanoarrow reads other rows."""
        own = pa.array([b"aaa", None, b"ccc", b"ddd"], pa.binary(3)).slice(1)
        self.assertNotEqual(na.Array(own).to_pylist(), own.to_pylist())

    def test_pyarrow_moves(self):
        """The same object given to pyarrow: the struct is moved out of the capsule, and released with the array."""
        t = TYPES.index("struct<i32, utf8, bool>")
        out, schema = cases.array(t, 5)
        given = Given(out)
        array = pa.array(Exporter(given.out, schema))
        gc.collect()
        self.assertTrue(released(given.out))
        self.assertEqual((open_capsules(), given.releases), (0, 0))
        self.same(array_in(*cases.array(t, 5)), array)
        del array
        self.assertEqual(given.releases, 1)
        batch = pa.record_batch(Exporter(*cases.batch([t, t], 5)))
        self.same_batch(batch_in(*cases.batch([t, t], 5)), batch)


class FromNanoarrow(NanoarrowCase):
    def test_its_own_memory(self):
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
            with self.subTest(type=pa_type):
                there = na_device.c_device_array(na.c_array(values, na_type))
                out, schema = opened(there)
                self.assertEqual((out.device_type, out.sync_event), (CPU, None))
                with cases.Held.take(out, schema) as held:
                    del there, out, schema
                    gc.collect()
                    self.same(pa.array(values, pa_type), array_in(*held.export()))
                    with held.copy("sim") as far, far.copy("cpu") as back:
                        self.same(pa.array(values, pa_type), array_in(*back.export()))

    def test_n7_reserved_is_not_looked_at(self):
        """N7: nanoarrow leaves `reserved` as the memory was; garbage is put there by ctypes, to be sure of it. The other
        half of number 7, its crash on views, is seen in `known.NANOARROW_CANNOT_EXPORT`: it gets none from these tests."""
        there = na_device.c_device_array(na.c_array([1, 2, 3], na.int32()))
        out, schema = opened(there)
        c.memset(c.addressof(out.reserved), 0xAB, 24)
        with cases.Held.take(out, schema) as held:
            again, again_schema = held.export()
        self.assertEqual(list(again.reserved), [0, 0, 0])
        self.assertEqual(array_in(again, again_schema).to_pylist(), [1, 2, 3])

    def test_memory_that_the_host_can_read(self):
        """Page-locked memory without an event needs no backend, nor does Metal's, which nanoarrow labels with a registry id."""
        t = TYPES.index("struct<i32, utf8, bool>")
        for number in (CUDA_HOST, ROCM_HOST, METAL):
            for device_id in (ID, ID + 1, -1, REGISTRY_ID):
                with self.subTest(device_type=number, device_id=device_id):
                    out, schema = cases.array(t, 22)
                    out.device_type, out.device_id = number, device_id
                    there = na_device.c_device_array(Exporter(out, schema))
                    out, schema = opened(there)
                    with cases.Held.take(out, schema) as held:
                        held.check(t, 22)
                        # Out again as it is labelled, and from there to the CPU.
                        again, again_schema = held.export()
                        self.assertEqual((again.device_type, again.device_id), (number, device_id))
                        release(again)
                        release(again_schema)
                        with held.copy("cpu") as copy:
                            self.same(array_in(*cases.array(t, 22)), array_in(*copy.export()))

    def test_what_cannot_be_read(self):
        """A clear error that names the device and what to do; everything is released, once."""
        t = TYPES.index("struct<i32, utf8, bool>")
        event = c.c_uint64(0)
        no_backend = "no backend is registered for this device type; see Devices::register"
        texts = {
            ROCM: "arrow-device was built without ROCm",
            ROCM_HOST: "arrow-device was built without ROCm",
            EXT_DEV: "no extension device with this id is registered; simulated devices are added with Devices::add",
            CUDA: "", CUDA_HOST: "", CUDA_MANAGED: "",  # depends on the machine's driver
        }  # fmt: skip
        refused = 0
        for number in [*NAMES, *UNNAMED]:
            for has_event in (False, True):
                if number in (CPU, METAL) or number in (CUDA_HOST, ROCM_HOST) and not has_event:
                    continue
                with self.subTest(device_type=number, event=has_event):
                    out, schema = cases.array(t, 5)
                    given = Given(out)
                    given.out.device_type, given.out.device_id = number, ID
                    given.out.sync_event = c.addressof(event) if has_event else None
                    there = na_device.c_device_array(Exporter(given.out, schema))
                    out, out_schema = opened(there)
                    with self.assertRaises(RustError) as error:
                        cases.Held.take(out, out_schema)
                    self.assertEqual(error.exception.errno, errno.ENOTSUP)
                    name = NAMES.get(number, f"unknown device type ({number})")
                    self.assertIn(f"device {name}:{ID} is not available: ", error.exception.text)
                    text = texts.get(number, no_backend)
                    if number in UNNAMED:
                        text = "the specification does not name this device type"
                    self.assertIn(text, error.exception.text)
                    self.assertTrue(released(out))
                    del there, out, out_schema
                    gc.collect()
                    self.assertEqual(given.releases, 1)
                    refused += 1
        self.assertEqual(refused, 2 * (len(NAMES) - 2 + len(UNNAMED)) - 2)

    def test_an_event_of_the_cpu(self):
        """There is no such thing. nanoarrow keeps it, pyarrow drops it without a word, this crate says so."""
        t, event = TYPES.index("Int32"), c.c_uint64(0)
        out, schema = cases.array(t, 5)
        out.sync_event = c.addressof(event)
        there = na_device.c_device_array(Exporter(out, schema))
        out, schema = opened(there)
        self.assertEqual(out.sync_event, c.addressof(event))
        with self.assertRaises(RustError) as refused:
            cases.Held.take(out, schema)
        self.assertIn("sync_event: cpu has no events, so this one cannot be waited for", refused.exception.text)
        self.assertTrue(released(out))
        del there, out, schema

    def test_an_event_of_metal(self):
        """Only Metal's framework can wait for one: refused, with the reason."""
        t, event = TYPES.index("Int32"), c.c_uint64(0)
        out, schema = cases.array(t, 5)
        given = Given(out)
        given.out.device_type, given.out.device_id, given.out.sync_event = METAL, REGISTRY_ID, c.addressof(event)
        there = na_device.c_device_array(Exporter(given.out, schema))
        out, schema = opened(there)
        with self.assertRaises(RustError) as refused:
            cases.Held.take(out, schema)
        self.assertEqual(refused.exception.errno, errno.EINVAL)
        self.assertIn(f"sync_event: metal:{REGISTRY_ID} has no events", refused.exception.text)
        self.assertIn("MTLSharedEvent", refused.exception.text)
        self.assertTrue(released(out))
        del there, out, schema
        gc.collect()
        self.assertEqual(given.releases, 1)

    def test_memory_of_another_device(self):
        """Host memory that is called the simulated device's: told by its address."""
        t = TYPES.index("Int32")
        settled = cases.array(t, 5, "sim")
        device_id = settled[0].device_id
        for struct in settled:
            release(struct)
        out, schema = cases.array(t, 5)
        out.device_type, out.device_id = EXT_DEV, device_id
        there = na_device.c_device_array(Exporter(out, schema))
        out, schema = opened(there)
        with self.assertRaises(RustError) as refused:
            cases.Held.take(out, schema)
        self.assertEqual(refused.exception.errno, errno.EINVAL)
        self.assertIn("array.buffers[", refused.exception.text)
        del there, out, schema


class Metal(NanoarrowCase):
    def test_every_type(self):
        """Ours, labelled METAL, arrives in pages; what nanoarrow gives on is read here again, and by nanoarrow as the CPU's."""
        for t, name in enumerate(TYPES):
            # The lengths of a view's data lie in the export, not in a page.
            if name in known.NANOARROW_CANNOT_EXPORT or "View" in name:
                continue
            for case in (5, 22):
                with self.subTest(type=name, case=case):
                    out, schema = cases.array(t, case, "metal")
                    self.assertEqual((out.device_type, out.device_id, out.sync_event), (METAL, -1, None))
                    before = tree(out.array)
                    self.assertEqual({address % PAGE for address in addresses(before)} - {0}, set())
                    there = na_device.c_device_array(Exporter(out, schema))
                    self.assertEqual((there.device_type_id, there.device_id), (METAL, -1))
                    self.assertEqual(seen_by_nanoarrow(there.array), before)
                    cases.check_array(*opened(there), t, case)
                    COMPARED.value += 1

    def test_its_own_memory(self):
        """nanoarrow's own arrays under the label that it gives on a Mac."""
        for values, na_type, pa_type in [
            ([1, None, -3], na.int32(), pa.int32()),
            ([], na.int64(), pa.int64()),
            (["", None, "ünicode 𝄞", "x" * 100], na.string(), pa.utf8()),
        ]:
            with self.subTest(type=pa_type):
                there = na_device.c_device_array(na.c_array(values, na_type))
                out, schema = opened(there)
                out.device_type, out.device_id = METAL, REGISTRY_ID
                with cases.Held.take(out, schema) as held:
                    del there, out, schema
                    gc.collect()
                    again, again_schema = held.export()
                    self.assertEqual((again.device_type, again.device_id), (METAL, REGISTRY_ID))
                    again.device_type = CPU
                    values_here = na.Array(na_device.c_device_array(Exporter(again, again_schema))).to_pylist()
                    self.assertEqual(list(values_here), values)
                    with held.copy("cpu") as copy:
                        self.same(pa.array(values, pa_type), array_in(*copy.export()))


class FromTheDevice(NanoarrowCase):
    def test_a_real_device_array(self):
        """Data on the simulated device, with its event, through nanoarrow and back here."""
        for t in range(len(TYPES)):
            if TYPES[t] in known.NANOARROW_CANNOT_EXPORT:
                continue
            with self.subTest(type=TYPES[t]):
                out, schema = cases.array(t, 22, "sim")
                before, event = tree(out.array), out.sync_event
                there = na_device.c_device_array(Exporter(out, schema))
                self.assertEqual(there.device_type_id, EXT_DEV)
                out, schema = opened(there)
                self.assertEqual((tree(out.array), out.sync_event), (before, event))
                with cases.Held.take(out, schema) as held:
                    del there, out, schema
                    gc.collect()
                    held.check(t, 22)
                COMPARED.value += 1

    def test_children_of_it(self):
        """A child that nanoarrow hands out keeps its parent alive, and so does the parent's struct."""
        t = TYPES.index("struct<i32, utf8, bool>")
        there = na_device.c_device_array(Exporter(*cases.array(t, 5)))
        child = there.array.child(1)
        del there
        gc.collect()
        self.assertEqual(open_capsules(), 2)  # both structs are still needed
        # The child goes out alone.
        capsules = child.__arrow_c_array__()
        column = pa.Array._import_from_c_capsule(*capsules)
        del child, capsules
        gc.collect()
        self.same(array_in(*cases.array(t, 5)).field(1), column)
        del column
