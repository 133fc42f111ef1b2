"""Runs the tests of this folder: all files, or those that are named. A line for each class, and all failures."""

import faulthandler
import importlib
import os
import pathlib
import platform
import subprocess
import sys
import time
import unittest

import nanoarrow
import numpy
import pyarrow

# Longer than everything takes on a slow machine: what hangs is shown and ends.
LIMIT_SECONDS = 600


class Result(unittest.TestResult):
    """Counts by class; shows failures when they happen."""

    def __init__(self):
        super().__init__()
        self.of_class, self.tests, self.since = None, 0, time.perf_counter()

    def startTest(self, test):
        super().startTest(test)
        name = f"{type(test).__module__}.{type(test).__qualname__}"
        if name != self.of_class:
            self.line()
            self.of_class = name
        self.tests += 1

    def line(self):
        """Ends a class."""
        if self.of_class:
            tests = "test" if self.tests == 1 else "tests"
            print(f"{self.of_class}: {self.tests} {tests}, {time.perf_counter() - self.since:.1f} s", flush=True)
        self.tests, self.since = 0, time.perf_counter()

    def show(self, kind, test, error):
        print(f"--- {kind}: {test}\n{self._exc_info_to_string(error, test)}", flush=True)

    def addError(self, test, err):
        super().addError(test, err)
        self.show("ERROR", test, err)

    def addFailure(self, test, err):
        super().addFailure(test, err)
        self.show("FAILURE", test, err)

    def addSubTest(self, test, subtest, err):
        super().addSubTest(test, subtest, err)
        if err is not None:
            self.show("FAILURE", subtest, err)


def versions():
    print(f"Python {platform.python_version()}")
    print(f"pyarrow {pyarrow.__version__}, libarrow {pyarrow.cpp_version}")
    print(f"nanoarrow {nanoarrow.__version__}, C library {nanoarrow.c_version()}")
    print(f"numpy {numpy.__version__}")
    if "ARROW_DEVICE_SHIM" in os.environ:
        compiler = subprocess.run(
            [os.environ.get("CXX", "c++"), "--version"], capture_output=True, text=True, check=True
        )
        print(compiler.stdout.splitlines()[0])


def main(names: list[str]) -> int:
    faulthandler.enable()
    faulthandler.dump_traceback_later(LIMIT_SECONDS, exit=True)
    versions()
    folder = pathlib.Path(__file__).parent
    found = sorted(path.stem for path in folder.glob("test_*.py"))
    unknown = set(names) - set(found)
    if unknown:
        print(f"no such file of tests: {', '.join(sorted(unknown))}; there are {', '.join(found)}")
        return 1
    result = Result()
    started = time.perf_counter()
    for name in names or found:
        tests = unittest.defaultTestLoader.loadTestsFromModule(importlib.import_module(name))
        if tests.countTestCases() == 0:
            print(f"{name} has no tests")
            return 1
        tests.run(result)
    result.line()
    bad = len(result.failures) + len(result.errors) + len(result.unexpectedSuccesses)
    for test, reason in result.skipped + result.expectedFailures:
        print(f"--- NOT RUN: {test}: {reason}")
        bad += 1
    seconds = time.perf_counter() - started
    import peer_case

    print(f"{result.testsRun} tests, {peer_case.COMPARED.value} values compared, {bad} failed, {seconds:.1f} s")
    return int(bad > 0 or result.testsRun == 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
