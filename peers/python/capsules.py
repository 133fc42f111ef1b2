"""Capsules made and opened by hand, well and badly."""

import ctypes as c

from abi import ArrowDeviceArray, ArrowDeviceArrayStream, ArrowSchema

api = c.pythonapi
api.PyCapsule_New.restype = c.py_object
api.PyCapsule_New.argtypes = [c.c_void_p, c.c_char_p, c.c_void_p]
api.PyCapsule_GetPointer.restype = c.c_void_p
api.PyCapsule_GetPointer.argtypes = [c.py_object, c.c_char_p]
api.PyCapsule_GetName.restype = c.c_char_p
api.PyCapsule_GetName.argtypes = [c.py_object]
api.PyCapsule_SetPointer.argtypes = [c.py_object, c.c_void_p]

_names = {}  # a capsule keeps the address of its name


def capsule(struct, name):
    """A capsule of a struct that somebody else keeps alive and releases."""
    return api.PyCapsule_New(c.addressof(struct), _names.setdefault(name, name), None)


def struct_of(capsule, name, struct_type):
    """The struct in a capsule."""
    return struct_type.from_address(api.PyCapsule_GetPointer(capsule, name))


def device_array_of(pair):
    """The two structs of what `__arrow_c_device_array__` answers: schema and array."""
    schema, array = pair
    return struct_of(schema, b"arrow_schema", ArrowSchema), struct_of(array, b"arrow_device_array", ArrowDeviceArray)


def stream_of(capsule):
    return struct_of(capsule, b"arrow_device_array_stream", ArrowDeviceArrayStream)


class Answers:
    """An object whose methods answer what it was given."""

    def __init__(self, **methods):
        for name, answer in methods.items():
            setattr(self, f"__arrow_c_{name}__", lambda *_, _answer=answer, **__: _answer)


class Exporter:
    """A device array as Python objects hand it around. Its structs, which are kept, must be released by whoever made
    them, unless they were moved out."""

    def __init__(self, out: ArrowDeviceArray, schema: ArrowSchema):
        self.structs = out, schema

    def __arrow_c_device_array__(self, requested_schema=None, **kwargs):
        out, schema = self.structs
        return capsule(schema, b"arrow_schema"), capsule(out, b"arrow_device_array")


def opened(exporter) -> tuple[ArrowDeviceArray, ArrowSchema]:
    """What an object gives through its capsules. To import it moves it out; otherwise the capsules release it."""
    capsules = exporter.__arrow_c_device_array__()
    schema, array = device_array_of(capsules)
    schema.capsule, array.capsule = capsules  # keeps them
    return array, schema
