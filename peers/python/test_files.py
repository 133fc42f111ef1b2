"""Files that pyarrow writes, opened by the example library; files that it writes, opened by pyarrow."""

import errno
import os
import sys

import pyarrow as pa
import pyarrow.csv
import pyarrow.feather
import pyarrow.parquet

import cases
import known
from abi import CPU, EXT_DEV
from capi import EXAMPLE, INNER, Library
from cases import TYPES
from peer_case import InFolder, StreamError, arrays_of, batch_in, batches_in, release, schema_in, stream_schema
from producer import Producer
from rust import RustError
from test_types import SEEN

# What the files hold: types that Parquet and its reader in Rust give back as they were.
PLAIN = [
    "Boolean", "Int8", "Int16", "Int32", "Int64", "UInt8", "UInt16", "UInt32", "UInt64", "Float32", "Float64",
    "Date32", "Timestamp(µs)", 'Timestamp(ns, "UTC")', "Binary", "Utf8", "LargeUtf8", "FixedSizeBinary(3)",
    "Decimal128(38, 10)", "list<i32>", "struct<i32, utf8, bool>", "list<list<struct<i64, utf8>>>",
]  # fmt: skip


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
        types = [TYPES[t] for t in SEEN if TYPES[t] not in known.CHANGED | known.IPC_WRONG]
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
        self.assertEqual([b.num_rows for b in batches], [300, 0, 8, 150])
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
        """Told when it is opened."""
        expected = table(["Int64"])
        path = self.path("cut.arrows")
        with pa.ipc.new_stream(path, expected.schema) as writer:
            writer.write_table(expected)
        whole = os.path.getsize(path)
        for size in (whole - 4, whole * 2 // 3, 100):
            with open(path, "rb+") as file:
                file.truncate(size)
            with self.assertRaises(RustError) as refused:
                INNER.open(path)
            self.assertEqual(refused.exception.errno, errno.EINVAL)
            self.assertIn("cut.arrows: truncated", refused.exception.text)

    def test_a_wrong_value_in_the_middle(self):
        """The stream begins, fails at the batch, and then at every further call."""
        good = pa.record_batch([pa.array(["good"])], ["s"])
        offsets, text = pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe")
        bad = pa.record_batch([pa.StringArray.from_buffers(1, offsets, text)], ["s"])
        path = self.path("bad.arrows")
        with pa.ipc.new_stream(path, good.schema) as writer:
            for batch in (good, bad, good):
                writer.write_batch(batch)
        for device in ("cpu", "sim"):
            stream = INNER.open(path, device)
            arrays = arrays_of(stream)
            release(next(arrays))
            texts = set()
            for _ in range(3):
                with self.assertRaises(StreamError) as failed:
                    next(arrays_of(stream))
                texts.add((failed.exception.errno, failed.exception.text))
            [(number, text)] = texts
            self.assertEqual(number, errno.EINVAL)
            self.assertIn("invalid utf-8", text.lower())
            release(stream)


def one(of: pa.Table) -> pa.RecordBatch:
    """All rows in one batch."""
    columns = [column.combine_chunks() for column in of.columns]
    columns = [pa.concat_arrays(col.chunks) if isinstance(col, pa.ChunkedArray) else col for col in columns]
    return pa.RecordBatch.from_arrays(columns, schema=of.schema.remove_metadata())
