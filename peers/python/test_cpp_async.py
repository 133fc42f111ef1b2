"""Arrow C++: async streams both ways. Where it does what the specification has otherwise a comment says so; this crate
survives it."""

import os

import rust
from abi import CPU, CUDA, EXT_DEV
from peer_case import settled
from rust import ALL, COMMON, INT, Giving, Taking
from shim import CANCELLED, DEVICES, EAGER, INVALID, IO_ERROR, LAZY, NOT_IMPLEMENTED, OUT_OF_MEMORY, UNKNOWN
from shim import Batch, Consumer, CppCase, Export, ShimError
from test_cpp import FIXED, STRINGS

EIO, ENOMEM, EINVAL, ECANCELED = 5, 12, 22, 125
COMPLETED, DROPPED, PANICKED = 0, 2, 3
QUEUE = 5
ENDLESS = 10_000_000
MANY = 10_000 if "ARROW_DEVICE_PEERS_ALL" in os.environ else 500


def batches(types, count=COMMON, device="cpu"):
    batches = [Batch.take(rust.batch(types, variant)) for variant in range(count)]
    return batches if device == "cpu" else [batch.copy(DEVICES[device]) for batch in batches]


class AsyncCase(CppCase):
    def lost(self, at_most: int, at_least: int = 0):
        """So many batches of ours, of one column, Arrow C++ never lets go of, and no more."""
        now = settled(self.before, 0.5)
        lost = now["buffers of cases"] - self.before["buffers of cases"]
        # Values, and perhaps a bitmap.
        self.assertTrue(at_least <= lost <= 2 * at_most, f"{lost} buffers are lost")
        self.before["buffers of cases"] += lost


class FromRust(AsyncCase):
    """Our streams, read by Arrow C++."""

    def given(self, types, count, queue=QUEUE, **how):
        consumer = Consumer.new(queue)
        return consumer, Giving(consumer.handler, types, count, **how)

    def read(self, consumer, types, count, device_type=CPU):
        for k in range(count):
            batch = consumer.next()
            self.assertEqual(batch.device_type, device_type)
            rust.check_batch(batch.copy().export(), types, k % COMMON)
        self.assertIsNone(consumer.next())

    def test_many(self):
        """With the handler moved and where it is."""
        for in_place in (False, True):
            for queue in (1, QUEUE, 100):
                with self.subTest(in_place=in_place, queue=queue):
                    consumer, giving = self.given([INT], MANY, queue, in_place=in_place)
                    self.read(consumer, [INT], MANY)
                    self.assertEqual(giving.end(), COMPLETED)
                    consumer.drop()

    def test_short_streams(self):
        for i in range(100):
            consumer, giving = self.given([INT], i % 7, queue=1 + i % 4, in_place=i % 2 == 0)
            self.read(consumer, [INT], i % 7)
            self.assertEqual(giving.end(), COMPLETED)
            consumer.drop()

    def test_every_type(self):
        """On a device our events go along. Strings are read before the event, so these are waited for: by nobody that
        makes a lazy device work. Nor does it move the bitmaps of the last variants, which are cut there."""
        for device, types, wait, count in (
            ("cpu", ALL, False, COMMON), ("cpu", [], False, COMMON), (LAZY, FIXED, False, COMMON - 6),
            (EAGER, STRINGS, True, COMMON), (EAGER, ALL, True, COMMON),
        ):  # fmt: skip
            with self.subTest(device=device, columns=len(types)):
                consumer, giving = self.given(types, count, device=device, wait=wait)
                self.read(consumer, types, count, CPU if device == "cpu" else EXT_DEV)
                self.assertEqual(giving.end(), COMPLETED)

    def test_metadata(self):
        """Metadata of batches arrives; for that of the stream Arrow C++ has no place."""
        for metadata in (False, True):
            consumer, giving = self.given(STRINGS, 3, metadata=metadata)
            for k in range(3):
                rust.check_batch(consumer.next().export(), STRINGS, k)
                expected = (2, str(k), "значение") if metadata else (-1, None, None)
                self.assertEqual(consumer.metadata("batch", "ключ"), expected)
            self.assertIsNone(consumer.next())
            self.assertEqual(giving.end(), COMPLETED)

    def test_batches_outlive_both_sides(self):
        consumer, giving = self.given(ALL, 3)
        kept = [consumer.next() for _ in range(3)]
        self.assertIsNone(consumer.next())
        self.assertEqual(giving.end(), COMPLETED)
        del giving
        consumer.drop()
        for variant, batch in enumerate(kept):
            rust.check_batch(batch.export(), ALL, variant)

    def test_released_before_the_last_task(self):
        """The end comes without a request, so that all is over here while their queue is full. They request after
        that, though the handler was released."""
        for in_place in (False, True):
            consumer, giving = self.given([INT], QUEUE, in_place=in_place)
            self.assertEqual(giving.end(), COMPLETED)
            del giving
            self.read(consumer, [INT], QUEUE)

    def test_errors(self):
        """Errno and text of our error; its code of a Status is always the same."""
        for errno in (EIO, ENOMEM, EINVAL, 95, 2):
            with self.subTest(errno):
                consumer, giving = self.given(STRINGS, 5, fail_at=0, errno=errno)
                self.assert_fails(errno, "batch 0 cannot be made", giving.end)
                self.assert_fails(UNKNOWN, "batch 0 cannot be made", consumer.next)
                code, text = consumer.detail()
                self.assertEqual(code, errno)
                self.assertIn("batch 0 cannot be made", text)
                self.assertIsNone(consumer.next())

    def test_an_error_after_batches(self):
        """What is queued when it comes is neither read nor let go of: lost, unless it was read before."""
        for queue in (1, QUEUE):
            consumer, giving = self.given([INT], QUEUE, queue, fail_at=4, errno=EIO)
            read = 0
            with self.assertRaisesRegex(Exception, "batch 4 cannot be made"):
                for k in range(QUEUE):
                    rust.check_batch(consumer.next().export(), [INT], k)
                    read += 1
            self.assertLessEqual(read, 4)
            self.assert_fails(EIO, "batch 4 cannot be made", giving.end)
            del giving
            consumer.drop()
            self.lost(4 - read)

    def test_a_panic(self):
        """Of the stream: an error there."""
        consumer, giving = self.given(STRINGS, 5, fail_at=0)
        self.assertEqual(giving.end(), PANICKED)
        self.assert_fails(UNKNOWN, "", consumer.next)
        self.assertEqual(consumer.detail()[0], ECANCELED)

    def test_dropped(self):
        """Our side goes away: that is an error there, and never a stream that looks whole."""
        consumer, giving = self.given([INT], ENDLESS, queue=1)
        for k in range(3):
            rust.check_batch(consumer.next().export(), [INT], k)
        giving.stop()
        self.assertEqual(giving.end(), DROPPED)
        with self.assertRaises(Exception):
            for _ in range(1000):
                self.assertIsNotNone(consumer.next())
        self.assertEqual(consumer.detail()[0], ECANCELED)
        del giving
        consumer.drop()
        self.lost(1)

    def test_a_consumer_is_dropped(self):
        """No cancel comes, and as many batches are lost as were queued. Our side can still go."""
        for read in (1, 3, 40):
            with self.subTest(read):
                consumer, giving = self.given([INT], ENDLESS)
                for _ in range(read):
                    self.assertIsNotNone(consumer.next())
                consumer.drop()
                self.assert_fails(rust.DIFFERS, "does not end", giving.end, 0.1)
                giving.stop()
                self.assertEqual(giving.end(), DROPPED)
                del giving
                self.lost(QUEUE)


class FromCpp(AsyncCase):
    """Streams of Arrow C++, read by us."""

    def read(self, taking, types, count, device_type=CPU, end=True):
        for k in range(count):
            given = taking.next()
            self.assertEqual((taking.device_type, taking.metadata), (device_type, 0))
            rust.check_batch(given, types, k % COMMON)
        if end:
            out, schema = taking.next()
            self.assertFalse(out.array.release)
            self.assertEqual(schema.n_children, len(types))
            schema.release(schema)

    def over(self, export):
        """Waits for the end of an export whose batch we refused: our cancel comes before its end or after it."""
        try:
            export.finish()
        except ShimError as ended:
            self.assertRegex(ended.text, "Consumer requested cancellation|more than one device")

    def test_many(self):
        """In calls from one thread and from a pool's."""
        theirs = batches([INT])
        for pooled in (False, True):
            for depth in (1, QUEUE, 100):
                with self.subTest(pooled=pooled, depth=depth):
                    taking = Taking(depth)
                    export = Export.of(taking.handler, theirs, MANY, pooled=pooled)
                    self.read(taking, [INT], MANY)
                    export.finish()

    def test_every_type(self):
        """On a device they give no event, so what they give is done."""
        for device, types in (("cpu", ALL), ("cpu", []), (LAZY, FIXED), (LAZY, STRINGS), (EAGER, ALL)):
            with self.subTest(device=device, columns=len(types)):
                theirs = batches(types, 8, device)
                device_type = CPU
                if device != "cpu":
                    DEVICES[device].settle()
                    device_type = EXT_DEV
                taking = Taking()
                export = Export.of(taking.handler, theirs, device_type=device_type)
                del theirs
                self.read(taking, types, 8, device_type)
                export.finish()

    def test_empty(self):
        taking = Taking()
        export = Export.of(taking.handler, [], like=batches(ALL, 1)[0])
        self.read(taking, ALL, 0)
        export.finish()

    def test_there_and_back(self):
        """Our stream through Arrow C++ is our stream."""
        consumer, taking = Consumer.new(), Taking()
        giving = Giving(consumer.handler, ALL, COMMON)
        export = Export.relay(consumer, taking.handler)
        self.read(taking, ALL, COMMON)
        export.finish()
        self.assertEqual(giving.end(), COMPLETED)

    def test_errors(self):
        """Their Status is our error, with its text, after the batches before it; its errno is always EINVAL."""
        theirs = batches([INT])
        for at in (0, 3):
            for code in (IO_ERROR, INVALID, OUT_OF_MEMORY, NOT_IMPLEMENTED):
                for pooled in (False, True):
                    with self.subTest(code, at=at, pooled=pooled):
                        taking, text = Taking(), "the disk is gone"
                        export = Export.of(taking.handler, theirs, 10, None, CPU, at, code, text, pooled)
                        self.read(taking, [INT], at, end=False)
                        self.assert_fails(EINVAL, text, taking.next)
                        self.read(taking, [INT], 0)
                        self.assert_fails(code, text, export.finish)

    def test_dropped(self):
        """We go away after some batches: they stop, and nothing stays behind. They call `on_error` then, though the
        stream was cancelled."""
        theirs = batches([INT])
        for pooled in (False, True):
            for read in (1, 7):
                with self.subTest(pooled=pooled, read=read):
                    taking = Taking()
                    export = Export.of(taking.handler, theirs, ENDLESS, pooled=pooled)
                    self.read(taking, [INT], read, end=False)
                    taking.drop()
                    self.assert_fails(CANCELLED, "Consumer requested cancellation", export.finish)

    def test_dropped_with_queued_batches(self):
        """All batches are there, and the end; nobody takes them."""
        for read in (0, 3):
            taking = Taking(4)
            export = Export.of(taking.handler, batches([INT], 4))
            self.read(taking, [INT], read, end=False)
            export.finish()
            taking.drop()
            self.assertEqual(settled(self.before), self.before)

    def test_short_streams(self):
        """Read to the end, or dropped anywhere."""
        theirs = batches([INT])
        for i in range(100):
            taking, count = Taking(1 + i % 4), i % 7
            export = Export.of(taking.handler, theirs, count, pooled=i % 2 == 0)
            if i % 3:
                self.read(taking, [INT], count)
                export.finish()
            else:
                self.read(taking, [INT], i % (count + 1), end=False)
            taking.drop()

    def test_dropped_before_the_schema(self):
        """Nobody waits for the stream any more."""
        taking = Taking()
        handler = taking.handler
        taking.drop()
        export = Export.of(handler, batches([INT], 1))
        self.assert_fails(UNKNOWN, "Received error from handler::on_schema", export.finish)

    def test_a_batch_that_cannot_be_exported(self):
        """It says that all is well and gives nothing."""
        host = batches(FIXED, 1)[0]
        mixed = host.mix(host.copy(DEVICES[LAZY]))
        DEVICES[LAZY].settle()
        taking = Taking()
        export = Export.of(taking.handler, [host, mixed, host])
        self.read(taking, FIXED, 1, end=False)
        self.assert_fails(EINVAL, "", taking.next)
        taking.drop()
        self.over(export)

    def test_another_device_type(self):
        """Than is declared: refused, and nothing stays behind."""
        for declared in (CUDA, CPU):
            theirs = batches(FIXED, 2, LAZY)
            DEVICES[LAZY].settle()
            taking = Taking()
            export = Export.of(taking.handler, theirs, device_type=declared)
            self.assert_fails(EINVAL, "is EXT_DEV (12) in a stream of", taking.next)
            taking.drop()
            self.over(export)
