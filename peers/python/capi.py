"""The C library, by its header: the copy inside the library of `peers/rust`, and the library itself.

Two copies in one process are two strangers: each has devices of its own, and CPU data is all that they share.
"""

import ctypes as c
import os

import rust
from abi import ArrowDeviceArray, ArrowDeviceArrayStream, ArrowSchema
from rust import RustError


class Library:
    def __init__(self, lib: c.CDLL):
        self.lib = lib
        for name in ("open", "write_ipc", "copy", "last_error"):
            ours, theirs = getattr(rust.lib, f"arrow_device_{name}"), getattr(lib, f"arrow_device_{name}")
            theirs.argtypes, theirs.restype = ours.argtypes, ours.restype

    def last_error(self) -> str | None:
        text = self.lib.arrow_device_last_error()
        return None if text is None else text.decode()

    def check(self, code: int):
        if code:
            raise RustError(code, self.last_error())

    def open(self, path: str, device: str = "cpu") -> ArrowDeviceArrayStream:
        out = ArrowDeviceArrayStream()
        self.check(self.lib.arrow_device_open(path.encode(), device.encode(), out))
        return out

    def write_ipc(self, stream: ArrowDeviceArrayStream, path: str):
        """Consumes the stream."""
        self.check(self.lib.arrow_device_write_ipc(stream, path.encode()))

    def copy(self, array: ArrowDeviceArray, schema: ArrowSchema, device: str) -> tuple[ArrowDeviceArray, ArrowSchema]:
        """Consumes both."""
        out, out_schema = ArrowDeviceArray(), ArrowSchema()
        self.check(self.lib.arrow_device_copy(array, schema, device.encode(), out, out_schema))
        return out, out_schema


INNER = Library(rust.lib)
EXAMPLE = Library(c.CDLL(os.environ["ARROW_DEVICE_CAPI"]))
