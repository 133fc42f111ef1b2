"""Batches between two processes: the package's publisher and subscriber, with Rust's and with each other."""

import asyncio
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading
import time

import arrow_device as ad
import nanoarrow
import polars as pl
import pyarrow as pa
from arrow_device.share import Publisher, Subscriber, shared_cpu
from test_capsules import Balanced, batch, settle
from test_manners import interrupt

ROOT = pathlib.Path(__file__).parents[2]
LONG = 60


def held():
    """What this process has open, and mapped of shared memory."""
    return len(os.listdir("/proc/self/fd")), len(shared_memory())


def shared_memory():
    """Where memory of a publisher is mapped."""
    lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
    spans = (line.split()[0].split("-") for line in lines if "memfd:arrow-device" in line)
    return [range(int(start, 16), int(end, 16)) for start, end in spans]


def addresses(of: pa.RecordBatch):
    buffers = (buffer for column in of.columns for buffer in column.buffers() if buffer is not None)
    return [buffer.address for buffer in buffers if buffer.size]


class Other:
    """Another process, which runs a program of Python and says something line by line."""

    HEAD = """
    import sys, time
    import arrow_device as ad, pyarrow as pa
    from arrow_device.share import Publisher, Subscriber, shared_cpu
    path = sys.argv[1]
    """

    def __init__(self, program, path, **more):
        text = textwrap.dedent(self.HEAD) + textwrap.dedent(program)
        command = [sys.executable, "-u", "-X", "faulthandler", "-c", text, str(path)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, **more)

    def line(self):
        return self.process.stdout.readline().rstrip("\n")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.stdout.close()
        self.process.wait(LONG)

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(LONG)

    def rest(self):
        """What it says until its end, which must be a good one."""
        rest = self.process.stdout.read()
        if code := self.process.wait(LONG):
            raise AssertionError(f"the other process: {code}, after {rest}")
        return rest


class Shared(Balanced):
    """Nothing is left open or mapped, either."""

    def setUp(self):
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = pathlib.Path(folder.name, "socket")
        # What is made once.
        shared_cpu().upload(batch())
        self.held = held()

    def tearDown(self):
        super().tearDown()
        settle(lambda: held() == self.held)

    def pair(self, **options):
        publisher = Publisher(self.path, **options)
        subscriber = Subscriber(self.path)
        publisher.wait_for_subscribers(timeout=LONG)
        return publisher, subscriber


def batches():
    """Of many types, whole and sliced; the last without rows."""
    numbers = pa.array([1, None, 3, 4, 5])
    whole = pa.record_batch(
        {
            "number": numbers,
            "text": ["a", None, "ccc", "", "e"],
            "view": pa.array(["a", None, "c" * 30, "", "e"], pa.string_view()),
            "key": pa.array(["x", "y", None, "x", "y"]).dictionary_encode(),
            "list": [[1], None, [2, 3], [], [4]],
            "struct": [{"a": 1}, None, {"a": 3}, {"a": None}, {"a": 5}],
            "flag": [True, False, None, True, True],
        }
    )
    return [whole, whole.slice(1), whole.slice(2, 2), whole.slice(5)]


class Processes(Shared):
    def test_a_publisher_of_rust(self):
        """The example of the guide, with a child in Python: the values are the same, and nothing is copied on either side."""
        example = os.environ.get("ARROW_DEVICE_TWO_PROCESSES", str(ROOT / "target/debug/examples/two_processes"))
        child = [sys.executable, str(ROOT / "share/examples/subscriber.py")]
        done = subprocess.run([example, *child], capture_output=True, text=True, timeout=300)
        self.assertEqual((done.returncode, done.stderr), (0, ""), done.stdout)
        self.assertIn("600572 rows in 74 batches", done.stdout)
        self.assertIn("0 bytes copied to send them, 0 to receive them", done.stdout)
        self.assertIn("The results are equal.", done.stdout)

    def test_a_publisher_of_python(self):
        program = """
        batches = pa.ipc.open_stream(sys.stdin.buffer)
        with Publisher(path) as publisher:
            print("listens")
            publisher.wait_for_subscribers(timeout=60)
            for batch in batches:
                publisher.send(shared_cpu().upload(batch))
            print(publisher.stats())
        """
        with tempfile.TemporaryFile() as file:
            with pa.ipc.new_stream(file, batches()[0].schema) as writer:
                for sent in batches():
                    writer.write_batch(sent)
            file.seek(0)
            with Other(program, self.path, stdin=file) as other:
                self.assertEqual(other.line(), "listens")
                before = ad.Device("cpu").counters()
                kept = []
                for received, sent in zip(Subscriber(self.path), batches(), strict=True):
                    there = pa.record_batch(received)
                    there.validate(full=True)
                    self.assertTrue(there.equals(sent))
                    mapped = shared_memory()
                    for address in addresses(there):
                        self.assertTrue(any(address in span for span in mapped), address)
                    kept.append(there)
                self.assertEqual(ad.Device("cpu").counters(), before)
                said = other.rest()
                # A dictionary that was joined to slices lies by itself, and nothing was copied to be sent.
                self.assertIn("'copied_batches': 0", said)
        # The memory outlives the publisher's process.
        self.assertTrue(all(there.equals(sent) for there, sent in zip(kept, batches())))

    def test_a_subscriber_of_python(self):
        program = """
        read = pa.table(Subscriber(path).stream())
        with pa.ipc.new_stream(sys.stdout.buffer, read.schema) as writer:
            writer.write_table(read)
        """
        with Publisher(self.path) as publisher, Other(program, self.path) as other:
            publisher.wait_for_subscribers(timeout=LONG)
            for sent in batches():
                self.assertEqual(publisher.send(sent), 1)
            self.assertEqual(publisher.stats()["copied_batches"], 4)
            publisher.finish()
            there = pa.ipc.open_stream(other.process.stdout.buffer).read_all()
            self.assertEqual(other.process.wait(LONG), 0)
            self.assertTrue(there.equals(pa.Table.from_batches(batches())))

    def test_a_child_over_a_socket(self):
        program = """
        for batch in Subscriber.over(0, trusting=True):
            print(batch.num_rows)
        """
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with here, there, Other(program, "", stdin=there) as other:
            there.close()
            with Publisher.over(here.fileno()) as publisher:
                here.close()
                self.assertEqual([publisher.send(sent) for sent in batches()], [1] * 4)
            self.assertEqual(other.rest().split(), ["5", "4", "2", "0"])

    def test_ends(self):
        program = """
        import os
        for end in ("finish", "fail", "raise", "drop", "kill"):
            publisher = Publisher(path)
            print("listens")
            publisher.wait_for_subscribers(timeout=60)
            for i in range(2):
                publisher.send(pa.record_batch({"a": [i]}))
            match end:
                case "finish":
                    publisher.finish()
                case "fail":
                    publisher.fail("no more today")
                case "raise":
                    try:
                        with publisher:
                            raise KeyError("x")
                    except KeyError:
                        pass
                case "drop":
                    del publisher
                case "kill":
                    os.kill(os.getpid(), 9)
        """
        died = ConnectionResetError, "has gone without ending the stream"
        ends = None, (RuntimeError, "the publisher failed: no more today"), (RuntimeError, "the publisher failed: KeyError: 'x'"), died, died
        with Other(program, self.path) as other:
            for end in ends:
                self.assertEqual(other.line(), "listens")
                subscriber = Subscriber(self.path)
                for i in range(2):
                    self.assertEqual(pa.record_batch(next(subscriber)).to_pydict(), {"a": [i]})
                if end is not None:
                    with self.assertRaisesRegex(*end):
                        next(subscriber)
                self.assertEqual(list(subscriber), [])
            self.assertEqual(other.process.wait(LONG), -signal.SIGKILL)

    def test_a_publisher_that_is_killed_while_it_is_waited_for(self):
        program = """
        publisher = Publisher(path)
        print("listens")
        publisher.wait_for_subscribers(timeout=60)
        publisher.send(shared_cpu().upload(pa.record_batch({"a": [1, 2]})))
        time.sleep(600)
        """
        with Other(program, self.path) as other:
            self.assertEqual(other.line(), "listens")
            subscriber = Subscriber(self.path)
            there = pa.record_batch(next(subscriber))
            thread = threading.Timer(0.2, other.kill)
            thread.start()
            with self.assertRaises(ConnectionResetError):
                next(subscriber)
            thread.join()
            # What it has is still there.
            self.assertEqual(there.to_pydict(), {"a": [1, 2]})
        # The file that it has left is not in the way of the next one.
        Publisher(self.path).finish()

    def test_a_stream_of_a_publisher_that_is_killed(self):
        program = """
        publisher = Publisher(path)
        print("listens")
        publisher.wait_for_subscribers(timeout=60)
        publisher.send(pa.record_batch({"a": [1, 2]}))
        print("sent")
        time.sleep(600)
        """
        # Whoever reads it by the C interface gets an error of the same number.
        for read, kind in ((list, ConnectionResetError), (pa.table, OSError)):
            with Other(program, self.path) as other:
                self.assertEqual(other.line(), "listens")
                subscriber = Subscriber(self.path)
                self.assertEqual(other.line(), "sent")
                other.kill()
                with self.assertRaisesRegex(kind, "104.*has gone"):
                    read(subscriber.stream())

    def test_a_subscriber_that_is_killed(self):
        program = """
        subscriber = Subscriber.over(0)
        kept = next(subscriber)
        print("has one")
        time.sleep(600)
        """
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with here, Other(program, "", stdin=there) as other:
            there.close()
            publisher = Publisher.over(here.fileno())
            publisher.send(batch())
            self.assertEqual(other.line(), "has one")
            other.kill()
            settle(lambda: publisher.stats()["leases"] == 0)
            with self.assertRaisesRegex(BrokenPipeError, "a subscriber has died"):
                publisher.send(batch())
            self.assertEqual(publisher.stats()["died"], 1)


class Ends(Shared):
    """Both ends in this process."""

    def test_other_libraries(self):
        publisher, subscriber = self.pair()
        for data in (batch(), nanoarrow.c_array(batch()), ad.RecordBatch(batch()), batch().__arrow_c_array__(), shared_cpu().upload(batch())):
            self.assertEqual(publisher.send(data), 1)
            self.assertTrue(pa.record_batch(next(subscriber)).equals(batch()))
        publisher.send(batch())
        publisher.finish()
        self.assertEqual(pl.DataFrame(subscriber.stream()).to_dict(as_series=False), batch().to_pydict())

    def test_what_is_copied(self):
        publisher, subscriber = self.pair()
        there = shared_cpu().upload(batch())
        self.assertEqual(repr(there.device), "Device('cpu')")
        for sent in (there, there[1:]):
            publisher.send(sent)
        self.assertEqual((publisher.stats()["batches"], publisher.stats()["copied_bytes"]), (2, 0))
        publisher.send(batch())
        stats = publisher.stats()
        self.assertEqual((stats["batches"], stats["copied_batches"], stats["subscribers"], stats["leases"]), (3, 1, 1, 3))
        self.assertGreater(stats["copied_bytes"], 0)
        publisher.finish()
        # Still known.
        self.assertEqual(publisher.stats(), stats)
        self.assertEqual(len(list(subscriber)), 3)
        publisher, subscriber = self.pair()
        publisher.send(ad.RecordBatch.from_arrays([there["text"]], ["text"]))
        self.assertEqual((publisher.stats()["batches"], publisher.stats()["copied_bytes"]), (1, 0))
        self.assertEqual(pa.record_batch(next(subscriber)).column(0).to_pylist(), batch()["text"].to_pylist())
        publisher.finish()

    def test_what_is_refused(self):
        publisher, subscriber = self.pair()
        publisher.send(batch())
        for data, kind, text in (
            (pa.record_batch({"other": [1]}), ValueError, "another schema"),
            (pa.table(batch()), TypeError, "use Stream, or Device.upload"),
            (3, TypeError, "type int"),
            (ad.RecordBatch(batch()).to("sim"), NotImplementedError, "sim"),
        ):
            with self.assertRaisesRegex(kind, text):
                publisher.send(data)
        self.assertEqual(len(next(subscriber)), 3)
        with self.assertRaisesRegex(OSError, "in use.*socket"):
            Publisher(self.path)
        publisher.finish()
        publisher.finish()
        for call in (lambda: publisher.send(batch()), publisher.wait_for_subscribers):
            with self.assertRaisesRegex(ValueError, "has ended"):
                call()
        with self.assertRaisesRegex(FileNotFoundError, "socket"):
            Subscriber(self.path)
        self.path.touch()
        with self.assertRaises(ConnectionRefusedError):
            Subscriber(self.path)
        for over in (Publisher.over, Subscriber.over):
            with self.assertRaisesRegex(OSError, "descriptor"):
                over(-1)
            with socket.socket(socket.AF_UNIX) as other, self.assertRaisesRegex(PermissionError, "SOCK_SEQPACKET"):
                over(other.fileno())

    def test_times(self):
        publisher = Publisher(self.path, leases=2)
        with self.assertRaisesRegex(TimeoutError, "too few subscribers"):
            publisher.wait_for_subscribers(timeout=0.01)
        with self.assertRaisesRegex(ValueError, "negative"):
            publisher.wait_for_subscribers(timeout=-1)
        subscriber = Subscriber(self.path)
        publisher.wait_for_subscribers(timeout=LONG)
        for _ in range(2):
            publisher.send(batch(), timeout=None)
        for timeout in (0, 0.12):
            with self.assertRaisesRegex(TimeoutError, "returns nothing"):
                publisher.send(batch(), timeout=timeout)
        next(subscriber)
        publisher.send(batch())
        publisher.finish()
        self.assertEqual(len(list(subscriber)), 2)

    def test_streams(self):
        publisher, subscriber = self.pair()
        publisher.send(batch())
        publisher.send(batch())
        stream = subscriber.stream()
        publisher.finish()
        self.assertEqual((stream.schema, stream.device_type), (ad.RecordBatch(batch()).schema, "cpu"))
        self.assertEqual((len(stream.to("sim").read_all()), stream.rows), (6, 6))
        publisher, subscriber = self.pair()
        publisher.finish()
        self.assertEqual(len(subscriber.stream().schema), 0)

    def test_async_loops(self):
        publisher, subscriber = self.pair()
        publisher.send(batch())
        publisher.finish()

        async def read():
            return [len(each) async for each in subscriber]

        self.assertEqual(asyncio.run(read()), [3])

    def test_cancelled_waits_lose_nothing(self):
        publisher, subscriber = self.pair(leases=100)

        async def read():
            with self.assertRaises(TimeoutError):
                await asyncio.wait_for(anext(subscriber), 0.05)
            task = asyncio.create_task(anext(subscriber))
            await asyncio.sleep(0.02)
            task.cancel()
            # The thread's turn is not over.
            await asyncio.gather(task, return_exceptions=True)
            publisher.send(batch())
            await asyncio.sleep(0.2)
            there = len(await anext(subscriber))
            # The end of the loop ends this one.
            waiting = asyncio.create_task(anext(subscriber))
            await asyncio.sleep(0.05)
            return there, waiting.done()

        self.assertEqual(asyncio.run(read()), (3, False))
        publisher.send(batch())
        self.assertEqual(len(next(subscriber)), 3)
        publisher.finish()
        self.assertEqual(list(subscriber), [])

    def test_closing(self):
        publisher, subscriber = self.pair()
        publisher.send(batch())
        there, read = next(subscriber), []
        thread = threading.Thread(target=lambda: read.extend(subscriber))
        thread.start()
        with subscriber:
            time.sleep(0.05)
        thread.join(LONG)
        self.assertEqual((read, list(subscriber), thread.is_alive()), ([], [], False))
        subscriber.close()
        settle(lambda: publisher.stats()["left"] + publisher.stats()["subscribers"] == 0)
        self.assertEqual((publisher.send(batch()), publisher.stats()["leases"]), (0, 1))
        self.assertTrue(pa.record_batch(there).equals(batch()))
        del there
        settle(lambda: publisher.stats()["left"] == 1)

    def test_what_is_shown(self):
        publisher, subscriber = self.pair()
        self.assertEqual(repr(publisher), f"<Publisher: at {self.path}>")
        publisher.send(batch())
        next(subscriber)
        self.assertEqual(repr(subscriber), f"<Subscriber: 1 batches so far, of {self.path}>")
        publisher.finish()
        subscriber.close()
        self.assertEqual(repr(publisher), f"<Publisher: at {self.path}, closed>")
        self.assertEqual(repr(subscriber), f"<Subscriber: 1 batches so far, of {self.path}, closed>")


class Manners(Shared):
    def interrupted(self, name, wait):
        start = time.monotonic()
        with self.subTest(name), self.assertRaises(KeyboardInterrupt):
            interrupt(lambda: time.monotonic() > start + 0.1)
            wait()

    def test_ctrl_c_ends_every_wait(self):
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        self.addCleanup(signal.signal, signal.SIGINT, before)
        publisher, subscriber = self.pair(leases=1)
        with subscriber:
            behind = threading.Thread(target=lambda: list(subscriber))
            behind.start()
            time.sleep(0.1)
            # Behind another thread, which waits for the same.
            self.interrupted("behind", lambda: next(subscriber))
        behind.join(LONG)
        subscriber = Subscriber(self.path)
        publisher.wait_for_subscribers(timeout=LONG)
        self.interrupted("next", lambda: next(subscriber))
        self.interrupted("stream", subscriber.stream)
        self.interrupted("wait_for_subscribers", lambda: publisher.wait_for_subscribers(2))
        publisher.send(batch())
        self.interrupted("send", lambda: publisher.send(batch(), timeout=None))
        # Nothing is lost, and what was not sent was sent to nobody.
        publisher.finish()
        self.assertEqual([len(each) for each in subscriber], [3])

    def test_a_signals_handler_ends_every_wait(self):
        """A program of its own, which is killed if one does not end."""
        program = """
        import faulthandler, signal, threading
        faulthandler.dump_traceback_later(30, exit=True)
        one = pa.record_batch({"a": [1]})

        def during(handler, wait):
            signal.signal(signal.SIGUSR1, lambda *_: handler())
            threading.Timer(0.2, signal.pthread_kill, (threading.main_thread().ident, signal.SIGUSR1)).start()
            try:
                print("returns", wait())
            except Exception as e:
                print(type(e).__name__, e)

        def pair():
            publisher = Publisher(path, leases=1)
            subscriber = Subscriber(path)
            publisher.wait_for_subscribers()
            return publisher, subscriber

        publisher, subscriber = pair()
        during(subscriber.close, lambda: [len(each) for each in subscriber])
        subscriber = Subscriber(path)
        publisher.wait_for_subscribers()
        # The handler takes the first one.
        during(lambda: (publisher.send(one), next(subscriber), publisher.finish()), lambda: list(subscriber))
        for end in (Publisher.finish, lambda publisher: publisher.fail("no more")):
            publisher, subscriber = pair()
            during(lambda: end(publisher), lambda: publisher.wait_for_subscribers(2))
            publisher, subscriber = pair()
            publisher.send(one)
            during(lambda: (end(publisher), publisher.stats()), lambda: publisher.send(one, timeout=None))
        """
        with Other(program, self.path) as other:
            ended = "ValueError the publisher has ended its stream"
            self.assertEqual(other.rest().splitlines(), ["returns []", "returns []", *[ended] * 4])

    def test_every_wait_releases_the_interpreter(self):
        """Another thread, which gets the interpreter only where it is given up, ends each wait."""
        publisher, subscriber = self.pair(leases=1)
        interval = sys.getswitchinterval()
        self.addCleanup(sys.setswitchinterval, interval)
        sys.setswitchinterval(3600)

        def meanwhile(wait, then):
            begin = threading.Event()
            thread = threading.Thread(target=lambda: begin.wait() and then())
            thread.start()
            try:
                # The thread takes no step before the interpreter is given up once more: in the wait.
                begin.set()
                return wait()
            finally:
                thread.join()

        there = [meanwhile(lambda: next(subscriber), lambda: publisher.send(batch()))]
        self.assertEqual(meanwhile(lambda: publisher.send(batch()), there.clear), 1)
        more = []
        meanwhile(lambda: publisher.wait_for_subscribers(2), lambda: more.append(Subscriber(self.path)))
        publisher.finish()

    def test_threads(self):
        """Each batch goes to one of the threads that read, whichever thread has sent it."""
        publisher, subscriber = self.pair(leases=3)
        read = []

        def receive():
            for each in subscriber:
                read.append(pa.record_batch(each)["a"][0].as_py())

        def send(start):
            for i in range(start, start + 50):
                publisher.send(pa.record_batch({"a": [i]}))

        # Each keeps a batch while it waits for its next one.
        receivers = [threading.Thread(target=receive) for _ in range(2)]
        senders = [threading.Thread(target=send, args=(i * 50,)) for i in range(3)]
        for thread in receivers + senders:
            thread.start()
        for thread in senders:
            thread.join()
        publisher.finish()
        for thread in receivers:
            thread.join()
        self.assertEqual(sorted(read), list(range(150)))

    def test_a_forked_child_is_refused(self):
        program = """
        import faulthandler, os, threading
        faulthandler.dump_traceback_later(60, exit=True)
        publisher, subscriber = Publisher(path), Subscriber(path)
        publisher.wait_for_subscribers()
        shared_cpu().upload(pa.record_batch({"a": [1]}))
        # Which holds the lock.
        threading.Thread(target=lambda: print("read", len(next(subscriber)))).start()
        time.sleep(0.1)
        child = os.fork()
        if child == 0:
            one = pa.record_batch({"a": [1]})
            for call in (lambda: publisher.send(one), publisher.finish, publisher.stats, lambda: next(subscriber), subscriber.close, lambda: shared_cpu().upload(one)):
                try:
                    print("works", call())
                except Exception as e:
                    print(type(e).__name__, "fork" in str(e))
            del publisher, subscriber
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        publisher.send(pa.record_batch({"a": [1, 2]}))
        """
        with Other("import warnings\nwarnings.simplefilter('ignore')\n" + textwrap.dedent(program), self.path) as other:
            self.assertEqual(other.rest().splitlines(), [*["PermissionError True"] * 5, "RuntimeError True", "0", "read 2"])
