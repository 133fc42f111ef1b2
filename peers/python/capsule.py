"""Capsules of the C data interface, made and opened through ctypes."""

import ctypes as c

from abi import ArrowArray, ArrowDeviceArray, ArrowSchema
from peer_case import release

NAMES = {ArrowSchema: b"arrow_schema", ArrowArray: b"arrow_array", ArrowDeviceArray: b"arrow_device_array"}

_new = c.pythonapi.PyCapsule_New
_new.restype, _new.argtypes = c.py_object, [c.c_void_p, c.c_char_p, c.c_void_p]
_pointer = c.PYFUNCTYPE(c.c_void_p, c.py_object, c.c_char_p)(("PyCapsule_GetPointer", c.pythonapi))
# A capsule that is being freed must not be touched as an object.
_dying_pointer = c.PYFUNCTYPE(c.c_void_p, c.c_void_p, c.c_char_p)(("PyCapsule_GetPointer", c.pythonapi))
_dying_name = c.PYFUNCTYPE(c.c_char_p, c.c_void_p)(("PyCapsule_GetName", c.pythonapi))

# The structs that capsules point to, by address.
_owned: dict[int, c.Structure] = {}


@c.PYFUNCTYPE(None, c.c_void_p)
def _destroy(capsule):
    struct = _owned.pop(_dying_pointer(capsule, _dying_name(capsule)))
    release(struct)


def capsule(struct: c.Structure):
    """A capsule that owns a struct, which the caller must not use any more, and releases it unless it was moved out."""
    address = c.addressof(struct)
    _owned[address] = struct
    return _new(address, NAMES[type(struct)], c.cast(_destroy, c.c_void_p))


def inside(of, struct_type):
    """The struct that a capsule points to; it stays the capsule's."""
    struct = struct_type.from_address(_pointer(of, NAMES[struct_type]))
    struct.capsule = of  # keeps it
    return struct


def open_capsules() -> int:
    return len(_owned)


class Exporter:
    """A device array as Python objects hand it around; once."""

    def __init__(self, out: ArrowDeviceArray, schema: ArrowSchema):
        self.structs = out, schema
        self.asked = []

    def __arrow_c_device_array__(self, requested_schema=None, **kwargs):
        self.asked.append((requested_schema, kwargs))
        out, schema = self.structs
        self.structs = None
        return capsule(schema), capsule(out)


def opened(exporter) -> tuple[ArrowDeviceArray, ArrowSchema]:
    """What an object gives through its capsules. To import it moves it out; otherwise the capsules release it."""
    schema, array = exporter.__arrow_c_device_array__()
    return inside(array, ArrowDeviceArray), inside(schema, ArrowSchema)
