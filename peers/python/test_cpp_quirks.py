"""What Arrow C++ sends that it should not, or that one may not expect: we survive each. The numbers are those of the
list of its known defects in this file:

1   exports never write `reserved`
3   the offsets of strings are read before the event is known
5   a null pointer for a buffer of no bytes becomes memory of the CPU
7   a stream may declare one device type, and its arrays carry another
8   a re-export has no event unless the caller passes one on
11  a failed export leaves what was in `out`"""

import unittest

import abi
import shim
from shim import DIFFERS, EINVAL, INVALID, NEW_EVENT, NO_EVENT, OWN_EVENT
from shim import Array, Balanced, Batch, Cases, Kind, Reader, has_null_data, release, spoiled

SPOILED = int.from_bytes(b"\xab" * 8, "little", signed=True)


class Quirks(Balanced):
    def test_1_reserved(self):
        """Their `reserved` is what was there before. Ours is zero."""
        case = Cases().of("Int32")[2]
        ours = case.export(into=spoiled())
        self.assertEqual(list(ours[0].reserved), [0, 0, 0])
        pair = Array.take(ours).export(into=spoiled())
        self.assertEqual(list(pair[0].reserved), [SPOILED] * 3)
        case.check(pair)
        kind = Kind.named("every type")
        pair = Batch.take(kind.export()).export(into=spoiled())
        self.assertEqual(list(pair[0].reserved), [SPOILED] * 3)
        kind.check(pair)

    def test_3_strings_are_read_before_the_event(self):
        """Four copies for four arrays with offsets, and no wait: an import of completed data only is no race."""
        kind = Kind.named("strings")
        with self.simulated(lazy=True) as (sim, device):
            early = Batch.take(kind.export(sim=sim))
            counts = device.counts
            self.assertEqual((counts.copies_to_host, counts.host_waits, counts.queue_waits), (4, 0, 0))
            # Whole offset buffers: of 300 rows three times, and of the list's items.
            self.assertGreater(counts.bytes_to_host, 301 * (4 + 8 + 4 + 4))
            early.drop()
            done = Batch.take(kind.export(sim=sim, wait=True))
            done.copy().assert_same(Batch.take_host(kind.export_host()))

    def test_5_buffers_of_no_bytes(self):
        """Theirs come with null pointers, on the device too."""
        kind = Kind.named("empty strings")
        with self.simulated(lazy=True) as (sim, device):
            pair = Batch.take_host(kind.export_host()).copy(device).export(NEW_EVENT, device)
            self.assertTrue(has_null_data(pair[0].array, pair[1]))
            kind.check(pair, sim=sim)

    def test_5_ours_there_and_back(self):
        """Buffers of no bytes of ours have an address, so that Arrow C++ takes them for what they are."""
        for kind in map(Kind.named, ("empty strings", "every type, no rows", "every type", "fixed width")):
            with self.subTest(kind.name), self.simulated(lazy=True) as (sim, device):
                pair = kind.export(sim=sim, wait=True)
                self.assertFalse(has_null_data(pair[0].array, pair[1]))
                ours = Batch.take(pair)
                ours.copy().assert_same(Batch.take_host(kind.export_host()))
                kind.check(ours.export(), sim=sim)

    def test_7_their_stream_declares_another_type(self):
        """CUDA or CPU is declared, arrays are on the simulated device: refused, and nothing stays behind."""
        kind = Kind.named("fixed width")
        for declared in (abi.CUDA, abi.CPU):
            with self.subTest(declared), self.simulated(lazy=True) as (sim, device):
                on_device = [Batch.take_host(kind.export_host(seed)).copy(device) for seed in range(2)]
                stream = Reader.of(on_device, device_type=declared).export()
                del on_device
                self.assertEqual(stream.device_type, declared)
                name = "CUDA (2)" if declared == abi.CUDA else "CPU (1)"
                text = f"array.device_type: is EXT_DEV (12) in a stream of {name}"
                self.assert_fails(EINVAL, text, kind.check_stream, stream, 2, sim=sim)

    def test_7_our_stream_declares_another_type(self):
        """Arrow C++ believes both: the reader is on one device, its batches on another."""
        kind = Kind.named("fixed width")
        with self.simulated(lazy=True) as (sim, device):
            stream = kind.stream(1, sim=sim)
            stream.device_type = abi.CUDA
            reader = Reader.take(stream)
            self.assertEqual(reader.device_type, abi.CUDA)
            batch = reader.next()
            self.assertEqual(batch.device_type, abi.EXT_DEV)
            batch.copy().assert_same(Batch.take_host(kind.export_host()))
            reader.drop()

    def test_8_events_after_a_re_export(self):
        """An event that is not passed on is lost, and with it the order; passed on, it is ours."""
        case = Cases().of("Int64")[2]
        with self.simulated(lazy=True) as (sim, device):
            ours = case.export(sim)
            event = ours[0].sync_event
            self.assertIsNotNone(event)
            theirs = Array.take(ours)
            lost, kept = theirs.export(NO_EVENT), theirs.export(OWN_EVENT)
            theirs.drop()
            self.assertIsNone(lost[0].sync_event)
            self.assertEqual(kept[0].sync_event, event)
            self.assert_fails(DIFFERS, "expected", case.check, lost, sim=sim, full=False)
            case.check(kept, sim=sim, full=False)
            # Waited for before: nothing is lost.
            theirs = Array.take(case.export(sim))
            theirs.wait()
            case.check(theirs.export(NO_EVENT), sim=sim, full=False)
            theirs.drop()

    def test_11_failed_export(self):
        """`release` stays what it was; in a stream that is our released struct."""
        kind = Kind.named("fixed width")
        with self.simulated(lazy=True) as (sim, device):
            host = Batch.take_host(kind.export_host())
            mixed = host.mix(host.copy(device))
            pair = spoiled()
            self.assert_fails(INVALID, "more than one device", mixed.export, into=pair)
            release = int.from_bytes(bytes(pair[0])[64:72], "little", signed=True)
            self.assertEqual(release, SPOILED)
            for batches in ([mixed], [host, mixed]):
                stream = Reader.of(batches).export()
                self.assert_fails(EINVAL, "more than one device", kind.check_stream, stream, len(batches), sim=sim)

    def test_unregistered_device(self):
        """Arrow C++ leaves an array on a device that it does not know with us."""
        case = Cases().of("Int32")[2]
        with self.simulated(lazy=True) as (sim, device):
            device.drop()
            pair = case.export(sim)
            self.assert_fails(shim.KEY_ERROR, "no simulated device", Array.take, pair)
            self.assertTrue(pair[0].array.release)
            release(pair[0])
            device.handle = shim.Device.over(sim).give()


if __name__ == "__main__":
    unittest.main()
