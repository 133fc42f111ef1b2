"""Arrow C++ on the CPU: streams both ways, with their errors and their ends."""

import unittest

import abi
import shim
from shim import EINVAL, EIO, ENOMEM, ENOSYS, INVALID, IO_ERROR, NOT_IMPLEMENTED, OUT_OF_MEMORY
from shim import Balanced, Batch, Kind, Reader


def batches(kind, count):
    return [Batch.take_host(kind.export_host(seed)) for seed in range(count)]


class FromRust(Balanced):
    """Our streams, read by Arrow C++."""

    def test_all_batches(self):
        for kind in Kind.all():
            with self.subTest(kind.name):
                reader = Reader.take(kind.stream(3))
                self.assertEqual(reader.device_type, abi.CPU)
                for expected in batches(kind, 3):
                    batch = reader.next()
                    batch.validate()
                    batch.assert_same(expected)
                self.assertIsNone(reader.next())
                self.assertIsNone(reader.next())

    def test_empty(self):
        reader = Reader.take(Kind.named("every type").stream(0))
        self.assertIsNone(reader.next())

    def test_batches_outlive_the_stream(self):
        kind = Kind.named("every type")
        reader = Reader.take(kind.stream(3))
        kept = [reader.next(), reader.next()]
        reader.drop()
        self.assertEqual(shim.rust.peers_cpp_readers(), self.before["Rust readers"])
        for batch, expected in zip(kept, batches(kind, 2)):
            batch.assert_same(expected)

    def test_closed_early(self):
        """Closing or dropping a reader lets go of ours at once."""
        kind = Kind.named("fixed width")
        for read, end in ((0, Reader.drop), (1, Reader.drop), (0, Reader.close), (1, Reader.close), (2, Reader.close)):
            reader = Reader.take(kind.stream(2))
            for _ in range(read):
                reader.next()
            self.assertEqual(shim.rust.peers_cpp_readers(), self.before["Rust readers"] + 1)
            end(reader)
            self.assertEqual(shim.rust.peers_cpp_readers(), self.before["Rust readers"])

    def test_errors(self):
        """Our error in the middle is a Status with its text, again and again."""
        kind = Kind.named("strings")
        codes = {EIO: IO_ERROR, ENOMEM: OUT_OF_MEMORY, EINVAL: INVALID, shim.ENOTSUP: IO_ERROR, 0: IO_ERROR}
        for errno, code in codes.items():
            with self.subTest(errno):
                reader = Reader.take(kind.stream(5, fail_at=2, errno=errno))
                for expected in batches(kind, 2):
                    reader.next().assert_same(expected)
                text = "batch 2 cannot be made"
                self.assert_fails(code, text if errno else f"panicked: {text}", reader.next)
                self.assert_fails(code, text, reader.next)


class FromCpp(Balanced):
    """Readers of Arrow C++, read by us."""

    def test_all_batches(self):
        for later in (False, True):
            for kind in Kind.all():
                with self.subTest(kind.name, later=later):
                    reader = Reader.of(batches(kind, 3))
                    stream = reader.export()
                    reader.drop()
                    self.assertEqual(stream.device_type, abi.CPU)
                    kind.check_stream(stream, 3, later=later)

    def test_empty(self):
        kind = Kind.named("every type")
        reader = Reader.of([], like=Batch.take_host(kind.export_host()))
        kind.check_stream(reader.export(), 0)

    def test_there_and_back(self):
        """Our stream through Arrow C++ is our stream."""
        for kind in Kind.all():
            with self.subTest(kind.name):
                kind.check_stream(Reader.take(kind.stream(3)).export(), 3, later=True)

    def test_closed_early(self):
        """We let go of their reader at once; batches that we hold live on."""
        kind = Kind.named("every type")
        for stop, later in ((0, False), (1, False), (2, True)):
            stream = Reader.of(batches(kind, 3)).export()
            self.assertEqual(shim.lib.shim_readers(), self.before["C++ readers"] + 1)
            kind.check_stream(stream, 3, stop=stop, later=later)
            self.assertEqual(shim.lib.shim_readers(), self.before["C++ readers"])

    def test_errors(self):
        """Their Status is our error, with its errno and its text; then our reader ends."""
        kind = Kind.named("fixed width")
        codes = {IO_ERROR: EIO, INVALID: EINVAL, OUT_OF_MEMORY: ENOMEM, NOT_IMPLEMENTED: ENOSYS}
        for at in (0, 2):
            for code, errno in codes.items():
                with self.subTest(code, at=at):
                    reader = Reader.of(batches(kind, 3), fail_at=at, code=code, text="the disk is gone")
                    text = f"get_next of a foreign producer failed with errno {errno}: "
                    self.assert_fails(errno, text, kind.check_stream, reader.export(), 3)
                    self.assert_fails(errno, "the disk is gone", kind.check_stream, reader.export(), 3)

    def test_error_there_and_back(self):
        """Our error through Arrow C++ comes back to us with its text and its errno."""
        kind = Kind.named("fixed width")
        for errno in (EIO, ENOMEM, EINVAL):
            stream = Reader.take(kind.stream(3, fail_at=1, errno=errno)).export()
            self.assert_fails(errno, "batch 1 cannot be made", kind.check_stream, stream, 3)

    def test_schema_error(self):
        """A schema that Arrow C++ cannot export."""
        stream = Reader.odd().export()
        text = f"get_schema of a foreign producer failed with errno {ENOSYS}: "
        self.assert_fails(ENOSYS, text, Kind.named("strings").check_stream, stream, 0)


if __name__ == "__main__":
    unittest.main()
