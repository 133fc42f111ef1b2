"""C++ exceptions that leave a producer's callbacks end the process in a defined abort.

Each runs in a process of its own."""

import signal
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
        code = PRELUDE + textwrap.dedent(body)
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)

    def check_abort(self, body):
        child = self.run_child(body)
        self.assertEqual(child.returncode, -signal.SIGABRT, child.stderr)
        self.assertIn("Rust cannot catch foreign exceptions", child.stderr)

    def test_nothing_is_thrown(self):
        """The control: the same stream, with no callback that throws."""
        child = self.run_child("print(said(read, -1))")
        self.assertEqual((child.returncode, child.stdout.strip()), (0, "nothing"), child.stderr)

    def test_get_schema(self):
        self.check_abort(f"read({GET_SCHEMA})")

    def test_get_next(self):
        self.check_abort(f"read({GET_NEXT})")

    def test_get_last_error(self):
        self.check_abort(f"read({GET_LAST_ERROR})")

    def test_stream_release(self):
        self.check_abort(f"read({STREAM_RELEASE})")

    def test_releases_of_a_streams_arrays(self):
        self.check_abort(f"read({ARRAY_RELEASE})")

    def test_release_of_an_array(self):
        """Through this crate's own export of it."""
        self.check_abort("""
        array, schema = array()
        out, out_schema = ArrowDeviceArray(), ArrowSchema()
        rust.check(rust.lib.arrow_device_copy(array, schema, b"cpu", out, out_schema))
        out.array.release(out.array)
        """)

    def test_release_of_a_refused_array(self):
        self.check_abort("""
        array, schema = array()
        array.array.null_count = 7
        out, out_schema = ArrowDeviceArray(), ArrowSchema()
        rust.check(rust.lib.arrow_device_copy(array, schema, b"cpu", out, out_schema))
        """)


if __name__ == "__main__":
    unittest.main()
