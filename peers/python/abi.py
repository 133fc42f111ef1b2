"""The C structs of the specification, for ctypes."""

import ctypes as c


class ArrowSchema(c.Structure):
    pass


class ArrowArray(c.Structure):
    pass


class ArrowDeviceArray(c.Structure):
    pass


class ArrowDeviceArrayStream(c.Structure):
    pass


SchemaRelease = c.CFUNCTYPE(None, c.POINTER(ArrowSchema))
ArrayRelease = c.CFUNCTYPE(None, c.POINTER(ArrowArray))
GetSchema = c.CFUNCTYPE(c.c_int, c.POINTER(ArrowDeviceArrayStream), c.POINTER(ArrowSchema))
GetNext = c.CFUNCTYPE(c.c_int, c.POINTER(ArrowDeviceArrayStream), c.POINTER(ArrowDeviceArray))
GetLastError = c.CFUNCTYPE(c.c_void_p, c.POINTER(ArrowDeviceArrayStream))
StreamRelease = c.CFUNCTYPE(None, c.POINTER(ArrowDeviceArrayStream))

ArrowSchema._fields_ = [
    ("format", c.c_char_p),
    ("name", c.c_char_p),
    ("metadata", c.c_void_p),
    ("flags", c.c_int64),
    ("n_children", c.c_int64),
    ("children", c.POINTER(c.POINTER(ArrowSchema))),
    ("dictionary", c.POINTER(ArrowSchema)),
    ("release", SchemaRelease),
    ("private_data", c.c_void_p),
]
ArrowArray._fields_ = [
    ("length", c.c_int64),
    ("null_count", c.c_int64),
    ("offset", c.c_int64),
    ("n_buffers", c.c_int64),
    ("n_children", c.c_int64),
    ("buffers", c.POINTER(c.c_void_p)),
    ("children", c.POINTER(c.POINTER(ArrowArray))),
    ("dictionary", c.POINTER(ArrowArray)),
    ("release", ArrayRelease),
    ("private_data", c.c_void_p),
]
ArrowDeviceArray._fields_ = [
    ("array", ArrowArray),
    ("device_id", c.c_int64),
    ("device_type", c.c_int32),
    ("sync_event", c.c_void_p),
    ("reserved", c.c_int64 * 3),
]
ArrowDeviceArrayStream._fields_ = [
    ("device_type", c.c_int32),
    ("get_schema", GetSchema),
    ("get_next", GetNext),
    ("get_last_error", GetLastError),
    ("release", StreamRelease),
    ("private_data", c.c_void_p),
]


class ArrowArrayStream(c.Structure):
    """Of the C stream interface; callbacks are addresses."""

    _fields_ = [(name, c.c_void_p) for name in ("get_schema", "get_next", "get_last_error", "release", "private_data")]


CPU, CUDA, CUDA_HOST, OPENCL, VULKAN, METAL, VPI, ROCM, ROCM_HOST, EXT_DEV, CUDA_MANAGED, ONEAPI, WEBGPU, HEXAGON = (
    1, 2, 3, 4, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16,
)  # fmt: skip
