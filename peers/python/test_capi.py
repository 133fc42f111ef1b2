"""The C library: files of pyarrow's in and out, errors of all kinds, two copies of this crate in one process, and a
program in C++."""

import ctypes as c
import errno
import os
import tempfile
import threading

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

import rust
import shim
from abi import EXT_DEV, ArrowDeviceArray, ArrowDeviceArrayStream, ArrowSchema
from peer_case import Given, batch_in, batch_out, filled, is_zero, next_of, release, released
from rust import ALL, COMMON, INNER, INT, OTHER, TYPES
from shim import Batch, Reader
from test_pyarrow import SEEN

# Types that Parquet and its reader in Rust give back as they were.
PLAIN = [
    TYPES.index(name)
    for name in (
        "Boolean", "Int8", "Int16", "Int32", "Int64", "UInt8", "UInt16", "UInt32", "UInt64", "Float32", "Float64",
        "Date32", "Timestamp(µs)", 'Timestamp(ns, "UTC")', "Binary", "Utf8", "LargeUtf8", "FixedSizeBinary(3)",
        "Decimal128(38, 10)", "list<i32>", "struct<i32, utf8, bool>", "list<list<struct<i64, utf8>>>",
    )
]  # fmt: skip


def table() -> pa.Table:
    """Several batches of pyarrow's, one of them empty."""
    batches = [batch_in(*rust.batch(PLAIN, variant)) for variant in (5, 9, 13)]
    schema = batches[0].schema
    batches.insert(1, pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema))
    return pa.Table.from_batches(batches)


def stream_of(*batches: pa.RecordBatch) -> ArrowDeviceArrayStream:
    """pyarrow's batches as a stream of Arrow C++'s."""
    return Reader.of([Batch.take(batch_out(batch)) for batch in batches]).export()


def broken() -> pa.RecordBatch:
    """With a text that is not UTF-8."""
    text = pa.StringArray.from_buffers(1, pa.py_buffer(b"\0\0\0\0\3\0\0\0"), pa.py_buffer(b"a\xffb"))
    return pa.record_batch([text], ["x"])


class CapiCase(shim.CppCase):
    def setUp(self):
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def path(self, name: str) -> str:
        return os.path.join(self.folder, name)

    def same_table(self, expected: pa.Table, actual: pa.Table):
        """Values; batches may be others."""
        one = [table.replace_schema_metadata().combine_chunks().to_batches()[0] for table in (expected, actual)]
        self.same_batch(*one)


class Files(CapiCase):
    def check(self, path: str, expected: pa.Table):
        for device in ("cpu", "sim"):
            for library in (INNER, OTHER):
                with self.subTest(os.path.basename(path), device=device, other=library is OTHER):
                    stream, batches = library.open(path, device), []
                    while given := next_of(stream):
                        self.assertEqual(given[0].device_type == EXT_DEV, device == "sim")
                        batches.append(batch_in(*library.copy(*given, "cpu")))
                    release(stream)
                    self.same_table(expected, pa.Table.from_batches(batches))

    def test_of_pyarrow(self):
        expected = table()
        for compression in (None, "lz4", "zstd"):
            options = pa.ipc.IpcWriteOptions(compression=compression)
            for name, new in (("stream", pa.ipc.new_stream), ("file", pa.ipc.new_file)):
                path = self.path(f"{compression}.{name}.arrow")
                with new(path, expected.schema, options=options) as writer:
                    writer.write_table(expected)
                self.check(path, expected)
        for compression in ("none", "snappy", "zstd", "gzip", "lz4"):
            path = self.path(f"{compression}.parquet")
            pa.parquet.write_table(expected, path, compression=compression, row_group_size=700, use_compliant_nested_type=False)
            self.check(path, expected)
        texts = ["plain", 'with "quotes", and commas', "two\nlines", "ünicode 𝄞"]
        simple = pa.table({"i": [1, -2, None, 2**62], "f": [0.5, None, -1e300, 3.25], "b": [True, False, None, True], "s": texts})
        pa.csv.write_csv(simple, self.path("x.csv"))
        self.check(self.path("x.csv"), simple)

    def test_written(self):
        """Streams with a column of every type, read by pyarrow; and a file that is read, moved and written again."""
        for device, library in (("cpu", INNER), ("sim", INNER), ("cpu", OTHER)):
            with self.subTest(device=device):
                library.write_ipc(rust.stream(SEEN, COMMON, device), self.path("ü.arrows"))
                with pa.OSFile(self.path("ü.arrows")) as file:
                    for variant, batch in enumerate(pa.ipc.open_stream(file)):
                        self.same_batch(batch_in(*rust.batch(SEEN, variant)), batch)
                self.assertEqual(variant, COMMON - 1)
        expected = table()
        INNER.write_ipc(stream_of(*expected.to_batches()), self.path("1.arrows"))
        INNER.write_ipc(INNER.open(self.path("1.arrows"), "sim"), self.path("2.arrows"))
        with pa.OSFile(self.path("2.arrows")) as file:
            self.same_table(expected, pa.ipc.open_stream(file).read_all())
        self.assertEqual(sorted(os.listdir(self.folder)), ["1.arrows", "2.arrows", "ü.arrows"])

    def test_truncated(self):
        """Told when it is opened."""
        path = self.path("cut.arrows")
        with pa.ipc.new_stream(path, table().schema) as writer:
            writer.write_table(table())
        whole = os.path.getsize(path)
        for size in (whole - 4, whole * 2 // 3, 100):
            os.truncate(path, size)
            self.assert_fails(errno.EINVAL, "cut.arrows: truncated", INNER.open, path)

    def test_a_wrong_value_in_the_middle(self):
        """The stream begins, fails at the batch, and then at every further call."""
        good = pa.record_batch([pa.array(["good"])], ["x"])
        with pa.ipc.new_stream(self.path("bad.arrows"), good.schema) as writer:
            for batch in (good, broken(), good):
                writer.write_batch(batch)
        for device in ("cpu", "sim"):
            stream = INNER.open(self.path("bad.arrows"), device)
            for struct in next_of(stream):
                release(struct)
            for _ in range(3):
                self.assert_fails(errno.EINVAL, "utf-8", next_of, stream)
            release(stream)

    def test_from_cpp(self):
        """A file to a device and back to a file, by a program in C++ with the header; and what it is told."""
        source, target = self.path("from"), self.path("to")
        parts = pa.table({"id": [1, None, 3], "text": ["a", "bc", None], "list": [[1], None, []]})
        with pa.ipc.new_stream(source, parts.schema) as writer:
            for _ in range(2):
                writer.write_table(parts)

        def there_and_back(*paths):
            batches = c.c_int64(-1)
            shim.check(shim.lib.shim_capi_there_and_back(*(path.encode() for path in paths), batches))
            return batches.value

        for device in ("cpu", "sim"):
            self.assertEqual(there_and_back(source, device, target), 2)
            with pa.OSFile(target) as file:
                self.same_table(pa.concat_tables([parts, parts]), pa.ipc.open_stream(file).read_all())
        missing = self.path("missing")
        self.assert_fails(shim.IO_ERROR, "errno 2: ", there_and_back, missing, "cpu", target)
        self.assert_fails(shim.IO_ERROR, "rocm:0 is not available", there_and_back, source, "rocm", target)
        self.assert_fails(shim.IO_ERROR, "errno 2: ", there_and_back, source, "cpu", self.path("missing/to"))


class Mistakes(CapiCase):
    """Whatever is wrong: an errno, a text, `out` released, what was to be consumed released."""

    def test_open(self):
        good, empty, odd = self.path("good.csv"), self.path("empty.arrow"), self.path("odd.parquet")
        for path, content in ((good, b"a\n1\n"), (empty, b""), (odd, b"PAR1" + b"\xff" * 64)):
            with open(path, "wb") as file:
                file.write(content)
        for path, device, number, text in [
            (self.path("missing.arrow"), b"cpu", errno.ENOENT, "missing.arrow"),
            (self.folder, b"cpu", errno.EINVAL, "is a directory"),
            (empty, b"cpu", errno.EINVAL, "is empty"),
            (odd, b"cpu", errno.EINVAL, "odd.parquet"),
            ("/dev/null", b"cpu", errno.EINVAL, "is not a regular file"),
            (good, b"abacus", errno.EINVAL, "abacus"),
            (good, b"cuda:99", errno.ENOTSUP, "cuda:99"),
            (good, b"rocm:0", errno.ENOTSUP, "rocm:0"),
            (good, b"\xff", errno.EINVAL, "device is not UTF-8"),
            (None, b"cpu", errno.EINVAL, "path is null"),
            (good, None, errno.EINVAL, "device is null"),
        ]:
            with self.subTest(path=path, device=device):
                out = filled(ArrowDeviceArrayStream)
                self.assert_fails(number, text, INNER.call, "open", path and path.encode(), device, out)
                self.assertTrue(is_zero(out))
        self.assert_fails(errno.EINVAL, "out is null", INNER.call, "open", good.encode(), b"cpu", None)
        # The test's own file is good.
        release(INNER.open(good))

    def test_write_ipc(self):
        for path, number, text in [
            (None, errno.EINVAL, "path is null"),
            (self.path("no/such/folder/x"), errno.ENOENT, "No such file"),
            (self.folder, errno.EISDIR, ""),
        ]:
            with self.subTest(path=path):
                stream = rust.stream([INT])
                self.assert_fails(number, text, INNER.call, "write_ipc", stream, path and path.encode())
                self.assertTrue(released(stream))
        to = self.path("x")
        self.assert_fails(errno.EINVAL, "stream is null", INNER.call, "write_ipc", None, to.encode())
        self.assert_fails(errno.EINVAL, "already released", INNER.write_ipc, ArrowDeviceArrayStream(), to)
        failing = Reader.take(rust.stream([INT], 3, fail_at=1, errno=errno.ENOMEM)).export()
        self.assert_fails(errno.ENOMEM, "batch 1 cannot be made", INNER.write_ipc, failing, to)
        self.assertEqual(os.listdir(self.folder), [])

    def test_copy(self):
        """Both inputs are consumed, whatever happens, null pointers among the arguments included."""
        for wrong in ("array", "schema", "device", "out", "out_schema", "unknown", "absent", "not a struct", "ids"):
            with self.subTest(wrong=wrong):
                batch = pa.record_batch([pa.array([1, 2, 3])], ["x"])
                inner, schema = batch_out(batch.column(0) if wrong == "not a struct" else batch)
                del batch
                given = Given(inner)
                if wrong == "ids":
                    given.out.device_type = 99
                device = {"device": None, "unknown": b"abacus", "absent": b"cuda:42"}.get(wrong, b"cpu")
                outs = filled(ArrowDeviceArray), filled(ArrowSchema)
                names = ("array", "schema", "device", "out", "out_schema")
                arguments = [None if name == wrong else of for name, of in zip(names, (given.out, schema, device, *outs))]
                number = errno.ENOTSUP if wrong in ("absent", "ids") else errno.EINVAL
                text = {"unknown": "abacus", "absent": "cuda:42", "not a struct": "struct", "ids": "(99)"}
                self.assert_fails(number, text.get(wrong, f"{wrong} is null"), INNER.call, "copy", *arguments)
                for name, out in zip(names[3:], outs):
                    self.assertEqual(is_zero(out), wrong != name)
                for name, struct in (("array", given.out), ("schema", schema)):
                    self.assertEqual(released(struct), wrong != name)
                    release(struct)
                self.assertEqual(given.releases, 1)

    def test_values_are_checked(self):
        """Both functions that take data look at every value of it."""
        for device in ("cpu", "sim"):
            out = batch_out(broken())
            self.assert_fails(errno.EINVAL, "invalid input at array.children[0]: ", INNER.copy, *out, device)
            self.assertTrue(all(map(released, out)))
        text = "invalid input at array.children[0]: "
        self.assert_fails(errno.EINVAL, text, INNER.write_ipc, stream_of(broken()), self.path("x"))
        self.assertEqual(os.listdir(self.folder), [])

    def test_misaligned(self):
        """A pointer that no compiler would give."""
        memory = c.create_string_buffer(c.sizeof(ArrowDeviceArray) + 8)
        odd = c.cast(c.addressof(memory) + 1, c.POINTER(ArrowDeviceArray))
        self.assert_fails(errno.EINVAL, "array is null or misaligned", INNER.call, "copy", odd, ArrowSchema(), b"cpu", *rust.pair())

    def test_in_place(self):
        """`out` and `out_schema` may be the structs that came in."""
        out = batch_out(pa.record_batch([pa.array([1, None, 3])], ["x"]))
        for device in (b"sim", b"sim", b"cpu", b"cpu"):
            INNER.call("copy", *out, device, *out)
        self.assertEqual(batch_in(*out).to_pydict(), {"x": [1, None, 3]})

    def test_last_error(self):
        """Null before the first failure of a thread; then never null again, and nobody else's: no other thread's, and
        not that of the library's other copy."""
        seen, barrier = {}, threading.Barrier(6)

        def body(name, library):
            before = library.last_error()
            self.assert_fails(errno.ENOENT, name, library.open, self.path(name))
            barrier.wait(30)
            # A success leaves it alone.
            for struct in library.copy(*batch_out(pa.record_batch([pa.array([1])], ["x"])), "cpu"):
                release(struct)
            seen[name] = before, library.last_error()

        threads = [threading.Thread(target=body, args=(f"missing {i}", (INNER, OTHER)[i % 2])) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(len(seen), 6)
        for name, (before, after) in seen.items():
            self.assertIsNone(before)
            self.assertIn(name, after)


class TwoCopies(CapiCase):
    """This crate twice in one process: strangers that keep to the interface."""

    def test_data_passes(self):
        """The CPU's as it is; up by one library and down by the same, and the other's data in between."""
        for variant in range(0, COMMON, 3):
            for device in ("cpu", "sim"):
                with self.subTest(variant=variant, device=device):
                    there = OTHER.copy(*rust.batch(ALL, variant), device)
                    rust.check_batch(INNER.copy(*OTHER.copy(*there, "cpu"), "cpu"), ALL, variant)

    def test_the_others_device_is_refused(self):
        """Both have a device sim. Addresses and events of another are told apart, and released."""
        for struct in OTHER.copy(*rust.batch([INT], 5), "sim"):  # so that it has one
            release(struct)
        for wait, path in [(False, "sync_event: "), (True, "array.children[0].buffers[")]:
            given = rust.batch([INT], 5, "sim", wait)
            self.assert_fails(errno.EINVAL, f"invalid input at {path}", OTHER.copy, *given, "cpu")
            self.assertTrue(all(map(released, given)))
