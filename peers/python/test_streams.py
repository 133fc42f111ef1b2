"""Device streams: this crate's read from Python, Python's read by this crate."""

import ctypes as c
import errno
import os
import tempfile
import threading

import pyarrow as pa

import cases
import known
from abi import CPU, EXT_DEV, ArrowDeviceArray
from capi import INNER
from cases import COMMON, TYPES
from peer_case import (
    COMPARED,
    PeerCase,
    StreamError,
    array_in,
    arrays_of,
    batch_in,
    batch_out,
    batches_in,
    field_in,
    plain,
    release,
    released,
    schema_in,
    stream_check,
    stream_schema,
)
from producer import Failure, Producer, failing
from rust import RustError
from test_types import SEEN, changed

ALL = list(range(len(TYPES)))
INTS = [TYPES.index("Int32")]
SHOWN = SEEN


def ints(*values) -> pa.RecordBatch:
    return pa.record_batch([pa.array(values, pa.int32())], ["i"])


def own_batches(types) -> list[pa.RecordBatch]:
    """All common variants as pyarrow has them."""
    return [batch_in(*cases.batch(types, variant)) for variant in range(COMMON)]


class FromRust(PeerCase):
    def test_batches(self):
        """Several batches, empty ones among them; the end, and again the end."""
        stream = cases.stream(ALL)
        self.assertEqual(stream.device_type, CPU)
        batches = 0
        for variant, batch in enumerate(batches_in(stream)):
            reference = batch_in(*cases.batch(ALL, variant))
            for t in SEEN:
                batch.column(t).validate(full=True)
                self.same(reference.column(t), batch.column(t))
            batches += 1
        self.assertEqual(batches, COMMON)
        self.assertEqual(list(arrays_of(stream)), [])
        release(stream)
        self.assertTrue(released(stream))

    def test_arrays_of_every_type(self):
        """A stream's arrays need not be structs."""
        for t in SEEN:
            with self.subTest(type=TYPES[t]):
                stream = cases.array_stream(t)
                field = field_in(stream_schema(stream))
                self.assertEqual((field.name, field.metadata), ("läne", {b"note": "ünicode".encode()}))
                arrays = 0
                for case, out in enumerate(arrays_of(stream)):
                    array = pa.Array._import_from_c_device(c.addressof(out), field.type)
                    array.validate(full=True)
                    if TYPES[t] not in known.UNSORTED:
                        self.same(plain(t, case), array)
                    arrays += 1
                self.assertEqual(arrays, len(cases.case_names(t)))
                release(stream)

    def test_the_device(self):
        """Batches on the simulated device, each brought to the CPU by the C function."""
        stream = cases.stream(ALL, "sim")
        self.assertEqual(stream.device_type, EXT_DEV)
        for variant, out in enumerate(arrays_of(stream)):
            self.assertEqual(out.device_type, EXT_DEV)
            batch = batch_in(*INNER.copy(out, stream_schema(stream), "cpu"))
            cases.check_batch(*batch_out(batch), ALL, variant, True)
            COMPARED.value += 1
        self.assertEqual(variant, COMMON - 1)
        release(stream)

    def test_to_a_file(self):
        """Streams on both devices, written by the C function, read by pyarrow."""
        types = SHOWN
        for device in ("cpu", "sim"):
            with self.subTest(device=device), tempfile.TemporaryDirectory() as folder:
                path = os.path.join(folder, "ü.arrows")
                INNER.write_ipc(cases.stream(types, device), path)
                self.assertEqual(os.listdir(folder), ["ü.arrows"])
                with pa.OSFile(path) as file:
                    written = list(pa.ipc.open_stream(file))
                self.assertEqual(len(written), COMMON)
                for variant, batch in enumerate(written):
                    self.same_batch(batch_in(*cases.batch(types, variant)), batch)

    def test_arrays_outlive_the_stream(self):
        stream = cases.stream(INTS)
        schema = schema_in(stream_schema(stream))
        outs = list(arrays_of(stream))
        release(stream)
        for variant, out in enumerate(outs):
            self.same_batch(batch_in(*cases.batch(INTS, variant)), batch_in(out, schema))

    def test_closed_early(self):
        """Before the schema, before the first array, in the middle, with an array in hand."""
        for pulled in (None, 0, 1, 7):
            with self.subTest(pulled=pulled):
                stream = cases.stream(ALL, "sim")
                if pulled is not None:
                    release(stream_schema(stream))
                    arrays = arrays_of(stream)
                    for _ in range(pulled):
                        release(out := next(arrays))
                        self.assertTrue(released(out))
                release(stream)
                self.assertTrue(released(stream))

    def test_the_schema_can_be_asked_for_any_time(self):
        stream = cases.stream(ALL)
        first = schema_in(a := stream_schema(stream))
        batches = sum(1 for _ in map(release, arrays_of(stream)))
        last = schema_in(b := stream_schema(stream))
        self.assertEqual(batches, COMMON)
        self.assertTrue(released(a) and released(b))
        shown = [i for i in range(len(TYPES)) if i in SEEN]
        self.assertEqual([first.field(i) for i in shown], [last.field(i) for i in shown])
        release(stream)


class ToRust(PeerCase):
    def test_batches(self):
        batches = own_batches(ALL)
        producer = Producer(batches[0].schema, batches)
        del batches
        cases.check_stream(producer.stream, ALL, True)
        COMPARED.value += COMMON
        self.assertEqual((producer.gets, producer.calls_after_end, producer.releases), (COMMON + 1, 0, 1))
        self.assertTrue(released(producer.stream))
        producer.items = None

    def test_arrays_of_every_type(self):
        for t in SEEN:
            with self.subTest(type=TYPES[t]):
                arrays = [array_in(*cases.array(t, case)) for case in range(len(cases.case_names(t)))]
                producer = Producer(pa.field("x", arrays[0].type), arrays)
                cases.check_array_stream(producer.stream, t, changed(t))
                self.assertEqual((producer.calls_after_end, producer.releases), (0, 1))
                COMPARED.value += len(arrays)

    def test_to_a_file(self):
        """pyarrow's batches, written by this crate, read by pyarrow."""
        types = [t for t in SHOWN if TYPES[t] not in known.IPC_WRONG]
        batches = own_batches(types)
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "own.arrows")
            INNER.write_ipc(Producer(batches[0].schema, batches).stream, path)
            with pa.OSFile(path) as file:
                written = list(pa.ipc.open_stream(file))
        self.assertEqual(len(written), COMMON)
        for expected, actual in zip(batches, written):
            self.same_batch(expected, actual)

    def test_relayed(self):
        """Python's stream, through this crate's reader and out of its stream again."""
        batches = own_batches(SHOWN)
        producer = Producer(batches[0].schema, batches)
        stream = cases.relay(producer.stream)
        again = list(batches_in(stream))
        self.assertEqual(len(again), len(batches))
        for expected, actual in zip(batches, again):
            self.same_batch(expected, actual)
        self.assertEqual(producer.releases, 0)
        release(stream)
        self.assertEqual((producer.releases, producer.calls_after_end), (1, 0))

    def test_no_batches(self):
        producer = Producer(ints().schema, [])
        with cases.Reader(producer.stream) as reader:
            self.assertIsNone(reader.next())
            self.assertIsNone(reader.next())
        self.assertEqual((producer.gets, producer.releases), (1, 1))

    def test_arrays_outlive_the_stream(self):
        producer = Producer(ints().schema, [ints(1, 2), ints(3)])
        with cases.Reader(producer.stream) as reader:
            first, second = reader.next(), reader.next()
        self.assertEqual(producer.releases, 1)
        self.assertEqual((len(first), len(second)), (2, 1))
        with first, second:
            self.assertEqual(batch_in(*first.export()).to_pydict(), {"i": [1, 2]})

    def test_closed_early(self):
        for pulled in (0, 1, 2):
            with self.subTest(pulled=pulled):
                producer = Producer(ints().schema, [ints(1), ints(2), ints(3)])
                with cases.Reader(producer.stream) as reader:
                    for _ in range(pulled):
                        reader.next().drop()
                self.assertEqual((producer.gets, producer.releases), (pulled, 1))

    def test_a_batch_reader_wants_structs(self):
        producer = Producer(pa.field("x", pa.int32()), [])
        with self.assertRaises(RustError) as refused:
            cases.Reader(producer.stream)
        self.assertEqual(refused.exception.errno, errno.EINVAL)
        self.assertEqual(producer.releases, 1)


class Errors(PeerCase):
    """An errno and a text cross in both directions."""

    def test_of_a_python_producer(self):
        for number, text in [
            (errno.EIO, "the disk is gone: ünicode"),
            (errno.ENOSPC, ""),
            (errno.EAGAIN, None),
            (-1, "not an errno"),
            (123456, b"not UTF-8: \xff"),
        ]:
            with self.subTest(number=number):
                producer = Producer(ints().schema, [ints(1), failing(number, text)])
                with cases.Reader(producer.stream) as reader:
                    reader.next().drop()
                    with self.assertRaises(RustError) as failed:
                        reader.next()
                    self.assertEqual(failed.exception.errno, number)
                    if text is None:
                        self.assertIn("gives no text", failed.exception.text)
                    else:
                        shown = text if isinstance(text, str) else text.decode(errors="replace")
                        self.assertIn(f"get_next of a foreign producer failed with errno {number}: {shown}",
                                      failed.exception.text)
                    # After an error there is nothing more, and nobody asks for it.
                    self.assertIsNone(reader.next())
                self.assertEqual((producer.gets, producer.calls_after_end, producer.releases), (2, 0, 1))

    def test_of_get_schema(self):
        def schema(_out):
            raise Failure(errno.EIO, "no schema today")

        producer = Producer(schema, [])
        with self.assertRaises(RustError) as failed:
            cases.Reader(producer.stream)
        self.assertEqual(failed.exception.errno, errno.EIO)
        self.assertIn("no schema today", failed.exception.text)
        self.assertEqual(producer.releases, 1)

    def test_of_this_crate(self):
        """Through this crate and out again: the producer's own errno, its text, and the same answer ever after."""
        producer = Producer(ints().schema, [ints(1), failing(errno.ENODEV, "the device is gone")])
        stream = cases.relay(producer.stream)
        arrays = arrays_of(stream)
        release(next(arrays))
        for _ in range(3):
            with self.assertRaises(StreamError) as failed:
                next(arrays_of(stream))
            self.assertEqual(failed.exception.errno, errno.ENODEV)
            self.assertIn("the device is gone", failed.exception.text)
        self.assertEqual((producer.gets, producer.releases), (2, 0))
        # What does not fail clears the text.
        release(stream_schema(stream))
        self.assertIsNone(stream.get_last_error(stream))
        release(stream)
        self.assertEqual(producer.releases, 1)

    def test_writing_what_fails(self):
        """The C function hands the errno on, consumes the stream and leaves no file."""
        producer = Producer(ints().schema, [ints(1), failing(errno.EPIPE, "nobody listens")])
        with tempfile.TemporaryDirectory() as folder:
            with self.assertRaises(RustError) as failed:
                INNER.write_ipc(producer.stream, os.path.join(folder, "x"))
            self.assertEqual(os.listdir(folder), [])
        self.assertEqual(failed.exception.errno, errno.EPIPE)
        self.assertIn("nobody listens", failed.exception.text)
        self.assertEqual(producer.releases, 1)

    def test_a_batch_of_another_schema(self):
        other = pa.record_batch([pa.array(["x"])], ["i"])
        producer = Producer(ints().schema, [ints(1), other, ints(2)])
        with cases.Reader(producer.stream) as reader:
            reader.next().drop()
            with self.assertRaises(RustError) as refused:
                reader.next()
            self.assertEqual(refused.exception.errno, errno.EINVAL)
            self.assertIsNone(reader.next())
        self.assertEqual(producer.releases, 1)


class Threads(PeerCase):
    def together(self, bodies):
        """Runs all at the same time; raises what one of them raises."""
        errors = []
        barrier = threading.Barrier(len(bodies))

        def run(body):
            try:
                barrier.wait(30)
                body()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(body,)) for body in bodies]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    def test_streams_at_the_same_time(self):
        """Each thread reads a stream of its own: this crate's, Python's, and one on the device."""
        types = SHOWN[::4]
        references = own_batches(types)
        schema = references[0].schema

        def theirs():
            stream = cases.stream(types)
            count = 0
            for variant, batch in enumerate(batches_in(stream)):
                self.same_batch(references[variant], batch)
                count += 1
            self.assertEqual(count, COMMON)
            release(stream)

        def ours():
            cases.check_stream(Producer(schema, list(references)).stream, types, True)

        def on_device():
            stream = cases.stream(types, "sim")
            for variant, out in enumerate(arrays_of(stream)):
                cases.check_batch(*INNER.copy(out, stream_schema(stream), "cpu"), types, variant)
            release(stream)

        self.together([theirs, ours, on_device] * 3)

    def test_errors_belong_to_their_thread(self):
        def fails(number):
            def body():
                for _ in range(20):
                    producer = Producer(ints().schema, [failing(number, f"error {number}")])
                    with cases.Reader(producer.stream) as reader, self.assertRaises(RustError) as failed:
                        reader.next()
                    self.assertEqual(failed.exception.errno, number)
                    self.assertIn(f": error {number}", failed.exception.text)

            return body

        self.together([fails(number) for number in range(1, 9)])

    def test_a_stream_goes_from_thread_to_thread(self):
        """One call at a time, each on another thread, and the release on yet another."""
        stream = cases.stream(SHOWN)
        producer = Producer(ints().schema, [ints(1), ints(2)])
        reader = cases.Reader(producer.stream)
        outs, held = [], []

        def pull():
            stream_check(stream, stream.get_next(stream, outs[-1]))
            held.append(reader.next())

        for _ in range(3):
            outs.append(ArrowDeviceArray())
            self.together([pull])
        self.together([lambda: release(stream), reader.drop])
        self.assertEqual([len(h) if h else None for h in held], [1, 1, None])
        self.together([lambda out=out: release(out) for out in outs] + [h.drop for h in held if h])
        self.assertTrue(all(map(released, outs)))
