"""Who keeps what alive, and for how long: children, exports, processes that end."""

import os
import subprocess
import sys
import threading

import pyarrow as pa

import cases
from capi import INNER
from cases import TYPES
from peer_case import (
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
from rust import lib

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
        """Round trips of a batch of all types leave this library's heap as it was. Pools and lists grow for a while;
        what leaks grows for ever, however little it is."""
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
            "batch = pa.record_batch([pa.array([1], pa.int32())], ['i'])\n"
            "p = producer.Producer(batch.schema, [batch])\n"
            "reader = cases.Reader(p.stream)\n"
            "kept += [reader, reader.next(), p]"
        )

    def test_on_its_way(self):
        """Copies to the device are still queued when the process ends."""
        self.run_child(
            "for _ in range(20):\n"
            "    kept += [INNER.copy(*batch_out(pa.record_batch([pa.array(range(200_000))], ['x'])), 'sim')]"
        )

    def test_a_child_that_ends_otherwise_is_seen(self):
        """The check itself."""
        with self.assertRaises(AssertionError):
            self.run_child("os.kill(os.getpid(), 9)")
