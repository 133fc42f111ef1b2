"""Input that breaks the rules."""

import contextlib
import ctypes as c
import errno
import io
import sys

import pyarrow as pa

import cases
from abi import (
    ArrowArray,
    ArrowDeviceArray,
    ArrowDeviceArrayStream,
    ArrowSchema,
    GetLastError,
    GetNext,
    GetSchema,
    SchemaRelease,
)
from cases import TYPES
from peer_case import Given, PeerCase, array_out, arrays_of, release, released
from producer import Producer
from rust import RustError

STRUCT = TYPES.index("struct<i32, utf8, bool>")


def ints(*values) -> pa.RecordBatch:
    return pa.record_batch([pa.array(values, pa.int32())], ["i"])


class Taken:
    """Releases what was moved out, when it goes."""

    def __init__(self, out: ArrowDeviceArray):
        self.out = out

    def __del__(self):
        release(self.out)


class Callbacks(PeerCase):
    def test_a_callback_that_raises(self):
        """ctypes prints what Python raises, and answers with 0 or whatever is there. For this crate the stream has
        ended or failed: `out` is as it was, so that nothing else can be told."""

        def raises(_out):
            raise ZeroDivisionError("in the callback")

        class Raising(Producer):
            def _answer(self, body):
                body()
                return 0

        producer = Raising(ints().schema, [ints(1), raises])
        with cases.Reader(producer.stream) as reader:
            reader.next().drop()
            printed = []
            hook, sys.unraisablehook = sys.unraisablehook, lambda info: printed.append(info.exc_type)
            try:
                self.assertIsNone(reader.next())
            except RustError as failed:
                self.assertIn("get_next of a foreign producer failed", failed.text)
            finally:
                sys.unraisablehook = hook
            self.assertEqual(printed, [ZeroDivisionError])
            self.assertIsNone(reader.next())
        self.assertEqual((producer.gets, producer.releases), (2, 1))

    def test_a_schema_callback_that_raises(self):
        """The same for the schema: success without one, or an error."""

        class Raising(Producer):
            def _get_schema(self, _stream, _out):
                raise ZeroDivisionError

        producer = Raising(ints().schema, [])
        with contextlib.redirect_stderr(io.StringIO()), self.assertRaises(RustError) as refused:
            cases.Reader(producer.stream)
        self.assertRegex(refused.exception.text, "released|get_schema of a foreign producer failed")
        self.assertEqual(producer.releases, 1)

    def test_missing_callbacks(self):
        """A stream without a callback is refused by name, and released."""
        for name, none in [("get_schema", GetSchema()), ("get_next", GetNext()), ("get_last_error", GetLastError())]:
            with self.subTest(missing=name):
                producer = Producer(ints().schema, [])
                setattr(producer.stream, name, none)
                with self.assertRaises(RustError) as refused:
                    cases.Reader(producer.stream)
                self.assertEqual(refused.exception.errno, errno.EINVAL)
                self.assertIn(f"stream.{name}: is null", refused.exception.text)
                self.assertEqual(producer.releases, 1)
        with self.assertRaisesRegex(RustError, "already released"):
            cases.Reader(ArrowDeviceArrayStream())

    def test_calls_without_an_out(self):
        """Our own callbacks answer null pointers with EINVAL, and the stream goes on."""
        stream = cases.stream([STRUCT])
        self.assertEqual(stream.get_next(stream, None), errno.EINVAL)
        self.assertEqual(stream.get_schema(stream, None), errno.EINVAL)
        self.assertIn(b"out is null", c.string_at(stream.get_last_error(stream)))
        self.assertEqual(sum(1 for _ in map(release, arrays_of(stream))), cases.COMMON)
        release(stream)


@SchemaRelease
def no_release(schema):
    """Of a copy: the memory is the original's."""
    schema.contents.release = SchemaRelease()


class Structure(PeerCase):
    """Every member of the structs, wrong one at a time: refused by name, released once."""

    def refused(self, of: pa.Array, change, path: str):
        with self.subTest(path=path):
            inner, inner_schema = array_out(of)
            given, schema = Given(inner), ArrowSchema()
            # pyarrow releases what it made, not what became of it.
            c.memmove(c.addressof(schema), c.addressof(inner_schema), c.sizeof(schema))
            schema.release, schema.private_data = no_release, None
            kept = change(given.out.array, schema)
            with self.assertRaises(RustError) as refused:
                cases.Held.take(given.out, schema)
            release(inner_schema)
            self.assertEqual(refused.exception.errno, errno.EINVAL, refused.exception)
            self.assertIn(path, refused.exception.text)
            self.assertEqual(given.releases, 1)
            self.assertTrue(released(given.out) and released(schema))
            del kept

    def test_numbers(self):
        of = pa.array([1, None, 3], pa.int32())

        def sets(**members):
            def change(array: ArrowArray, _schema):
                for name, value in members.items():
                    setattr(array, name, value)

            return change

        for members, path in [
            ({"length": -1}, "array.length: is -1"),
            ({"offset": -1}, "array.offset: is -1"),
            ({"length": 2**63 - 1, "offset": 1}, "array.offset: 1 and length"),
            ({"null_count": -2}, "array.null_count: is -2"),
            ({"null_count": 4}, "array.null_count: is 4"),
            ({"n_buffers": 1}, "array.n_buffers: is 1, Int32 has 2"),
            ({"n_buffers": 3}, "array.n_buffers: is 3"),
            ({"n_buffers": -1}, "array.n_buffers: is -1"),
            ({"n_children": 1}, "array.n_children: is 1"),
            ({"n_children": -1}, "array.n_children: is -1"),
            ({"buffers": None}, "array.buffers: is null"),
            ({"null_count": 0}, "null_count"),
        ]:
            self.refused(of, sets(**members), path)

    def test_pointers(self):
        def buffer(i):
            def change(array, _schema):
                array.buffers[i] = None

            return change

        self.refused(pa.array([1, 2, 3]), buffer(1), "array.buffers[1]: is null, 24 bytes are needed")
        self.refused(pa.array(["a", "b"]), buffer(1), "array.buffers[1]: is null, 12 bytes are needed")
        self.refused(pa.array([1, None, 3]), buffer(0), "array.null_count: is 1, but there is no validity bitmap")
        struct = pa.array([{"a": 1, "b": "x"}])

        def children(array, _schema):
            array.children = None

        def child(array, _schema):
            # In a list of its own: pyarrow needs its list for the release.
            children = (c.POINTER(ArrowArray) * 2)(array.children[0])
            array.children = children
            return children

        def short(array, _schema):
            array.children[1].contents.length = 0

        def deep(array, _schema):
            array.children[1].contents.buffers[1] = None

        self.refused(struct, children, "array.children: is null")
        self.refused(struct, child, "array.children[1]: is null")
        self.refused(struct, short, "array.children[1].length: is 0, but its parent needs 1 rows")
        self.refused(struct, deep, "array.children[1].buffers[1]: is null")

        def moved(array, _schema):
            taken = ArrowDeviceArray()
            taken.array = array.children[0].contents
            array.children[0].contents.release = type(array.release)()
            return Taken(taken)

        self.refused(struct, moved, "array.children[0]: is released")
        coded = pa.array(["a", "b"]).dictionary_encode()

        def without(array, _schema):
            # Put back by whoever releases: the producer keeps its own copy.
            array.dictionary = c.POINTER(ArrowArray)()

        self.refused(coded, without, "array.dictionary: is ")

    def test_values(self):
        """Full validation reads what a peer's structs point to."""

        def writes(i, index, value, kind):
            def change(array, _schema):
                memory = c.cast(array.buffers[i], c.POINTER(kind))
                kept = memory[index]
                memory[index] = value
                return kept

            return change

        text = pa.array(["abc", "de"])
        self.refused(text, writes(1, 1, 100, c.c_int32), "array: ")
        self.refused(pa.array(["abc", "de"]), writes(1, 0, -1, c.c_int32), "array: first offset -1")
        self.refused(pa.array(["abc", "de"]), writes(2, 0, 0xFF, c.c_uint8), "array: ")
        self.refused(pa.array(["a", "b"]).dictionary_encode(), writes(1, 0, 7, c.c_int32), "array: ")
        self.refused(pa.array([[1], [2, 3]]), writes(1, 2, 9, c.c_int32), "array: ")
        views = pa.array(["x" * 20], pa.string_view())
        self.refused(views, writes(1, 2, 5, c.c_int32), "array: ")
        ends = pa.RunEndEncodedArray.from_arrays(pa.array([1, 3], pa.int32()), pa.array([1, 2]))

        def end(array, _schema):
            c.cast(array.children[0].contents.buffers[1], c.POINTER(c.c_int32))[0] = -1

        self.refused(ends, end, "")

    def test_schemas(self):
        def sets(name, value):
            def change(_array, schema):
                setattr(schema, name, value)

            return change

        for of, name, value, path in [
            (pa.array([1]), "format", None, "schema.format: a null pointer"),
            (pa.array([1]), "format", b"\xff", "schema.format"),
            (pa.array([1]), "format", b"nonsense", "schema.format"),
            (pa.array([1]), "format", b"w:-1", "schema.format"),
            (pa.array([1]), "format", b"", "schema.format"),
            (pa.array([1]), "name", b"\xff\xfe", "schema.name"),
            (pa.array([1]), "n_children", 1, "schema.n_children: 1; the format has 0"),
            (pa.array([{"a": 1}]), "n_children", -1, "schema.n_children"),
            (pa.array([{"a": 1}]), "n_children", 2**62, "schema.n_children"),
            (pa.array([{"a": 1}]), "children", None, "schema.children: "),
            (pa.array([[1]]), "n_children", 0, "schema.n_children: 0; the format has 1"),
            (pa.array(["a"]).dictionary_encode(), "format", b"u", "schema.format: dictionary keys must be integers"),
        ]:
            self.refused(of, sets(name, value), path)

    def test_a_released_schema(self):
        inner, schema = array_out(pa.array([1]))
        given = Given(inner)
        release(schema)
        with self.assertRaisesRegex(RustError, "released"):
            cases.Held.take(given.out, schema)
        self.assertEqual(given.releases, 1)

    def test_released_input(self):
        out, schema = array_out(pa.array([1]))
        release(out)
        with self.assertRaisesRegex(RustError, "the ArrowDeviceArray was already released"):
            cases.Held.take(out, schema)
        self.assertTrue(released(schema))

    def test_a_type_that_does_not_fit(self):
        """A schema of one type, an array of another."""
        for array, type_ in [
            (pa.array([1]), pa.utf8()),
            (pa.array(["a"]), pa.int64()),
            (pa.array([{"a": 1}]), pa.list_(pa.int64())),
            (pa.array([[1]]), pa.struct([("a", pa.int64())])),
            (pa.array([1]), pa.null()),
        ]:
            with self.subTest(array=array.type, schema=type_):
                inner, schema = array_out(array)
                release(schema)
                pa.field("x", type_)._export_to_c(c.addressof(schema))
                given = Given(inner)
                with self.assertRaises(RustError) as refused:
                    cases.Held.take(given.out, schema)
                self.assertEqual(refused.exception.errno, errno.EINVAL)
                self.assertIn("array.n_", refused.exception.text)
                self.assertEqual(given.releases, 1)
