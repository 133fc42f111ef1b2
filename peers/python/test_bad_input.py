"""Input that breaks the rules, and consumers and producers that use every freedom that the rules leave them."""

import contextlib
import ctypes as c
import errno
import io
import os
import subprocess
import sys
import threading

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
from capi import INNER
from cases import TYPES
from peer_case import (
    Given,
    PeerCase,
    array_in,
    array_out,
    arrays_of,
    batch_in,
    batch_out,
    moved_child,
    moved_child_schema,
    release,
    released,
    stream_schema,
    unbalanced,
)
from producer import Producer
from rust import RustError, lib

STRUCT = TYPES.index("struct<i32, utf8, bool>")
NESTED = TYPES.index("list<list<struct<i64, utf8>>>")


def ints(*values) -> pa.RecordBatch:
    return pa.record_batch([pa.array(values, pa.int32())], ["i"])


def on_thread(body):
    """Runs `body` on another thread."""
    errors = []

    def run():
        try:
            body()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


class Callbacks(PeerCase):
    def test_a_callback_that_raises(self):
        """ctypes prints what Python raises, and answers with 0 or whatever is there. For this crate the stream has ended
        or failed: `out` is as it was, so that nothing else can be told."""

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
        self.refused(pa.array([1, None, 3]), buffer(0), "array.null_count: is 1, but there is no mask")
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


class Taken:
    """Releases what was moved out, when it goes."""

    def __init__(self, out: ArrowDeviceArray):
        self.out = out

    def __del__(self):
        release(self.out)


class Children(PeerCase):
    """Children that are moved out live on when their parent is gone, in any order, on any thread."""

    def test_of_this_crate(self):
        """Child 1 taken, the parent released, the child used by pyarrow and by this crate, and released."""
        for device in ("cpu", "sim"):
            with self.subTest(device=device):
                out, schema = cases.batch([STRUCT, NESTED, STRUCT], 5, device)
                taken, taken_schema = moved_child(out, 1), moved_child_schema(schema, 1)
                release(out)
                release(schema)
                self.assertTrue(released(out))
                if device == "cpu":
                    column = array_in(taken, taken_schema)
                    column.validate(full=True)
                    self.same(array_in(*cases.array(NESTED, 5)), column)
                else:
                    cases.check_array(taken, taken_schema, NESTED, 5)

    def test_all_in_another_order(self):
        out, schema = cases.batch([STRUCT, NESTED, STRUCT, NESTED], 5, "sim")
        taken = [moved_child(out, i) for i in range(4)]
        grandchild = moved_child(taken[0], 2)
        for struct in (taken[2], schema, taken[0], out):
            release(struct)
        on_thread(lambda: release(taken[3]))
        self.assertGreater(cases.stat("sim", "live_allocations"), 0)
        release(grandchild)
        release(taken[1])

    def test_of_pyarrow(self):
        """The same with pyarrow's memory, used by this crate."""
        batch = batch_in(*cases.batch([STRUCT, NESTED, STRUCT], 5))
        half = batch.num_rows // 2
        own = [pa.concat_arrays([column.slice(0, half), column.slice(half)]) for column in batch.columns]
        batch = pa.RecordBatch.from_arrays(own, schema=batch.schema)
        del own
        out, schema = batch_out(batch)
        del batch
        taken, taken_schema = moved_child(out, 1), moved_child_schema(schema, 1)
        release(out)
        release(schema)
        with cases.Held.take(taken, taken_schema) as held:
            held.check(NESTED, 5)
            with held.copy("sim") as there:
                there.check(NESTED, 5)

    def test_of_a_held_array(self):
        """Taken on this crate's own side: the column alone keeps what it needs."""
        batch = batch_in(*cases.batch([STRUCT, NESTED], 5))
        with cases.Held.take(*batch_out(batch)) as held:
            child = held.child(1)
        del batch
        with child:
            child.check(NESTED, 5)
            column = array_in(*child.export())
        self.same(array_in(*cases.array(NESTED, 5)), column)
        del column


class Lifetimes(PeerCase):
    def test_released_on_another_thread(self):
        """Arrays and streams of each side, let go on threads that did not make them."""
        out, schema = cases.batch([STRUCT, NESTED], 5, "sim")
        stream = cases.stream([STRUCT], "sim")
        first = next(arrays_of(stream))
        on_thread(lambda: release(stream))
        on_thread(lambda: release(out))
        on_thread(lambda: release(first))
        on_thread(lambda: release(schema))
        held = cases.Held.take(*array_out(pa.array(["a" * 100])))
        on_thread(held.drop)
        producer = Producer(ints().schema, [ints(1, 2), ints(3)])
        reader = cases.Reader(producer.stream)
        batch = reader.next()
        on_thread(reader.drop)
        on_thread(batch.drop)
        self.assertEqual(producer.releases, 1)

    def test_one_array_exported_many_times(self):
        """Every export lives by itself."""
        with cases.Held.take(*array_out(pa.array([[1, 2], None, [3]]))) as held:
            exports = [held.export() for _ in range(8)]
        for i, (out, schema) in enumerate(exports):
            if i % 2:
                release(out)
                release(schema)
            else:
                self.assertEqual(array_in(out, schema).to_pylist(), [[1, 2], None, [3]])

    def test_memory_that_is_used_is_kept(self):
        """pyarrow's memory stays as long as this crate's copy of the struct, and no longer."""
        before = pa.total_allocated_bytes()
        array = pa.array(range(10_000))
        size = pa.total_allocated_bytes()
        self.assertGreater(size, before)
        held = cases.Held.take(*array_out(array))
        del array
        slice_ = held.slice(10, 5)
        held.drop()
        self.assertGreaterEqual(pa.total_allocated_bytes(), size)
        self.assertEqual(array_in(*slice_.export()).to_pylist(), [10, 11, 12, 13, 14])
        slice_.drop()
        self.assertEqual(pa.total_allocated_bytes(), before)

    def test_the_heap_does_not_grow(self):
        """Round trips of a batch of all types leave this library's heap as it was. Pools and lists grow for a while; what
        leaks grows for ever, however little it is."""
        types = list(range(len(TYPES)))

        def round_trip():
            out, schema = cases.batch(types, 11, "sim")
            out, schema = INNER.copy(out, schema, "cpu")
            cases.check_batch(*batch_out(batch_in(out, schema)), types, 11, True)
            stream = cases.stream(types[:4])
            for out in arrays_of(stream):
                release(out)
            release(stream_schema(stream))
            release(stream)

        left = unbalanced(seconds=1)

        def heap() -> int:
            self.assertEqual(unbalanced(left), left)
            return lib.peers_heap_bytes()

        grown = []
        while grown[-3:] != [0, 0, 0]:
            self.assertLess(len(grown), 60, f"bytes after every four round trips: {grown}")
            before = heap()
            for _ in range(4):
                round_trip()
            grown.append(max(heap() - before, 0))


CHILD = """
import os, sys
sys.path.insert(0, {folder!r})
import ctypes as c
import pyarrow as pa
import cases, producer
from capi import INNER
from peer_case import *
kept = []
{body}
print("done", flush=True)
"""


class NeverReleased(PeerCase):
    """Processes that end while they hold something of the other side: cleanly, whatever is held."""

    def run_child(self, body: str):
        source = CHILD.format(folder=os.path.dirname(__file__), body=body)
        child = subprocess.run([sys.executable, "-X", "faulthandler", "-c", source], capture_output=True, text=True)
        self.assertEqual((child.stdout, child.stderr, child.returncode), ("done\n", "", 0))

    def test_arrays(self):
        self.run_child("kept += [cases.batch([0, 1, 50, 70], 5, device) for device in ('cpu', 'sim')]")

    def test_streams(self):
        self.run_child(
            "for device in ('cpu', 'sim'):\n"
            "    stream = cases.stream([1, 50, 70], device)\n"
            "    kept += [stream, next(arrays_of(stream))]"
        )

    def test_what_pyarrow_imported(self):
        self.run_child("kept += [batch_in(*cases.batch([1, 50, 70], 5))]")

    def test_what_this_crate_holds(self):
        self.run_child(
            "held = cases.Held.take(*array_out(pa.array(['a' * 1000])))\n"
            "kept += [held, held.copy('sim')]\n"
            "p = producer.Producer(pa.schema([('i', pa.int32())]), [pa.record_batch([pa.array([1], pa.int32())], ['i'])])\n"
            "reader = cases.Reader(p.stream)\n"
            "kept += [reader, reader.next(), p]"
        )

    def test_on_its_way(self):
        """Copies to the device are still queued when the process ends."""
        self.run_child(
            "for _ in range(20):\n"
            "    kept += [INNER.copy(*batch_out(pa.record_batch([pa.array(range(200_000))], ['x'])), 'sim')]"
        )

    def test_a_child_that_crashes_is_seen(self):
        """The check itself."""
        with self.assertRaises(AssertionError):
            self.run_child("c.string_at(8)")
