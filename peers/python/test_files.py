"""Files as streams on a device: those that pyarrow and polars write."""

import gc
import os
import pathlib
import tempfile

import arrow_device as ad
import polars as pl
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
from test_capsules import Balanced
from test_clients import COLUMNS


def table(rows=1000):
    numbers = pa.array([i if i % 7 else None for i in range(rows)])
    return pa.table({"n": numbers, "t": numbers.cast(pa.utf8()), "l": pa.array([[i, None] for i in range(rows)]), "x": pa.array(range(rows), pa.int32())})


class Files(Balanced):
    def setUp(self):
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = pathlib.Path(folder.name) / "dät a"

    def write_ipc(self, data, **options):
        with pa.ipc.new_file(self.path, data.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
            writer.write_table(data, 300)

    def same(self, stream, expected):
        self.assertEqual(stream.device_type, "sim")
        self.assertTrue(pa.table(stream.to_host()).equals(expected))
        self.assertEqual(stream.rows, expected.num_rows)


class Parquet(Files):
    def test_every_codec(self):
        for codec in ("none", "snappy", "zstd", "lz4", "gzip"):
            pq.write_table(table(), self.path, compression=codec)
            self.same(ad.read_parquet(self.path, "sim"), table())
        pl.DataFrame(table()).write_parquet(self.path)
        stream = ad.read_parquet(str(self.path), ad.Device("sim"))
        self.assertTrue(pl.DataFrame(stream.to_host()).equals(pl.DataFrame(table())))

    def test_columns(self):
        pq.write_table(table(), self.path)
        for columns in (["x", "n"], ["t"], ["n", "t", "l", "x"], ["x", "x"], []):
            stream = ad.read_parquet(self.path, "sim", columns=columns)
            self.assertEqual(stream.schema.names, columns)
            rows = sum(len(batch) for batch in stream) if not columns else None
            self.assertIn(rows, (None, 1000))
            if columns and len(set(columns)) == len(columns):
                self.same(ad.read_parquet(self.path, "sim", columns=columns), table().select(columns))
        with self.assertRaisesRegex(KeyError, "no column 'z'; there are n: Int64, t: Utf8"):
            ad.read_parquet(self.path, "sim", columns=["n", "z"])

    def test_batches(self):
        pq.write_table(table(), self.path)
        for ahead in (0, 1, 3):
            stream = ad.read_parquet(self.path, "sim", batch_size=300, ahead=ahead, memory_budget=1)
            self.assertEqual([len(batch) for batch in stream], [300, 300, 300, 100])
            self.assertEqual((stream.batches, stream.rows), (4, 1000))
        pq.write_table(table(0), self.path)
        self.same(ad.read_parquet(self.path, "sim"), table(0))

    def test_every_type(self):
        # Those that Parquet has.
        left_out = ("interval", "list_view", "runs", "duration", "decimal256", "bool8", "uuid", "date64")
        data = pa.table({name: column for name, column in COLUMNS.items() if name not in left_out})
        pq.write_table(data, self.path)
        back = pa.table(ad.read_parquet(self.path, "sim").to_host())
        self.assertEqual(back.to_pylist(), data.to_pylist())

    def test_nobody_reads_it(self):
        pq.write_table(table(), self.path, row_group_size=10)
        stream = ad.read_parquet(self.path, "sim", batch_size=10, memory_budget=0)
        next(stream)
        del stream
        gc.collect()


class Ipc(Files):
    def test_files_and_streams(self):
        for codec in (None, "lz4", "zstd"):
            self.write_ipc(table(), compression=codec)
            self.same(ad.read_ipc(self.path, "sim"), table())
        with pa.ipc.new_stream(self.path, table().schema) as writer:
            writer.write_table(table(), 300)
        stream = ad.read_ipc(self.path, "sim")
        self.assertEqual([len(batch) for batch in stream], [300, 300, 300, 100])
        self.same(ad.read_ipc(self.path, "sim", columns=["x", "n"]), table().select(["x", "n"]))
        pa.feather.write_feather(table(), str(self.path))
        self.same(ad.read_ipc(self.path, "sim"), table())
        pl.DataFrame(table()).write_ipc(self.path)
        self.assertTrue(pl.DataFrame(ad.read_ipc(self.path, "sim").to_host()).equals(pl.DataFrame(table())))

    def test_every_type(self):
        data = pa.table(COLUMNS)
        self.write_ipc(data)
        back = pa.table(ad.read_ipc(self.path, "sim").to_host())
        self.assertTrue(back.schema.equals(data.schema, check_metadata=True))
        self.assertEqual(back.to_pylist(), data.to_pylist())


class Refused(Files):
    def test_files_that_are_not_there(self):
        for read in (ad.read_parquet, ad.read_ipc):
            with self.assertRaises(FileNotFoundError) as failed:
                read(self.path, "sim")
            self.assertEqual((failed.exception.filename, failed.exception.strerror), (str(self.path), "No such file or directory"))
            with self.assertRaisesRegex(ValueError, f"{self.path.parent}: .*not a regular file"):
                read(self.path.parent, "sim")

    def test_batches_of_no_rows(self):
        with self.assertRaisesRegex(ValueError, "batch_size must be at least 1"):
            ad.read_parquet("absent", "cpu", batch_size=0)

    def test_devices_that_are_not_there(self):
        pq.write_table(table(), self.path)
        with self.assertRaisesRegex(NotImplementedError, "cuda:3"):
            ad.read_parquet(self.path, "cuda:3")

    def test_other_files(self):
        for content in (b"", b"PAR1", b"ARROW1", b"what is this" * 100, b"\xff\xff\xff\xff\x10\0\0\0" + b"x" * 100):
            self.path.write_bytes(content)
            for read in (ad.read_parquet, ad.read_ipc):
                with self.assertRaisesRegex(ValueError, f"{self.path}: "):
                    list(read(self.path, "sim"))

    def test_damaged_files(self):
        """Each byte of a small file in turn is wrong: what is read is right in form, or an error that names the file."""
        small = table(3)
        for write, read in ((lambda: pq.write_table(small, self.path), ad.read_parquet), (lambda: self.write_ipc(small), ad.read_ipc)):
            write()
            whole, failed = self.path.read_bytes(), 0
            step = 1 if os.environ.get("ARROW_DEVICE_PEERS_ALL") else 37
            for at in range(0, len(whole), step):
                self.path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
                try:
                    for batch in read(self.path, "sim"):
                        pa.record_batch(batch.to_host()).validate()
                except (ValueError, RuntimeError, MemoryError, NotImplementedError) as e:
                    failed += 1
                    self.assertIn(str(self.path), str(e))
            self.assertGreater(failed, 10)
