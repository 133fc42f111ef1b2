"""What peers are known to send, by number: N of nanoarrow's device extension, A of Arrow C++ and pyarrow.

Where a wheel cannot be made to send it (it needs a GPU build, or there is no Python API for it), ctypes writes what it
would; the docstring says so.
"""

import ctypes as c
import errno

import pyarrow as pa

import cases
from abi import CPU, CUDA, CUDA_HOST, EXT_DEV, ArrayRelease, ArrowDeviceArray, ArrowSchema
from capi import INNER
from cases import TYPES
from peer_case import (
    Given,
    PeerCase,
    StreamError,
    array_in,
    array_out,
    arrays_of,
    batch_in,
    batch_out,
    filled,
    is_zero,
    release,
    released,
    stream_schema,
)
from producer import Failure, Producer, failing
from rust import RustError

STRUCT = TYPES.index("struct<i32, utf8, bool>")
INT = TYPES.index("Int32")


def ints(*values) -> pa.RecordBatch:
    return pa.record_batch([pa.array(values, pa.int32())], ["i"])


def buffers(of) -> list[int | None]:
    return [of.buffers[i] for i in range(of.n_buffers)]


class Nanoarrow(PeerCase):
    def never_ending(self, schema, end, device_type=CPU):
        """A producer that gives one array and then, for ever, what `end` makes: by ctypes, as
        ArrowDeviceBasicArrayStreamInit does on CUDA."""
        ends: list[Given] = []

        def at_the_end(out):
            ends.append(end())
            c.memmove(c.addressof(out), c.addressof(ends[-1].out), c.sizeof(out))
            out.device_type = device_type

        def items():
            while True:
                yield at_the_end

        return Producer(schema, items(), device_type), ends

    def test_n3_the_end_has_a_release_callback(self):
        """N3: the released array that ends the stream comes with a callback again, the rest of it zero. Such an array
        is none of the stream's type, and that is how it is told: an error, and the reader has ended."""
        for device_type in (CPU, CUDA_HOST):
            for schema in (ints().schema, pa.schema([("a", pa.utf8()), ("b", pa.list_(pa.int8()))]), pa.schema([])):
                with self.subTest(schema=schema, device_type=device_type):
                    producer, ends = self.never_ending(schema, Given, device_type)
                    with cases.Reader(producer.stream) as reader:
                        with self.assertRaises(RustError) as refused:
                            reader.next()
                        self.assertEqual(refused.exception.errno, errno.EINVAL)
                        self.assertRegex(refused.exception.text, r"array\.n_(buffers|children)")
                        for _ in range(10):
                            self.assertIsNone(reader.next())
                    self.assertEqual([end.releases for end in ends], [1])
                    self.assertEqual((producer.gets, producer.releases), (1, 1))

    def test_n3_where_it_cannot_be_told(self):
        """N3: an array of type null needs nothing but a length, so that the zeros are one with no rows. The reader then
        goes on as long as it is asked; every such array is released, and nothing waits or grows."""
        producer, ends = self.never_ending(pa.field("x", pa.null()), Given)
        with cases.Reader(producer.stream, batches=False) as reader:
            for _ in range(50):
                with reader.next() as held:
                    self.assertEqual(len(held), 0)
        self.assertEqual([end.releases for end in ends], [1] * 50)

    def test_n5_views_without_their_buffers(self):
        """N5: a copied string_view has its views and no variadic buffer. By ctypes: the copy is only in the C library.
        Full validation refuses it; texts of at most 12 bytes need no such buffer and pass."""
        short, long = ["a", None, "twelve bytes"], ["a", None, "thirteen bytes"]
        for view, plain in [(pa.string_view(), pa.utf8()), (pa.binary_view(), pa.binary())]:
            for values in (short, long):
                with self.subTest(type=view, values=values):
                    own = pa.array(pa.array(values, plain).to_pylist(), view)
                    inner, schema = array_out(own)
                    # Mask, views, lengths of the variadic buffers: of none.
                    pointers = (c.c_void_p * 3)(inner.array.buffers[0], inner.array.buffers[1], None)
                    given = Given(inner)
                    given.out.array.n_buffers = 3
                    given.out.array.buffers = pointers
                    if values is short:
                        with cases.Held.take(given.out, schema) as held:
                            self.same(own, array_in(*held.export()))
                    else:
                        with self.assertRaises(RustError) as refused:
                            cases.Held.take(given.out, schema)
                        self.assertEqual(refused.exception.errno, errno.EINVAL)
                        self.assertRegex(refused.exception.text, "array: .*buffer")
                    self.assertEqual(given.releases, 1)


class Arrow(PeerCase):
    def test_a1_reserved_is_never_written(self):
        """A1: what was in `reserved` stays there. Accepted; this crate writes zeros."""
        garbage = [c.c_int64(int.from_bytes(b"\xab" * 8)).value] * 3
        for value in (pa.array([1, None, 3]), ints(1, 2)):
            out, schema = filled(ArrowDeviceArray), ArrowSchema()
            value._export_to_c_device(c.addressof(out), c.addressof(schema))
            self.assertEqual(list(out.reserved), garbage)
            with cases.Held.take(out, schema) as held:
                again, again_schema = held.export()
                self.assertEqual(list(again.reserved), [0, 0, 0])
                release(again)
                release(again_schema)
        out, schema = batch_out(ints(1, 2))
        to, to_schema = filled(ArrowDeviceArray), filled(ArrowSchema)
        self.assertEqual(INNER.lib.arrow_device_copy(out, schema, b"cpu", to, to_schema), 0)
        self.assertEqual(list(to.reserved), [0, 0, 0])
        self.assertEqual(batch_in(to, to_schema).to_pydict(), {"i": [1, 2]})
        stream = cases.stream([INT])
        out = filled(ArrowDeviceArray)
        self.assertEqual(stream.get_next(stream, out), 0)
        self.assertEqual(list(out.reserved), [0, 0, 0])
        release(out)
        release(stream)

    def test_a5_null_for_no_bytes(self):
        """A5: a buffer of no bytes may be null. Arrow C++ sends and takes that on the CPU, and then takes it for CPU
        memory whatever the device. By ctypes: null where pyarrow has an address."""
        empty = pa.array(["", "", ""])
        for ours in (empty, empty.cast(pa.large_utf8()), empty.cast(pa.binary())):
            inner, schema = array_out(ours)
            given = Given(inner)
            given.out.array.buffers[2] = None
            with cases.Held.take(given.out, schema) as held, held.copy("sim") as there, there.copy("cpu") as back:
                self.same(ours, array_in(*held.export()))
                self.same(ours, array_in(*back.export()))
                # Text of no bytes has an address on the device that it is on, which C++ needs to know it.
                out, out_schema = there.export()
                self.assertEqual(out.device_type, EXT_DEV)
                self.assertNotIn(None, buffers(out.array)[1:])
                release(out)
                release(out_schema)
            # After the copy to the device has run.
            self.wait_for(lambda given=given: given.releases == 1, "the release")

    def test_a5_what_has_no_bytes_at_all(self):
        """A5: rows of no width, no rows: they have an address too."""
        for own in (pa.array([b""] * 3, pa.binary(0)), pa.array([], pa.int32()), pa.array([], pa.bool_())):
            with cases.Held.take(*array_out(own)) as held, held.copy("sim") as there:
                out, schema = there.export()
                mask, values = buffers(out.array)
                self.assertIsNone(mask)
                self.assertIsNotNone(values)
                with cases.Held.take(out, schema) as again, again.copy("cpu") as back:
                    self.same(own, array_in(*back.export()))

    def test_a7_a_stream_of_another_device(self):
        """A7: the stream names one type of device, its arrays another. Refused; array and stream are released. By
        ctypes: a reader of C++ takes and gives it."""
        for declared, carried in [(CUDA, CPU), (CPU, CUDA_HOST), (CUDA_HOST, CPU), (EXT_DEV, CPU), (99, CPU), (0, CPU)]:
            with self.subTest(declared=declared, carried=carried):
                inner, schema = batch_out(ints(1, 2))
                release(schema)
                given = Given(inner)
                given.out.device_type = carried

                def give(out, given=given):
                    c.memmove(c.addressof(out), c.addressof(given.out), c.sizeof(out))

                producer = Producer(ints().schema, [give, give], declared)
                with cases.Reader(producer.stream) as reader:
                    with self.assertRaises(RustError) as refused:
                        reader.next()
                    self.assertEqual(refused.exception.errno, errno.EINVAL)
                    self.assertIn("array.device_type: is ", refused.exception.text)
                    self.assertIsNone(reader.next())
                    self.assertEqual((given.releases, producer.releases), (1, 0))
                self.assertEqual((producer.gets, producer.releases), (1, 1))

    def test_a8_an_event_is_lost(self):
        """A8: pyarrow takes an array with an event, and gives it out without: the event is gone."""
        event = c.c_uint64(0)
        out, schema = cases.array(STRUCT, 5)
        out.sync_event = c.addressof(event)
        array = array_in(out, schema)
        again, again_schema = array_out(array)
        self.assertIsNone(again.sync_event)
        release(again)
        release(again_schema)

    def test_a8_complete_data_for_such_a_peer(self):
        """A8: what such a peer is to be given is waited for here, once, and comes without an event."""
        waits = cases.stat("sim", "host_waits")
        out, schema = cases.batch([STRUCT], 5, "sim")
        self.assertIsNotNone(out.sync_event)
        self.assertEqual(cases.stat("sim", "host_waits"), waits)
        with cases.Held.take(out, schema) as held:
            with_event, event_schema = held.export()
            self.assertIsNotNone(with_event.sync_event)
            waits = cases.stat("sim", "host_waits")
            without, schema = held.export(wait=True)
            self.assertIsNone(without.sync_event)
            self.assertLessEqual(cases.stat("sim", "host_waits"), waits + 1)
            for struct in (with_event, event_schema):
                release(struct)
        # Read here without an event, as such a peer would.
        cases.check_batch(without, schema, [STRUCT], 5)
        stream = cases.stream([STRUCT], "sim", wait=True)
        for out in arrays_of(stream):
            self.assertIsNone(out.sync_event)
            release(out)
        release(stream)

    def test_a11_a_failed_export_leaves_garbage(self):
        """A11: after an error `out` is what it was before. By ctypes, since an export of pyarrow's does not fail on the
        CPU: this crate gives zeros in, so that there is nothing to release."""
        seen = []

        def look(out):
            seen.append(is_zero(out))
            raise Failure(errno.EIO, "not today")

        producer = Producer(ints().schema, [look])
        with cases.Reader(producer.stream) as reader, self.assertRaises(RustError):
            reader.next()
        self.assertEqual(seen, [True])

        def look_at_schema(out):
            seen.append(is_zero(out))
            raise Failure(errno.EIO, "not today")

        producer = Producer(look_at_schema, [])
        with self.assertRaises(RustError):
            cases.Reader(producer.stream)
        self.assertEqual(seen, [True, True])
        self.assertEqual(producer.releases, 1)

    def test_a11_an_error_after_filling(self):
        """A11: the other way round, as another peer does it: `out` is filled, and then the answer is an error. What is
        there is released, once."""
        inner, schema = batch_out(ints(1, 2))
        release(schema)
        given = Given(inner)

        def fill_and_fail(out):
            c.memmove(c.addressof(out), c.addressof(given.out), c.sizeof(out))
            raise Failure(errno.EIO, "too late")

        producer = Producer(ints().schema, [fill_and_fail])
        with cases.Reader(producer.stream) as reader:
            with self.assertRaises(RustError) as failed:
                reader.next()
            self.assertIn("too late", failed.exception.text)
        self.assertEqual((given.releases, producer.releases), (1, 1))

        def schema_and_fail(out):
            ints().schema._export_to_c(c.addressof(out))
            raise Failure(errno.EIO, "too late")

        producer = Producer(schema_and_fail, [])
        with self.assertRaises(RustError):
            cases.Reader(producer.stream)
        self.assertEqual(producer.releases, 1)

    def test_a11_what_this_crate_leaves(self):
        """A11: after a failure of this crate's own, and at the end, `out` is zero."""
        stream = cases.relay(Producer(ints().schema, [failing(errno.EIO, "x")]).stream)
        out = filled(ArrowDeviceArray)
        self.assertEqual(stream.get_next(stream, out), errno.EIO)
        self.assertTrue(is_zero(out))
        release(stream)
        stream = cases.relay(Producer(ints().schema, []).stream)
        out = filled(ArrowDeviceArray)
        self.assertEqual(stream.get_next(stream, out), 0)
        self.assertTrue(is_zero(out))
        release(stream)

    def test_the_end_with_garbage_around_it(self):
        """Legal: an end of stream whose only written member is `release`."""

        def end(out):
            c.memset(c.addressof(out), 0xAB, c.sizeof(out))
            out.array.release = ArrayRelease()

        producer = Producer(ints().schema, [ints(1), end])
        with cases.Reader(producer.stream) as reader:
            reader.next().drop()
            self.assertIsNone(reader.next())
            self.assertIsNone(reader.next())
        self.assertEqual((producer.gets, producer.releases), (2, 1))

    def test_a_root_with_an_offset(self):
        """pyarrow gives a sliced struct out with an offset at the root, which its own batches refuse."""
        struct = pa.StructArray.from_arrays([pa.array([1, 2, 3, 4]), pa.array(["a", None, "c", "d"])], ["i", "s"])
        out, schema = array_out(struct.slice(1, 2))
        self.assertEqual((out.array.offset, out.array.children[0].contents.offset), (1, 0))
        release(out)
        release(schema)
        with self.assertRaises(pa.ArrowInvalid):
            batch_in(*array_out(struct.slice(1, 2)))
        for device in ("cpu", "sim"):
            out, schema = array_out(struct.slice(1, 2))
            out, schema = INNER.copy(*INNER.copy(out, schema, device), "cpu")
            self.assertEqual(out.array.offset, 0)
            self.assertEqual(batch_in(out, schema).to_pylist(), [{"i": 2, "s": None}, {"i": 3, "s": "c"}])

    def test_a_root_with_nulls(self):
        """Rows of a batch are never null: refused as a batch, taken as an array."""
        mask = pa.array([False, True])
        struct = pa.StructArray.from_arrays([pa.array([1, 2])], ["i"], mask=mask)
        with self.assertRaises(RustError) as refused:
            INNER.copy(*array_out(struct), "cpu")
        self.assertEqual(refused.exception.errno, errno.EINVAL)
        self.assertIn("cannot be null", refused.exception.text)
        with cases.Held.take(*array_out(struct)) as held:
            self.same(struct, array_in(*held.export()))

    def test_errors_of_streams_in_both_directions(self):
        """The text belongs to the last call: a success takes it away."""
        stream = cases.relay(Producer(ints().schema, [failing(errno.EDOM, "once")]).stream)
        with self.assertRaises(StreamError) as failed:
            next(arrays_of(stream))
        self.assertEqual(failed.exception.errno, errno.EDOM)
        self.assertIn("once", failed.exception.text)
        release(schema := stream_schema(stream))
        self.assertTrue(released(schema))
        self.assertIsNone(stream.get_last_error(stream))
        release(stream)
