"""Arrays of every type from this crate and comparisons with them: the functions `peers_...` of `peers/rust/cases`."""

import ctypes as c
from collections.abc import Sequence

from abi import ArrowArray, ArrowDeviceArray, ArrowDeviceArrayStream, ArrowSchema
from rust import RustError, lib

_u64, _text, _bool = c.c_uint64, c.c_char_p, c.c_bool
_array, _schema = c.POINTER(ArrowDeviceArray), c.POINTER(ArrowSchema)
_stream, _types, _handle = c.POINTER(ArrowDeviceArrayStream), c.POINTER(c.c_uint64), c.c_void_p
_out = c.POINTER(c.c_void_p)

_signatures = {
    "type_count": (_u64, []),
    "type_name": (_text, [_u64]),
    "case_count": (_u64, [_u64]),
    "common_cases": (_u64, []),
    "case_name": (_text, [_u64, _u64]),
    "last_error": (_text, []),
    "live_buffers": (c.c_int64, []),
    "live_bytes": (c.c_int64, []),
    "live_handles": (c.c_int64, []),
    "heap_bytes": (c.c_int64, []),
    "settle": (c.c_int, [_text]),
    "stat": (c.c_int, [_text, _text, _types]),
    "array": (c.c_int, [_u64, _u64, _text, _bool, _array, _schema]),
    "batch": (c.c_int, [_types, _u64, _u64, _text, _bool, _array, _schema]),
    "stream": (c.c_int, [_types, _u64, _text, _bool, _stream]),
    "array_stream": (c.c_int, [_u64, _text, _bool, _stream]),
    "plain_array": (c.c_int, [_u64, _u64, c.POINTER(ArrowArray), _schema]),
    "ipc": (c.c_int, [_types, _u64, _text]),
    "check_array": (c.c_int, [_array, _schema, _u64, _u64, _bool]),
    "check_batch": (c.c_int, [_array, _schema, _types, _u64, _u64, _bool]),
    "check_stream": (c.c_int, [_stream, _types, _u64, _bool]),
    "check_array_stream": (c.c_int, [_stream, _u64, _bool]),
    "hold": (c.c_int, [_array, _schema, _out]),
    "held_rows": (c.c_int64, [_handle]),
    "held_check": (c.c_int, [_handle, _u64, _u64, _bool]),
    "held_child": (c.c_int, [_handle, _u64, _out]),
    "held_slice": (c.c_int, [_handle, _u64, _u64, _out]),
    "held_copy": (c.c_int, [_handle, _text, _out]),
    "held_export": (c.c_int, [_handle, _bool, _array, _schema]),
    "held_drop": (None, [_handle]),
    "reader_open": (c.c_int, [_stream, _bool, _out]),
    "reader_next": (c.c_int, [_handle, _out]),
    "reader_drop": (None, [_handle]),
    "relay": (c.c_int, [_stream, _stream]),
}
for _name, (_result, _arguments) in _signatures.items():
    _function = getattr(lib, f"peers_{_name}")
    _function.restype, _function.argtypes = _result, _arguments


def _check(code: int):
    if code:
        raise RustError(code, lib.peers_last_error().decode())


TYPES: list[str] = [lib.peers_type_name(i).decode() for i in range(lib.peers_type_count())]
COMMON: int = lib.peers_common_cases()


def case_names(type_: int) -> list[str]:
    return [lib.peers_case_name(type_, i).decode() for i in range(lib.peers_case_count(type_))]


def _listed(types: Sequence[int]):
    return (c.c_uint64 * len(types))(*types), len(types)


def array(type_: int, case: int, device: str = "cpu", wait: bool = False) -> tuple[ArrowDeviceArray, ArrowSchema]:
    """A case on a device."""
    out, schema = ArrowDeviceArray(), ArrowSchema()
    _check(lib.peers_array(type_, case, device.encode(), wait, out, schema))
    return out, schema


def batch(types: Sequence[int], case: int, device: str = "cpu", wait: bool = False):
    """A batch with a column of each type, all of the same variant."""
    out, schema = ArrowDeviceArray(), ArrowSchema()
    _check(lib.peers_batch(*_listed(types), case, device.encode(), wait, out, schema))
    return out, schema


def stream(types: Sequence[int], device: str = "cpu", wait: bool = False) -> ArrowDeviceArrayStream:
    """All common variants as batches."""
    out = ArrowDeviceArrayStream()
    _check(lib.peers_stream(*_listed(types), device.encode(), wait, out))
    return out


def array_stream(type_: int, device: str = "cpu", wait: bool = False) -> ArrowDeviceArrayStream:
    """All variants of a type as arrays."""
    out = ArrowDeviceArrayStream()
    _check(lib.peers_array_stream(type_, device.encode(), wait, out))
    return out


def plain_array(type_: int, case: int) -> tuple[ArrowArray, ArrowSchema]:
    """A case through arrow-rs's own C data interface."""
    out, schema = ArrowArray(), ArrowSchema()
    _check(lib.peers_plain_array(type_, case, out, schema))
    return out, schema


def write_ipc(types: Sequence[int], path: str):
    """All common variants, written by arrow-rs as an Arrow IPC stream file."""
    _check(lib.peers_ipc(*_listed(types), path.encode()))


def check_array(out: ArrowDeviceArray, schema: ArrowSchema, type_: int, case: int, through_pyarrow: bool = False):
    """Consumes an array and compares it with a case; `through_pyarrow`: in a type as pyarrow gives it back."""
    _check(lib.peers_check_array(out, schema, type_, case, through_pyarrow))


def check_batch(
    out: ArrowDeviceArray, schema: ArrowSchema, types: Sequence[int], case: int, through_pyarrow: bool = False
):
    _check(lib.peers_check_batch(out, schema, *_listed(types), case, through_pyarrow))


def check_stream(out: ArrowDeviceArrayStream, types: Sequence[int], through_pyarrow: bool = False):
    _check(lib.peers_check_stream(out, *_listed(types), through_pyarrow))


def check_array_stream(out: ArrowDeviceArrayStream, type_: int, through_pyarrow: bool = False):
    _check(lib.peers_check_array_stream(out, type_, through_pyarrow))


def relay(out: ArrowDeviceArrayStream) -> ArrowDeviceArrayStream:
    """Consumes a stream of batches; what this crate reads comes out of another one."""
    again = ArrowDeviceArrayStream()
    _check(lib.peers_relay(out, again))
    return again


def settle(device: str):
    """Waits for all work of a device."""
    _check(lib.peers_settle(device.encode()))


def stat(device: str, counter: str) -> int:
    value = c.c_uint64()
    _check(lib.peers_stat(device.encode(), counter.encode(), value))
    return value.value


class Held:
    """An array that this crate imported and holds until it is dropped."""

    def __init__(self, handle: int):
        self._handle = handle

    @classmethod
    def take(cls, out: ArrowDeviceArray, schema: ArrowSchema) -> "Held":
        """Both are consumed, whatever happens."""
        handle = c.c_void_p()
        _check(lib.peers_hold(out, schema, handle))
        return cls(handle.value)

    def __len__(self) -> int:
        return lib.peers_held_rows(self._handle)

    def check(self, type_: int, case: int, through_pyarrow: bool = False):
        _check(lib.peers_held_check(self._handle, type_, case, through_pyarrow))

    def _new(self, function, *arguments) -> "Held":
        handle = c.c_void_p()
        _check(function(self._handle, *arguments, handle))
        return Held(handle.value)

    def child(self, i: int) -> "Held":
        return self._new(lib.peers_held_child, i)

    def slice(self, offset: int, rows: int) -> "Held":
        return self._new(lib.peers_held_slice, offset, rows)

    def copy(self, device: str) -> "Held":
        return self._new(lib.peers_held_copy, device.encode())

    def export(self, wait: bool = False) -> tuple[ArrowDeviceArray, ArrowSchema]:
        out, schema = ArrowDeviceArray(), ArrowSchema()
        _check(lib.peers_held_export(self._handle, wait, out, schema))
        return out, schema

    def drop(self):
        handle, self._handle = self._handle, None
        lib.peers_held_drop(handle)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.drop()


class Reader:
    """This crate's reader over a foreign stream: of batches, or of arrays of any type."""

    def __init__(self, out: ArrowDeviceArrayStream, batches: bool = True):
        """The stream is consumed, whatever happens."""
        handle = c.c_void_p()
        self._handle = None
        _check(lib.peers_reader_open(out, batches, handle))
        self._handle = handle.value

    def next(self) -> Held | None:
        handle = c.c_void_p()
        _check(lib.peers_reader_next(self._handle, handle))
        return None if handle.value is None else Held(handle.value)

    def drop(self):
        handle, self._handle = self._handle, None
        lib.peers_reader_drop(handle)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.drop()
