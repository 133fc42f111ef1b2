"""The Python package's own objects: devices, arrays, batches, schemas, streams; and the programs of its pages."""

import asyncio
import contextlib
import io
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

import arrow_device as ad
import numpy as np
import polars as pl
import pyarrow as pa
from test_capsules import Balanced, batch

ROOT = pathlib.Path(__file__).parents[2]


class Devices(Balanced):
    def test_names(self):
        sim = ad.Device("sim")
        self.assertEqual((sim.name, str(sim), repr(sim)), ("sim", "sim", "Device('sim')"))
        self.assertEqual((sim, hash(sim)), (ad.Device("sim:0"), hash(ad.Device("sim:0"))))
        self.assertNotEqual(sim, ad.Device("cpu"))
        self.assertEqual((sim.is_host_readable, ad.Device("cpu").is_host_readable), (False, True))

    def test_what_is_not_there(self):
        with self.assertRaisesRegex(ValueError, "unknown device 'gpu0'.*cuda"):
            ad.Device("gpu0")
        for open_it in (lambda: ad.Device("cuda:3"), lambda: ad.Stream(batch()).to("cuda:3"), ad.Device.gpu):
            with self.assertRaisesRegex(NotImplementedError, "cuda:.*driver"):
                open_it()
        with self.assertRaisesRegex(TypeError, "Device | str"):
            ad.RecordBatch(batch()).to(3)

    def test_uploads(self):
        table = pa.concat_tables([pa.table({"a": [1, 2], "t": ["x", None]}), pa.table({"a": [3], "t": ["z"]})])
        makes = lambda: table, table.to_reader, lambda: pl.DataFrame(table), lambda: table.combine_chunks().to_batches()[0], table.to_pandas
        for device in ("sim", "cpu"):
            for make in makes:
                there = ad.Device(device).upload(make())
                self.assertEqual((str(there.device), len(there)), (device, 3))
                self.assertEqual(pa.record_batch(there.to_host()).to_pydict(), table.to_pydict())
        empty = ad.Device("sim").upload(table.schema.empty_table())
        self.assertTrue(pa.record_batch(empty.to_host()).schema.equals(table.schema))
        with self.assertRaisesRegex(TypeError, "type list"):
            ad.Device("sim").upload([1, 2])

    def test_an_upload_is_one_allocation(self):
        sim = ad.Device("sim")
        before = sim.counters()
        there = sim.upload(batch())
        self.assertEqual(sim.counters()["allocations"] - before["allocations"], 1)
        self.assertIs(sim.upload(there).to_host().is_ready(), True)
        self.assertEqual(sim.counters()["bytes_to_device"] - before["bytes_to_device"], there.nbytes)


class Batches(Balanced):
    def test_columns_and_rows(self):
        there = ad.RecordBatch(batch()).to("sim")
        self.assertEqual((there.num_rows, there.num_columns, len(there)), (3, 3, 3))
        for key, name in (("text", "text"), (1, "text"), (-1, "list"), (np.int64(0), "id")):
            self.assertEqual(pa.array(there[key].to_host()), batch()[name])
        for rows in (slice(1, 3), slice(None), slice(-2, None), slice(5, 9), slice(2, 1)):
            self.assertEqual(pa.record_batch(there[rows].to_host()), batch()[rows])
            self.assertEqual(pa.array(there["id"][rows].to_host()), batch()["id"][rows])
        self.assertEqual(pa.record_batch(there.slice(1, 1).to_host()), batch().slice(1, 1))

    def test_what_is_not_there(self):
        there = ad.RecordBatch(batch())
        with self.assertRaisesRegex(KeyError, "no column 'x'; there are id: Int64, text: Utf8"):
            there["x"]
        for index in (3, -4):
            with self.assertRaisesRegex(IndexError, f"no column {index} of 3"):
                there[index]
        with self.assertRaisesRegex(TypeError, "int | slice"):
            there[1.5]
        for sliced in (there, there["id"]):
            with self.assertRaisesRegex(TypeError, "step"):
                sliced[::2]
            with self.assertRaisesRegex(ValueError, "3"):
                sliced.slice(2, 2)
        with self.assertRaisesRegex(TypeError, "use Stream, or Device.upload"):
            ad.RecordBatch(pa.table(batch()))
        with self.assertRaisesRegex(TypeError, r"array\[0:1\]"):
            there["id"][0]
        with self.assertRaisesRegex(TypeError, "expected a table.*of type dict"):
            ad.Device("cpu").upload({"a": [1]})

    def test_of_arrays(self):
        there = ad.RecordBatch(batch()).to("sim")
        doubled = ad.RecordBatch.from_arrays([there["id"], there["text"], there["id"]], ["a", "b", "c"])
        self.assertEqual(pa.record_batch(doubled.to_host()).to_pydict(), {"a": [1, 2, None], "b": ["a", None, "ccc"], "c": [1, 2, None]})
        uuids = ad.Array(pa.array([b"0" * 16], pa.uuid()))
        self.assertEqual(pa.schema(ad.RecordBatch.from_arrays([uuids], ["u"])).field("u").type, pa.uuid())
        for arrays, names, text in (
            ([there["id"]], [], "1 arrays and 0 names"),
            ([], [], "column"),
            ([there["id"], there["id"][1:]], ["a", "b"], "length|rows"),
            ([there["id"], ad.Array(pa.array([1, 2, 3]))], ["a", "b"], "sim|cpu"),
        ):
            with self.assertRaisesRegex(ValueError, text):
                ad.RecordBatch.from_arrays(arrays, names)

    def test_what_is_shown(self):
        there = ad.RecordBatch(batch()).to("sim")
        self.assertRegex(repr(there), r"^<RecordBatch: 3 rows of 3 columns on sim, \d+ bytes; id: Int64, text: Utf8, list: List")
        self.assertRegex(repr(there["id"]), rf"^<Array: Int64, 3 rows on sim, {there.nbytes} bytes>$")
        wide = ad.RecordBatch(pa.record_batch({f"c{i}": [i] for i in range(20)}))
        self.assertRegex(repr(wide), "c11: Int64, and 8 more>$")
        self.assertEqual((there["id"].type, there["id"].null_count, ad.Array(pa.array([1])).null_count), ("Int64", 1, 0))

    def test_it_is_waited_for(self):
        there = ad.RecordBatch(batch()).to("sim")
        for waited in (there, there["id"]):
            waited.wait()
            self.assertIs(waited.is_ready(), True)

    def test_to_host_does_not_copy_what_the_host_can_read(self):
        sent = batch()
        back = pa.record_batch(ad.RecordBatch(sent).to_host())
        self.assertEqual(back["id"].buffers()[1].address, sent["id"].buffers()[1].address)
        field = pa.field("u", pa.uuid(), metadata={"of": "it"})
        named = pa.record_batch([pa.array([b"0" * 16], pa.uuid())], schema=pa.schema([field]))
        column = ad.RecordBatch(named).to("sim")["u"].to_host()
        self.assertTrue(pa.field(column).equals(field, check_metadata=True))

    def test_schemas(self):
        sent = batch().replace_schema_metadata({"of": "the schema"})
        for made in (ad.RecordBatch(sent), ad.Stream(sent), ad.RecordBatch(sent).to("sim")):
            schema = made.schema
            self.assertEqual((schema.names, schema.types[:2], len(schema)), (["id", "text", "list"], ["Int64", "Utf8"], 3))
            self.assertEqual((schema.metadata, schema == ad.RecordBatch(sent).schema), ({"of": "the schema"}, True))
            self.assertTrue(pa.schema(schema).equals(sent.schema, check_metadata=True))
            self.assertRegex(repr(schema), "^<Schema: id: Int64, text: Utf8")
        self.assertNotEqual(ad.RecordBatch(sent).schema, ad.RecordBatch(batch()).schema)

    def test_schemas_of_other_libraries(self):
        sent = batch().schema.with_metadata({"of": "the schema"})
        for data in (sent, ad.RecordBatch(batch().replace_schema_metadata({"of": "the schema"})), sent.__arrow_c_schema__(), pa.struct(list(sent))):
            schema = ad.Schema(data)
            self.assertEqual(schema.names, ["id", "text", "list"])
            self.assertTrue(pa.schema(schema).equals(sent, check_metadata=not isinstance(data, pa.DataType)))
        with self.assertRaisesRegex(TypeError, "__arrow_c_schema__, got an object of type int"):
            ad.Schema(3)
        with self.assertRaisesRegex(ValueError, "arrow_schema"):
            ad.Schema(batch().__arrow_c_array__()[1])
        for data in (pa.int32(), pa.field("a", pa.int32())):
            with self.assertRaisesRegex(ValueError, "Int32|struct"):
                ad.Schema(data)


class Tensors(Balanced):
    def test_a_copy_to_the_host(self):
        """Which from_dlpack(device="cpu") asks for."""
        there = ad.Array(pa.array([1, 2, 3])).to("sim")
        self.assertEqual(np.from_dlpack(there, device="cpu").tolist(), [1, 2, 3])
        with self.assertRaisesRegex(BufferError, "sim"):
            np.from_dlpack(there, device="cpu", copy=False)
        mine = np.from_dlpack(there[1:], device="cpu", copy=True)
        mine[0] = 7
        self.assertEqual(pa.array(there.to_host()).to_pylist(), [1, 2, 3])
        for wrong in (there, ad.Array(pa.array([1]))):
            with self.assertRaises(BufferError):
                wrong.__dlpack__(dl_device=(2, 0))
        with self.assertRaisesRegex(BufferError, "null"):
            np.from_dlpack(ad.Array(pa.array([1, None])).to("sim"), device="cpu")


class Streams(Balanced):
    def chunks(self, count=5):
        return pa.Table.from_batches([batch()] * count)

    def test_progress(self):
        stream = ad.Stream(self.chunks()).to("sim")
        self.assertEqual((stream.batches, stream.rows, stream.bytes), (0, 0, 0))
        nbytes = next(stream).nbytes
        self.assertEqual((stream.batches, stream.rows, stream.bytes), (1, 3, nbytes))
        self.assertRegex(repr(stream), f"^<Stream: on sim, 3 rows and {nbytes} bytes read so far; id: Int64")
        self.assertEqual(pa.table(host := stream.to_host()).num_rows, 12)
        # Whoever reads it.
        self.assertEqual((stream.rows, host.rows, host.batches), (15, 12, 4))

    def test_as_one(self):
        for device in ("cpu", "sim"):
            for count in (1, 5):
                whole = ad.Stream(self.chunks(count)).to(device).read_all()
                self.assertEqual((str(whole.device), len(whole)), (device, 3 * count))
                self.assertEqual(pa.table(pa.record_batch(whole.to_host())).to_pydict(), self.chunks(count).to_pydict())
        stream = ad.Stream(self.chunks())
        stream.read_all()
        with self.assertRaisesRegex(ValueError, "already been consumed"):
            stream.read_all()

    def test_ahead(self):
        for ahead in (1, 2, 100):
            for memory_budget in (0, 100, 1 << 30):
                stream = ad.Stream(self.chunks()).to("sim", ahead=ahead, memory_budget=memory_budget)
                self.assertEqual(pa.table(stream.to_host()), self.chunks())
        with self.assertRaisesRegex(NotImplementedError, "cannot read a stream on sim"):
            ad.Stream(self.chunks()).to("sim").to("sim:1", ahead=1)
        # Nobody takes the rest.
        next(ad.Stream(self.chunks()).to("sim", ahead=1, memory_budget=0))

    def test_the_budget(self):
        """Reading pauses once what nobody has taken is as large, and goes on as it is taken."""
        numbers = pa.record_batch({"a": pa.array(range(1000))})
        # 16 bytes a row, and a MB of text.
        views = pa.record_batch({"a": pa.array(["x" * 1000] * 1000, pa.string_view())})
        for one, budget, most in ((numbers, 0, 1), (numbers, 8_000, 1), (numbers, 24_000, 3), (numbers, 1 << 30, 12), (views, 24_000, 1)):
            read = []

            def batches():
                for i in range(50):
                    read.append(i)
                    yield one

            stream = ad.Stream(pa.RecordBatchReader.from_batches(one.schema, batches())).to("sim", ahead=5, memory_budget=budget)
            for taken in range(50):
                # Those that wait, and the one that is being read.
                self.assertLessEqual(len(read), taken + most + (budget > 24_000))
                self.assertEqual(len(next(stream)), 1000)
            self.assertEqual((list(stream), len(read)), ([], 50))

    def test_errors_come_in_their_place(self):
        def batches():
            yield batch()
            raise ValueError("no more today")

        for ahead in (0, 2):
            stream = ad.Stream(pa.RecordBatchReader.from_batches(batch().schema, batches())).to("sim", ahead=ahead)
            self.assertEqual(len(next(stream)), 3)
            with self.assertRaisesRegex(ValueError, "no more today"):
                next(stream)
            self.assertEqual(list(stream), [])

    def test_async_loops(self):
        async def read():
            return [len(each) async for each in ad.Stream(self.chunks()).to("sim", ahead=2)]

        self.assertEqual(asyncio.run(read()), [3] * 5)

        async def fail():
            reader = pa.RecordBatchReader.from_batches(batch().schema, iter([batch(), 3]))
            async for _ in ad.Stream(reader):
                pass

        with self.assertRaisesRegex(ValueError, "'int'"):
            asyncio.run(fail())


class Interpreters(unittest.TestCase):
    def test_without_the_gil_it_says_why_not(self):
        program = "import sys; sys._is_gil_enabled = lambda: False; import arrow_device"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        self.assertEqual(done.returncode, 1)
        self.assertIn("ImportError: arrow_device has not been tried without the GIL: set PYTHON_GIL=1", done.stderr)


class Pages(unittest.TestCase):
    """The Python programs of the pages, as they stand."""

    def test_programs(self):
        for page in ("README.md", "python/README.md", "docs/guide/python.md"):
            programs = re.findall(r"^```python\n(.*?)^```$", (ROOT / page).read_text(), re.M | re.S)
            self.assertTrue(programs, page)
            scope, here = {}, os.getcwd()
            with tempfile.TemporaryDirectory() as folder:
                os.chdir(folder)
                try:
                    for program in programs:
                        with self.subTest(page, program=program[:60]), contextlib.redirect_stdout(io.StringIO()):
                            exec(compile(program, page, "exec"), scope)
                finally:
                    os.chdir(here)
