"""The interpreter is free while others work, there when a release needs it, and may be gone."""

import ctypes as c
import errno
import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
import unittest
import weakref

import arrow_device as ad
import numpy as np
import pyarrow as pa
import rust
from abi import ArrowArray, ArrowArrayStream, ArrowDeviceArray, ArrowDeviceArrayStream, ArrowSchema
from capsules import capsule, device_array_of, stream_of, struct_of
from test_capsules import Balanced, settle


def counts():
    out = (c.c_uint64 * 5)()
    rust.lib.peers_python_counts(out)
    names = ("released_attached", "released_detached", "called_attached", "called_detached", "readers_dropped")
    return dict(zip(names, out))


def noticed(take):
    """What `take` makes of a batch whose release notices the interpreter."""
    array, schema = ArrowDeviceArray(), ArrowSchema()
    assert rust.lib.peers_python_batch(c.byref(array), c.byref(schema)) == 0
    try:
        return take((capsule(schema, b"arrow_schema"), capsule(array, b"arrow_device_array")))
    finally:
        schema.release(c.byref(schema))


def stream(batches, milliseconds):
    """A stream whose `get_next` notices the interpreter; and its struct, to be kept alive."""
    struct = ArrowDeviceArrayStream()
    assert rust.lib.peers_python_stream(batches, milliseconds, c.byref(struct)) == 0
    return ad.Stream(capsule(struct, b"arrow_device_array_stream"))


def released_elsewhere():
    """Waits for what was released before: one thread drops all that threads without the interpreter let go of, in order."""
    marker = np.zeros(1, np.int8)
    gone = weakref.ref(marker)
    pair = ad.Array(pa.Array.from_buffers(pa.int8(), 1, [None, pa.py_buffer(marker)])).__arrow_c_device_array__()
    del marker
    rust.lib.peers_python_release_elsewhere(c.byref(device_array_of(pair)[1]))
    settle(lambda: gone() is None)


class Interpreter(Balanced):
    def setUp(self):
        super().setUp()
        released_elsewhere()
        self.before = counts()

    def since(self):
        return {name: count - self.before[name] for name, count in counts().items()}

    def test_releases_are_attached(self):
        noticed(ad.RecordBatch)
        gc.collect()
        self.assertEqual(self.since(), dict.fromkeys(counts(), 0) | {"released_attached": 1})

    def test_releases_on_other_threads_are_attached(self):
        # The exported array is released by a thread that never heard of Python.
        batch = noticed(ad.RecordBatch)
        pair = batch.__arrow_c_device_array__()
        del batch
        _, array = device_array_of(pair)
        rust.lib.peers_python_release_elsewhere(c.byref(array))
        settle(lambda: self.since()["released_attached"] == 1)
        self.assertEqual(self.since()["released_detached"], 0)

    def test_the_source_of_an_upload_is_released_attached(self):
        for _ in range(10):
            noticed(ad.RecordBatch).to("sim")
        ad.Device("sim").synchronize()
        settle(lambda: self.since()["released_attached"] == 10)
        self.assertEqual(self.since()["released_detached"], 0)

    def test_a_refused_array_is_released_attached(self):
        """After it was taken: its device is not there."""

        def refused(pair):
            device_array_of(pair)[1].device_type = 99
            with self.assertRaisesRegex(NotImplementedError, "99"):
                ad.RecordBatch(pair)

        noticed(refused)
        settle(lambda: self.since()["released_attached"] == 1)
        self.assertEqual(self.since()["released_detached"], 0)

    def test_an_array_of_a_stream_is_released_attached(self):
        pair = next(stream(1, 0)).__arrow_c_device_array__()
        rust.lib.peers_python_release_elsewhere(c.byref(device_array_of(pair)[1]))
        settle(lambda: self.since()["released_attached"] == 1)
        self.assertEqual(self.since()["released_detached"], 0)

    def test_get_next_is_called_detached(self):
        self.assertEqual(sum(len(batch) for batch in stream(3, 0)), 9)
        gc.collect()
        expected = dict.fromkeys(counts(), 0) | {"released_attached": 3, "readers_dropped": 1}
        self.assertEqual(self.since() | {"called_detached": 0}, expected)
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

    def overlapping(self, get_next, struct, array_type):
        """The answers of two calls at once by a consumer that keeps the interpreter."""
        get_next = c.cast(get_next, c.PYFUNCTYPE(c.c_int, c.c_void_p, c.c_void_p))
        answers = []

        def call():
            array = array_type()
            answers.append(get_next(c.addressof(struct), c.addressof(array)))
            inner = getattr(array, "array", array)
            if inner.release:
                inner.release(c.byref(inner))

        threads = [threading.Thread(target=call) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return sorted(answers)

    def test_calls_that_overlap_are_refused(self):
        answer = stream(4, 300).__arrow_c_device_stream__()
        struct = stream_of(answer)
        self.assertEqual(self.overlapping(struct.get_next, struct, ArrowDeviceArray), [0, errno.EBUSY])
        host_answer = stream(4, 300).to_host().__arrow_c_stream__()
        host = struct_of(host_answer, b"arrow_array_stream", ArrowArrayStream)
        self.assertEqual(self.overlapping(host.get_next, host, ArrowArray), [0, errno.EBUSY])

    def test_errors_that_overlap(self):
        def batches():
            raise ValueError("x" * 300)
            yield

        reader = pa.RecordBatchReader.from_batches(pa.schema([("a", pa.int64())]), batches())
        answer = ad.Stream(reader).__arrow_c_device_stream__()
        struct = stream_of(answer)
        for _ in range(500):
            self.assertNotIn(0, self.overlapping(struct.get_next, struct, ArrowDeviceArray))

    def test_released_from_inside_its_own_call(self):
        """The call goes on to its end, and what it used is freed then."""
        answer = stream(4, 300).__arrow_c_device_stream__()
        struct = stream_of(answer)
        get_next = c.cast(struct.get_next, c.PYFUNCTYPE(c.c_int, c.c_void_p, c.c_void_p))
        array = ArrowDeviceArray()
        thread = threading.Thread(target=get_next, args=(c.addressof(struct), c.addressof(array)))
        thread.start()
        while self.since()["called_detached"] == 0:
            time.sleep(0.001)
        struct.release(c.byref(struct))
        self.assertFalse(struct.release)
        thread.join()
        self.assertEqual(array.array.length, 3)
        array.array.release(c.byref(array.array))
        settle(lambda: self.since()["readers_dropped"] == 1)

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
            # Python 3.12 warns of forks beside threads.
            [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program], capture_output=True, text=True, timeout=60, env=os.environ, cwd=os.path.dirname(__file__)
        )
        self.assertEqual((done.returncode, done.stderr), (0, ""), done.stdout)
        return done.stdout

    def test_released_after_the_interpreter(self):
        """What came from Python is leaked then, not released."""
        out = self.run_alone(
            """
            import ctypes, rust, test_interpreter as t, arrow_device as ad
            from capsules import device_array_of
            batch = t.noticed(ad.RecordBatch)
            pair = batch.__arrow_c_device_array__()
            rust.lib.peers_python_hold(ctypes.byref(device_array_of(pair)[1]))
            print("ends")
            """
        )
        self.assertEqual(out, "ends\n")

    def test_a_consumer_that_never_releases(self):
        out = self.run_alone(
            """
            import ctypes, pyarrow as pa, arrow_device as ad
            from abi import ArrowDeviceArray
            from capsules import device_array_of
            kept = []
            for device in ("cpu", "sim"):
                _, array = device_array_of(ad.RecordBatch(pa.record_batch({"a": [1, 2]})).to(device).__arrow_c_device_array__())
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

    SUBINTERPRETER = """
        try:
            import _interpreters as interpreters
        except ImportError:
            import _xxsubinterpreters as interpreters
        interpreters.destroy(interpreters.create())
    """

    def test_after_a_subinterpreter_waits(self):
        """CPython does not answer PyGILState_Check any more then. The consumer, pyarrow, detaches without pyo3's knowledge."""
        out = self.run_alone(
            self.SUBINTERPRETER
            + """
        import arrow_device as ad, pyarrow as pa
        batch = pa.record_batch({"a": [1, 2]})
        class Producer:
            def __arrow_c_device_array__(self, requested_schema=None, **kwargs):
                reader = pa.RecordBatchReader.from_batches(batch.schema, [batch] * 3)
                print(pa.RecordBatchReader.from_stream(ad.Stream(reader).to("sim").to_host()).read_all().num_rows)
                return batch.__arrow_c_device_array__()
        print(len(ad.RecordBatch(Producer())))
            """
        )
        self.assertEqual(out, "6\n2\n")

    def test_after_a_subinterpreter_releases(self):
        """A consumer that joins its releasing thread while it keeps the interpreter."""
        out = self.run_alone(
            self.SUBINTERPRETER
            + """
        import ctypes, rust, test_interpreter as t
        from capsules import device_array_of
        faulthandler.dump_traceback_later(20, exit=True)
        pair = t.noticed(t.ad.RecordBatch).__arrow_c_device_array__()
        ctypes.PyDLL(rust.lib._name).peers_python_release_elsewhere(ctypes.byref(device_array_of(pair)[1]))
        t.settle(lambda: t.counts()["released_attached"] == 1)
        print(t.counts()["released_detached"])
            """
        )
        self.assertEqual(out, "0\n")

    def test_a_tensor_is_released_without_a_wait(self):
        """Its object's deleter wants the interpreter, which the consumer keeps until the releasing thread has ended."""
        out = self.run_alone(
            """
            import ctypes, sys, numpy as np, rust, test_interpreter as t
            from capsules import device_array_of
            faulthandler.dump_traceback_later(20, exit=True)
            values = np.arange(3)
            before = sys.getrefcount(values)
            pair = t.ad.Array.from_dlpack(values).__arrow_c_device_array__()
            ctypes.PyDLL(rust.lib._name).peers_python_release_elsewhere(ctypes.byref(device_array_of(pair)[1]))
            t.settle(lambda: sys.getrefcount(values) == before)
            print("released")
            """
        )
        self.assertEqual(out, "released\n")

    def test_a_forked_process_releases(self):
        out = self.run_alone(
            """
            import ctypes, os, rust, test_interpreter as t
            from capsules import device_array_of
            def one():
                pair = t.noticed(t.ad.RecordBatch).__arrow_c_device_array__()
                rust.lib.peers_python_release_elsewhere(ctypes.byref(device_array_of(pair)[1]))
            one()
            t.settle(lambda: t.counts()["released_attached"] == 1)
            child = os.fork()
            if child == 0:
                one()
                t.settle(lambda: t.counts()["released_attached"] == 2)
                os._exit(7)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            """
        )
        self.assertEqual(out, "7\n")

    def test_a_stream_from_python_after_the_interpreter(self):
        """It is not called any more: its consumer gets an error."""
        out = self.run_alone(
            """
            import ctypes, rust, pyarrow as pa, arrow_device as ad
            from capsules import stream_of
            batch = pa.record_batch({"a": [1, 2]})
            reader = pa.RecordBatchReader.from_batches(batch.schema, [batch] * 3)
            answer = ad.Stream(reader).__arrow_c_device_stream__()
            rust.lib.peers_python_hold_stream(ctypes.byref(stream_of(answer)))
            print("ends", flush=True)
            """
        )
        self.assertRegex(out, "^ends\nget_next after the interpreter: 125 .*interpreter is gone")

