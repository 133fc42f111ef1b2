"""The interpreter is free while others work, there when a release needs it, and may be gone."""

import ctypes as c
import gc
import os
import subprocess
import sys
import textwrap
import threading
import unittest

import arrow_device_example as ad
import pyarrow as pa
import rust
from abi import ArrowArray, ArrowArrayStream, ArrowDeviceArray, ArrowDeviceArrayStream, ArrowSchema
from capsules import capsule, device_array_of, stream_of, struct_of
from test_capsules import Balanced, settle


def counts():
    out = (c.c_uint64 * 4)()
    rust.lib.peers_python_counts(out)
    return dict(zip(("released_attached", "released_detached", "called_attached", "called_detached"), out))


def noticed(take):
    """What `take` makes of a batch whose release notices the interpreter."""
    array, schema = ArrowDeviceArray(), ArrowSchema()
    rust.check(rust.lib.peers_python_batch(c.byref(array), c.byref(schema)))
    try:
        return take((capsule(schema, b"arrow_schema"), capsule(array, b"arrow_device_array")))
    finally:
        schema.release(c.byref(schema))


def stream(batches, milliseconds):
    """A stream whose `get_next` notices the interpreter; and its struct, to be kept alive."""
    struct = ArrowDeviceArrayStream()
    rust.check(rust.lib.peers_python_stream(batches, milliseconds, c.byref(struct)))
    return ad.Stream(capsule(struct, b"arrow_device_array_stream"))


class Interpreter(Balanced):
    def setUp(self):
        super().setUp()
        self.before = counts()

    def since(self):
        return {name: count - self.before[name] for name, count in counts().items()}

    def test_releases_are_attached(self):
        noticed(ad.Batch)
        gc.collect()
        self.assertEqual(self.since(), dict.fromkeys(counts(), 0) | {"released_attached": 1})

    def test_releases_on_other_threads_are_attached(self):
        # The exported array is released by a thread that never heard of Python.
        batch = noticed(ad.Batch)
        pair = batch.__arrow_c_device_array__()
        del batch
        _, array = device_array_of(pair)
        rust.lib.peers_python_release_elsewhere(c.byref(array))
        settle(lambda: self.since()["released_attached"] == 1)
        self.assertEqual(self.since()["released_detached"], 0)

    def test_the_source_of_an_upload_is_released_attached(self):
        for _ in range(10):
            noticed(ad.Batch).to("sim")
        ad.synchronize("sim")
        settle(lambda: self.since()["released_attached"] == 10)
        self.assertEqual(self.since()["released_detached"], 0)

    def test_a_refused_array_is_released_attached(self):
        with self.assertRaises(ValueError):
            noticed(lambda pair: ad.Batch((ad.Array(pa.array([1])).__arrow_c_device_array__()[0], pair[1])) and None)
        # The pair's own capsules own nothing: what was not taken is still there, and released here.

    def test_get_next_is_called_detached(self):
        self.assertEqual(sum(len(batch) for batch in stream(3, 0)), 9)
        gc.collect()
        self.assertEqual(self.since() | {"called_detached": 0}, dict.fromkeys(counts(), 0) | {"released_attached": 3})
        self.assertGreaterEqual(self.since()["called_detached"], 3)

    def test_a_consumer_that_keeps_the_interpreter(self):
        """It calls a stream of ours attached: the reader behind it works detached all the same."""
        answer = stream(2, 0).__arrow_c_device_stream__()
        struct = stream_of(answer)
        attached = c.PYFUNCTYPE(c.c_int, c.POINTER(ArrowDeviceArrayStream), c.POINTER(ArrowDeviceArray))
        get_next = c.cast(struct.get_next, attached)
        for _ in range(2):
            array = ArrowDeviceArray()
            self.assertEqual(get_next(c.byref(struct), c.byref(array)), 0)
            self.assertEqual(array.array.length, 3)
            c.cast(array.array.release, c.PYFUNCTYPE(None, c.c_void_p))(c.addressof(array))
        self.assertEqual(self.since()["called_attached"], 0)
        self.assertEqual(self.since()["called_detached"], 2)
        self.assertEqual(self.since()["released_detached"], 0)

    def test_a_host_consumer_that_keeps_the_interpreter(self):
        answer = stream(2, 0).to_host().__arrow_c_stream__()
        struct = struct_of(answer, b"arrow_array_stream", ArrowArrayStream)
        attached = c.PYFUNCTYPE(c.c_int, c.c_void_p, c.POINTER(ArrowArray))
        array = ArrowArray()
        self.assertEqual(c.cast(struct.get_next, attached)(c.addressof(struct), c.byref(array)), 0)
        array.release(c.byref(array))
        self.assertEqual((self.since()["called_attached"], self.since()["called_detached"]), (0, 1))

    def test_others_run_meanwhile(self):
        """With the interpreter held, the other thread could not count."""
        slow, ticks, done = stream(1, 300), [0], threading.Event()

        def tick():
            while not done.wait(0.001):
                ticks[0] += 1

        thread = threading.Thread(target=tick)
        thread.start()
        next(slow)
        done.set()
        thread.join()
        self.assertGreater(ticks[0], 10)

    def test_many_threads_on_one_stream(self):
        shared, seen = stream(60, 1), []

        def pull():
            for batch in shared:
                seen.append(len(batch.to("sim").to("cpu")))

        threads = [threading.Thread(target=pull) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(seen, [3] * 60)
        del shared
        settle(lambda: self.since()["released_attached"] == 60)


class Ends(unittest.TestCase):
    """A process of its own that ends in an odd way."""

    def run_alone(self, program):
        program = "import faulthandler; faulthandler.enable()\n" + textwrap.dedent(program)
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=os.environ, cwd=os.path.dirname(__file__)
        )
        self.assertEqual((done.returncode, done.stderr), (0, ""), done.stdout)
        return done.stdout

    def test_released_after_the_interpreter(self):
        """What came from Python is leaked then, not released."""
        out = self.run_alone(
            """
            import ctypes, rust, test_interpreter as t, arrow_device_example as ad
            from capsules import device_array_of
            batch = t.noticed(ad.Batch)
            pair = batch.__arrow_c_device_array__()
            rust.lib.peers_python_hold(ctypes.byref(device_array_of(pair)[1]))
            print("ends")
            """
        )
        self.assertEqual(out, "ends\n")

    def test_a_consumer_that_never_releases(self):
        out = self.run_alone(
            """
            import ctypes, pyarrow as pa, arrow_device_example as ad
            from abi import ArrowDeviceArray
            from capsules import device_array_of
            kept = []
            for device in ("cpu", "sim"):
                _, array = device_array_of(ad.Batch(pa.record_batch({"a": [1, 2]})).to(device).__arrow_c_device_array__())
                kept.append(ArrowDeviceArray.from_buffer_copy(array))
                array.array.release = type(array.array.release)()
            print("ends")
            """
        )
        self.assertEqual(out, "ends\n")

    def test_ends_with_streams_and_threads_at_work(self):
        out = self.run_alone(
            """
            import threading, test_interpreter as t
            streams = [t.stream(1000, 1) for _ in range(3)]
            def pull(stream):
                for batch in stream:
                    batch.to("sim")
            for stream in streams:
                threading.Thread(target=pull, args=(stream,), daemon=True).start()
            threading.Event().wait(0.1)
            print("ends")
            """
        )
        self.assertEqual(out, "ends\n")


if __name__ == "__main__":
    unittest.main()
