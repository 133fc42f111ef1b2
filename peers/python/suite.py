"""Runs the tests of this folder: all files, or those that are named. Tells the slowest ten, by a processor's time."""

import faulthandler
import gc
import importlib.metadata
import os
import pathlib
import platform
import sys
import time
import unittest

import arrow_device
import nanoarrow
import numpy
import pyarrow

# Longer than everything takes on a slow machine: what hangs is shown and ends.
LIMIT_SECONDS = 900


class Result(unittest.TextTestResult):
    def __init__(self, *arguments, **more):
        super().__init__(*arguments, **more)
        self.took = []

    def startTest(self, test):
        super().startTest(test)
        self.since = time.perf_counter(), time.process_time()

    def stopTest(self, test):
        wall, cpu = (now - then for now, then in zip((time.perf_counter(), time.process_time()), self.since))
        self.took.append((cpu, wall, test.id()))
        super().stopTest(test)


def main(names: list[str]) -> int:
    faulthandler.dump_traceback_later(LIMIT_SECONDS, exit=True)
    print(f"Python {platform.python_version()}, pyarrow {pyarrow.__version__} with libarrow {pyarrow.cpp_version},")
    print(f"arrow-device {arrow_device.__version__}, nanoarrow {nanoarrow.__version__}, NumPy {numpy.__version__},")
    clients = "polars", "duckdb", "arro3-core", "datafusion", "pandas"
    print(", ".join(f"{name} {importlib.metadata.version(name)}" for name in clients), flush=True)
    # Those of `all_*.py` need wheels of hundreds of megabytes.
    kinds = ("test", "all") if os.environ.get("ARROW_DEVICE_PEERS_ALL") else ("test",)
    names = names or sorted(path.stem for kind in kinds for path in pathlib.Path(__file__).parent.glob(f"{kind}_*.py"))
    tests = unittest.defaultTestLoader.loadTestsFromNames(names)
    # The tests collect garbage often: imported modules are frozen, so that no collection walks them.
    gc.freeze()
    result = unittest.TextTestRunner(stream=sys.stdout, resultclass=Result).run(tests)
    for cpu, wall, name in sorted(result.took, reverse=True)[:10]:
        print(f"{cpu:5.1f} s of a processor, {wall:5.1f} s: {name}")
    # Nothing is left out here.
    return int(not result.wasSuccessful() or bool(result.skipped) or result.testsRun == 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
