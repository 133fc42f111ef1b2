"""The Python package: capsules out and in."""

import contextlib
import ctypes as c
import gc
import inspect
import sys
import threading
import unittest

import arrow_device as ad
import nanoarrow.device
import pyarrow as pa
import rust
from abi import (
    CPU,
    EXT_DEV,
    ArrayRelease,
    ArrowArrayStream,
    ArrowDeviceArray,
    ArrowDeviceArrayStream,
    ArrowSchema,
    GetLastError,
    GetNext,
    GetSchema,
    SchemaRelease,
    StreamRelease,
)
from capsules import Answers, capsule, device_array_of, stream_of, struct_of


def batch():
    return pa.record_batch({"id": [1, 2, None], "text": ["a", None, "ccc"], "list": [[1], None, [2, 3]]})


def settle(condition):
    """Some releases go through a thread that waits for the interpreter."""
    for _ in range(1000):
        gc.collect()
        if condition():
            return
        threading.Event().wait(0.005)
    raise AssertionError("not settled in 5 s")


class Balanced(unittest.TestCase):
    """Nothing of what a test made is left, on either side."""

    def setUp(self):
        gc.collect()
        ad.Device("sim").synchronize()
        self.host, self.device = pa.total_allocated_bytes(), self.on_device()

    def tearDown(self):
        ad.Device("sim").synchronize()
        settle(lambda: (pa.total_allocated_bytes(), self.on_device()) == (self.host, self.device))

    def on_device(self):
        counters = ad.Device("sim").counters()
        return counters["allocations"] - counters["frees"]


class Arrays(Balanced):
    def test_there_and_back(self):
        for sent in (batch(), batch().slice(1), batch().slice(3), batch().select([])):
            for device in ("cpu", "sim"):
                there = ad.RecordBatch(sent).to(device)
                self.assertEqual(len(there), sent.num_rows)
                back = pa.record_batch(there.to("cpu"))
                back.validate(full=True)
                self.assertTrue(back.equals(sent), device)

    def test_arrays_of_any_type(self):
        for values in (pa.array([1, None]), pa.array(["a", None]).dictionary_encode(), pa.nulls(3), pa.array([[1], None])):
            back = pa.array(ad.Array(values).to("sim").to("cpu"))
            back.validate(full=True)
            self.assertTrue(back.equals(values), values.type)

    def test_nothing_is_copied_on_the_cpu(self):
        sent = batch()
        back = pa.record_batch(ad.RecordBatch(sent))
        self.assertEqual(back["id"].buffers()[1].address, sent["id"].buffers()[1].address)

    def test_the_struct_says_where_it_is(self):
        there = ad.RecordBatch(batch()).to("sim")
        schema, array = device_array_of(pair := there.__arrow_c_device_array__())
        self.assertEqual((array.device_type, array.device_id, list(array.reserved)), (EXT_DEV, 0, [0, 0, 0]))
        self.assertEqual((schema.format, array.array.length, array.array.n_children), (b"+s", 3, 3))
        on_cpu = ad.RecordBatch(batch()).__arrow_c_device_array__()
        _, array = device_array_of(on_cpu)
        self.assertEqual((array.device_type, array.device_id, array.sync_event), (CPU, -1, None))
        del pair, on_cpu

    def test_a_consumer_that_does_not_move_the_struct(self):
        there = nanoarrow.device.c_device_array(ad.RecordBatch(batch()).to("sim"))
        self.assertEqual((there.device_type_id, there.device_id, there.array.length), (EXT_DEV, 0, 3))
        again = ad.RecordBatch(there)
        self.assertTrue(pa.record_batch(again.to("cpu")).equals(batch()))

    def test_host_only_producers(self):
        schema, array = batch().__arrow_c_array__()
        self.assertTrue(pa.record_batch(ad.RecordBatch(Answers(array=(schema, array)))).equals(batch()))
        self.assertTrue(pa.record_batch(ad.RecordBatch(batch().__arrow_c_array__())).equals(batch()))

    def test_a_capsule_that_nobody_takes(self):
        ad.RecordBatch(batch()).to("sim").__arrow_c_device_array__()

    def test_destroyed_on_another_thread(self):
        pairs = [ad.RecordBatch(batch()).to("sim").__arrow_c_device_array__() for _ in range(8)]
        threads = [threading.Thread(target=pairs.pop) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def test_released_on_a_thread_without_an_interpreter(self):
        pair = ad.RecordBatch(batch()).__arrow_c_device_array__()
        _, array = device_array_of(pair)
        rust.lib.peers_python_release_elsewhere(c.byref(array))
        self.assertFalse(array.array.release)
        del pair
        settle(lambda: pa.total_allocated_bytes() == self.host)


class Requests(Balanced):
    def test_keywords(self):
        for there in (ad.RecordBatch(batch()), ad.Array(pa.array([1]))):
            there.__arrow_c_device_array__(requested_schema=None, stream=None, other=None)
            with self.assertRaisesRegex(NotImplementedError, "stream"):
                there.__arrow_c_device_array__(stream=1)
        stream = ad.Stream(batch())
        with self.assertRaisesRegex(NotImplementedError, "other"):
            stream.__arrow_c_device_stream__(other=0)
        # It was refused before it was consumed.
        self.assertEqual(len(list(stream)), 1)

    def requests(self, request, schema):
        request(requested_schema=schema.__arrow_c_schema__())

    def test_another_representation_is_a_wish(self):
        wish = pa.schema([("id", pa.int32()), ("text", pa.string_view()), ("list", pa.large_list(pa.float64()))])
        there = ad.RecordBatch(batch())
        schema, array = there.__arrow_c_device_array__(wish.__arrow_c_schema__())
        self.assertEqual(pa.RecordBatch._import_from_c_device_capsule(schema, array).schema, batch().schema)
        self.requests(ad.Stream(batch()).__arrow_c_device_stream__, wish)

    def test_names_within_a_map_mean_nothing(self):
        map_of = pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int64()))
        entries = pa.struct([pa.field("x", pa.string(), False), pa.field("y", pa.int32())])
        wish = pa.schema([pa.field("m", pa.list_(pa.field("z", entries, False)))]).field(0)
        schema = wish.__arrow_c_schema__()
        struct_of(schema, b"arrow_schema", ArrowSchema).format = b"+m"
        ad.Array(map_of).__arrow_c_device_array__(schema)

    def test_other_data_is_refused(self):
        fields = list(batch().schema)
        wrong = {
            "3 fields, 2 are asked for": pa.schema(fields[:2]),
            "id is Int64": pa.schema([("id", pa.string()), *fields[1:]]),
            'asked for as "other"': pa.schema([("other", pa.int64()), *fields[1:]]),
            "list.item is Int64": pa.schema([*fields[:2], ("list", pa.list_(pa.bool_()))]),
        }
        for text, schema in wrong.items():
            with self.assertRaisesRegex(ValueError, text):
                self.requests(ad.RecordBatch(batch()).__arrow_c_device_array__, schema)
            stream = ad.Stream(batch())
            with self.assertRaisesRegex(ValueError, text):
                self.requests(stream.__arrow_c_device_stream__, schema)
            self.assertEqual(len(list(stream)), 1)

    def test_a_request_that_is_none(self):
        there = ad.RecordBatch(batch())
        with self.assertRaisesRegex(TypeError, "arrow_schema"):
            there.__arrow_c_device_array__(requested_schema="int64")
        with self.assertRaisesRegex(ValueError, "arrow_device_array"):
            there.__arrow_c_device_array__(requested_schema=there.__arrow_c_device_array__()[1])


class Streams(Balanced):
    def reader(self, count=3):
        return pa.RecordBatchReader.from_batches(batch().schema, [batch()] * count)

    def test_there_and_back(self):
        for count in (0, 1, 3):
            there = ad.Stream(self.reader(count)).to("sim")
            again = ad.Stream(there)  # through __arrow_c_device_stream__
            table = pa.RecordBatchReader.from_stream(again.to_host()).read_all()
            self.assertTrue(table.equals(pa.Table.from_batches([batch()] * count, batch().schema)))

    def test_the_capsule(self):
        answer = ad.Stream(self.reader()).to("sim").__arrow_c_device_stream__()
        self.assertEqual(stream_of(answer).device_type, EXT_DEV)
        self.assertEqual(sum(len(part) for part in ad.Stream(answer)), 9)
        with self.assertRaisesRegex(ValueError, "released"):
            ad.Stream(answer)

    def test_consumed_once(self):
        stream = ad.Stream(self.reader())
        stream.__arrow_c_device_stream__()
        with self.assertRaisesRegex(ValueError, "already been consumed"):
            stream.__arrow_c_device_stream__()
        self.assertEqual(list(stream), [])

    def test_closed_early(self):
        stream = ad.Stream(self.reader()).to("sim")
        first = next(stream)
        del stream
        gc.collect()
        self.assertTrue(pa.record_batch(first.to("cpu")).equals(batch()))

    def test_exceptions_keep_their_kind(self):
        for kind in (ValueError, MemoryError, NotImplementedError):

            def batches():
                raise kind("no batches today")
                yield

            with self.assertRaisesRegex(kind, "no batches today"):
                next(ad.Stream(pa.RecordBatchReader.from_batches(batch().schema, batches())))

    def test_an_error_of_the_producer(self):
        def batches():
            yield batch()
            raise OSError("the disk is on fire")

        stream = ad.Stream(pa.RecordBatchReader.from_batches(batch().schema, batches()))
        self.assertEqual(len(next(stream)), 3)
        with self.assertRaisesRegex(OSError, "the disk is on fire"):
            next(stream)
        self.assertEqual(list(stream), [])

    def test_an_error_on_its_way_through_two_streams(self):
        def batches():
            raise ValueError("no batches today")
            yield

        inner = ad.Stream(pa.RecordBatchReader.from_batches(batch().schema, batches()))
        reader = pa.RecordBatchReader.from_stream(ad.Stream(inner).to("sim").to_host())
        with self.assertRaisesRegex(Exception, "no batches today"):
            reader.read_all()


class BadStreams(Balanced):
    """Producers of streams that do not keep to the rules, made with ctypes."""

    def make(self, on_next, on_schema=None, device_type=CPU, **without):
        """A capsule of a stream whose `get_next` is this; counts its releases."""
        kept, self.released = _kept, []

        def schema(_, out):
            c.memmove(out, c.byref(child_schema()), c.sizeof(ArrowSchema))
            return 0

        def release(stream):
            self.released.append(1)
            stream.contents.release = StreamRelease()

        struct = ArrowDeviceArrayStream(device_type=device_type)
        struct.get_schema, struct.get_next = GetSchema(on_schema or schema), GetNext(on_next)
        struct.get_last_error, struct.release = GetLastError(lambda _: 0), StreamRelease(release)
        for name, callback in without.items():
            setattr(struct, name, callback)
        kept.append(struct)
        return capsule(struct, b"arrow_device_array_stream")

    def refuses(self, exception, text, *args, **kwargs):
        with self.assertRaisesRegex(exception, text):
            for _ in ad.Stream(self.make(*args, **kwargs)):
                pass
        settle(lambda: self.released == [1])

    @staticmethod
    def fill(out, device_type=CPU):
        array = empty_struct(device_type)
        c.memmove(out, c.byref(array), c.sizeof(ArrowDeviceArray))

    def test_the_end_at_once(self):
        self.assertEqual(list(ad.Stream(self.make(lambda _, out: 0))), [])
        settle(lambda: self.released == [1])

    def test_errors_without_a_text(self):
        self.refuses(OSError, "no text", lambda _, out: 5)
        self.refuses(OSError, "-7", lambda _, out: -7)
        self.refuses(ValueError, "no text", lambda _, out: 22)
        self.refuses(MemoryError, "no text", lambda _, out: 12)

    def test_an_error_with_an_array(self):
        """What `out` holds after a failure is released, not used."""

        def get_next(_, out):
            self.fill(out)
            return 5

        _releases.clear()
        self.refuses(OSError, "errno 5", get_next)
        settle(lambda: _releases == [1])

    def test_another_device_type(self):
        def get_next(_, out):
            self.fill(out, 9)
            return 0

        _releases.clear()
        self.refuses(ValueError, r"device_type.*is VPI \(9\) in a stream of CPU", get_next)
        settle(lambda: _releases == [1])

    def test_an_exception_in_a_callback(self):
        """ctypes prints it and answers something; nothing breaks."""

        def get_next(_, out):
            raise RuntimeError("boom")

        caught = []
        before, sys.unraisablehook = sys.unraisablehook, caught.append
        try:
            with contextlib.suppress(Exception):
                list(ad.Stream(self.make(get_next)))
        finally:
            sys.unraisablehook = before
        self.assertIn("boom", str(caught[0].exc_value))
        del caught, before
        settle(lambda: self.released == [1])

    def test_a_failing_schema(self):
        self.refuses(OSError, "get_schema.*errno 5", lambda _, out: 0, on_schema=lambda _, out: 5)
        # Filled all the same.
        def filled(_, out):
            c.memmove(out, c.byref(child_schema()), c.sizeof(ArrowSchema))
            return 5

        self.refuses(OSError, "errno 5", lambda _, out: 0, on_schema=filled)
        # Not filled although it succeeded.
        self.refuses(ValueError, "schema", lambda _, out: 0, on_schema=lambda _, out: 0)

    def test_missing_callbacks(self):
        missing = {"get_schema": GetSchema(), "get_next": GetNext(), "get_last_error": GetLastError()}
        for name, none in missing.items():
            self.refuses(ValueError, f"{name}.*is null", lambda _, out: 0, **{name: none})

    def test_wrong_names(self):
        struct = ArrowDeviceArrayStream()
        for name in (b"arrow_device_array", b"arrow_stream", b""):
            with self.assertRaises((TypeError, ValueError)):
                ad.Stream(capsule(struct, name))
            with self.assertRaisesRegex(ValueError, "arrow_device_array_stream"):
                ad.Stream(Answers(device_stream=capsule(struct, name)))
        with self.assertRaisesRegex(ValueError, "released"):
            ad.Stream(capsule(struct, b"arrow_device_array_stream"))
        with self.assertRaisesRegex(ValueError, "released"):
            ad.Stream(capsule(ArrowArrayStream(), b"arrow_array_stream"))


class BadInput(Balanced):
    def test_objects(self):
        for wrong in (None, 3, "text", object(), batch().schema, [], (1,), (1, 2), (1, 2, 3)):
            with self.assertRaises(TypeError, msg=repr(wrong)):
                ad.RecordBatch(wrong)
            with self.assertRaises(TypeError, msg=repr(wrong)):
                ad.Stream(wrong)

    def test_a_stream_is_no_batch(self):
        table = pa.table({"a": [1, 2]})
        for stream in (table, table.to_reader(), ad.Stream(table)):
            for of_one in (ad.RecordBatch, ad.Array):
                with self.assertRaisesRegex(TypeError, type(stream).__name__ + ".*is a stream.*use Stream"):
                    of_one(stream)
        with self.assertRaisesRegex(TypeError, "Array.*a single array or batch"):
            ad.Stream(ad.Array(pa.array([1])))

    def test_answers(self):
        schema, array = ad.RecordBatch(batch()).__arrow_c_device_array__()
        for wrong in (None, 3, array, (array, schema), (schema,), (schema, None), (schema, schema), (array, array)):
            with self.assertRaises((TypeError, ValueError), msg=repr(wrong)):
                ad.RecordBatch(Answers(device_array=wrong))
            with self.assertRaises((TypeError, ValueError), msg=repr(wrong)):
                ad.Stream(Answers(device_stream=wrong))
        # None of them consumed it.
        self.assertEqual(len(ad.RecordBatch((schema, array))), 3)

    def test_wrong_names(self):
        struct = ArrowDeviceArray()
        for name in (b"arrow_devicearray", b"", b"arrow_array_stream", b"\xff"):
            with self.assertRaisesRegex(ValueError, "arrow_device_array"):
                ad.RecordBatch((schema_capsule(), capsule(struct, name)))

    def test_used_twice(self):
        pair = ad.RecordBatch(batch()).__arrow_c_device_array__()
        ad.RecordBatch(pair)
        with self.assertRaisesRegex(ValueError, "released"):
            ad.RecordBatch(pair)
        pa.record_batch(Answers(device_array=(again := ad.RecordBatch(batch()).__arrow_c_device_array__())))
        with self.assertRaisesRegex(ValueError, "released"):
            ad.RecordBatch(again)

    def test_a_null_pointer(self):
        """Python itself refuses null in a capsule; a struct of nulls is a released one."""
        with self.assertRaises(ValueError):
            c.pythonapi.PyCapsule_SetPointer(capsule(struct := ArrowDeviceArray(), b"arrow_device_array"), None)
        with self.assertRaisesRegex(ValueError, "released"):
            ad.RecordBatch((schema_capsule(), capsule(struct, b"arrow_device_array")))
        with self.assertRaisesRegex(ValueError, "released"):
            ad.RecordBatch((capsule(empty := ArrowSchema(), b"arrow_schema"), capsule(struct, b"arrow_device_array")))
        del empty

    def test_a_misaligned_pointer(self):
        room = c.create_string_buffer(256)
        inside = ArrowDeviceArray.from_buffer(room, 1 + -c.addressof(room) % 8)
        with self.assertRaisesRegex(ValueError, "misaligned"):
            ad.RecordBatch((schema_capsule(), capsule(inside, b"arrow_device_array")))

    def test_a_struct_that_lies(self):
        """Structure and values are checked; the struct is released once, whatever happens."""
        released = []
        release = ArrayRelease(lambda array: (released.append(1), setattr(array.contents, "release", ArrayRelease()))[0])
        changes = [
            lambda s: setattr(s.array, "n_buffers", 7),
            lambda s: setattr(s.array, "n_children", 2),
            lambda s: setattr(s.array, "length", -1),
            lambda s: setattr(s.array, "offset", -1),
            lambda s: setattr(s, "device_type", 99),
            lambda s: setattr(s, "device_type", 2),
            lambda s: setattr(s, "sync_event", 64),
            lambda s: setattr(s.array, "null_count", 77),
        ]
        for change in changes:
            del released[:]
            buffers = (c.c_void_p * 1)(None)
            struct = ArrowDeviceArray(device_type=CPU, device_id=-1)
            struct.array.length, struct.array.n_buffers, struct.array.buffers = 0, 1, buffers
            struct.array.release = release
            change(struct)
            with self.assertRaises((ValueError, NotImplementedError), msg=inspect.getsource(change)):
                ad.RecordBatch((schema_capsule(), capsule(struct, b"arrow_device_array")))
            settle(lambda: released)
            self.assertEqual(released, [1])
            self.assertFalse(struct.array.release)

    def test_values_are_checked(self):
        array = pa.StringArray.from_buffers(1, pa.py_buffer(bytes([0, 0, 0, 0, 1, 0, 0, 0])), pa.py_buffer(b"\xff"))
        with self.assertRaisesRegex(ValueError, "(?i)utf-?8"):
            ad.Array(array)

    def test_an_exception_in_the_method(self):
        class Raises:
            def __arrow_c_device_array__(self, requested_schema=None, **_):
                raise KeyError("not today")

            def __arrow_c_device_stream__(self, requested_schema=None, **_):
                raise KeyError("not today")

        for take in (ad.RecordBatch, ad.Array, ad.Stream):
            with self.assertRaisesRegex(KeyError, "not today"):
                take(Raises())

    def test_an_exception_in_the_attribute(self):
        class Raises:
            @property
            def __arrow_c_device_array__(self):
                raise RuntimeError("hands off")

        with self.assertRaisesRegex(RuntimeError, "hands off"):
            ad.RecordBatch(Raises())

    def test_unknown_devices(self):
        with self.assertRaisesRegex(ValueError, "unknown device"):
            ad.RecordBatch(batch()).to("gpu")
        with self.assertRaisesRegex(NotImplementedError, "rocm:0 is not available"):
            ad.RecordBatch(batch()).to("rocm")


def child_schema():
    """An empty struct type, whose release frees nothing."""
    struct = ArrowSchema(format=b"+s", flags=2)
    struct.release = _keep
    _kept.append(struct)
    return struct


def schema_capsule():
    return capsule(child_schema(), b"arrow_schema")


def empty_struct(device_type):
    """An array of it, whose releases are counted."""
    struct = ArrowDeviceArray(device_type=device_type, device_id=-1)
    struct.array.n_buffers, struct.array.buffers = 1, (c.c_void_p * 1)(None)
    struct.array.release = _release
    _kept.append(struct)
    return struct


def _released(array):
    _releases.append(1)
    array.contents.release = ArrayRelease()


_keep = SchemaRelease(lambda schema: setattr(schema.contents, "release", SchemaRelease()))
_releases = []
_release = ArrayRelease(_released)
_kept = []

