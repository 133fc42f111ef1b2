"""The example library `capi`: files in and out, errors of all kinds, and two copies of this crate in one process."""

import ctypes as c
import errno
import os
import sys
import tempfile
import threading
import unittest

import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet

import cases
import known
from abi import CPU, EXT_DEV, ArrowDeviceArray, ArrowDeviceArrayStream, ArrowSchema
from capi import EXAMPLE, INNER, Library
from cases import COMMON, TYPES
from peer_case import (
    Given,
    PeerCase,
    StreamError,
    arrays_of,
    batch_in,
    batch_out,
    batches_in,
    filled,
    is_zero,
    release,
    released,
    schema_in,
    stream_schema,
)
from producer import Producer
from rust import RustError
from test_types import SEEN

# What the files hold: types that Parquet and its reader in Rust give back as they were.
PLAIN = [
    "Boolean", "Int8", "Int16", "Int32", "Int64", "UInt8", "UInt16", "UInt32", "UInt64", "Float32", "Float64",
    "Date32", "Timestamp(µs)", 'Timestamp(ns, "UTC")', "Binary", "Utf8", "LargeUtf8", "FixedSizeBinary(3)",
    "Decimal128(38, 10)", "list<i32>", "struct<i32, utf8, bool>", "list<list<struct<i64, utf8>>>",
]  # fmt: skip


class InFolder(PeerCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def path(self, name: str) -> str:
        return os.path.join(self.folder, name)


def table(names=PLAIN) -> pa.Table:
    """Several batches of pyarrow's, one of them empty."""
    types = [TYPES.index(name) for name in names]
    batches = [batch_in(*cases.batch(types, variant)) for variant in (5, 9, 13)]
    none = [empty(column) for column in batches[0].columns]
    batches.insert(1, pa.RecordBatch.from_arrays(none, schema=batches[0].schema))
    return pa.Table.from_batches(batches)


def empty(like: pa.Array) -> pa.Array:
    try:
        return pa.array([], like.type)
    except pa.ArrowNotImplementedError:
        return like.take(pa.array([], pa.int64()))


class Files(InFolder):
    def read(self, path: str, device: str, library: Library = INNER) -> pa.Table:
        stream = library.open(path, device)
        self.assertEqual(stream.device_type, EXT_DEV if device == "sim" else CPU)
        if device == "cpu":
            batches = list(batches_in(stream))
            schema = schema_in(stream_schema(stream))
        else:
            schema = schema_in(stream_schema(stream))
            batches = []
            for out in arrays_of(stream):
                self.assertEqual(out.device_type, EXT_DEV)
                batches.append(batch_in(*library.copy(out, stream_schema(stream), "cpu")))
        release(stream)
        return pa.Table.from_batches(batches, schema)

    def check(self, path: str, expected: pa.Table):
        for device in ("cpu", "sim"):
            for library in (INNER, EXAMPLE):
                with self.subTest(device=device, example=library is EXAMPLE):
                    actual = self.read(path, device, library)
                    # Parquet's own batches are larger.
                    self.same_batch(one(expected), one(actual))

    def test_ipc_stream_and_file(self):
        types = [TYPES[t] for t in SEEN if TYPES[t] not in known.EMPTY_VIEWS | known.CHANGED | known.IPC_WRONG]
        # Dictionaries that differ from batch to batch cannot be put into an IPC file.
        types = [name for name in types if "dictionary" not in name]
        types = [name for name in types if known.NOT_FROM_VALUES.get(name, (None, None))[1] != "concat"]
        self.assertGreater(len(types), 70)
        for compression in (None, "lz4", "zstd"):
            options = pa.ipc.IpcWriteOptions(compression=compression)
            for name, new in (("stream", pa.ipc.new_stream), ("file", pa.ipc.new_file)):
                with self.subTest(format=name, compression=compression):
                    expected = table(types)
                    path = self.path(f"{name}.arrow")
                    with new(path, expected.schema, options=options) as writer:
                        writer.write_table(expected)
                    self.check(path, expected)

    def test_feather(self):
        expected = table()
        pa.feather.write_feather(expected, self.path("x.feather"))
        self.check(self.path("x.feather"), expected)

    def test_parquet(self):
        for compression in ("none", "snappy", "zstd", "gzip", "lz4"):
            with self.subTest(compression=compression):
                expected = table()
                pa.parquet.write_table(expected, self.path("x.parquet"), compression=compression, row_group_size=700,
                                       use_compliant_nested_type=False)
                self.check(self.path("x.parquet"), expected)

    def test_csv(self):
        """Integers, floats, booleans, texts with commas, quotes and line ends; nulls are empty."""
        expected = pa.table(
            {
                "i": pa.array([1, -2, None, 2**62], pa.int64()),
                "f": pa.array([0.5, None, -1e300, 3.25], pa.float64()),
                "b": pa.array([True, False, None, True]),
                "s": pa.array(["plain", 'with "quotes", and commas', "two\nlines", "ünicode 𝄞"]),
            }
        )
        pa.csv.write_csv(expected, self.path("x.csv"))
        self.check(self.path("x.csv"), expected)

    def test_written_and_read_again(self):
        """From pyarrow's stream to a file, from the file to a stream on the device, from that to another file."""
        expected = table()
        first, second = self.path("1.arrows"), self.path("2.arrows")
        INNER.write_ipc(Producer(expected.schema, expected.to_batches()).stream, first)
        INNER.write_ipc(INNER.open(first, "sim"), second)
        with pa.OSFile(second) as file:
            batches = list(pa.ipc.open_stream(file))
        self.assertEqual([b.num_rows for b in batches], [1000, 0, 8, 500])
        self.same_batch(one(expected), one(pa.Table.from_batches(batches)))
        self.assertEqual(sorted(os.listdir(self.folder)), ["1.arrows", "2.arrows"])

    def test_no_rows_but_an_offset(self):
        """pyarrow writes the first offset as it is, and no values; arrow-rs then refuses the file."""
        offsets, text = pa.py_buffer((3).to_bytes(4, sys.byteorder) * 2), pa.py_buffer(b"abc")
        slice_ = pa.record_batch([pa.StringArray.from_buffers(0, offsets, text)], ["s"])
        slice_.validate(full=True)
        path = self.path("sliced.arrows")
        with pa.ipc.new_stream(path, slice_.schema) as writer:
            writer.write_batch(slice_)
        for device in ("cpu", "sim"):
            stream = INNER.open(path, device)
            with self.assertRaises(StreamError) as refused:
                list(arrays_of(stream))
            self.assertEqual(refused.exception.errno, errno.EINVAL)
            self.assertIn("First offset 3 of Utf8 is larger than values length 0", refused.exception.text)
            release(stream)

    def test_a_truncated_file(self):
        """The stream begins and then fails, each time it is asked."""
        expected = table(["Int64"])
        path = self.path("cut.arrows")
        with pa.ipc.new_stream(path, expected.schema) as writer:
            writer.write_table(expected)
        with open(path, "rb+") as file:
            file.truncate(os.path.getsize(path) * 2 // 3)
        try:
            stream = INNER.open(path)
        except RustError as refused:
            self.assertEqual(refused.errno, errno.EINVAL)
            self.assertIn("cut.arrows", refused.text)
            return
        for _ in range(2):
            with self.assertRaises(StreamError) as failed:
                for out in arrays_of(stream):
                    release(out)
            self.assertTrue(failed.exception.text)
        release(stream)


def one(of: pa.Table) -> pa.RecordBatch:
    """All rows in one batch."""
    columns = [column.combine_chunks() for column in of.columns]
    columns = [pa.concat_arrays(col.chunks) if isinstance(col, pa.ChunkedArray) else col for col in columns]
    return pa.RecordBatch.from_arrays(columns, schema=of.schema.remove_metadata())


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
    def fail(self, name: str | None = None):
        if name is None:
            return super().fail()
        with self.assertRaises(RustError):
            INNER.open(self.path(name))

    def test_per_thread(self):
        """Null before the first failure of a thread; then never null again, and nobody else's."""
        seen = {}

        def body(name):
            before = INNER.last_error()
            self.fail(name)
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
        self.fail("first")
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
        """Both call their device ext-dev:0. Addresses and events of another are told apart, and released."""
        t = [TYPES.index("Int32")]
        for wait in (False, True):
            with self.subTest(wait=wait):
                out, schema = cases.batch(t, 5, "sim", wait)
                with self.assertRaises(RustError) as refused:
                    EXAMPLE.copy(out, schema, "cpu")
                self.assertIn(refused.exception.errno, (errno.EINVAL, errno.ENOTSUP))
                self.assertTrue(released(out) and released(schema))

    def test_streams_pass(self):
        types = [t for t in SEEN if TYPES[t] not in known.EMPTY_VIEWS]
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
        header = os.path.join(root, "examples", "capi", "arrow_device.h")
        with open(header, encoding="utf-8") as file:
            text = file.read()
        declared = {word.split("(")[0] for word in text.split() if word.startswith("arrow_device_") and "(" in word}
        self.assertEqual(len(declared), 4)
        for name in declared:
            self.assertTrue(hasattr(EXAMPLE.lib, name), name)
