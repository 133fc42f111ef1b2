"""What the tests share: the balance that every test ends with, arrays in and out of pyarrow, equality bit by bit."""

import ctypes as c
import gc
import struct
import time
import unittest

import pyarrow as pa

import rust
from abi import ArrayRelease, ArrowArray, ArrowDeviceArray, ArrowDeviceArrayStream, ArrowSchema

# Work in the background lets go of its memory a little later; on a slow machine later still.
PATIENCE_SECONDS = 20


def balance() -> dict[str, int]:
    """What is alive on both sides; all zero once everybody has let go of everything. libarrow's memory is pyarrow's."""
    alive = {
        "bytes in pyarrow's pool": pa.total_allocated_bytes(),
        "buffers of cases": rust.lib.peers_live_buffers(),
        "readers": rust.lib.peers_live_readers(),
        "Python's own structs": Given.alive,
    }
    for sim in rust.SIMS:
        for counter in ("live_allocations", "live_events", "violations"):
            alive[f"{counter} of {sim}"] = rust.stat(sim, counter)
    return alive


def settled(expected: dict[str, int], seconds: float = PATIENCE_SECONDS) -> dict[str, int]:
    """What is alive in the end."""
    deadline = time.monotonic() + seconds
    while True:
        gc.collect()
        for sim in rust.SIMS:
            rust.settle(sim)
        now = balance()
        if now == expected or time.monotonic() > deadline:
            return now
        time.sleep(0.005)


def until(condition, what: str):
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        gc.collect()
        if time.monotonic() > deadline:
            raise AssertionError(f"does not happen: {what}")
        time.sleep(0.002)


class PeerCase(unittest.TestCase):
    """Each test of it leaves nothing alive on either side."""

    maxDiff = None

    def setUp(self):
        self.before = balance()

    def tearDown(self):
        # What a failed test holds is not blamed on those after it, nor waited for.
        failed = getattr(self._outcome, "success", True) is False
        self.assertEqual(settled(self.before, 1 if failed else PATIENCE_SECONDS), self.before, "alive after the test")

    def same(self, expected: pa.Array, actual: pa.Array):
        """Equal in type, with its metadata, and in every bit of every value."""
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

    def assert_fails(self, code: int, text: str, call, *arguments, **more):
        """That a call fails with this code, and a text that has `text` in it."""
        with self.assertRaises(Exception) as failed:
            call(*arguments, **more)
        error = failed.exception
        self.assertEqual(getattr(error, "errno", None), code, error)
        self.assertIn(text, error.text)


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


def described(schema: ArrowSchema) -> tuple:
    """Every member of a schema and its descendants. The names in a map's entries, and the metadata of the extension type
    `arrow.uuid` where it is left out, are as Arrow C++ writes them."""

    def node(schema: ArrowSchema, name: bytes | None) -> tuple:
        metadata = _metadata(schema.metadata)
        if metadata.get(b"ARROW:extension:name") == b"arrow.uuid":
            metadata.setdefault(b"ARROW:extension:metadata", b"")
        children = [child.contents for child in schema.children[: schema.n_children]]
        names = [None] * len(children)
        if schema.format == b"+m":
            names = [b"entries"]
        elif name == b"entries":
            names = [b"key", b"value"]
        dictionary = node(schema.dictionary.contents, None) if schema.dictionary else None
        children = [node(child, name) for child, name in zip(children, names)]
        return schema.format, name or schema.name or b"", schema.flags, metadata, children, dictionary

    return node(schema, None)


def _metadata(encoded: int | None) -> dict[bytes, bytes]:
    if not encoded:
        return {}
    at = encoded

    def number() -> int:
        nonlocal at
        at += 4
        return c.c_int32.from_address(at - 4).value

    def text() -> bytes:
        nonlocal at
        size = number()
        at += size
        return c.string_at(at - size, size)

    return {text(): text() for _ in range(number())}


# Structs: moves and releases as the specification has them.


def released(what: ArrowDeviceArray | ArrowArray | ArrowSchema | ArrowDeviceArrayStream) -> bool:
    return not (what.array if isinstance(what, ArrowDeviceArray) else what).release


def release(what: ArrowDeviceArray | ArrowArray | ArrowSchema | ArrowDeviceArrayStream):
    """Releases what is not released."""
    if isinstance(what, ArrowDeviceArray):
        what = what.array
    if what.release:
        what.release(what)


def moved_child(parent, i: int):
    """Moves child `i` out of an array, whose device and event it keeps, and of its schema."""
    array, schema = parent
    out, out_schema = ArrowDeviceArray(), ArrowSchema()
    out.device_id, out.device_type, out.sync_event = array.device_id, array.device_type, array.sync_event
    for to, child in ((out.array, array.array.children[i]), (out_schema, schema.children[i])):
        c.memmove(c.addressof(to), c.addressof(child.contents), c.sizeof(to))
        child.contents.release = type(to.release)()
    return out, out_schema


def filled(struct_type, byte: int = 0xAB):
    """A struct full of garbage, as uninitialised memory is."""
    out = struct_type()
    c.memset(c.addressof(out), byte, c.sizeof(out))
    return out


def is_zero(struct: c.Structure) -> bool:
    """Whether every member is zero; padding between members may be anything."""
    members = [(getattr(type(struct), name).offset, c.sizeof(of)) for name, of in struct._fields_]
    return not any(any(bytes(struct)[at : at + size]) for at, size in members)


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


class StreamError(Exception):
    """What a producer answered: an errno and a text."""

    def __init__(self, errno: int, text: str | None):
        super().__init__(f"[{errno}] {text}")
        self.errno, self.text = errno, text


def next_of(stream: ArrowDeviceArrayStream) -> tuple[ArrowDeviceArray, ArrowSchema] | None:
    """The next batch of a stream, with the stream's schema; none at the end."""

    def check(code: int):
        if code:
            text = stream.get_last_error(stream)
            raise StreamError(code, None if text is None else c.string_at(text).decode())

    out, schema = rust.pair()
    check(stream.get_next(stream, out))
    if released(out):
        return None
    check(stream.get_schema(stream, schema))
    return out, schema
