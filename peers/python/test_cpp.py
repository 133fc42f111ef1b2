"""Arrow C++ with a device whose memory the host cannot read: its own `arrow::Device` over our simulated one. Arrays and
batches of every type, events, and streams, which are also read and written on the CPU. What its structs are on the CPU,
pyarrow shows: see test_pyarrow.

On the lazy device queued work runs only when somebody waits for it: what is right there is right because of its event."""

import os

import pyarrow as pa

import rust
from abi import CPU, CUDA, EXT_DEV
from peer_case import array_in, batch_in, batch_out, filled, next_of, release, released
from rust import ALL, CASES, COMMON, INT, STRUCT, TYPES, ArrowDeviceArray, ArrowSchema
from shim import DEVICES, EAGER, LAZY, NEW_EVENT, NO_EVENT, OWN_EVENT
from shim import Array, Batch, CppCase, Reader, has_strings, lib
from shim import INVALID, IO_ERROR, KEY_ERROR, NOT_IMPLEMENTED, OUT_OF_MEMORY

EIO, ENOMEM, EINVAL, ENOSYS, ENOTSUP = 5, 12, 22, 38, 95
FIXED = [TYPES.index(name) for name in ("Int32", "Float64", "Boolean", "Decimal128(38, 10)", "fixed_list<i16, 3>")]
STRINGS = [TYPES.index(name) for name in ("Utf8", "LargeUtf8", "Binary", "Utf8View")]
# What is done with every array of every type on the lazy device; on the other one with a part, unless all is wanted.
PART = 1 if "ARROW_DEVICE_PEERS_ALL" in os.environ else 7


class Arrays(CppCase):
    def each(self, body):
        for device, every in ((LAZY, 1), (EAGER, PART)):
            for t in ALL:
                for case in range(t % every, CASES[t], every):
                    with self.subTest(TYPES[t], case=rust.lib.peers_case_name(t, case).decode(), device=device):
                        body(t, case, device)

    def test_from_rust(self):
        """Copied to the host by Arrow C++. Types without strings come with an event, which it waits for on its queue.
        Strings come completed: it reads their offsets before it has the event."""

        def check(t, case, device):
            given = rust.array(t, case, device)
            if has_strings(given[1]):
                for struct in given:
                    release(struct)
                given = rust.array(t, case, device, wait=True)
                self.assertIsNone(given[0].sync_event)
            rust.check_array(Array.take(given).copy().export(), t, case)

        self.each(check)

    def test_from_cpp(self):
        """Made on its device, with its own event, downloaded by us. The sole exception are types without a buffer: it
        says that they are on the CPU."""
        on_cpu = set()

        def check(t, case, device):
            given = Array.take(rust.array(t, case)).copy(DEVICES[device]).export(NEW_EVENT, DEVICES[device])
            self.assertIsNotNone(given[0].sync_event)
            if given[0].device_type == EXT_DEV:
                rust.check_array(given, t, case)
            else:
                on_cpu.add(TYPES[t])
                self.assert_fails(EINVAL, "sync_event: cpu has no events", rust.check_array, given, t, case)

        self.each(check)
        self.assertEqual(on_cpu, {"Null", "struct<>"})

    def test_there_and_back(self):
        """Through Arrow C++ with our own event: the same memory, nothing copied. A buffer of no bytes of ours has an
        address, so that it is taken for what it is."""
        back = 0
        for t in ALL:
            for case in range(0, CASES[t], 1 + PART // 3):
                given = Array.take(rust.array(t, case, LAZY, wait=True)).export(OWN_EVENT)
                if given[0].device_type == EXT_DEV:
                    back += 1
                    rust.check_array(given, t, case)
                else:  # Without any buffer.
                    for struct in given:
                        release(struct)
        self.assertGreater(back, 1000)

    def test_the_event_is_needed(self):
        """Without a wait for the event either side reads what is not there yet."""
        device = DEVICES[LAZY]
        for t in FIXED[:2]:
            with self.subTest(TYPES[t]):
                device.waits(False)
                self.addCleanup(device.waits, True)
                early = Array.take(rust.array(t, 2, LAZY)).copy().export()
                self.assert_fails(rust.DIFFERS, "expected", rust.check_array, early, t, 2)
                theirs = Array.take(rust.array(t, 2)).copy(device)
                given = theirs.export(NEW_EVENT, device)
                given[0].sync_event = None
                self.assert_fails(rust.DIFFERS, "expected", rust.check_array, given, t, 2)
                rust.check_array(theirs.export(NEW_EVENT, device), t, 2)

    def test_events_after_a_re_export(self):
        """An event that is not passed on is lost, and with it the order; passed on, it is ours."""
        given = rust.array(INT, 2, LAZY)
        event = given[0].sync_event
        theirs = Array.take(given)
        lost, kept = theirs.export(NO_EVENT), theirs.export(OWN_EVENT)
        theirs.drop()
        self.assertIsNone(lost[0].sync_event)
        self.assertEqual(kept[0].sync_event, event)
        self.assert_fails(rust.DIFFERS, "expected", rust.check_array, lost, INT, 2)
        rust.check_array(kept, INT, 2)

    def test_several_holders(self):
        """An array is exported twice, released in any order, and lives on in Arrow C++."""
        theirs = Array.take(rust.array(STRUCT, 2))
        first, second = theirs.export(), theirs.export()
        for struct in first:
            release(struct)
        theirs.drop()
        rust.check_array(second, STRUCT, 2)

    def test_reserved(self):
        """Theirs is what was there before. Ours is zero."""
        given = Array.take(rust.array(INT, 2)).export(into=(filled(ArrowDeviceArray), filled(ArrowSchema)))
        self.assertNotEqual(list(given[0].reserved), [0, 0, 0])
        out, schema = rust.passed(given)
        self.assertEqual(list(out.reserved), [0, 0, 0])
        rust.check_array((out, schema), INT, 2)

    def test_a_device_that_it_does_not_know(self):
        """It leaves the array with us."""
        given = rust.array(INT, 2, "sim")
        self.assert_fails(KEY_ERROR, "no simulated device", Array.take, given)
        self.assertFalse(released(given[0]))
        release(given[0])


class Batches(CppCase):
    def test_from_rust(self):
        for device in ("cpu", LAZY, EAGER):
            for types in ([], FIXED, STRINGS, ALL):
                for variant in (0, 5, 11, 23):
                    with self.subTest(device=device, columns=len(types), variant=variant):
                        batch = Batch.take(rust.batch(types, variant, device, wait=True))
                        rust.check_batch(batch.copy().export(), types, variant)

    def test_from_cpp(self):
        for device in DEVICES:
            for types in (FIXED, STRINGS, ALL):
                for variant in (0, 5, 11, 23):
                    with self.subTest(device=device, columns=len(types), variant=variant):
                        theirs = Batch.take(rust.batch(types, variant)).copy(DEVICES[device])
                        rust.check_batch(theirs.export(OWN_EVENT), types, variant)

    def test_one_event_of_many(self):
        """Columns with events of their own go out with one event, after all of them, and nobody has waited."""
        host, queue = rust.stat(LAZY, "host_waits"), rust.stat(LAZY, "queue_waits")
        theirs = Batch.take(rust.batch(FIXED, 5, LAZY, apart=True))
        self.assertEqual(rust.stat(LAZY, "host_waits"), host)
        self.assertEqual(rust.stat(LAZY, "queue_waits"), queue + len(FIXED))
        rust.check_batch(theirs.copy().export(), FIXED, 5)

    def test_moved_children(self):
        """Children that were moved out live on when the parent is released, and keep the event, also one that is nobody
        else's, and wait for it."""
        for device in ("cpu", LAZY):
            for apart in (False, True):
                for columns in ([3], [4, 0, 2], [0, 1, 2, 3, 4]):
                    with self.subTest(columns, apart=apart, device=device):
                        moved = Batch.move_columns(rust.batch(FIXED, 5, device, apart=apart), columns)
                        batch = batch_in(*moved.copy().export())
                        for i, column in enumerate(columns):
                            self.same(array_in(*rust.array(FIXED[column], 5)), batch.column(i))
        for column in ALL[::3]:
            if "Interval" not in TYPES[column]:
                moved = batch_in(*Batch.move_columns(rust.batch(ALL, 5), [column]).export())
                self.same(array_in(*rust.array(column, 5)), moved.column(0))

    def test_released_unread(self):
        for struct in rust.batch(ALL, 5, LAZY):
            release(struct)
        Batch.take(rust.batch(FIXED, 5, LAZY)).drop()

    def test_buffers_of_no_bytes(self):
        """Theirs are null, on the device too; ours have an address."""
        lists = pa.array([[], None, []], pa.list_(pa.int32()))
        empty = pa.record_batch([pa.array(["", "", ""]), pa.array([None, b"", None]), lists], ["s", "b", "l"])
        theirs = Batch.take(batch_out(empty)).copy(DEVICES[LAZY]).export(OWN_EVENT)
        self.assertIsNone(theirs[0].array.children[0].contents.buffers[2])
        there = rust.passed(theirs, LAZY, wait=True)
        self.same_batch(empty, batch_in(*rust.passed(there, "cpu")))
        there = rust.passed(batch_out(empty), LAZY, wait=True)
        self.assertIsNotNone(there[0].array.children[0].contents.buffers[2])
        self.same_batch(empty, batch_in(*rust.passed(Batch.take(there).export(), "cpu")))

    def test_a_failed_export(self):
        """What it leaves in `out` is no array; in a stream that is an error of ours."""
        host = Batch.take(rust.batch(FIXED, 5))
        mixed = host.mix(host.copy(DEVICES[LAZY]))
        self.assert_fails(INVALID, "more than one device", mixed.export)
        for batches in ([mixed], [host, mixed]):
            stream = rust.relay(Reader.of(batches).export())
            for _ in batches[1:]:
                rust.check_batch(next_of(stream), FIXED, 5)
            self.assert_fails(EINVAL, "more than one device", next_of, stream)
            release(stream)


class StreamsFromRust(CppCase):
    def test_all_batches(self):
        """Each has its event on the device; what is kept outlives the stream."""
        for device, types, wait in (
            ("cpu", ALL, False), ("cpu", [], False), (LAZY, FIXED, False), (LAZY, STRINGS, True), (EAGER, ALL, True),
        ):  # fmt: skip
            with self.subTest(device=device, columns=len(types)):
                stream = rust.stream(types, COMMON, device, wait)
                reader = Reader.take(stream)
                self.assertEqual(reader.device_type, CPU if device == "cpu" else EXT_DEV)
                kept = [reader.next() for _ in range(COMMON)]
                self.assertIsNone(reader.next())
                self.assertIsNone(reader.next())
                reader.drop()
                for variant, batch in enumerate(kept):
                    rust.check_batch(batch.copy().export(), types, variant)

    def test_closed_early(self):
        """Closing or dropping a reader lets go of ours at once."""
        for device in ("cpu", LAZY):
            for read, end in ((0, Reader.drop), (1, Reader.drop), (0, Reader.close), (2, Reader.close)):
                reader = Reader.take(rust.stream(FIXED, 2, device))
                for _ in range(read):
                    reader.next()
                self.assertEqual(rust.lib.peers_live_readers(), 1)
                end(reader)
                self.assertEqual(rust.lib.peers_live_readers(), 0)

    def test_errors(self):
        """Our error in the middle is a Status with its text, again and again."""
        codes = {EIO: IO_ERROR, ENOMEM: OUT_OF_MEMORY, EINVAL: INVALID, ENOTSUP: IO_ERROR, 0: IO_ERROR}
        for device in ("cpu", LAZY):
            for errno, code in codes.items():
                with self.subTest(errno, device=device):
                    reader = Reader.take(rust.stream(FIXED, 5, device, fail_at=2, errno=errno))
                    for variant in range(2):
                        rust.check_batch(reader.next().copy().export(), FIXED, variant)
                    for _ in range(2):
                        self.assert_fails(code, "batch 2 cannot be made", reader.next)


class StreamsFromCpp(CppCase):
    """Readers of Arrow C++, read by us and, what we read, by it."""

    def batches(self, types, count=3, device="cpu"):
        batches = [Batch.take(rust.batch(types, variant)) for variant in range(count)]
        return batches if device == "cpu" else [batch.copy(DEVICES[device]) for batch in batches]

    def test_all_batches(self):
        for device in ("cpu", *DEVICES):
            for types in (FIXED, STRINGS, ALL):
                with self.subTest(device=device, columns=len(types)):
                    theirs = Reader.of(self.batches(types, 8, device), device_type=CPU if device == "cpu" else EXT_DEV)
                    stream = rust.relay(theirs.export())
                    theirs.drop()
                    kept = [next_of(stream) for _ in range(8)]
                    self.assertIsNone(next_of(stream))
                    release(stream)
                    for variant, given in enumerate(kept):
                        rust.check_batch(given, types, variant)

    def test_empty(self):
        stream = rust.relay(Reader.of([], like=self.batches(ALL, 1)[0]).export())
        self.assertIsNone(next_of(stream))
        release(stream)

    def test_closed_early(self):
        """We let go of their reader; batches that are held live on."""
        for device in ("cpu", LAZY):
            theirs = Reader.of(self.batches(FIXED, 3, device), device_type=CPU if device == "cpu" else EXT_DEV)
            stream = rust.relay(theirs.export())
            theirs.drop()
            live = lib.shim_live()
            given = next_of(stream)
            release(stream)
            self.assertLess(lib.shim_live(), live)
            rust.check_batch(given, FIXED, 0)

    def test_errors(self):
        """Their Status is our error, with its errno and its text; ours through them comes back to us."""
        codes = {IO_ERROR: EIO, INVALID: EINVAL, OUT_OF_MEMORY: ENOMEM, NOT_IMPLEMENTED: ENOSYS}
        for at in (0, 2):
            for code, errno in codes.items():
                with self.subTest(code, at=at):
                    theirs = Reader.of(self.batches(FIXED), fail_at=at, code=code, text="the disk is gone")
                    stream = rust.relay(theirs.export())
                    for variant in range(at):
                        rust.check_batch(next_of(stream), FIXED, variant)
                    for text in (f"foreign producer failed with errno {errno}: ", "the disk is gone"):
                        self.assert_fails(errno, text, next_of, stream)
                    release(stream)
        for errno, code in ((EIO, IO_ERROR), (ENOMEM, OUT_OF_MEMORY)):
            relayed = rust.relay(Reader.take(rust.stream(FIXED, 3, fail_at=0, errno=errno)).export())
            self.assert_fails(code, "batch 0 cannot be made", Reader.take(relayed).next)

    def test_another_device_type(self):
        """CUDA or CPU is declared, arrays are on the simulated device: refused, and nothing stays behind."""
        for declared, name in ((CUDA, "CUDA (2)"), (CPU, "CPU (1)")):
            stream = Reader.of(self.batches(FIXED, 2, LAZY), device_type=declared).export()
            self.assertEqual(stream.device_type, declared)
            stream = rust.relay(stream)
            self.assert_fails(EINVAL, f"array.device_type: is EXT_DEV (12) in a stream of {name}", next_of, stream)
            release(stream)
