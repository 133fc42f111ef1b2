"""This crate, through C functions: the library of `peers/rust`, which also has those of the C library."""

import ctypes as c
import os

from abi import ArrowDeviceArray, ArrowDeviceArrayStream, ArrowSchema

lib = c.CDLL(os.environ["ARROW_DEVICE_PEERS"])
lib.arrow_device_last_error.restype = c.c_char_p
lib.arrow_device_open.argtypes = [c.c_char_p, c.c_char_p, c.POINTER(ArrowDeviceArrayStream)]
lib.arrow_device_write_ipc.argtypes = [c.POINTER(ArrowDeviceArrayStream), c.c_char_p]
lib.arrow_device_copy.argtypes = [
    c.POINTER(ArrowDeviceArray),
    c.POINTER(ArrowSchema),
    c.c_char_p,
    c.POINTER(ArrowDeviceArray),
    c.POINTER(ArrowSchema),
]


class RustError(Exception):
    """An errno and its text."""

    def __init__(self, errno, text):
        super().__init__(f"[{errno}] {text}")
        self.errno, self.text = errno, text


def check(code):
    """Raises what `code` stands for; to be called on the thread of the call."""
    if code:
        raise RustError(code, lib.arrow_device_last_error().decode())
