"""The Arrow C data interface by ctypes: host batches out, host arrays in, and what a device array says of itself.

A machine with a GPU need not have a library that makes Arrow data on the host.
"""

import ctypes
import struct
from ctypes import CFUNCTYPE, POINTER, Structure, c_char_p, c_int32, c_int64, c_void_p, py_object


class Schema(Structure):
    """ArrowSchema."""


class Array(Structure):
    """ArrowArray."""


ReleaseSchema = CFUNCTYPE(None, POINTER(Schema))
ReleaseArray = CFUNCTYPE(None, POINTER(Array))
Schema._fields_ = [
    ("format", c_char_p), ("name", c_char_p), ("metadata", c_char_p), ("flags", c_int64), ("n_children", c_int64),
    ("children", POINTER(POINTER(Schema))), ("dictionary", POINTER(Schema)), ("release", ReleaseSchema),
    ("private_data", c_void_p),
]
Array._fields_ = [
    ("length", c_int64), ("null_count", c_int64), ("offset", c_int64), ("n_buffers", c_int64), ("n_children", c_int64),
    ("buffers", POINTER(c_void_p)), ("children", POINTER(POINTER(Array))), ("dictionary", POINTER(Array)),
    ("release", ReleaseArray), ("private_data", c_void_p),
]


class DeviceArray(Structure):
    """ArrowDeviceArray."""

    _fields_ = [
        ("array", Array), ("device_id", c_int64), ("device_type", c_int32), ("sync_event", c_void_p), ("reserved", c_int64 * 3),
    ]


NULLABLE = 2
NUMBERS = {"c": "b", "C": "B", "s": "h", "S": "H", "i": "i", "I": "I", "l": "q", "L": "Q", "f": "f", "g": "d"}

_api = ctypes.pythonapi
_api.PyCapsule_New.restype, _api.PyCapsule_New.argtypes = py_object, [c_void_p, c_char_p, c_void_p]
_api.PyCapsule_GetPointer.restype, _api.PyCapsule_GetPointer.argtypes = c_void_p, [py_object, c_char_p]


# While a capsule is destroyed it must not be handled as an object.
_dying = ctypes.PYFUNCTYPE(c_void_p, c_void_p, c_char_p)(("PyCapsule_GetPointer", _api))


def pointer(capsule, name, kind):
    """The struct in a capsule, which must have this name. It lives as long as the capsule."""
    return kind.from_address(_api.PyCapsule_GetPointer(capsule, name))


def _bitmap(flags):
    bits = bytearray((len(flags) + 7) // 8)
    for i, flag in enumerate(flags):
        bits[i // 8] |= bool(flag) << (i % 8)
    return bytes(bits)


def _buffers(kind, values):
    """The buffers of a column; None is null."""
    mask = _bitmap([v is not None for v in values]) if None in values else None
    if kind == "u":
        texts = [(v or "").encode() for v in values]
        ends = [0]
        for text in texts:
            ends.append(ends[-1] + len(text))
        return [mask, struct.pack(f"<{len(ends)}i", *ends), b"".join(texts)]
    if kind == "b":
        return [mask, _bitmap([bool(v) for v in values])]
    return [mask, struct.pack(f"<{len(values)}{NUMBERS[kind]}", *(v or 0 for v in values))]


class HostBatch:
    """A record batch in host memory, of columns (name, format, values), for any reader of `__arrow_c_array__`.

    What its structs refer to lives until the process ends, which is soon, and only the releases are counted.
    """

    given, released = 0, 0
    _alive = []

    def __init__(self, columns):
        self.columns = columns

    def __len__(self):
        return len(self.columns[0][2]) if self.columns else 0

    def __arrow_c_array__(self, requested_schema=None):
        return self._schema(), self._array()

    @classmethod
    def _capsule(cls, name, value, *others):
        cls._alive.append((value, others))
        cls.given += 1
        end = {b"arrow_schema": _end_schema, b"arrow_array": _end_array}[name]
        return _api.PyCapsule_New(ctypes.addressof(value), name, ctypes.cast(end, c_void_p))

    def _schema(self):
        children = [
            Schema(kind.encode(), name.encode(), None, NULLABLE, 0, None, None, _release_schema, None)
            for name, kind, _ in self.columns
        ]
        pointers = (POINTER(Schema) * len(children))(*map(ctypes.pointer, children))
        schema = Schema(b"+s", b"", None, 0, len(children), pointers, None, _release_schemas, None)
        return self._capsule(b"arrow_schema", schema, children, pointers)

    def _array(self):
        children, owned = [], []
        for _, kind, values in self.columns:
            buffers = [b if b is None else ctypes.create_string_buffer(b, max(len(b), 1)) for b in _buffers(kind, values)]
            addresses = (c_void_p * len(buffers))(*(b if b is None else ctypes.addressof(b) for b in buffers))
            nulls = sum(v is None for v in values)
            children.append(Array(len(values), nulls, 0, len(buffers), 0, addresses, None, None, _release_array, None))
            owned += [buffers, addresses]
        pointers = (POINTER(Array) * len(children))(*map(ctypes.pointer, children))
        none = (c_void_p * 1)(None)
        array = Array(len(self), 0, 0, 1, len(children), none, pointers, None, _release_arrays, None)
        return self._capsule(b"arrow_array", array, children, pointers, none, owned)


def _end(ended):
    """Marks one struct as released."""
    ended.contents.release = type(ended.contents.release)()


def _end_all(ended):
    """The whole of what a capsule gave: its children too, except those that were moved out."""
    for i in range(ended.contents.n_children):
        child = ended.contents.children[i]
        if child.contents.release:
            child.contents.release(child)
    _end(ended)
    HostBatch.released += 1


_release_schema, _release_array = ReleaseSchema(_end), ReleaseArray(_end)
_release_schemas, _release_arrays = ReleaseSchema(_end_all), ReleaseArray(_end_all)


def _destructor(name, kind):
    """Releases what nobody has moved out of a capsule."""
    def end(capsule):
        held = kind.from_address(_dying(capsule, name))
        if held.release:
            held.release(held)

    return ctypes.PYFUNCTYPE(None, c_void_p)(end)


_end_schema, _end_array = _destructor(b"arrow_schema", Schema), _destructor(b"arrow_array", Array)


def _values(schema, array):
    """The values of an array of a type that `_buffers` knows, in host memory."""
    kind, length, offset = schema.format.decode(), array.length, array.offset

    def read(i, bytes_, at=0):
        return ctypes.string_at(array.buffers[i] + at, bytes_) if bytes_ else b""

    def bits(i):
        packed = read(i, (offset + length + 7) // 8)
        return [packed[n // 8] >> (n % 8) & 1 == 1 for n in range(offset, offset + length)]

    valid = bits(0) if array.buffers[0] and array.null_count != 0 else [True] * length
    if kind in ("u", "U"):
        size, code = (4, "i") if kind == "u" else (8, "q")
        ends = struct.unpack(f"<{length + 1}{code}", read(1, (length + 1) * size, offset * size)) if length else (0,)
        values = [read(2, end - start, start).decode() for start, end in zip(ends, ends[1:])]
    elif kind == "b":
        values = bits(1)
    else:
        size = struct.calcsize(NUMBERS[kind])
        values = struct.unpack(f"<{length}{NUMBERS[kind]}", read(1, length * size, offset * size))
    return [value if ok else None for value, ok in zip(values, valid)]


def _on_host(obj, read):
    """What `read` makes of the structs of an object in host memory, while their capsules live."""
    if hasattr(obj, "__arrow_c_device_array__"):
        schema, capsule = obj.__arrow_c_device_array__()
        device = pointer(capsule, b"arrow_device_array", DeviceArray)
        if device.device_type != 1:
            raise TypeError(f"memory of device type {device.device_type}, not the host's")
        return read(pointer(schema, b"arrow_schema", Schema), device.array)
    schema, capsule = obj.__arrow_c_array__()
    return read(pointer(schema, b"arrow_schema", Schema), pointer(capsule, b"arrow_array", Array))


def host_column(obj):
    """The values of an array in host memory, from `__arrow_c_device_array__` or `__arrow_c_array__`."""
    return _on_host(obj, _values)


def host_columns(obj):
    """The values of each column of a batch in host memory."""
    def read(schema, array):
        if array.offset or schema.format != b"+s":
            raise TypeError(f"a struct from its start is expected, not {schema.format} from {array.offset}")
        columns = range(array.n_children)
        return [_values(schema.children[i].contents, array.children[i].contents) for i in columns]

    return _on_host(obj, read)


def device_of(obj):
    """Device type and number, whether there is an event, and the formats of the columns, of a batch on a device."""
    capsules = obj.__arrow_c_device_array__()  # They own what they point to.
    schema = pointer(capsules[0], b"arrow_schema", Schema)
    device = pointer(capsules[1], b"arrow_device_array", DeviceArray)
    formats = [schema.children[i].contents.format.decode() for i in range(schema.n_children)]
    return device.device_type, device.device_id, bool(device.sync_event), formats
