"""The C library: errors of all kinds, and two copies of this crate in one process."""

import ctypes as c
import errno
import os
import tempfile
import threading
import unittest

import pyarrow as pa
import pyarrow.csv

import cases
import known
from abi import EXT_DEV, ArrowDeviceArray, ArrowDeviceArrayStream, ArrowSchema
from capi import EXAMPLE, INNER
from cases import COMMON, TYPES
from peer_case import (
    Given,
    InFolder,
    PeerCase,
    batch_in,
    batch_out,
    filled,
    is_zero,
    release,
    released,
)
from producer import Producer
from rust import RustError
from test_types import SEEN


class Mistakes(InFolder):
    """Whatever is wrong: an errno, a text, `out` released, what was to be consumed released."""

    def refused(self, number: int, text: str, code: int):
        self.assertEqual(code, number, INNER.last_error())
        self.assertIn(text, INNER.last_error())

    def test_open(self):
        call = INNER.lib.arrow_device_open
        good = self.path("good.csv")
        pa.csv.write_csv(pa.table({"a": [1]}), good)
        empty, odd = self.path("empty.arrow"), self.path("odd.parquet")
        open(empty, "wb").close()
        with open(odd, "wb") as file:
            file.write(b"PAR1" + b"\xff" * 64)
        for path, device, number, text in [
            (self.path("missing.arrow").encode(), b"cpu", errno.ENOENT, "missing.arrow"),
            (self.folder.encode(), b"cpu", errno.EINVAL, "is a directory"),
            (empty.encode(), b"cpu", errno.EINVAL, "is empty"),
            (odd.encode(), b"cpu", errno.EINVAL, "odd.parquet"),
            (b"/dev/null", b"cpu", errno.EINVAL, "is not a regular file"),
            (good.encode(), b"abacus", errno.EINVAL, "abacus"),
            (good.encode(), b"cuda:99", errno.ENOTSUP, "cuda:99"),
            (good.encode(), b"rocm:0", errno.ENOTSUP, "rocm:0"),
            (good.encode(), b"\xff", errno.EINVAL, "device is not UTF-8"),
            (None, b"cpu", errno.EINVAL, "path is null"),
            (good.encode(), None, errno.EINVAL, "device is null"),
        ]:
            with self.subTest(path=path, device=device):
                out = filled(ArrowDeviceArrayStream)
                self.refused(number, text, call(path, device, out))
                self.assertTrue(is_zero(out))
        self.refused(errno.EINVAL, "out is null", call(good.encode(), b"cpu", None))
        # The test's own file is good.
        release(INNER.open(good))

    def test_write_ipc(self):
        call = INNER.lib.arrow_device_write_ipc
        for path, number, text in [
            (None, errno.EINVAL, "path is null"),
            (self.path("no/such/folder/x").encode(), errno.ENOENT, "No such file"),
            (self.folder.encode(), None, ""),
        ]:
            with self.subTest(path=path):
                producer = Producer(pa.schema([("a", pa.int32())]), [])
                code = call(producer.stream, path)
                if number is None:
                    self.assertNotEqual(code, 0)
                else:
                    self.refused(number, text, code)
                self.assertTrue(released(producer.stream))
                self.assertEqual(producer.releases, 1)
        self.refused(errno.EINVAL, "stream is null", call(None, self.path("x").encode()))
        self.refused(errno.EINVAL, "already released", call(ArrowDeviceArrayStream(), self.path("x").encode()))
        self.assertEqual(os.listdir(self.folder), [])

    def test_copy(self):
        """Both inputs are consumed, whatever happens, null pointers among the arguments included."""
        call = INNER.lib.arrow_device_copy
        for wrong in ("array", "schema", "device", "out", "out_schema", "unknown", "absent", "not a struct", "ids"):
            with self.subTest(wrong=wrong):
                batch = pa.record_batch([pa.array([1, 2, 3])], ["x"])
                if wrong == "not a struct":
                    batch = batch.column(0)
                inner, schema = batch_out(batch)
                del batch
                given = Given(inner)
                if wrong == "ids":
                    given.out.device_type = 99
                device = {"device": None, "unknown": b"abacus", "absent": b"cuda:42"}.get(wrong, b"cpu")
                out, out_schema = filled(ArrowDeviceArray), filled(ArrowSchema)
                code = call(
                    None if wrong == "array" else given.out,
                    None if wrong == "schema" else schema,
                    device,
                    None if wrong == "out" else out,
                    None if wrong == "out_schema" else out_schema,
                )
                self.assertEqual(code, errno.ENOTSUP if wrong in ("absent", "ids") else errno.EINVAL)
                text = {"unknown": "abacus", "absent": "cuda:42", "not a struct": "struct", "ids": "(99)"}
                self.assertIn(text.get(wrong, f"{wrong} is null"), INNER.last_error())
                if wrong != "out":
                    self.assertTrue(is_zero(out))
                if wrong != "out_schema":
                    self.assertTrue(is_zero(out_schema))
                if wrong == "array":
                    release(given.out)
                if wrong == "schema":
                    release(schema)
                self.assertTrue(released(given.out) and released(schema))
                self.assertEqual(given.releases, 1)

    def test_values_are_checked(self):
        """Both functions that take data look at every value of it: here a text that is not UTF-8."""

        def broken() -> pa.RecordBatch:
            text = pa.StringArray.from_buffers(1, pa.py_buffer(b"\0\0\0\0\3\0\0\0"), pa.py_buffer(b"a\xffb"))
            return pa.record_batch([text], ["x"])

        for device in ("cpu", "sim"):
            out, schema = batch_out(broken())
            with self.assertRaises(RustError) as refused:
                INNER.copy(out, schema, device)
            self.assertEqual(refused.exception.errno, errno.EINVAL)
            self.assertIn("invalid input at array.children[0]: ", refused.exception.text)
            self.assertTrue(released(out) and released(schema))
        producer = Producer(broken().schema, [broken()])
        with self.assertRaises(RustError) as refused:
            INNER.write_ipc(producer.stream, self.path("x"))
        self.assertIn("invalid input at array.children[0]: ", refused.exception.text)
        self.assertEqual((producer.releases, os.listdir(self.folder)), (1, []))

    def test_misaligned(self):
        """A pointer that no compiler would give."""
        memory = c.create_string_buffer(c.sizeof(ArrowDeviceArray) + 8)
        odd = c.cast(c.addressof(memory) + 1, c.POINTER(ArrowDeviceArray))
        schema = ArrowSchema()
        out, out_schema = ArrowDeviceArray(), ArrowSchema()
        code = INNER.lib.arrow_device_copy(odd, schema, b"cpu", out, out_schema)
        self.refused(errno.EINVAL, "array is null or misaligned", code)

    def test_in_place(self):
        """`out` and `out_schema` may be the structs that came in."""
        out, schema = batch_out(pa.record_batch([pa.array([1, None, 3])], ["x"]))
        for device in (b"sim", b"sim", b"cpu", b"cpu"):
            self.assertEqual(INNER.lib.arrow_device_copy(out, schema, device, out, schema), 0)
        self.assertEqual(batch_in(out, schema).to_pydict(), {"x": [1, None, 3]})


class LastError(InFolder):
    def open_missing(self, name: str):
        with self.assertRaises(RustError):
            INNER.open(self.path(name))

    def test_per_thread(self):
        """Null before the first failure of a thread; then never null again, and nobody else's."""
        seen = {}

        def body(name):
            before = INNER.last_error()
            self.open_missing(name)
            barrier.wait(30)
            mine = INNER.last_error()
            # A success leaves it alone.
            out = batch_out(pa.record_batch([pa.array([1])], ["x"]))
            for struct in INNER.copy(*out, "cpu"):
                release(struct)
            seen[name] = (before, mine, INNER.last_error())

        names = [f"missing {i}" for i in range(6)]
        barrier = threading.Barrier(len(names))
        threads = [threading.Thread(target=body, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for name in names:
            before, mine, after = seen[name]
            self.assertIsNone(before)
            self.assertIn(name, mine)
            self.assertEqual(mine, after)

    def test_of_each_library(self):
        """Two copies of the library keep their errors apart."""
        self.open_missing("first")
        with self.assertRaises(RustError):
            EXAMPLE.open(self.path("second"))
        self.assertIn("first", INNER.last_error())
        self.assertIn("second", EXAMPLE.last_error())


class TwoCopies(PeerCase):
    """This crate twice in one process: strangers that keep to the interface."""

    def test_cpu_data_passes(self):
        types = list(range(len(TYPES)))
        for variant in range(COMMON):
            with self.subTest(variant=variant):
                out, schema = EXAMPLE.copy(*cases.batch(types, variant), "cpu")
                cases.check_batch(*INNER.copy(out, schema, "cpu"), types, variant)

    def test_through_the_others_device(self):
        """Up by one library and down by the same, and the other's data in between."""
        types = list(range(len(TYPES)))
        for variant in range(COMMON):
            with self.subTest(variant=variant):
                out, schema = EXAMPLE.copy(*cases.batch(types, variant), "sim")
                self.assertEqual((out.device_type, out.device_id), (EXT_DEV, 0))
                cases.check_batch(*EXAMPLE.copy(out, schema, "cpu"), types, variant)

    def test_the_others_device_is_refused(self):
        """Both have a device sim. Addresses and events of another are told apart, and released."""
        t = [TYPES.index("Int32")]
        for struct in EXAMPLE.copy(*cases.batch(t, 5), "sim"):  # so that it has one
            release(struct)
        for wait, path in [(False, "sync_event: "), (True, "array.children[0].buffers[")]:
            with self.subTest(wait=wait):
                out, schema = cases.batch(t, 5, "sim", wait)
                out.device_id = 0
                with self.assertRaises(RustError) as refused:
                    EXAMPLE.copy(out, schema, "cpu")
                self.assertEqual(refused.exception.errno, errno.EINVAL)
                self.assertIn(f"invalid input at {path}", refused.exception.text)
                self.assertTrue(released(out) and released(schema))

    def test_streams_pass(self):
        types = SEEN
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "x")
            EXAMPLE.write_ipc(cases.stream(types), path)
            with pa.OSFile(path) as file:
                for variant, batch in enumerate(pa.ipc.open_stream(file)):
                    self.same_batch(batch_in(*cases.batch(types, variant)), batch)
            # arrow-rs cannot read all of it again: it takes run ends of no rows for wrong ones.
            types = [t for t in types if TYPES[t] not in known.IPC_WRONG]
            EXAMPLE.write_ipc(cases.stream(types), path)
            cases.check_stream(EXAMPLE.open(path), types)


class Header(unittest.TestCase):
    """The header is C that a compiler takes, and declares what the library exports."""

    def test_symbols(self):
        root = os.path.join(os.path.dirname(__file__), "..", "..")
        header = os.path.join(root, "capi", "arrow_device.h")
        with open(header, encoding="utf-8") as file:
            text = file.read()
        declared = {word.split("(")[0] for word in text.split() if word.startswith("arrow_device_") and "(" in word}
        self.assertEqual(len(declared), 4)
        for name in declared:
            self.assertTrue(hasattr(EXAMPLE.lib, name), name)
