"""The libraries that people use: polars, DuckDB, arro3, DataFusion and pandas, both ways, on the CPU and the simulated
device. What one of them makes of our data is what it makes of pyarrow's, and what pyarrow makes of its data stays the same
on the way through a device."""

import datetime
import decimal

import arrow_device as ad
import arro3.core
import datafusion
import duckdb
import nanoarrow
import pandas as pd
import polars as pl
import pyarrow as pa
from test_capsules import Balanced
from test_host_methods import HostOnly

DAY, TIME = datetime.date(1969, 2, 28), datetime.time(12, 34, 56, 789000)
MOMENT, PRICE = datetime.datetime.combine(DAY, TIME), decimal.Decimal("-1.25")

COLUMNS = {
    "bool": pa.array([True, None, False]),
    "int8": pa.array([1, None, -128], pa.int8()),
    "uint64": pa.array([2**64 - 1, None, 0], pa.uint64()),
    "float16": pa.array([1.5, None, -0.0], pa.float16()),
    "float32": pa.array([1.5, None, -0.0], pa.float32()),
    "float64": pa.array([float("inf"), None, -0.0]),
    "text": pa.array(["a", None, "é" * 20]),
    "large_text": pa.array(["a", None, "b"], pa.large_utf8()),
    "text_view": pa.array(["a", None, "x" * 40], pa.string_view()),
    "binary": pa.array([b"a", None, b"\xff"]),
    "binary_view": pa.array([b"a", None, b"\xff" * 40], pa.binary_view()),
    "binary_of_2": pa.array([b"ab", None, b"cd"], pa.binary(2)),
    "date32": pa.array([DAY, None, DAY]),
    "date64": pa.array([DAY, None, DAY], pa.date64()),
    "moment": pa.array([MOMENT, None, MOMENT], pa.timestamp("us")),
    "moment_utc": pa.array([MOMENT, None, MOMENT], pa.timestamp("ms", "UTC")),
    "moment_ns": pa.array([MOMENT, None, MOMENT], pa.timestamp("ns")),
    "duration": pa.array([datetime.timedelta(1), None, datetime.timedelta(0)], pa.duration("us")),
    "time64": pa.array([TIME, None, TIME], pa.time64("us")),
    "time32": pa.array([TIME, None, TIME], pa.time32("ms")),
    "decimal128": pa.array([PRICE, None, -PRICE], pa.decimal128(10, 2)),
    "decimal256": pa.array([PRICE, None, -PRICE], pa.decimal256(50, 2)),
    "list": pa.array([[1, None], None, []]),
    "large_list": pa.array([[1, None], None, []], pa.large_list(pa.int64())),
    "list_of_2": pa.array([[1, 2], None, [3, None]], pa.list_(pa.int32(), 2)),
    "list_view": pa.array([[1, None], None, []], pa.list_view(pa.int64())),
    "texts": pa.array([["a", None], None, ["b" * 20]]),
    "struct": pa.array([{"x": 1, "y": "a"}, None, {"x": None, "y": None}]),
    "structs": pa.array([[{"x": 1}], None, [None, {"x": None}]]),
    "map": pa.array([[("a", 1)], None, []], pa.map_(pa.utf8(), pa.int64())),
    "dictionary": pa.array(["a", None, "b"]).dictionary_encode(),
    "dictionary_u8": pa.DictionaryArray.from_arrays(pa.array([0, None, 1], pa.uint8()), pa.array(["a", "b"])),
    "null": pa.nulls(3),
    "runs": pa.RunEndEncodedArray.from_arrays(pa.array([2, 3], pa.int32()), pa.array(["a", None])),
    "interval": pa.array([pa.MonthDayNano([1, 2, 3]), None, pa.MonthDayNano([0, 0, 0])]),
    "uuid": pa.array([b"0" * 16, None, b"1" * 16], pa.uuid()),
    "bool8": pa.ExtensionArray.from_storage(pa.bool8(), pa.array([1, None, 0], pa.int8())),
}


class Clients:
    """What is tested with each client: `of` makes an object of its own of one that has the methods, and `out` a table of
    that."""

    # The columns that it does not take from pyarrow either, and those of which it takes no slices.
    refuses, whole = (), ()

    def each(self, columns, check):
        for name in columns:
            table = pa.table({"c": COLUMNS[name]}, metadata={"of": "the schema"})
            tables = [table, pa.concat_tables([table, table])]
            if name not in self.whole:
                tables += [table.slice(1, 2), table.slice(3), pa.concat_tables([table, table.slice(1)])]
            for table in tables:
                with self.subTest(name, rows=table.num_rows):
                    check(table)

    def same(self, expected: pa.Table, actual: pa.Table):
        self.assertTrue(expected.schema.equals(actual.schema, check_metadata=True), (expected.schema, actual.schema))
        actual.validate(full=True)
        self.assertTrue(expected.equals(actual), (expected, actual))

    def test_streams_to_it(self):
        def check(table):
            expected = self.out(self.of(HostOnly(table)))
            for ours in (ad.Stream(table), ad.Stream(table).to("sim").to("cpu"), ad.Stream(table).to("sim").to_host()):
                self.same(expected, self.out(self.of(ours)))

        self.each(COLUMNS.keys() - self.refuses, check)

    def test_batches_to_it(self):
        def check(table):
            for batch in table.to_batches():
                expected = self.out(self.of(HostOnly(batch)))
                for ours in (ad.RecordBatch(batch), ad.RecordBatch(batch).to("sim").to("cpu")):
                    self.same(expected, self.out(self.of(ours)))

        self.each(COLUMNS.keys() - self.refuses, check)

    def test_streams_from_it(self):
        def check(table):
            expected = pa.table(self.of(HostOnly(table)))
            for device in ("cpu", "sim"):
                self.same(expected, pa.table(ad.Stream(self.of(HostOnly(table))).to(device).to_host()))

        self.each(COLUMNS.keys() - {*self.refuses}, check)

    def test_many_rows(self):
        numbers = pa.array(range(20_000))
        table = pa.table({"n": numbers, "t": numbers.cast(pa.utf8()), "l": pa.array([[n] for n in range(20_000)])})
        chunks = pa.Table.from_batches(table.to_batches(max_chunksize=3_000))
        back = pa.table(ad.Stream(self.of(ad.Stream(chunks).to("sim").to_host())).to("sim").to_host())
        self.assertEqual(back.to_pydict(), table.to_pydict())

    def test_what_the_host_cannot_read(self):
        """An error, and no wrong data."""
        for ours in (ad.Stream(pa.table({"a": [1]})).to("sim"), ad.RecordBatch(pa.record_batch({"a": [1]})).to("sim")):
            # Ours, or the client's own; Rust libraries may wrap it in a panic.
            with self.assertRaises(BaseException) as failed:
                self.out(self.of(ours))
            self.assertRegex(str(failed.exception), "(?i)cannot read|not implemented|__arrow_c|Arrow Stream in from_arrow|no simulated device|Device type 12")
            del failed


class Polars(Clients, Balanced):
    refuses, whole = ("decimal256", "list_view", "runs", "interval"), ("list_of_2",)
    def of(self, data):
        return pl.DataFrame(data)

    def out(self, frame):
        return frame.to_arrow()

    def test_series(self):
        for sent in (pa.array([1, None]), pa.array(["a", None]), pa.array([[1], None])):
            self.assertEqual(pl.Series(ad.Array(sent).to("sim").to("cpu")).to_list(), sent.to_pylist())

    def test_a_stream_is_no_frame_of_one_cell(self):
        self.assertEqual(pl.DataFrame(ad.Stream(pa.table({"a": [1, 2]}))).to_dict(as_series=False), {"a": [1, 2]})

    def test_an_argument_without_a_default(self):
        inner = pl.DataFrame({"a": [1, None]})._df
        self.assertEqual(pa.table(ad.Stream(inner)).to_pydict(), {"a": [1, None]})


class Duckdb(Clients, Balanced):
    refuses = ("float16", "decimal256")

    # To make one takes long.
    connection = duckdb.connect(config={"threads": 1})

    def of(self, data):
        return self.connection.sql("from data")

    def out(self, relation):
        return relation.to_arrow_table()

    def test_it_asks_for_the_schema_first(self):
        stream = ad.Stream(pa.table({"id": [1, 2, 3]})).to("sim").to_host()
        self.assertEqual(self.connection.sql("select sum(id) from stream where id > 1").fetchall(), [(5,)])


    def test_every_way_in(self):
        make = lambda: ad.Stream(pa.table({"id": [1, None, 3]})).to("sim").to_host()
        connection = duckdb.connect(config={"threads": 1})
        mine = make()
        self.assertEqual(connection.sql("select count(id) from mine").fetchall(), [(2,)])
        connection.register("named", make())
        self.assertEqual(connection.sql("select * from named").fetchall(), [(1,), (None,), (3,)])
        self.assertEqual(connection.from_arrow(make()).fetchall(), [(1,), (None,), (3,)])
        # Ours of what it makes: a relation.
        there = ad.Device("sim").upload(connection.sql("select range as r from range(5)"))
        self.assertEqual(pa.record_batch(there.to_host()).to_pydict(), {"r": [0, 1, 2, 3, 4]})
        connection.close()
        del mine, connection


class Arro3(Clients, Balanced):
    def of(self, data):
        return arro3.core.Table.from_arrow(data)

    def out(self, table):
        return pa.table(table)

    def test_arrays(self):
        for name, sent in COLUMNS.items():
            with self.subTest(name):
                theirs = arro3.core.Array.from_arrow(ad.Array(sent).to("sim").to("cpu"))
                self.assertTrue(pa.array(theirs).equals(sent))
                self.assertTrue(pa.array(ad.Array(theirs)).equals(sent))


class Datafusion(Clients, Balanced):
    def of(self, data):
        return datafusion.SessionContext().from_arrow(data)

    def out(self, frame):
        return frame.to_arrow_table()


class Pandas(Clients, Balanced):
    # It makes Python's objects of them, of which pyarrow cannot make the column again.
    refuses = ("map", "list_view")

    def of(self, data):
        return pd.DataFrame.from_arrow(data)

    def out(self, frame):
        return pa.Table.from_pandas(frame)

    def test_series(self):
        self.assertEqual(pd.Series.from_arrow(ad.Array(pa.array([1, 2])).to("sim").to("cpu")).tolist(), [1, 2])


class Nanoarrow(Balanced):
    def test_both_ways(self):
        table = pa.table({"a": [1, None], "b": [[1], None]})
        for ours in (ad.Stream(table), ad.Stream(table).to("sim").to_host(), ad.RecordBatch(table.to_batches()[0])):
            self.assertEqual(nanoarrow.Array(ours).to_pylist(), table.to_pylist())
        self.assertEqual(pa.table(ad.Stream(nanoarrow.ArrayStream(table)).to("sim").to_host()), table)


class Columns(Balanced):
    """Streams of arrays that are no batches."""

    def test_they_are_refused_and_their_chunks_are_not(self):
        column = pa.chunked_array([[1], [2, None]])
        for stream in (column, pl.Series([1, 2])):
            with self.assertRaisesRegex(ValueError, "needs a struct, not Int64; import arrays of other types one by one"):
                ad.Stream(stream)
        for chunk in column.chunks:
            self.assertEqual(pa.array(ad.Array(chunk)), chunk)


class ExtensionsInDictionaries(Balanced):
    """arrow-rs has no place for what the schema of a dictionary's values says besides their type."""

    def test_they_stay(self):
        uuids = pa.DictionaryArray.from_arrays(pa.array([0, 0, None], pa.int8()), pa.array([b"0" * 16], pa.uuid()))
        fields = [
            pa.field("u", uuids.type, metadata={"of": "the field"}),
            pa.field("l", pa.list_(uuids.type)),
            pa.field("s", pa.struct([("u", uuids.type)])),
        ]
        offsets = pa.array([0, 1, 2, 3], pa.int32())
        columns = [uuids, pa.ListArray.from_arrays(offsets, uuids), pa.StructArray.from_arrays([uuids], ["u"])]
        table = pa.Table.from_arrays(columns, schema=pa.schema(fields))
        del offsets
        for make in (lambda: ad.Stream(table), lambda: ad.Stream(table).to("sim").to_host(), lambda: ad.Stream(ad.Stream(table).to("sim")).to("cpu")):
            got = pa.table(make())
            self.assertTrue(got.schema.equals(table.schema, check_metadata=True), got.schema)
            self.assertTrue(got.equals(table))
            self.assertTrue(pa.schema(make()).equals(table.schema, check_metadata=True))
        column = ad.Device("sim").upload(table)["u"]
        self.assertTrue(pa.field(column).equals(fields[0], check_metadata=True))
        self.assertTrue(pa.array(column[1:].to_host()).equals(uuids[1:]))


class TextsUnderNulls(Balanced):
    """Bytes under a null that are no UTF-8, which others accept."""

    def texts(self, of=pa.utf8(), bitmap=b"\x05"):
        offsets = pa.array([0, 1, 3, 5], pa.int64() if of == pa.large_utf8() else pa.int32()).buffers()[1]
        # Bytes of its own: columns that are not the same take a copy each, of no more than there is.
        return pa.Array.from_buffers(of, 3, [pa.py_buffer(bitmap), offsets, pa.py_buffer(bytearray(b"a\xff\xfebc"))])

    def test_they_are_taken(self):
        texts = self.texts()
        offsets = pa.array([0, 1, 3], pa.int32())
        columns = {
            "text": texts,
            "large": self.texts(pa.large_utf8()),
            "slice": pa.concat_arrays([texts, texts]).slice(1, 3),
            "list": pa.ListArray.from_arrays(pa.array([0, 1, 2, 3], pa.int32()), texts),
            "struct": pa.StructArray.from_arrays([texts, pa.array([1, 2, 3])], ["t", "n"]),
            "dictionary": pa.DictionaryArray.from_arrays(pa.array([0, 1, 2], pa.int8()), texts),
            "number": pa.array([1, None, 3]),
        }
        del offsets
        table = pa.table(columns)
        for name, column in columns.items():
            with self.subTest(name):
                column.validate(full=True)
                got = pa.array(ad.Array(column))
                self.assertEqual((got.type, got.to_pylist()), (column.type, column.to_pylist()))
                self.assertEqual(pa.array(ad.Array(column).to("sim").to_host()).to_pylist(), column.to_pylist())
        for make in (lambda: ad.Stream(table), lambda: ad.Stream(table).to("sim").to_host(), lambda: ad.Device("sim").upload(table).to_host()):
            got = pa.table(pa.record_batch(made)) if isinstance(made := make(), ad.RecordBatch) else pa.table(made)
            self.assertEqual(got.to_pydict(), table.to_pydict())
            # Nobody reads what is no text any more.
            self.assertEqual(pl.DataFrame(got)["text"].to_list(), ["a", None, "bc"])
        column = ad.RecordBatch(pa.record_batch([texts], schema=pa.schema([pa.field("t", pa.utf8(), metadata={"of": "it"})])))["t"]
        self.assertEqual(pa.field(column).metadata, {b"of": b"it"})

    def test_a_copy_is_counted_and_only_made_where_needed(self):
        cpu, good = ad.Device("cpu"), pa.array(["a", None, "bc"])
        for column, bytes_copied in ((self.texts(), 5), (good, 0)):
            before = cpu.counters()["host_copied_bytes"]
            ad.Array(column)
            self.assertEqual(cpu.counters()["host_copied_bytes"] - before, bytes_copied)
        self.assertEqual(pa.array(ad.Array(good)).buffers()[2].address, good.buffers()[2].address)

    def test_what_a_row_has_is_refused(self):
        for bitmap in (b"\x07", b"\x06", None):
            with self.assertRaisesRegex(ValueError, "Invalid UTF8"):
                ad.Array(self.texts(bitmap=bitmap) if bitmap else pa.Array.from_buffers(pa.utf8(), 3, [None, *self.texts().buffers()[1:]]))
