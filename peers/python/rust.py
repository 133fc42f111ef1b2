"""This crate through C functions: the C library (`capi/`) and what the tests need besides (`peers/rust`).

A type and a variant of it are numbers; the first COMMON variants have the same number of rows in every type, so that
they can be columns of a batch. A device is a name.
"""

import ctypes as c
import os
from collections.abc import Sequence

import pyarrow  # Its libarrow is loaded first, and the shim finds it. # noqa: F401

from abi import ArrowArray, ArrowDeviceArray, ArrowDeviceArrayStream, ArrowSchema

# The shim around Arrow C++ calls the simulated device's functions: they must be found by name.
lib = c.CDLL(os.environ["ARROW_DEVICE_PEERS"], os.RTLD_GLOBAL)
DIFFERS = -1

_u64, _i64, _text, _bool, _int, _size = c.c_uint64, c.c_int64, c.c_char_p, c.c_bool, c.c_int, c.c_size_t
_array, _schema, _stream = c.POINTER(ArrowDeviceArray), c.POINTER(ArrowSchema), c.POINTER(ArrowDeviceArrayStream)
_types, _handle = c.POINTER(_u64), c.c_void_p
_capi = {
    "open": [_text, _text, _stream],
    "write_ipc": [_stream, _text],
    "copy": [_array, _schema, _text, _array, _schema],
}
for _name, _result, *_arguments in [
    ("last_error", _text),
    ("types", _u64),
    ("type_name", _text, _u64),
    ("common", _u64),
    ("case_name", _text, _u64, _u64),
    ("live_buffers", _i64),
    ("live_readers", _i64),
    ("heap_bytes", _i64),
    ("settle", _int, _text),
    ("stat", _int, _text, _text, _types),
    ("array", _int, _u64, _u64, _text, _bool, _array, _schema),
    ("batch", _int, _types, _size, _u64, _text, _bool, _bool, _array, _schema),
    ("plain", _int, _u64, _u64, c.POINTER(ArrowArray), _schema),
    ("stream", _int, _types, _size, _u64, _i64, _int, _text, _bool, _stream),
    ("check_array", _int, _array, _schema, _u64, _u64, _u64, _i64),
    ("check_batch", _int, _array, _schema, _types, _size, _u64),
    ("pass", _int, _array, _schema, _u64, _i64, _text, _bool, _array, _schema),
    ("relay", _int, _stream, _stream),
    ("sim_new", _int, _bool, c.POINTER(_i64)),
    ("async_give", _int, _types, _size, _u64, _i64, _int, _text, _bool, _bool, _bool, _handle, c.POINTER(_handle)),
    ("async_given", _int, _handle, c.c_double, c.POINTER(_int)),
    ("async_stop", None, _handle),
    ("async_give_drop", None, _handle),
    ("async_take", _int, _size, c.POINTER(_handle), c.POINTER(_handle)),
    ("async_next", _int, _handle, c.c_double, c.POINTER(_int), c.POINTER(_size), _array, _schema),
    ("async_take_drop", None, _handle),
]:
    _function = getattr(lib, f"peers_{_name}")
    _function.restype, _function.argtypes = _result, _arguments


class RustError(Exception):
    """An errno, or DIFFERS, and its text."""

    def __init__(self, errno: int, text: str):
        super().__init__(f"[{errno}] {text}")
        self.errno, self.text = errno, text


def call(name: str, *arguments):
    code = getattr(lib, f"peers_{name}")(*arguments)
    if code:
        raise RustError(code, lib.peers_last_error().decode())


class Library:
    """The C library, by its header. Two copies in one process are two strangers: each has devices of its own, and CPU
    data is all that they share."""

    def __init__(self, lib: c.CDLL):
        self.lib = lib
        lib.arrow_device_last_error.restype = _text
        for name, arguments in _capi.items():
            getattr(lib, f"arrow_device_{name}").argtypes = arguments

    def last_error(self) -> str | None:
        text = self.lib.arrow_device_last_error()
        return None if text is None else text.decode()

    def call(self, name: str, *arguments):
        """To be called on the thread that asks for the error."""
        code = getattr(self.lib, f"arrow_device_{name}")(*arguments)
        if code:
            raise RustError(code, self.last_error())

    def open(self, path: str, device: str = "cpu") -> ArrowDeviceArrayStream:
        out = ArrowDeviceArrayStream()
        self.call("open", path.encode(), device.encode(), out)
        return out

    def write_ipc(self, stream: ArrowDeviceArrayStream, path: str):
        """Consumes the stream."""
        self.call("write_ipc", stream, path.encode())

    def copy(self, array: ArrowDeviceArray, schema: ArrowSchema, device: str) -> tuple[ArrowDeviceArray, ArrowSchema]:
        """Consumes both."""
        out = pair()
        self.call("copy", array, schema, device.encode(), *out)
        return out


# The copy inside the library of `peers/rust`, and the library itself.
INNER = Library(lib)
OTHER = Library(c.CDLL(os.environ["ARROW_DEVICE_CAPI"]))

TYPES: list[str] = [lib.peers_type_name(i).decode() for i in range(lib.peers_types())]
COMMON: int = lib.peers_common()
ALL = list(range(len(TYPES)))
# Types without a validity bitmap of their own have no variant whose rows are all null.
CASES = [next(n for n in range(99) if lib.peers_case_name(t, n) is None) for t in ALL]
STRUCT, NESTED = TYPES.index("struct<i32, utf8, bool>"), TYPES.index("list<list<struct<i64, utf8>>>")
INT = TYPES.index("Int32")


def pair() -> tuple[ArrowDeviceArray, ArrowSchema]:
    return ArrowDeviceArray(), ArrowSchema()


def _listed(types: Sequence[int]):
    return (_u64 * len(types))(*types), len(types)


def array(type_: int, case: int, device: str = "cpu", wait: bool = False):
    """A case on a device."""
    out = pair()
    call("array", type_, case, device.encode(), wait, *out)
    return out


def batch(types: Sequence[int], variant: int, device: str = "cpu", wait: bool = False, apart: bool = False):
    """A batch with a column of each type, all of the same variant. `apart`: each had an event of its own."""
    out = pair()
    call("batch", *_listed(types), variant, device.encode(), wait, apart, *out)
    return out


def plain(type_: int, case: int) -> tuple[ArrowArray, ArrowSchema]:
    """A case through arrow-rs's own C data interface."""
    out = ArrowArray(), ArrowSchema()
    call("plain", type_, case, *out)
    return out


def stream(types, count=COMMON, device="cpu", wait=False, fail_at=-1, errno=0) -> ArrowDeviceArrayStream:
    """Common variants as batches. In place of batch `fail_at` comes an error, or a panic if the errno is 0."""
    out = ArrowDeviceArrayStream()
    call("stream", *_listed(types), count, fail_at, errno, device.encode(), wait, out)
    return out


def check_array(given, type_: int, case: int, offset: int = 0, rows: int = -1):
    """Consumes an array, and compares it with rows of a case. Arrow C++'s names in types pass."""
    call("check_array", *given, type_, case, offset, rows)


def check_batch(given, types: Sequence[int], variant: int):
    call("check_batch", *given, *_listed(types), variant)


def passed(given, device: str | None = None, offset: int = 0, rows: int = -1, wait: bool = False):
    """Consumes an array; what this crate makes of it comes out again, on another device if one is named."""
    out = pair()
    call("pass", *given, offset, rows, device and device.encode(), wait, *out)
    return out


def relay(given: ArrowDeviceArrayStream) -> ArrowDeviceArrayStream:
    """Consumes a stream of batches; what this crate reads comes out of another one."""
    out = ArrowDeviceArrayStream()
    call("relay", given, out)
    return out


def settle(device: str):
    """Waits for all work of a device, and raises what went wrong in drops."""
    call("settle", device.encode())


def stat(device: str, counter: str) -> int:
    value = _u64()
    call("stat", device.encode(), counter.encode(), value)
    return value.value


def new_sim(lazy: bool) -> int:
    """The number of a new simulated device, `sim:N`. Lazy: queued work runs only when somebody waits for it."""
    number = _i64()
    call("sim_new", lazy, number)
    return number.value


# Counts of one kind each for one process.
LAZY, EAGER = new_sim(True), new_sim(False)
SIMS = ["sim", f"sim:{LAZY}", f"sim:{EAGER}"]


class Giving:
    """A stream of ours on its way to a handler, on a thread of its own."""

    def __init__(
        self, handler, types, count, fail_at=-1, errno=0, device="cpu", wait=False, metadata=False, in_place=False
    ):
        self.handle = None
        out = _handle()
        rest = device.encode(), wait, metadata, in_place, handler, c.byref(out)
        call("async_give", *_listed(types), count, fail_at, errno, *rest)
        self.handle = out

    def end(self, seconds: float = 30.0) -> int:
        """Waits for its end: how that was, or the error that it reported."""
        out = _int()
        call("async_given", self.handle, seconds, out)
        return out.value

    def stop(self):
        """Drops it before its end."""
        lib.peers_async_stop(self.handle)

    def __del__(self):
        if self.handle:
            lib.peers_async_give_drop(self.handle)


class Taking:
    """A stream of ours from a handler of ours."""

    def __init__(self, depth: int = 5):
        self.handle = None
        self.handler, out = _handle(), _handle()
        call("async_take", depth, c.byref(self.handler), c.byref(out))
        self.handle = out
        self.device_type = self.metadata = None

    def next(self, seconds: float = 30.0) -> tuple[ArrowDeviceArray, ArrowSchema]:
        """The next batch, a released one at the end."""
        out, device_type, metadata = pair(), _int(), _size()
        call("async_next", self.handle, seconds, device_type, metadata, *out)
        self.device_type, self.metadata = device_type.value, metadata.value
        return out

    def drop(self):
        handle, self.handle = self.handle, None
        if handle:
            lib.peers_async_take_drop(handle)

    __del__ = drop
