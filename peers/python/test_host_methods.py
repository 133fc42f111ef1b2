"""Arrays, batches and streams by the methods that know no devices, and schemas without data."""

import unittest

import arrow_device as ad
import nanoarrow as na
import pyarrow as pa
from abi import ArrowArray
from capsules import Answers, struct_of
from test_capsules import Balanced, batch
from test_tensors import on_a_stand_in_for_cuda


class HostOnly:
    """An object without its methods for devices."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        if not name.startswith("__arrow_c_") or "device" in name:
            raise AttributeError(name)
        return getattr(self.inner, name)


class OfOne(Balanced):
    def test_there_and_back(self):
        for sent in (batch(), batch().slice(1), batch().slice(3), batch().select([])):
            self.assertTrue(pa.record_batch(HostOnly(ad.RecordBatch(sent))).equals(sent))
            self.assertTrue(pa.record_batch(HostOnly(ad.RecordBatch(sent).to("sim").to("cpu"))).equals(sent))
        for sent in (pa.array([1, None]), pa.array(["a", None]).dictionary_encode(), pa.nulls(3), pa.array([[1], None])):
            self.assertTrue(pa.array(HostOnly(ad.Array(sent))).equals(sent))

    def test_nothing_is_copied(self):
        sent = batch()
        back = pa.record_batch(HostOnly(ad.RecordBatch(sent)))
        self.assertEqual(back["id"].buffers()[1].address, sent["id"].buffers()[1].address)

    def test_a_capsule_that_nobody_takes(self):
        schema, array = ad.RecordBatch(batch()).__arrow_c_array__()
        self.assertEqual(struct_of(array, b"arrow_array", ArrowArray).length, 3)
        self.assertIsNotNone(schema)

    def test_a_capsule_that_was_taken(self):
        pair = ad.RecordBatch(batch()).__arrow_c_array__()
        back = pa.record_batch(Answers(array=pair))
        self.assertFalse(struct_of(pair[1], b"arrow_array", ArrowArray).release)
        del pair
        self.assertTrue(back.equals(batch()))

    def test_what_the_host_cannot_read(self):
        """An error, so that nothing is copied unasked. Whoever knows devices takes the other method."""
        for there in (ad.RecordBatch(batch()).to("sim"), ad.Array(pa.array([1])).to("sim")):
            with self.assertRaisesRegex(NotImplementedError, "__arrow_c_device_array__"):
                there.__arrow_c_array__()
            with self.assertRaisesRegex(NotImplementedError, "cannot read"):
                na.c_array(there)
            there.__arrow_c_device_array__()

    def test_schemas(self):
        for device in ("cpu", "sim"):
            self.assertTrue(pa.schema(ad.RecordBatch(batch()).to(device)).equals(batch().schema, check_metadata=True))
        sent = batch().replace_schema_metadata({"of": "the schema"})
        self.assertEqual(pa.schema(ad.RecordBatch(sent)).metadata, {b"of": b"the schema"})
        uuids = pa.array([b"0" * 16], pa.uuid())
        self.assertEqual(pa.field(ad.Array(uuids)).type, pa.uuid())
        self.assertEqual(pa.field(ad.RecordBatch(batch())["id"]).name, "id")


class Streams(Balanced):
    def reader(self, count=3):
        return pa.RecordBatchReader.from_batches(batch().schema, [batch()] * count)

    def test_there_and_back(self):
        for count in (0, 1, 3):
            expected = self.reader(count).read_all()
            for there in (ad.Stream(self.reader(count)), ad.Stream(self.reader(count)).to("sim").to("cpu")):
                self.assertTrue(pa.table(there).equals(expected))
            self.assertTrue(pa.table(ad.Stream(self.reader(count)).to("sim").to_host()).equals(expected))

    def test_the_schema_comes_first(self):
        """DuckDB asks for it before it scans."""
        for device in ("cpu", "sim"):
            stream = ad.Stream(self.reader()).to(device)
            for _ in range(2):
                self.assertTrue(pa.schema(stream).equals(batch().schema, check_metadata=True))
            self.assertEqual(len(list(stream)), 3)
        self.assertTrue(pa.schema(stream).equals(batch().schema))

    def test_what_the_host_cannot_read(self):
        stream = ad.Stream(self.reader()).to("sim")
        with self.assertRaisesRegex(NotImplementedError, r"on sim.*to_host\(\) or __arrow_c_device_stream__"):
            stream.__arrow_c_stream__()
        # It was refused before it was consumed.
        self.assertEqual(pa.table(stream.to_host()).num_rows, 9)

    def test_requests(self):
        wrong, wish = pa.schema([("id", pa.string())]), pa.schema([("a", pa.int32())])
        sent = pa.record_batch({"a": [1, 2]})
        for there in (ad.RecordBatch(sent), ad.Stream(sent), ad.Stream(sent).to("sim").to_host()):
            method = getattr(there, "__arrow_c_array__", None) or there.__arrow_c_stream__
            with self.assertRaisesRegex(ValueError, "does not fit the data"):
                method(requested_schema=wrong.__arrow_c_schema__())
            method(wish.__arrow_c_schema__())

    def test_consumed_once(self):
        stream = ad.Stream(self.reader())
        stream.__arrow_c_stream__()
        for method in (stream.__arrow_c_stream__, stream.__arrow_c_device_stream__):
            with self.assertRaisesRegex(ValueError, "already been consumed"):
                method()


class Required:
    """A producer without a default for its argument."""

    def __init__(self, inner):
        self.inner = inner

    def __arrow_c_array__(self, requested_schema):
        return self.inner.__arrow_c_array__(requested_schema)

    def __arrow_c_stream__(self, requested_schema):
        return self.inner.__arrow_c_stream__(requested_schema)


class RequiredForDevices(Required):
    def __arrow_c_device_array__(self, requested_schema, **kwargs):
        return self.inner.__arrow_c_device_array__(requested_schema, **kwargs)

    def __arrow_c_device_stream__(self, requested_schema, **kwargs):
        return self.inner.__arrow_c_device_stream__(requested_schema, **kwargs)


class Producers(Balanced):
    def test_an_argument_without_a_default(self):
        for given in (Required(batch()), RequiredForDevices(ad.RecordBatch(batch()))):
            self.assertTrue(pa.record_batch(ad.RecordBatch(given)).equals(batch()))
        for given in (Required(batch()), RequiredForDevices(ad.Stream(batch()))):
            self.assertEqual(pa.table(ad.Stream(given)).num_rows, 3)


class Cuda(unittest.TestCase):
    def test_memory_that_the_host_can_read(self):
        program = """
        import arrow_device as ad, pyarrow as pa
        from test_host_methods import HostOnly, batch
        table = pa.table(batch())
        for name in ("cuda-managed", "cuda-host"):
            assert pa.record_batch(HostOnly(ad.RecordBatch(batch()).to(name))).equals(batch())
            assert pa.array(HostOnly(ad.Array(batch()["text"]).to(name))).equals(batch()["text"])
            assert pa.table(HostOnly(ad.Stream(table).to(name))).equals(table)
        try:
            ad.RecordBatch(batch()).to("cuda").__arrow_c_array__()
            raise AssertionError("the host cannot read it")
        except NotImplementedError as e:
            assert "cannot read" in str(e), e
        print("done")
        """
        on_a_stand_in_for_cuda(self, program)
