"""Arrow C++: the C structs and constants of its header are those of this crate."""

import ctypes as c
import pathlib
import re
import unittest

import pyarrow

import abi
import shim


class Layout(unittest.TestCase):
    def test_structs_and_constants(self):
        """Every struct, member and constant, in the same order, with the same numbers."""
        header = shim.lib.shim_abi().decode().splitlines()
        ours = shim.rust.peers_cpp_abi().decode().splitlines()
        self.assertEqual(header, ours)
        self.assertEqual(sum(line.startswith("struct ") for line in ours), 7)

    def test_no_constant_is_missing(self):
        """The header names no flag and no device type that this crate does not know."""
        text = (pathlib.Path(pyarrow.get_include()) / "arrow/c/abi.h").read_text()
        defined = dict(re.findall(r"#\s*define (ARROW_(?:FLAG|DEVICE)_\w+) (\d+)\s", text))
        ours = dict(re.findall(r"constant (\w+) (\d+)\n", shim.rust.peers_cpp_abi().decode()))
        self.assertEqual(defined, ours)
        self.assertEqual(len(ours), 3 + 14)

    def test_structs_of_these_tests(self):
        """What Python hands from one to the other has the size and offsets of both."""
        ours = shim.rust.peers_cpp_abi().decode()
        for struct in (abi.ArrowSchema, abi.ArrowArray, abi.ArrowDeviceArray, abi.ArrowDeviceArrayStream):
            name = struct.__name__
            self.assertIn(f"struct {name} {c.sizeof(struct)} {c.alignment(struct)}\n", ours)
            for field, _ in struct._fields_:
                self.assertIn(f"member {name}.{field} {getattr(struct, field).offset}\n", ours)


if __name__ == "__main__":
    unittest.main()
