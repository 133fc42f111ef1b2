"""What the tests share: the balance that every test ends with, arrays in and out of pyarrow, equality bit by bit."""

import ctypes as c
import functools
import gc
import os
import struct
import tempfile
import time
import unittest
from collections.abc import Iterator

import pyarrow as pa

import cases
from abi import ArrayRelease, ArrowArray, ArrowDeviceArray, ArrowDeviceArrayStream, ArrowSchema, SchemaRelease
from rust import lib

# Work in the background lets go of its memory a little later; on a slow machine later still.
PATIENCE_SECONDS = 20


class Counter:
    def __init__(self):
        self.value = 0


# How many values (arrays, batches) were compared, here or in the library.
COMPARED = Counter()


def balance() -> dict[str, int]:
    """What is alive on both sides; all zero once everybody has let go of everything."""
    return {
        "bytes in pyarrow's pool": pa.total_allocated_bytes(),
        "buffers of cases": lib.peers_live_buffers(),
        "bytes of cases": lib.peers_live_bytes(),
        "handles": lib.peers_live_handles(),
        "allocations on the device": cases.stat("sim", "live_allocations"),
        "events of the device": cases.stat("sim", "live_events"),
        "wrong uses of the device": cases.stat("sim", "violations"),
        "errors in drops": cases.stat("sim", "drop_errors") + cases.stat("cpu", "drop_errors"),
        "Python's own structs": Given.alive,
    }


def unbalanced(but_for: dict[str, int] = {}, seconds: float = PATIENCE_SECONDS) -> dict[str, int]:
    """What stays alive."""
    deadline = time.monotonic() + seconds
    while True:
        gc.collect()
        cases.settle("sim")
        left = {name: n for name, n in balance().items() if n != 0}
        if left == but_for or time.monotonic() > deadline:
            return left
        time.sleep(0.005)


# What a failed test left behind is not blamed on those after it.
_left_behind: dict[str, int] = {}
_failed = False
# Nor is the suite held up by one leak after the other.
_failed_before = False


def _balanced(test):
    @functools.wraps(test)
    def wrapper(self):
        global _left_behind, _failed, _failed_before
        if _failed:
            _left_behind = unbalanced(seconds=1)
        _failed = True
        test(self)
        left = unbalanced(_left_behind, 1 if _failed_before else PATIENCE_SECONDS)
        _failed_before = left != _left_behind
        self.assertEqual(left, _left_behind, "alive after the test")
        _failed = False

    return wrapper


class PeerCase(unittest.TestCase):
    """Each test of it ends with nothing alive on either side."""

    maxDiff = None

    def __init_subclass__(cls, **arguments):
        super().__init_subclass__(**arguments)
        for name, test in list(vars(cls).items()):
            if name.startswith("test"):
                setattr(cls, name, _balanced(test))

    def same(self, expected: pa.Array, actual: pa.Array):
        """Equal in type, with its metadata, and in every bit of every value."""
        COMPARED.value += 1
        if not expected.type.equals(actual.type, check_metadata=True):
            self.fail(f"type: expected {expected.type}, actual {actual.type}")
        self.assertEqual(len(expected), len(actual))
        if not _bits(expected).equals(_bits(actual)):
            expected, actual = expected.to_pylist(), actual.to_pylist()
            for row, (e, a) in enumerate(zip(expected, actual)):
                if packed(e) != packed(a):
                    self.fail(f"row {row}: expected {e!r}, actual {a!r}")
            self.fail("differ, but not in what Python sees of the values")

    def same_batch(self, expected: pa.RecordBatch, actual: pa.RecordBatch):
        self.assertTrue(expected.schema.equals(actual.schema, check_metadata=True), (expected.schema, actual.schema))
        self.assertEqual(expected.num_rows, actual.num_rows)
        for e, a in zip(expected.columns, actual.columns):
            self.same(e, a)

    def wait_for(self, condition, what: str):
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            if time.monotonic() > deadline:
                self.fail(f"does not happen: {what}")
            time.sleep(0.002)


class InFolder(PeerCase):
    """With a folder for files."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = folder.name

    def path(self, name: str) -> str:
        return os.path.join(self.folder, name)


class List:
    """Equality for what `pyarrow.Array.equals` takes for different: NaN."""

    def __init__(self, array: pa.Array):
        self.values = [packed(value) for value in array.to_pylist()]

    def equals(self, other: "List") -> bool:
        return self.values == other.values


def packed(value):
    """Floats as their bits, so that NaN equals itself and -0.0 does not equal 0.0."""
    match value:
        case float():
            return struct.pack("=d", value)
        case list() | tuple():
            return [packed(item) for item in value]
        case dict():
            return {key: packed(item) for key, item in value.items()}
    return value


def _bits(array: pa.Array):
    """`array` as something that compares bit by bit."""
    if pa.types.is_floating(array.type):
        return array.view({16: pa.uint16(), 32: pa.uint32(), 64: pa.uint64()}[array.type.bit_width])
    if pa.types.is_union(array.type) and any(pa.types.is_floating(field.type) for field in array.type):
        return List(array)
    return array


# In and out of pyarrow.


def array_out(array: pa.Array) -> tuple[ArrowDeviceArray, ArrowSchema]:
    out, schema = ArrowDeviceArray(), ArrowSchema()
    array._export_to_c_device(c.addressof(out), c.addressof(schema))
    return out, schema


batch_out = array_out  # has the method of the same name


def array_in(out: ArrowDeviceArray, schema: ArrowSchema) -> pa.Array:
    return pa.Array._import_from_c_device(c.addressof(out), c.addressof(schema))


def batch_in(out: ArrowDeviceArray, schema: ArrowSchema | pa.Schema) -> pa.RecordBatch:
    to = schema if isinstance(schema, pa.Schema) else c.addressof(schema)
    return pa.RecordBatch._import_from_c_device(c.addressof(out), to)


def schema_in(schema: ArrowSchema) -> pa.Schema:
    return pa.Schema._import_from_c(c.addressof(schema))


def field_in(schema: ArrowSchema) -> pa.Field:
    return pa.Field._import_from_c(c.addressof(schema))


def plain(type_: int, case: int) -> pa.Array:
    """A case as pyarrow reads it from arrow-rs, without this crate."""
    out, schema = cases.plain_array(type_, case)
    return pa.Array._import_from_c(c.addressof(out), c.addressof(schema))


def batches_in(stream: ArrowDeviceArrayStream) -> Iterator[pa.RecordBatch]:
    """Reads a stream of batches on the CPU to its end; the caller releases it."""
    schema = schema_in(stream_schema(stream))
    for out in arrays_of(stream):
        yield batch_in(out, schema)


def arrays_of(stream: ArrowDeviceArrayStream) -> Iterator[ArrowDeviceArray]:
    """The arrays of a stream, of any type, up to its end."""
    while True:
        out = ArrowDeviceArray()
        stream_check(stream, stream.get_next(stream, out))
        if not out.array.release:
            return
        yield out


class StreamError(Exception):
    """What a producer answered: an errno and a text."""

    def __init__(self, errno: int, text: str | None):
        super().__init__(f"[{errno}] {text}")
        self.errno, self.text = errno, text


def stream_check(stream: ArrowDeviceArrayStream, code: int):
    if code:
        text = stream.get_last_error(stream)
        raise StreamError(code, None if text is None else c.string_at(text).decode())


def stream_schema(stream: ArrowDeviceArrayStream) -> ArrowSchema:
    schema = ArrowSchema()
    stream_check(stream, stream.get_schema(stream, schema))
    return schema


# Structs: moves and releases as the specification has them.


def released(what: ArrowDeviceArray | ArrowArray | ArrowSchema | ArrowDeviceArrayStream) -> bool:
    return not (what.array if isinstance(what, ArrowDeviceArray) else what).release


def release(what: ArrowDeviceArray | ArrowArray | ArrowSchema | ArrowDeviceArrayStream):
    """Releases what is not released."""
    if isinstance(what, ArrowDeviceArray):
        what = what.array
    if what.release:
        what.release(what)


def moved_child(parent: ArrowDeviceArray, i: int) -> ArrowDeviceArray:
    """Moves child `i` out of `parent`, whose device and event it keeps."""
    child = parent.array.children[i].contents
    out = ArrowDeviceArray()
    c.memmove(c.addressof(out.array), c.addressof(child), c.sizeof(ArrowArray))
    out.device_id, out.device_type, out.sync_event = parent.device_id, parent.device_type, parent.sync_event
    child.release = ArrayRelease()
    return out


def moved_child_schema(parent: ArrowSchema, i: int) -> ArrowSchema:
    child = parent.children[i].contents
    out = ArrowSchema()
    c.memmove(c.addressof(out), c.addressof(child), c.sizeof(ArrowSchema))
    child.release = SchemaRelease()
    return out


def filled(struct_type, byte: int = 0xAB):
    """A struct full of garbage, as uninitialised memory is."""
    out = struct_type()
    c.memset(c.addressof(out), byte, c.sizeof(out))
    return out


def is_zero(struct: c.Structure) -> bool:
    """Whether every member is zero; padding between members may be anything."""
    for name, of in struct._fields_:
        member, size = getattr(type(struct), name), c.sizeof(of)
        if any(bytes(struct)[member.offset : member.offset + size]):
            return False
    return True


class Given:
    """An array that counts its releases, around one of somebody else's, which is released with it.

    For structs that no implementation gives out: change `out` as needed before it is given away.
    """

    alive = 0
    _kept: list = []

    def __init__(self, inner: ArrowDeviceArray | None = None):
        self.inner, self.releases = inner, 0
        self.out = ArrowDeviceArray()
        if inner is not None:
            c.memmove(c.addressof(self.out), c.addressof(inner), c.sizeof(inner))
        callback = ArrayRelease(self._release)
        # A callback is not freed while it may still run.
        Given._kept.append(callback)
        self.out.array.release = callback
        self.out.array.private_data = None
        Given.alive += 1

    def _release(self, array):
        self.releases += 1
        Given.alive -= 1
        array.contents.release = ArrayRelease()
        if self.inner is not None:
            release(self.inner)
            self.inner = None
