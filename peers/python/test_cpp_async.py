"""Arrow C++: async streams both ways. What it does that the specification has otherwise is in `known.CPP_ASYNC`; each
of those has a test here, which also shows that this crate survives it."""

import unittest

import abi
import known
import shim
from shim import DIFFERS, EINVAL, EIO, ENOMEM, INVALID, IO_ERROR, NOT_IMPLEMENTED, OUT_OF_MEMORY, UNKNOWN
from shim import Batch, Kind
from shim_async import COMPLETED, DROPPED, NUMBERED, PANICKED
from shim_async import AsyncBalanced, Consumer, Export, Giving, Taking

ECANCELED = 125
QUEUE = 5


def batches(kind, count):
    return [Batch.take_host(kind.export_host(seed)) for seed in range(count)]


class FromRust(AsyncBalanced):
    """Our streams, read by Arrow C++."""

    def given(self, kind, count, queue=QUEUE, **how):
        consumer = Consumer.new(queue)
        return consumer, Giving(consumer.handler, kind, count, **how)

    def test_ten_thousand(self):
        """Every value of 10,000 batches, with the handler moved and where it is."""
        for in_place in (False, True):
            for queue in (1, QUEUE, 100):
                with self.subTest(in_place=in_place, queue=queue):
                    consumer, giving = self.given(NUMBERED, 10_000, queue, in_place=in_place)
                    consumer.read_numbered(10_000)
                    self.assertEqual(giving.end(), COMPLETED)
                    consumer.drop()

    def test_many_short_streams(self):
        for i in range(300):
            consumer, giving = self.given(NUMBERED, i % 7, queue=1 + i % 4, in_place=i % 2 == 0)
            consumer.read_numbered(i % 7)
            self.assertEqual(giving.end(), COMPLETED)
            consumer.drop()

    def test_all_kinds(self):
        for kind in Kind.all():
            with self.subTest(kind.name):
                consumer, giving = self.given(kind, 3)
                self.assertEqual(consumer.schema(batches(kind, 1)[0]), abi.CPU)
                for expected in batches(kind, 3):
                    batch = consumer.next()
                    batch.validate()
                    batch.assert_same(expected)
                self.assertIsNone(consumer.next())
                self.assertEqual(giving.end(), COMPLETED)

    def test_on_a_device(self):
        """Our events go along. Strings are read before the event, so these are waited for: by nobody that makes a lazy
        device work."""
        for name, wait in (("fixed width", False), ("many columns", False), ("strings", True), ("every type", True)):
            kind = Kind.named(name)
            with self.subTest(name), self.simulated(lazy=not wait) as (sim, device):
                consumer, giving = self.given(kind, 3, sim=sim, wait=wait)
                self.assertEqual(consumer.schema(batches(kind, 1)[0]), abi.EXT_DEV)
                for expected in batches(kind, 3):
                    batch = consumer.next()
                    self.assertEqual(batch.device_type, abi.EXT_DEV)
                    batch.copy().assert_same(expected)
                self.assertIsNone(consumer.next())
                self.assertEqual(giving.end(), COMPLETED)

    def test_from_a_reader(self):
        """A reader on a thread of its own, as a stream."""
        consumer, giving = self.given(NUMBERED, 1_000, threaded=True)
        consumer.read_numbered(1_000)
        self.assertEqual(giving.end(), COMPLETED)
        consumer, giving = self.given(NUMBERED, 10, threaded=True, fail_at=0, errno=ENOMEM)
        self.assert_fails(ENOMEM, "batch 0 cannot be made", giving.end)
        self.assert_fails(UNKNOWN, "batch 0 cannot be made", consumer.next)

    def test_empty(self):
        kind = Kind.named("every type")
        consumer, giving = self.given(kind, 0)
        consumer.schema(batches(kind, 1)[0])
        self.assertEqual(giving.end(), COMPLETED)
        self.assertIsNone(consumer.next())

    def test_metadata(self):
        """Metadata of batches arrives; for that of the stream Arrow C++ has no place: known defect
        `metadata of a stream`."""
        kind = Kind.named("strings")
        for metadata in (False, True):
            consumer, giving = self.given(kind, 3, metadata=metadata)
            for k, expected in enumerate(batches(kind, 3)):
                consumer.next().assert_same(expected)
                expected = (2, str(k), "значение") if metadata else (-1, None, None)
                self.assertEqual(consumer.metadata("batch", "ключ"), expected)
            self.assertIsNone(consumer.next())
            self.assertEqual(giving.end(), COMPLETED)

    def test_batches_outlive_both_sides(self):
        kind = Kind.named("every type")
        consumer, giving = self.given(kind, 3)
        kept = [consumer.next() for _ in range(3)]
        self.assertIsNone(consumer.next())
        self.assertEqual(giving.end(), COMPLETED)
        giving.drop()
        consumer.drop()
        for batch, expected in zip(kept, batches(kind, 3)):
            batch.assert_same(expected)

    def test_released_before_the_last_task(self):
        """The end comes without a request, so that all is over here while their queue is full. They request after that:
        known defect `request after release`."""
        for in_place in (False, True):
            consumer, giving = self.given(NUMBERED, QUEUE, in_place=in_place)
            self.assertEqual(giving.end(), COMPLETED)
            giving.drop()
            consumer.read_numbered(QUEUE)

    def test_errors(self):
        """Errno and text of our error; its code of a Status is always the same."""
        kind = Kind.named("strings")
        for errno in (EIO, ENOMEM, EINVAL, 95, 2):
            with self.subTest(errno):
                consumer, giving = self.given(kind, 5, fail_at=0, errno=errno)
                self.assert_fails(errno, "batch 0 cannot be made", giving.end)
                self.assert_fails(UNKNOWN, "batch 0 cannot be made", consumer.next)
                code, text, _ = consumer.detail()
                self.assertEqual(code, errno)
                self.assertIn("batch 0 cannot be made", text)
                self.assertIsNone(consumer.next())

    def test_error_metadata(self):
        """Known defect `metadata of an error`: its bytes as if they were a text, which ends at the first zero of the
        count. There are two entries."""
        consumer, giving = self.given(Kind.named("strings"), 1, fail_at=0, errno=EIO)
        self.assert_fails(EIO, "cannot be made", giving.end)
        self.assert_fails(UNKNOWN, "cannot be made", consumer.next)
        self.assertEqual(consumer.detail()[2], b"\x02")

    def test_error_after_batches_that_were_read(self):
        """With a queue of one, what they read is here before the error is made."""
        kind = Kind.named("strings")
        consumer, giving = self.given(kind, 5, queue=1, fail_at=2, errno=EIO)
        read = 0
        with self.assertRaises(shim.ShimError) as failed:
            for expected in batches(kind, 3):
                consumer.next().assert_same(expected)
                read += 1
        self.assertIn("batch 2 cannot be made", failed.exception.text)
        self.assertLessEqual(read, 2)
        self.assert_fails(EIO, "batch 2 cannot be made", giving.end)
        consumer.drop()
        giving.drop()
        self.lost(2 - read)

    def test_error_after_queued_batches(self):
        """Known defect `tasks before an error`: four good batches are never read, nor let go of."""
        kind = Kind.named("fixed width")
        consumer, giving = self.given(kind, QUEUE, fail_at=4, errno=EIO)
        self.assert_fails(EIO, "batch 4 cannot be made", giving.end)
        self.assert_fails(UNKNOWN, "batch 4 cannot be made", consumer.next)
        giving.drop()
        consumer.drop()
        self.lost(4, at_least=4)

    def test_panic(self):
        """A panic of the stream is an error there."""
        consumer, giving = self.given(Kind.named("strings"), 5, fail_at=0)
        self.assertEqual(giving.end(), PANICKED)
        self.assert_fails(UNKNOWN, "", consumer.next)
        self.assertEqual(consumer.detail()[0], ECANCELED)

    def test_dropped(self):
        """Our side goes away: that is an error there, and never a stream that looks whole."""
        kind = Kind.named("fixed width")
        consumer, giving = self.given(kind, 1_000_000, queue=1)
        for expected in batches(kind, 3):
            consumer.next().assert_same(expected)
        giving.stop()
        self.assertEqual(giving.end(), DROPPED)
        with self.assertRaises(shim.ShimError):
            for _ in range(1000):
                self.assertIsNotNone(consumer.next())
        self.assertEqual(consumer.detail()[0], ECANCELED)
        consumer.drop()
        giving.drop()
        self.lost(1)

    def test_consumer_dropped(self):
        """Known defect `tasks of a dropped consumer`: no cancel, and as many batches are lost as were queued. Our side
        can still go."""
        kind = Kind.named("fixed width")
        consumer, giving = self.given(kind, 1_000_000)
        consumer.schema(batches(kind, 1)[0])
        consumer.drop()
        self.assert_fails(DIFFERS, "does not end", giving.end, 0.5)
        giving.stop()
        self.assertEqual(giving.end(), DROPPED)
        giving.drop()
        self.lost(QUEUE, at_least=QUEUE)

    def test_consumer_dropped_after_reading(self):
        kind = Kind.named("fixed width")
        for read in (1, 3, 40):
            with self.subTest(read):
                consumer, giving = self.given(kind, 1_000_000)
                for _ in range(read):
                    self.assertIsNotNone(consumer.next())
                consumer.drop()
                giving.stop()
                self.assertEqual(giving.end(), DROPPED)
                giving.drop()
                self.lost(QUEUE)


class FromCpp(AsyncBalanced):
    """Streams of Arrow C++, read by us."""

    def test_ten_thousand(self):
        """Every value of 10,000 batches, in calls from one thread and from a pool's."""
        for pooled in (False, True):
            for depth in (1, QUEUE, 100):
                with self.subTest(pooled=pooled, depth=depth):
                    taking = Taking(depth)
                    export = Export.numbered(taking.handler, 10_000, pooled=pooled)
                    taking.opened(NUMBERED)
                    taking.read(NUMBERED, 10_000)
                    export.finish()
                    taking.drop()

    def test_all_kinds(self):
        for later in (False, True):
            for kind in Kind.all():
                with self.subTest(kind.name, later=later):
                    taking = Taking()
                    export = Export.of(taking.handler, batches(kind, 3))
                    taking.opened(kind)
                    taking.read(kind, 3, later=later)
                    export.finish()
                    taking.drop()

    def test_on_a_device(self):
        """They give no event, so what they give is done."""
        for name in ("fixed width", "every type", "strings"):
            kind = Kind.named(name)
            with self.subTest(name), self.simulated(lazy=True) as (sim, device):
                on_device = [batch.copy(device) for batch in batches(kind, 3)]
                device.settle()
                taking = Taking(sim=sim)
                export = Export.of(taking.handler, on_device, device_type=abi.EXT_DEV)
                del on_device
                taking.opened(kind, abi.EXT_DEV)
                taking.read(kind, 3)
                export.finish()
                taking.drop()

    def test_empty(self):
        kind = Kind.named("every type")
        taking = Taking()
        export = Export.of(taking.handler, [], like=batches(kind, 1)[0])
        taking.opened(kind)
        taking.read(kind, 0)
        export.finish()

    def test_to_a_reader(self):
        """Pulled on a thread that waits."""
        taking = Taking()
        export = Export.numbered(taking.handler, 1_000)
        taking.opened(NUMBERED)
        taking.read_waiting(NUMBERED, 1_000)
        export.finish()
        taking = Taking()
        export = Export.numbered(taking.handler, 10, 3, INVALID, "the disk is gone")
        taking.opened(NUMBERED)
        self.assert_fails(known.CPP_ASYNC_ERRNO, "the disk is gone", taking.read_waiting, NUMBERED, 10)
        self.assert_fails(INVALID, "the disk is gone", export.finish)

    def test_there_and_back(self):
        """Our stream through Arrow C++ is our stream."""
        consumer, taking = Consumer.new(), Taking()
        giving = Giving(consumer.handler, NUMBERED, 1_000)
        export = Export.relay(consumer, taking.handler)
        taking.opened(NUMBERED)
        taking.read(NUMBERED, 1_000)
        export.finish()
        self.assertEqual(giving.end(), COMPLETED)

    def test_errors(self):
        """Their Status is our error, with its text, after the batches before it; its errno is always the same: known
        defect `errno of an error`."""
        for at in (0, 3):
            for code in (IO_ERROR, INVALID, OUT_OF_MEMORY, NOT_IMPLEMENTED):
                for pooled in (False, True):
                    with self.subTest(code, at=at, pooled=pooled):
                        text = "the disk is gone"
                        taking = Taking()
                        export = Export.numbered(taking.handler, 10, at, code, text, pooled)
                        taking.opened(NUMBERED)
                        taking.read(NUMBERED, at, stop=True)
                        self.assert_fails(known.CPP_ASYNC_ERRNO, text, taking.read, NUMBERED, 1, start=at)
                        taking.read(NUMBERED, 0)
                        self.assert_fails(code, text, export.finish)
                        taking.drop()

    def test_dropped(self):
        """We go away, before the schema is looked at or after some batches: they stop, and nothing stays behind. That
        they call `on_error` then is known defect `on_error after cancel`."""
        for pooled in (False, True):
            for read in (0, 1, 7):
                with self.subTest(pooled=pooled, read=read):
                    taking = Taking()
                    export = Export.numbered(taking.handler, 1_000_000, pooled=pooled)
                    taking.opened(NUMBERED)
                    taking.read(NUMBERED, read, stop=True)
                    taking.drop()
                    self.assert_fails(shim.CANCELLED, "Consumer requested cancellation", export.finish)

    def test_dropped_with_queued_batches(self):
        """All batches are there, and the end; nobody takes them."""
        for read in (0, 3):
            with self.subTest(read):
                taking = Taking(4)
                export = Export.numbered(taking.handler, 4)
                taking.opened(NUMBERED)
                taking.read(NUMBERED, read, stop=True)
                export.finish()
                self.assertGreater(shim.lib.shim_pool_bytes(), self.before["pool bytes"])
                taking.drop()
                self.assertEqual(shim.lib.shim_pool_bytes(), self.before["pool bytes"])

    def test_many_short_streams(self):
        """Read to the end, or dropped anywhere."""
        for i in range(300):
            taking, count = Taking(1 + i % 4), i % 7
            export = Export.numbered(taking.handler, count, pooled=i % 2 == 0)
            taking.opened(NUMBERED)
            if i % 3:
                taking.read(NUMBERED, count)
                export.finish()
            else:
                taking.read(NUMBERED, i % (count + 1), stop=True)
            taking.drop()

    def test_dropped_before_the_schema(self):
        """Nobody waits for the stream any more: known defect `answers of a handler`, of which only 1 is left."""
        taking = Taking()
        handler = taking.handler
        taking.drop()
        export = Export.numbered(handler, 10)
        self.assert_fails(UNKNOWN, "Received error from handler::on_schema 1", export.finish)


class Defects(AsyncBalanced):
    """What Arrow C++ does that breaks the contract."""

    def test_batch_that_cannot_be_exported(self):
        """Known defect `failed extraction`: it says that all is well and gives nothing."""
        kind = Kind.named("fixed width")
        with self.simulated(lazy=True) as (sim, device):
            host = batches(kind, 1)[0]
            mixed = host.mix(host.copy(device))
            device.settle()
            taking = Taking(sim=sim)
            export = Export.of(taking.handler, [host, mixed, host])
            taking.opened(kind)
            taking.read(kind, 1, stop=True)
            self.assert_fails(EINVAL, "", taking.read, kind, 1, start=1)
            taking.drop()
            export.finish()

    def test_another_device_type(self):
        """Known defect `declared device type`: refused, and nothing stays behind."""
        kind = Kind.named("fixed width")
        for declared in (abi.CUDA, abi.CPU):
            with self.subTest(declared), self.simulated(lazy=True) as (sim, device):
                on_device = [batch.copy(device) for batch in batches(kind, 2)]
                device.settle()
                taking = Taking(sim=sim)
                export = Export.of(taking.handler, on_device, device_type=declared)
                del on_device
                taking.opened(kind, declared)
                self.assert_fails(EINVAL, "is EXT_DEV (12) in a stream of", taking.read, kind, 2)
                taking.drop()
                export.finish()


if __name__ == "__main__":
    unittest.main()
