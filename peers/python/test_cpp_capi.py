"""The C library, driven by Arrow C++."""

import ctypes as c
import os
import tempfile
import unittest

import pyarrow as pa
import shim
from shim import Balanced


class Capi(Balanced):
    def there_and_back(self, source, device, target):
        batches = c.c_int64(-1)
        code = shim.lib.shim_capi_there_and_back(source.encode(), device.encode(), target.encode(), c.byref(batches))
        shim.check(code)
        return batches.value

    def test_a_file_to_a_device_and_back_to_a_file(self):
        table = pa.table({"id": [1, None, 3], "text": ["a", "bc", None], "list": [[1], None, []]})
        with tempfile.TemporaryDirectory() as folder:
            source, target = os.path.join(folder, "from"), os.path.join(folder, "to")
            with pa.ipc.new_stream(source, table.schema) as writer:
                for part in (table, table.slice(1, 1), table.slice(3)):
                    writer.write_batch(part.combine_chunks().to_batches()[0] if len(part) else empty(table.schema))
            for device in ("cpu", "sim"):
                self.assertEqual(self.there_and_back(source, device, target), 3)
                with pa.OSFile(target) as file, pa.ipc.open_stream(file) as reader:
                    expected = pa.concat_tables([table, table.slice(1, 1)])
                    self.assertTrue(reader.read_all().equals(expected))

    def test_errors_reach_cpp(self):
        with tempfile.TemporaryDirectory() as folder:
            missing, source = os.path.join(folder, "missing"), os.path.join(folder, "from.csv")
            with open(source, "w") as file:
                file.write("a\n1\n")
            for args, text in (
                ((missing, "cpu", missing), "errno 2: .*missing"),
                ((source, "rocm", missing), "errno 95: .*rocm:0 is not available"),
                ((source, "cpu", os.path.join(missing, "to")), "errno 2"),
            ):
                with self.assertRaisesRegex(shim.ShimError, text):
                    self.there_and_back(*args)


def empty(schema):
    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)


if __name__ == "__main__":
    unittest.main()
