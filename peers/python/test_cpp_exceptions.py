"""C++ exceptions out of a producer's callbacks: they end in an error or nowhere, never with the process.

Each runs in a process of its own."""

import subprocess
import sys
import textwrap
import unittest

PRELUDE = """
import os, tempfile
import rust, shim
from abi import ArrowDeviceArray, ArrowDeviceArrayStream, ArrowSchema

def array():
    pair = ArrowDeviceArray(), ArrowSchema()
    shim.lib.shim_throwing_array(*pair)
    return pair

def read(where):
    stream = ArrowDeviceArrayStream()
    shim.lib.shim_throwing_stream(stream, where)
    with tempfile.TemporaryDirectory() as directory:
        rust.check(rust.lib.arrow_device_write_ipc(stream, os.path.join(directory, "out").encode()))

def said(call, *args):
    try:
        call(*args)
    except rust.RustError as error:
        return f"{error.errno}: {error.text}"
    return "nothing"
"""
GET_SCHEMA, GET_NEXT, GET_LAST_ERROR, STREAM_RELEASE, ARRAY_RELEASE = range(5)


class Exceptions(unittest.TestCase):
    def run_child(self, body):
        """What a process prints that survives."""
        code = PRELUDE + textwrap.dedent(body)
        child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        self.assertEqual(child.returncode, 0, child.stderr)
        return child.stdout.strip()

    def check_read(self, where, callback):
        said = self.run_child(f"print(said(read, {where}))")
        self.assertRegex(said, r"^5: .+")
        self.assertIn(callback, said)

    def test_nothing_is_thrown(self):
        """The control: the same stream, with no callback that throws."""
        self.assertEqual(self.run_child("print(said(read, -1))"), "nothing")

    def test_get_schema(self):
        self.check_read(GET_SCHEMA, "get_schema")

    def test_get_next(self):
        self.check_read(GET_NEXT, "get_next")

    def test_get_last_error(self):
        self.check_read(GET_LAST_ERROR, "get_last_error")

    def test_stream_release(self):
        """A release cannot report: all that was read is there."""
        self.assertEqual(self.run_child(f"print(said(read, {STREAM_RELEASE}))"), "nothing")

    def test_releases_of_a_streams_arrays(self):
        self.assertEqual(self.run_child(f"print(said(read, {ARRAY_RELEASE}))"), "nothing")

    def test_release_of_an_array(self):
        """Through our own export of it: our release does not throw."""
        body = """
        array, schema = array()
        out, out_schema = ArrowDeviceArray(), ArrowSchema()
        rust.check(rust.lib.arrow_device_copy(array, schema, b"cpu", out, out_schema))
        print(out.array.length)
        out.array.release(out.array)
        print(bool(out.array.release))
        """
        self.assertEqual(self.run_child(body), "3\nFalse")

    def test_release_of_a_refused_array(self):
        """The error is why it was refused, not what its release threw."""
        body = """
        array, schema = array()
        array.array.null_count = 7
        out, out_schema = ArrowDeviceArray(), ArrowSchema()
        print(said(lambda: rust.check(rust.lib.arrow_device_copy(array, schema, b"cpu", out, out_schema))))
        """
        self.assertEqual(self.run_child(body), "22: invalid input at array.null_count: is 7 for 3 rows")


if __name__ == "__main__":
    unittest.main()
