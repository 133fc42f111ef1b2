"""Arrow C++ with a device whose memory the host cannot read: its own `arrow::Device` over our simulated one.

On a lazy device queued work runs only when somebody waits for it: what is right there is right because of its event."""

import signal
import subprocess
import sys
import unittest

import abi
import shim
from shim import DIFFERS, NEW_EVENT, OWN_EVENT, UNKNOWN
from shim import Array, Balanced, Batch, Cases, Kind, Reader
from shim import count_buffers, has_null_data, has_strings, release

FIXED = ("Int32", "Float64", "Boolean", "Decimal128(38, 10)", "fixed_list<i16, 3>")


class TheDevice(unittest.TestCase):
    def test_the_host_cannot_read(self):
        """A load from the device's memory ends the process: what passes below has read none of it."""
        code = """
import ctypes, shim
sim = shim.Sim(lazy=False)
array, schema = shim.Cases().of("Int32")[2].export(sim, wait=True)
print(array.array.length, flush=True)
ctypes.string_at(array.array.buffers[1], 4)
"""
        child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
        self.assertEqual((child.stdout, child.returncode), ("300\n", -signal.SIGSEGV), child.stderr)


class FromRust(Balanced):
    """Our device arrays, copied to the host by Arrow C++."""

    def test_every_type(self):
        """Types without strings come with an event, which Arrow C++ waits for on its queue. Strings come completed:
        Arrow C++ reads their offsets before it has the event."""
        cases = Cases()
        for lazy in (True, False):
            for name in cases.types:
                with self.subTest(name, lazy=lazy), self.simulated(lazy) as (sim, device):
                    for case in cases.of(name):
                        array, schema = case.export(sim)
                        if has_strings(schema):
                            release(array)
                            release(schema)
                            array, schema = case.export(sim, wait=True)
                            self.assertIsNone(array.sync_event)
                        ours = Array.take((array, schema))
                        on_host = ours.copy()
                        ours.drop()
                        on_host.validate()
                        on_host.assert_same(Array.take_host(case.export_host()))

    def test_the_event_is_needed(self):
        """Without a wait for our event Arrow C++ copies what is not there yet."""
        cases = Cases()
        for name in (*FIXED, "list<i32>", "Utf8View"):
            with self.subTest(name), self.simulated(lazy=True) as (sim, device):
                case = cases.of(name)[2]
                host = Array.take_host(case.export_host())
                device.waits(False)
                early = Array.take(case.export(sim)).copy()
                self.assertEqual((device.counts.host_waits, device.counts.queue_waits), (0, 0))
                self.assert_fails(UNKNOWN, "expected", early.assert_same, host)

    def test_waits_and_copies(self):
        """One host wait for the event, or one queue wait for each buffer; each buffer is copied once."""
        kind = Kind.named("fixed width")
        host = Batch.take_host(kind.export_host())
        with self.simulated(lazy=True) as (sim, device):
            array, schema = kind.export(sim=sim)
            buffers = count_buffers(array.array, schema)
            self.assertGreater(buffers, 11)
            batch = Batch.take((array, schema))
            self.assertEqual(batch.device_type, abi.EXT_DEV)
            self.assertEqual(device.counts.copies_to_host + device.counts.host_waits, 0)
            device.waits(False)
            batch.wait()
            self.assertEqual(device.counts.host_waits, 1)
            batch.copy().assert_same(host)
            self.assertEqual(device.counts.copies_to_host, buffers)
            device.waits(True)
            batch.copy().assert_same(host)
            self.assertEqual((device.counts.host_waits, device.counts.queue_waits), (1, buffers))

    def test_batches(self):
        for lazy in (True, False):
            for kind in Kind.all():
                with self.subTest(kind.name, lazy=lazy), self.simulated(lazy) as (sim, device):
                    batch = Batch.take(kind.export(sim=sim, wait=True))
                    on_host = batch.copy()
                    on_host.validate()
                    on_host.assert_same(Batch.take_host(kind.export_host()))

    def test_one_event_of_many(self):
        """Columns with events of their own go out with one event, after all of them."""
        kind = Kind.named("fixed width")
        host = Batch.take_host(kind.export_host())
        with self.simulated(lazy=True) as (sim, device):
            before = sim.stats
            ours = Batch.take(kind.export(sim=sim, apart=True))
            self.assertEqual(sim.stats.queue_waits - before.queue_waits, 10)
            self.assertEqual(sim.stats.host_waits, before.host_waits)
            ours.copy().assert_same(host)

    def test_move_several_children(self):
        """Children that were moved out keep the event alive, also one that is nobody else's, and wait for it."""
        kind = Kind.named("fixed width")
        host = Batch.take_host(kind.export_host())
        for apart in (False, True):
            for columns in ([3], [9, 0, 8]):
                with self.subTest(columns, apart=apart), self.simulated(lazy=True) as (sim, device):
                    moved = Batch.move_columns(kind.export(sim=sim, apart=apart), columns)
                    moved.copy().assert_same(host.select(columns))

    def test_released_unread(self):
        """Whether or not anybody waited."""
        kind = Kind.named("every type")
        with self.simulated(lazy=True) as (sim, device):
            array, schema = kind.export(sim=sim)
            release(array)
            release(schema)
            Batch.take(Kind.named("fixed width").export(sim=sim)).drop()

    def test_stream(self):
        """Through RegisterDeviceMapper; each batch has its event."""
        kind = Kind.named("fixed width")
        for lazy in (True, False):
            with self.simulated(lazy) as (sim, device):
                stream = kind.stream(4, sim=sim)
                self.assertEqual(stream.device_type, abi.EXT_DEV)
                reader = Reader.take(stream)
                self.assertEqual(reader.device_type, abi.EXT_DEV)
                kept = [reader.next() for _ in range(4)]
                self.assertIsNone(reader.next())
                reader.drop()
                for seed, batch in enumerate(kept):
                    self.assertEqual(batch.device_type, abi.EXT_DEV)
                    batch.copy().assert_same(Batch.take_host(kind.export_host(seed)))
                self.assertGreaterEqual(device.counts.queue_waits, 4)

    def test_stream_of_strings(self):
        kind = Kind.named("strings")
        with self.simulated(lazy=True) as (sim, device):
            reader = Reader.take(kind.stream(3, sim=sim, wait=True))
            for seed in range(3):
                reader.next().copy().assert_same(Batch.take_host(kind.export_host(seed)))
            self.assertIsNone(reader.next())

    def test_stream_closed_early_and_failing(self):
        kind = Kind.named("fixed width")
        with self.simulated(lazy=True) as (sim, device):
            reader = Reader.take(kind.stream(3, sim=sim))
            first = reader.next()
            reader.close()
            first.copy().assert_same(Batch.take_host(kind.export_host()))
            reader = Reader.take(kind.stream(3, fail_at=1, errno=shim.ENOMEM, sim=sim))
            reader.next()
            self.assert_fails(shim.OUT_OF_MEMORY, "batch 1 cannot be made", reader.next)


class FromCpp(Balanced):
    """Arrays that Arrow C++ made on its device, with its own events, downloaded by us."""

    def test_every_type(self):
        """The sole exception are types without a buffer: Arrow C++ says that they are on the CPU."""
        cases = Cases()
        on_cpu = set()
        for lazy in (True, False):
            for name in cases.types:
                with self.subTest(name, lazy=lazy), self.simulated(lazy) as (sim, device):
                    for case in cases.of(name):
                        theirs = Array.take_host(case.export_host()).copy(device)
                        array, schema = theirs.export(NEW_EVENT, device)
                        self.assertIsNotNone(array.sync_event)
                        theirs.drop()
                        if array.device_type == abi.EXT_DEV:
                            self.assertEqual(array.device_id, sim.id)
                            case.check((array, schema), sim=sim)
                        else:
                            on_cpu.add(name)
                            text = "sync_event: cpu has no events"
                            self.assert_fails(shim.EINVAL, text, case.check, (array, schema), sim=sim)
        self.assertEqual(on_cpu, {"Null", "struct<>"})

    def test_the_event_is_needed(self):
        """Without their event we copy what is not there yet."""
        cases = Cases()
        for name in FIXED:
            with self.subTest(name), self.simulated(lazy=True) as (sim, device):
                case = cases.of(name)[2]
                host = Array.take_host(case.export_host())
                array, schema = host.copy(device).export(NEW_EVENT, device)
                array.sync_event = None
                self.assert_fails(DIFFERS, "expected", case.check, (array, schema), sim=sim, full=False)
                case.check(host.copy(device).export(NEW_EVENT, device), sim=sim, full=False)

    def test_waits_and_copies(self):
        """An import waits for nothing; a download makes the queue wait once, copies, and waits once on the host."""
        kind = Kind.named("fixed width")
        with self.simulated(lazy=True) as (sim, device):
            theirs = Batch.take_host(kind.export_host()).copy(device)
            array, schema = theirs.export(OWN_EVENT)
            buffers = count_buffers(array.array, schema)
            before = sim.stats
            kind.check((array, schema), sim=sim, full=False)
            after = sim.stats
            # One wait for each owner's event: a batch has one.
            self.assertEqual(after.queue_waits - before.queue_waits, 1)
            self.assertEqual(after.host_waits - before.host_waits, 1)
            self.assertEqual(after.copies - before.copies, buffers)
            self.assertEqual(after.bytes_to_device, 0)

    def test_batches(self):
        for lazy in (True, False):
            for kind in Kind.all():
                if kind.name == "no columns":  # No buffers: on the CPU, see test_every_type.
                    continue
                with self.subTest(kind.name, lazy=lazy), self.simulated(lazy) as (sim, device):
                    theirs = Batch.take_host(kind.export_host()).copy(device)
                    pair = theirs.export(OWN_EVENT)
                    theirs.drop()
                    kind.check(pair, sim=sim)

    def test_stream(self):
        for lazy in (True, False):
            for later in (True, False):
                for kind in map(Kind.named, ("fixed width", "strings", "every type", "empty strings")):
                    with self.subTest(kind.name, lazy=lazy, later=later), self.simulated(lazy) as (sim, device):
                        on_device = [Batch.take_host(kind.export_host(seed)).copy(device) for seed in range(3)]
                        stream = Reader.of(on_device, device_type=abi.EXT_DEV).export()
                        del on_device
                        self.assertEqual(stream.device_type, abi.EXT_DEV)
                        kind.check_stream(stream, 3, later=later, sim=sim)

    def test_stream_closed_early_and_failing(self):
        kind = Kind.named("fixed width")
        with self.simulated(lazy=True) as (sim, device):
            on_device = [Batch.take_host(kind.export_host(seed)).copy(device) for seed in range(3)]
            kind.check_stream(Reader.of(on_device, device_type=abi.EXT_DEV).export(), 3, stop=1, sim=sim)
            failing = Reader.of(on_device, device_type=abi.EXT_DEV, fail_at=2, code=shim.IO_ERROR, text="it broke")
            self.assert_fails(shim.EIO, "it broke", kind.check_stream, failing.export(), 3, sim=sim)
            del on_device, failing

    def test_there_and_back(self):
        """Our device arrays through Arrow C++, with our own event: the same memory, nothing copied."""
        cases = Cases()
        back = 0
        for name in cases.types:
            with self.subTest(name), self.simulated(lazy=True) as (sim, device):
                for case in cases.of(name):
                    array, schema = case.export(sim, wait=True)
                    # It would take a null pointer, legal for no bytes, for memory of the CPU. See test_cpp_quirks.
                    self.assertFalse(has_null_data(array.array, schema), case)
                    ours = Array.take((array, schema))
                    pair = ours.export(OWN_EVENT)
                    ours.drop()
                    if count_buffers(pair[0].array, pair[1]):
                        back += 1
                        self.assertEqual(pair[0].device_type, abi.EXT_DEV)
                        case.check(pair, sim=sim)
                    else:
                        # Without a buffer it says that it is on the CPU.
                        self.assertEqual(pair[0].device_type, abi.CPU)
                        release(pair[0])
                        release(pair[1])
                self.assertEqual(sim.stats.queue_waits, 0)
        self.assertGreater(back, 1500)


if __name__ == "__main__":
    unittest.main()
