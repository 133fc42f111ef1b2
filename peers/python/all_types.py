"""The package's type stubs: they say what the module has, and checkers accept a program and refuse its mistakes."""

import pathlib
import subprocess
import sys
import tempfile
import textwrap
import unittest

GOOD = """
    import asyncio
    import pathlib

    import arrow_device as ad
    import numpy as np
    import polars as pl
    import pyarrow as pa
    from arrow_device.share import Publisher, Subscriber, shared_cpu

    device: ad.Device = ad.Device("sim")
    for data in (pl.DataFrame({"a": [1]}), pa.table({"a": [1]}), pa.record_batch({"a": [1]}), ad.Stream(pa.table({"a": [1]}))):
        there: ad.RecordBatch = device.upload(data)
    column: ad.Array = there["a"][1:]
    rows: ad.RecordBatch = there[:1]
    again = ad.RecordBatch(there.__arrow_c_device_array__())
    nulls: int | None = column.null_count
    names: list[str] = there.schema.names
    tensor = np.from_dlpack(ad.Array.from_dlpack(np.arange(3)).to(device).to_host())
    total: int = sum(len(batch) for batch in ad.read_parquet(pathlib.Path("a"), device, columns=["a"], ahead=1))
    frame = pl.DataFrame(there.to_host())
    table = pa.table(ad.Stream(frame).to("cpu").to_host())
    schema: ad.Schema = ad.Schema(table.schema)

    with Publisher(pathlib.Path("a"), leases=2) as publisher:
        publisher.wait_for_subscribers(timeout=1)
        sent: int = publisher.send(shared_cpu().upload(table)) + publisher.send(pa.record_batch({"a": [1]}), timeout=None)
        copied: int = publisher.stats()["copied_bytes"]
    with Subscriber("a", trusting=True) as subscriber:
        received: list[ad.RecordBatch] = list(subscriber)
        rest = pa.table(subscriber.stream())

    async def main() -> int:
        return sum([len(batch) async for batch in ad.Stream(table)])

    asyncio.run(main())
"""
BAD = [
    'ad.Device(3)',
    'ad.Device("sim").upload([1])',
    'ad.RecordBatch(batch).to(1)',
    'ad.RecordBatch(batch)[1.5]',
    'ad.read_parquet("a")',
    'ad.Stream(table).to("sim", ahead="many")',
    'ad.Array.from_dlpack([1])',
    'ad.Array(column).slice("a", 1)',
    'ad.Schema([1])',
    'Publisher("a").send([1])',
    'Subscriber.over("a")',
]
HEAD = "import arrow_device as ad\nfrom arrow_device.share import Publisher, Subscriber\nimport pyarrow as pa\nbatch = pa.record_batch({'a': [1]})\ntable = pa.table({'a': [1]})\ncolumn = pa.array([1])\n"


class Stubs(unittest.TestCase):
    def test_they_say_what_there_is(self):
        done = subprocess.run([sys.executable, "-m", "mypy.stubtest", "arrow_device"], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_docstrings(self):
        import arrow_device as ad
        import arrow_device.share

        all_of = [(module, name) for module in (ad, arrow_device.share) for name in module.__all__]
        for module, name in all_of:
            of = getattr(module, name)
            if name != "__version__":
                self.assertTrue(of.__doc__, name)
            methods = vars(of) if isinstance(of, type) else {}
            for method, what in methods.items():
                if not method.startswith("_") and method not in ("num_rows", "num_columns"):
                    self.assertTrue(what.__doc__, f"{name}.{method}")

    def test_checkers(self):
        checkers = {"mypy": ["-m", "mypy", "--strict", "--no-error-summary", "--disable-error-code=import-untyped", "--cache-dir=/dev/null"], "pyright": ["-m", "basedpyright", "--level", "error"]}
        for name, command in checkers.items():
            with tempfile.TemporaryDirectory() as folder, self.subTest(name):
                file = pathlib.Path(folder, "program.py")

                def check(text):
                    file.write_text(text)
                    done = subprocess.run([sys.executable, *command, file.name], capture_output=True, text=True, cwd=folder)
                    return done.returncode, done.stdout + done.stderr

                pathlib.Path(folder, "pyrightconfig.json").write_text('{"typeCheckingMode": "standard"}')
                code, said = check(textwrap.dedent(GOOD))
                self.assertEqual(code, 0, said)
                code, said = check(HEAD + "\n".join(BAD) + "\n")
                self.assertNotEqual(code, 0)
                for line in range(len(BAD)):
                    at = line + 1 + HEAD.count("\n")
                    self.assertRegex(said, rf"program.py:{at}\b", BAD[line])
