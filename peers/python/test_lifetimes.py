"""Who keeps what alive, and for how long: children, exports, processes that end. With pyarrow."""

import os
import subprocess
import sys
import threading

import pyarrow as pa

import peer_case
import rust
from peer_case import PeerCase, array_in, array_out, batch_in, batch_out, moved_child, release, released
from rust import ALL, INNER, NESTED, STRUCT
from test_pyarrow import own_batch


def on_thread(body):
    thread = threading.Thread(target=body)
    thread.start()
    thread.join()


class Lifetimes(PeerCase):
    def test_a_child_of_this_crate(self):
        """Taken, the parent released, the child used."""
        for device in ("cpu", "sim"):
            parent = rust.batch([STRUCT, NESTED, STRUCT], 5, device)
            taken = moved_child(parent, 1)
            for struct in parent:
                release(struct)
            if device == "cpu":
                column = array_in(*taken)
                column.validate(full=True)
                taken = array_out(column)
            rust.check_array(taken, NESTED, 5)

    def test_a_child_of_pyarrow(self):
        batch = own_batch(batch_in(*rust.batch([STRUCT, NESTED, STRUCT], 5)))
        parent = batch_out(batch)
        del batch
        taken = moved_child(parent, 1)
        for struct in parent:
            release(struct)
        rust.check_array(rust.passed(taken, "sim"), NESTED, 5)

    def test_all_children_in_another_order(self):
        parent = rust.batch([STRUCT, NESTED, STRUCT, NESTED], 5, "sim")
        taken = [moved_child(parent, i) for i in range(4)]
        grandchild = moved_child(taken[0], 2)
        for pair in (taken[2], taken[0], parent):
            for struct in pair:
                release(struct)
        on_thread(lambda: release(taken[3][0]))
        self.assertGreater(rust.stat("sim", "live_allocations"), 0)
        for struct in (*grandchild, *taken[1], taken[3][1]):
            release(struct)

    def test_released_on_another_thread(self):
        pair = rust.batch([STRUCT, NESTED], 5, "sim")
        for struct in (*pair, *rust.passed(array_out(pa.array(["a" * 100])))):
            on_thread(lambda struct=struct: release(struct))
            self.assertTrue(released(struct))

    def test_memory_that_is_used_is_kept(self):
        """pyarrow's memory stays as long as a slice of it on this side, and no longer."""
        before = pa.total_allocated_bytes()
        array = pa.array(range(10_000))
        size = pa.total_allocated_bytes()
        slice_ = rust.passed(array_out(array), offset=10, rows=5)
        del array
        self.assertGreaterEqual(pa.total_allocated_bytes(), size)
        self.assertEqual(array_in(*slice_).to_pylist(), [10, 11, 12, 13, 14])
        self.assertEqual(pa.total_allocated_bytes(), before)

    def test_the_heap_does_not_grow(self):
        """Round trips of a batch of all types leave this library's heap as it was. Pools and lists grow for a while;
        what leaks grows for ever, however little it is."""

        def heap() -> int:
            self.assertEqual(peer_case.settled(self.before), self.before)
            return rust.lib.peers_heap_bytes()

        grown = []
        while grown[-3:] != [0, 0, 0]:
            self.assertLess(len(grown), 60, f"bytes after every four round trips: {grown}")
            before = heap()
            for _ in range(4):
                there = INNER.copy(*rust.batch(ALL, 11, "sim"), "cpu")
                rust.check_batch(batch_out(batch_in(*there)), ALL, 11)
                stream = rust.relay(rust.stream(ALL[:4], 2))
                out = rust.ArrowDeviceArray()
                self.assertEqual(stream.get_next(stream, out), 0)
                release(out)
                release(stream)
            grown.append(max(heap() - before, 0))


class NeverReleased(PeerCase):
    """Processes that end while they hold something of the other side: cleanly, whatever is held."""

    def test_whatever_is_held(self):
        copies = "[rust.passed(array_out(pa.array(range(200_000))), 'sim') for _ in range(20)]"
        held = [
            "[rust.batch([0, 1, 50, 70], 5, device) for device in ('cpu', 'sim')]",
            "[rust.stream([1, 50, 70], 3, device) for device in ('cpu', 'sim')]",
            "[batch_in(*rust.batch([1, 50, 70], 5))]",
            "[rust.passed(array_out(pa.array(['a' * 1000])), to) for to in (None, 'sim')]",
            copies,
        ]
        for what, expression in {"copies on their way": copies, "everything": " + ".join(held)}.items():
            with self.subTest(what):
                source = f"import pyarrow as pa, rust\nfrom peer_case import *\nkept = {expression}\nprint('done', flush=True)"
                child = subprocess.run(
                    [sys.executable, "-X", "faulthandler", "-c", source],
                    capture_output=True, text=True, cwd=os.path.dirname(__file__), timeout=60,
                )  # fmt: skip
                self.assertEqual((child.stdout, child.stderr, child.returncode), ("done\n", "", 0))
