"""Through a device and back: data that really leaves host memory."""

import pyarrow as pa

import cases
import known
from abi import CPU, EXT_DEV
from capi import INNER
from cases import COMMON, TYPES
from peer_case import COMPARED, PeerCase, array_in, array_out, batch_in, batch_out, release, released
from rust import RustError
from test_types import SEEN, changed

ALL = list(range(len(TYPES)))
# pyarrow refuses its own batches of views without rows.
OWNED = SEEN


class ThroughTheDevice(PeerCase):
    def on_device(self, out, schema):
        """Moves a batch to the simulated device and sees that it went there. Its event may be over already, and is then
        not handed on if it is one of several."""
        before = cases.stat("sim", "bytes_to_device")
        rows = out.array.length
        out, schema = INNER.copy(out, schema, "sim")
        self.assertEqual(out.device_type, EXT_DEV)
        self.assertEqual(list(out.reserved), [0, 0, 0])
        if rows:
            self.assertGreater(cases.stat("sim", "bytes_to_device"), before)
        return out, schema

    def test_from_rust_to_pyarrow(self):
        """This crate's batch on the device, brought to the CPU for pyarrow."""
        for variant in range(COMMON):
            with self.subTest(variant=variant):
                before = cases.stat("sim", "bytes_to_host")
                out, schema = cases.batch(ALL, variant, "sim")
                self.assertEqual(out.device_type, EXT_DEV)
                batch = batch_in(*INNER.copy(out, schema, "cpu"))
                if batch.num_rows:
                    self.assertGreater(cases.stat("sim", "bytes_to_host"), before)
                here = batch_in(*cases.batch(ALL, variant))
                for t in SEEN:
                    self.same(here.column(t), batch.column(t))
                cases.check_batch(*batch_out(batch), ALL, variant, True)
                COMPARED.value += 1

    def test_from_pyarrow_and_back(self):
        """pyarrow's batch to the device; its own memory is let go once it is there."""
        before = pa.total_allocated_bytes()
        for variant in range(COMMON):
            with self.subTest(variant=variant):
                batch = batch_in(*cases.batch(OWNED, variant))
                # Copied, so that the memory is pyarrow's.
                batch = pa.RecordBatch.from_arrays([owned(column) for column in batch.columns], schema=batch.schema)
                out, schema = self.on_device(*batch_out(batch))
                again = batch_in(*INNER.copy(out, schema, "cpu"))
                self.same_batch(batch, again)
                del batch
                self.wait_for(lambda: pa.total_allocated_bytes() == before, "pyarrow's memory is let go")
                cases.check_batch(*batch_out(again), OWNED, variant, True)
                COMPARED.value += 1

    def test_arrays(self):
        """Arrays that are no batches, of every type, held on the device by this crate."""
        for t in SEEN:
            for case in (2, 8, 13, 22):
                with self.subTest(type=TYPES[t], case=cases.case_names(t)[case]):
                    array = array_in(*cases.array(t, case))
                    with cases.Held.take(*array_out(array)) as here, here.copy("sim") as there:
                        there.check(t, case, changed(t))
                        with there.copy("cpu") as back:
                            self.same(array, array_in(*back.export()))

    def test_the_device_is_checked_by_rust(self):
        """What goes out on the device, with its event, comes in again by this crate's own import."""
        for wait in (False, True):
            for variant in (0, 5, 11, 23):
                with self.subTest(variant=variant, wait=wait):
                    out, schema = cases.batch(ALL, variant, "sim", wait)
                    self.assertTrue(out.sync_event is None or not wait)
                    cases.check_batch(out, schema, ALL, variant)
                    COMPARED.value += 1

    def test_pyarrow_refuses_the_device(self):
        """pyarrow knows no such device: it says so, takes the schema and leaves the array."""
        out, schema = cases.batch([TYPES.index("Int32")], 5, "sim")
        with self.assertRaises(KeyError) as refused:
            batch_in(out, schema)
        self.assertTrue(released(schema))
        # The second where the tests of Arrow C++ have registered their device in this process.
        self.assertRegex(str(refused.exception), "Device type 12is not registered|no simulated device")
        self.assertTrue(out.array.release)
        release(out)

    def test_there_is_no_copy_to_where_it_is(self):
        array = pa.array([1, 2, 3])
        address = array.buffers()[1].address
        batch = pa.record_batch([array], ["x"])
        del array
        out, schema = INNER.copy(*batch_out(batch), "cpu")
        self.assertEqual(out.device_type, CPU)
        again = batch_in(out, schema)
        self.assertEqual(again.column(0).buffers()[1].address, address)
        there, there_schema = self.on_device(*batch_out(again))
        copied = cases.stat("sim", "bytes_on_device")
        address = there.array.children[0].contents.buffers[1]
        there, there_schema = INNER.copy(there, there_schema, "sim")
        self.assertEqual(there.array.children[0].contents.buffers[1], address)
        # Full validation reads the memory, into the host; nothing else is copied.
        self.assertEqual(cases.stat("sim", "bytes_on_device"), copied)
        release(there)
        release(there_schema)

    def test_a_device_that_is_not_there(self):
        out = batch_out(pa.record_batch([pa.array([1])], ["x"]))
        with self.assertRaises(RustError) as refused:
            INNER.copy(*out, "cuda:7")
        self.assertEqual(refused.exception.errno, 95)
        self.assertIn("cuda:7", refused.exception.text)


def owned(array: pa.Array) -> pa.Array:
    """In pyarrow's own memory, where pyarrow can copy it."""
    half = len(array) // 2
    try:
        return pa.concat_arrays([array.slice(0, half), array.slice(half)])
    except pa.ArrowException:
        return array
