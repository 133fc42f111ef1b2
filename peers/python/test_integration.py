"""The driver for integration files (`capi/integration.py`): between this crate, Arrow C++ and nanoarrow, on the CPU and the
simulated device, with Arrow's files if ARROW_TEST_DATA names their folder."""

import gzip
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

import pyarrow as pa

DRIVER = pathlib.Path(__file__).parents[2] / "capi/integration.py"
OURS, CPP = f"ArrowDevice={os.environ['ARROW_DEVICE_PEERS']}", f"ArrowCpp={os.environ['ARROW_DEVICE_SHIM']}"


def integration_json(values: list[int]) -> dict:
    """A file of one column, as Arrow's tool archery writes it."""
    name, count = "v", len(values)
    column_type = {"name": "int", "isSigned": True, "bitWidth": 32}
    field = {"name": name, "type": column_type, "nullable": True, "children": []}
    column = {"name": name, "count": count, "VALIDITY": [1] * (count - 1) + [0], "DATA": values}
    return {"schema": {"fields": [field]}, "batches": [{"count": count, "columns": [column]}]}


class Driver(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def write(self, name: str, batch: pa.RecordBatch, batches: int = 2):
        for form, new in (("stream", pa.ipc.new_stream), ("arrow_file", pa.ipc.new_file)):
            with new(self.folder / f"{name}.{form}", batch.schema) as writer:
                for _ in range(batches):
                    writer.write_batch(batch)

    def run_driver(self, status: int, *arguments) -> dict[tuple[str, str], list[tuple[int, int, int]]]:
        """Its table: by exporter and label, for each importer how many passed, failed and were skipped."""
        done = subprocess.run([sys.executable, DRIVER, *arguments], capture_output=True, text=True)
        self.assertEqual(done.returncode, status, done.stdout + done.stderr)
        self.output = done.stdout
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines() if " / " in line and line[0] == "|"]
        return {(name, label): [tuple(map(int, cell.split(" / "))) for cell in cells] for name, label, *cells in rows}

    def test_each_with_each(self):
        text = pa.array(["a", None, "bcd" * 10])
        numbers = pa.array([1, None, 3], pa.int64())
        self.write("flat", pa.record_batch({"text": text, "numbers": numbers, "bits": pa.array([True, False, None])}))
        nested = {"list": pa.array([[1], None, []]), "words": text.dictionary_encode()}
        self.write("nested", pa.record_batch({**nested, "pair": pa.StructArray.from_arrays([text, numbers], ["t", "n"])}))
        folders = [self.folder]
        if data := os.environ.get("ARROW_TEST_DATA"):
            folders += [pathlib.Path(data) / "arrow-ipc-stream/integration" / folder for folder in ("1.0.0-littleendian", "0.17.1")]
        table = self.run_driver(0, "--library", OURS, "--library", CPP, "--nanoarrow", *folders)
        # A schema, two batches and a stream of each file; nanoarrow has no streams.
        least = {"CPU": ([8, 8, 6], [8, 8, 6], [6, 6, 6]), "EXT_DEV": ([6, 6, 4], [6, 6, 4], [0, 0, 0])}
        for label, rows in least.items():
            for name, row in zip(("ArrowDevice", "ArrowCpp", "nanoarrow"), rows):
                for expected, (passed, failed, _) in zip(row, table[name, label]):
                    self.assertGreaterEqual(passed, expected, self.output)
                    self.assertEqual(failed, 0, self.output)

    def test_json(self):
        """Who reads JSON is given it, others its twin; what is in one and not in the other is noticed."""
        (self.folder / "same.json.gz").write_bytes(gzip.compress(json.dumps(integration_json([1, -2, 0])).encode()))
        self.write("same", pa.record_batch({"v": pa.array([1, -2, None], pa.int32())}), batches=1)
        table = self.run_driver(0, "--library", OURS, "--library", CPP, self.folder)
        self.assertEqual(table["ArrowDevice", "CPU"], [(3, 0, 0)] * 2)
        self.assertEqual(table["ArrowCpp", "EXT_DEV"], [(2, 0, 0)] * 2)
        (self.folder / "same.json.gz").write_bytes(gzip.compress(json.dumps(integration_json([1, -3, 0])).encode()))
        table = self.run_driver(1, "--library", OURS, "--library", CPP, self.folder)
        self.assertEqual(table["ArrowDevice", "CPU"], [(3, 0, 0), (1, 2, 0)])
        self.assertEqual(table["ArrowCpp", "EXT_DEV"], [(0, 2, 0), (2, 0, 0)])
        self.assertIn("ArrowDevice to ArrowCpp, CPU, batch of ", self.output)

    def test_nothing(self):
        """Files that nobody reads are no success."""
        (self.folder / "damaged.stream").write_bytes(b"what is this")
        (self.folder / "other.txt").write_text("")
        done = subprocess.run([sys.executable, DRIVER, "--library", OURS, self.folder / "other.txt"], capture_output=True)
        self.assertEqual(done.returncode, 1)
        done = subprocess.run([sys.executable, DRIVER, "--library", OURS, self.folder], capture_output=True)
        self.assertEqual(done.returncode, 1)
