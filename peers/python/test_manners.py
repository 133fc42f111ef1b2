"""Ctrl-C, forks, threads: how the package behaves in a program."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import unittest

import arrow_device as ad
import pyarrow as pa
from test_capsules import Balanced, batch
from test_interpreter import stream


def interrupt(when):
    """Presses Ctrl-C once this is so."""

    def wait():
        while not when():
            pause.wait(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    pause = threading.Event()
    threading.Thread(target=wait, daemon=True).start()


class CtrlC(Balanced):
    """Only a read that ends early is over before the test's limit: each has hours of batches."""

    def setUp(self):
        super().setUp()
        # A shell's background jobs ignore the signal.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        self.addCleanup(signal.signal, signal.SIGINT, before)

    def endless(self):
        return stream(10_000_000, 1)

    def test_ends_a_loop_and_a_join(self):
        for read in (list, ad.Stream.read_all, lambda s: list(s.to("sim")), lambda s: list(s.to("sim", ahead=2)), lambda s: s.to_host().read_all()):
            source = self.endless()
            interrupt(lambda: source.batches > 5)
            with self.assertRaises(KeyboardInterrupt):
                read(source)

    def test_ends_a_read_by_another_library(self):
        """Which gets an error of ours, and may make one of its own of it."""
        source = self.endless()
        interrupt(lambda: source.batches > 5)
        with self.assertRaisesRegex(BaseException, "KeyboardInterrupt|^$"):
            pa.table(source.to_host())

    def test_reads_on_another_thread_go_on(self):
        source, read = stream(50, 1), []
        thread = threading.Thread(target=lambda: read.append(len(source.read_all())))
        thread.start()
        with self.assertRaises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
            thread.join()
        thread.join()
        self.assertEqual(read, [150])


class Threads(Balanced):
    def test_every_wait_and_copy_releases_the_interpreter(self):
        """Another thread, which gets the interpreter only where it is given up, gets on during each."""
        large = pa.record_batch({"a": pa.array(range(1_000_000))})
        there = ad.RecordBatch(large).to("sim")
        sim = ad.Device("sim")
        calls = {
            "upload": lambda: sim.upload(large),
            "to": lambda: there.to("cpu"),
            "to of an array": lambda: there["a"].to("cpu"),
            "to_host": lambda: there.to_host(),
            "to_host of an array": lambda: there["a"].to_host(),
            "wait": lambda: ad.RecordBatch(large).to("sim").wait(),
            "synchronize": lambda: (ad.RecordBatch(large).to("sim"), sim.synchronize()),
            "read_all": lambda: ad.Stream(pa.table(large)).to("sim").read_all(),
            "capsule": lambda: ad.RecordBatch(large).to("sim").__arrow_c_device_array__(),
            "tensor": lambda: there["a"].__dlpack__(copy=True),
        }
        ticks, done = [0], threading.Event()

        def tick():
            while not done.wait(0):
                ticks[0] += 1
                os.sched_yield()

        before, thread = sys.getswitchinterval(), threading.Thread(target=tick)
        sys.setswitchinterval(3600)
        try:
            thread.start()
            for name, call in calls.items():
                for _ in range(1000):
                    seen = ticks[0]
                    call()
                    if ticks[0] > seen:
                        break
                else:
                    self.fail(f"{name} keeps the interpreter")
        finally:
            done.set()
            sys.setswitchinterval(before)
            thread.join()

    def test_one_batch_on_many_threads(self):
        there, seen = ad.RecordBatch(batch()).to("sim"), []

        def use():
            for _ in range(50):
                seen.append(pa.record_batch(there[1:].to_host()).equals(batch()[1:]))

        threads = [threading.Thread(target=use) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(seen, [True] * 200)


class Forks(unittest.TestCase):
    def test_a_device_is_refused_in_a_child(self):
        program = """
        import faulthandler, os, sys
        faulthandler.dump_traceback_later(60, exit=True)
        import arrow_device as ad, pyarrow as pa
        one = pa.record_batch({"a": [1, 2]})
        sim = ad.Device("sim")
        there = sim.upload(one)
        there.wait()
        ahead = ad.Stream(pa.table(one)).to("cpu", ahead=1)
        calls = [lambda: sim.upload(one), there.to_host, sim.synchronize, lambda: next(ahead), lambda: ad.Stream(one).to(sim).read_all()]
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            for call in calls:
                try:
                    print("works", call())
                except Exception as e:
                    print(type(e).__name__, "fork" in str(e))
            print(pa.record_batch(ad.RecordBatch(one).to("cpu")).equals(one), flush=True)
            os._exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(sim.upload(one).to_host()))
        """
        # Python 3.12 warns of forks beside threads.
        done = subprocess.run(
            [sys.executable, "-W", "ignore::DeprecationWarning", "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=100
        )
        lines = done.stdout.split("\n")
        self.assertEqual((done.returncode, done.stderr, lines[-3:]), (0, "", ["True", "0 2", ""]), done.stdout)
        for line in lines[:-3]:
            self.assertRegex(line, "^(RuntimeError|ValueError|NotImplementedError) True$")
        self.assertEqual(len(lines), 8)
