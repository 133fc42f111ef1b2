"""pyarrow: every type in every variant, as array and as batch, in both directions, sliced, and by way of a device."""

import ctypes as c

import pyarrow as pa

import rust
from abi import CPU, EXT_DEV, ArrowSchema
from peer_case import PeerCase, array_in, array_out, batch_in, batch_out, described, release, released, schema_in, until
from rust import ALL, CASES, COMMON, INNER, INT, TYPES

# Types that pyarrow's C++ reads, but for which Python has no class. As columns of a batch they pass through unseen.
NO_CLASS = {"Interval(YearMonth)", "Interval(DayTime)"}
SEEN = [t for t, name in enumerate(TYPES) if name not in NO_CLASS]
# arrow-rs loses the flag of sorted maps in its own C data interface.
UNSORTED = {"map<utf8, i32> sorted", "map<i32, utf8> sorted"}


def own(array: pa.Array) -> pa.Array:
    """The same values in memory of pyarrow's own, in the layout that it chooses."""
    half = len(array) // 2
    try:
        return pa.concat_arrays([array.slice(0, half), array.slice(half)])
    except pa.ArrowException:
        return array.take(pa.array(range(len(array)), pa.int64())) if len(array) else array


def own_batch(batch: pa.RecordBatch) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([own(column) for column in batch.columns], schema=batch.schema)


class Table(PeerCase):
    def test_no_type_of_pyarrow_is_missing(self):
        """Every type id of pyarrow is that of an array of this crate, except those without a class."""
        ours = set()

        def visit(of: pa.DataType):
            ours.add(of.id)
            if isinstance(of, pa.BaseExtensionType):
                visit(of.storage_type)
            if isinstance(of, pa.DictionaryType | pa.RunEndEncodedType):
                visit(of.value_type)
            for i in range(of.num_fields):
                visit(of.field(i).type)

        for t in SEEN:
            visit(array_in(*rust.array(t, 0)).type)
        missing = {name for name, i in vars(pa.lib).items() if name.startswith("Type_") and i not in ours}
        self.assertEqual(missing, {"Type_INTERVAL_MONTHS", "Type_INTERVAL_DAY_TIME"})

    def test_a_wrong_value_is_found(self):
        """The comparison on each side sees a difference."""
        self.assert_fails(rust.DIFFERS, "expected", rust.check_array, rust.array(INT, 19), INT, 9)
        self.assert_fails(rust.DIFFERS, "expected", rust.check_batch, rust.batch([INT], 2), [INT], 5)
        for one, other in [(array_in(*rust.array(INT, 2)), array_in(*rust.array(INT, 5))), (pa.array([0.0]), pa.array([-0.0]))]:
            with self.assertRaises(AssertionError):
                self.same(one, other)


class Arrays(PeerCase):
    def each(self, body, cases=range(99)):
        for t in SEEN:
            for case in range(CASES[t]):
                if case in cases:
                    with self.subTest(TYPES[t], case=rust.lib.peers_case_name(t, case).decode()):
                        body(t, case, array_in(*rust.array(t, case)))

    def test_values(self):
        """Against the same values through arrow-rs's own plain interface; back as they came, and in pyarrow's memory."""

        def check(t, case, array):
            array.validate(full=True)
            plain = rust.plain(t, case)
            reference = pa.Array._import_from_c(*map(c.addressof, plain))
            if TYPES[t] in UNSORTED:
                self.assertEqual((reference.type.keys_sorted, array.type.keys_sorted), (False, True))
                self.assertEqual(reference.to_pylist(), array.to_pylist())
            else:
                self.same(reference, array)
            rust.check_array(array_out(array), t, case)
            rust.check_array(array_out(own(array)), t, case)

        self.each(check)

    def test_slices(self):
        """Offsets that pyarrow puts into the C struct itself, read as they are and cut again on this side."""

        def check(t, case, whole):
            for offset, rows in [(0, len(whole)), (1, 5), (3, 4), (len(whole), 0)]:
                rust.check_array(array_out(whole.slice(offset, rows)), t, case, offset, min(rows, len(whole) - offset))
            again = array_in(*rust.passed(array_out(whole.slice(1)), offset=2, rows=4))
            self.same(whole.slice(3, 4), again)

        self.each(check, cases=[8, 19])

    def test_through_the_device(self):
        """Data that really leaves host memory."""

        def check(t, case, array):
            there = rust.passed(array_out(array), "sim")
            self.assertEqual(there[0].device_type, EXT_DEV)
            self.same(array, array_in(*rust.passed(there, "cpu")))

        self.each(check, cases=[2, 13, 22])

    def test_no_class(self):
        """pyarrow refuses what it has no class for, and releases it."""
        for name in NO_CLASS:
            with self.assertRaises(KeyError):
                array_in(*rust.array(TYPES.index(name), 3))


class Schemas(PeerCase):
    """Each struct of an exported schema against pyarrow's, member by member."""

    def theirs(self, of: pa.Field | pa.Schema):
        schema = ArrowSchema()
        of._export_to_c(c.addressof(schema))
        seen = described(schema)
        release(schema)
        return seen

    def through(self, of: pa.Schema, device: str):
        """The schema of an empty batch that went to a device."""
        batch = pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in of], schema=of)
        out, schema = INNER.copy(*batch_out(batch), device)
        seen = described(schema)
        release(out)
        release(schema)
        return seen

    def test_every_type(self):
        for t in SEEN:
            with self.subTest(TYPES[t]):
                out, schema = rust.array(t, 0)
                release(out)
                ours = described(schema)
                self.assertEqual(ours, self.theirs(pa.Field._import_from_c(c.addressof(schema))))

    def test_columns_of_every_type(self):
        out, schema = rust.batch(SEEN, 0)
        release(out)
        ours = described(schema)
        self.assertEqual(ours, self.theirs(schema_in(schema)))

    def test_there_and_back(self):
        """What pyarrow says of a field is what comes back."""
        text, ordered = (pa.dictionary(pa.int8(), pa.utf8(), ordered=o) for o in (False, True))
        item = pa.field("item", ordered, nullable=False, metadata={"k": "v"})
        pair = pa.struct([pa.field("o", ordered), pa.field("n", pa.int8(), nullable=False), ("u", pa.uuid())])
        types = [text, ordered, pa.uuid(), pa.bool8(), pa.json_(), pa.list_(item), pa.large_list(item), pa.list_(item, 2)]
        types += [pair, pa.list_view(item), pa.map_(pa.utf8(), item), pa.map_(pa.int8(), pair, keys_sorted=True)]
        types += [pa.run_end_encoded(pa.int16(), text), pa.dense_union([item, pa.field("b", pair)])]
        types += [pa.dictionary(pa.int32(), of) for of in (pair, pa.list_(text), pa.run_end_encoded(pa.int32(), text))]
        fields = [pa.field(str(i), of, nullable=i % 2 == 0, metadata={"i": str(i)}) for i, of in enumerate(types)]
        schema = pa.schema(fields, metadata={"origin": "pyarrow"})
        for device in ("cpu", "sim"):
            self.assertEqual(self.through(schema, device), self.theirs(schema))

    def test_known_gaps(self):
        """arrow-rs has no place for the order of a dictionary in a dictionary: `docs/compatibility.md` says so."""
        inner = pa.dictionary(pa.int8(), pa.utf8(), ordered=True)
        for values, kept in [(pa.uuid(), pa.uuid()), (inner, pa.dictionary(pa.int8(), pa.utf8()))]:
            there, back = (pa.schema([pa.field("d", pa.dictionary(pa.int8(), of))]) for of in (values, kept))
            self.assertEqual(self.through(there, "cpu"), self.theirs(back))


class Batches(PeerCase):
    """With a column of every type, those among them that pyarrow cannot show."""

    def test_from_rust(self):
        for device in ("cpu", "sim"):
            for variant in range(COMMON):
                with self.subTest(device=device, variant=variant):
                    out = rust.batch(ALL, variant, device)
                    batch = batch_in(*(out if device == "cpu" else INNER.copy(*out, "cpu")))
                    for t in SEEN:
                        batch.column(t).validate(full=True)
                        self.same(array_in(*rust.array(t, variant)), batch.column(t))
                    rust.check_batch(batch_out(batch), ALL, variant)

    def test_from_pyarrow(self):
        """To the device and back; its own memory is let go once it is there."""
        before = pa.total_allocated_bytes()
        for variant in range(COMMON):
            with self.subTest(variant=variant):
                batch = own_batch(batch_in(*rust.batch(SEEN, variant)))
                there = INNER.copy(*batch_out(batch), "sim")
                self.assertEqual((there[0].device_type, list(there[0].reserved)), (EXT_DEV, [0, 0, 0]))
                del batch
                until(lambda: pa.total_allocated_bytes() == before, "pyarrow's memory is let go")
                again = INNER.copy(*there, "cpu")
                rust.check_batch(again, SEEN, variant)

    def test_no_columns(self):
        """Rows, but nothing in them: only the length goes over."""
        again = batch_in(*rust.passed(batch_out(pa.RecordBatch.from_struct_array(pa.array([{}] * 5, pa.struct([]))))))
        self.assertEqual((again.num_rows, again.num_columns), (5, 0))

    def test_metadata(self):
        """Names, nullability and metadata of schema and fields, in both directions."""
        out, schema = rust.batch([INT] * 3, 2)
        seen = schema_in(schema)
        release(out)
        origin = {b"origin": b"peers", "ключ".encode(): "значение".encode(), b"empty": b""}
        self.assertEqual((seen.metadata, seen.names), (origin, ["c0", "c1", "c2"]))
        extension = {b"ARROW:extension:name": b"tests.opaque", b"ARROW:extension:metadata": b'{"a": 1}'}
        self.assertEqual([f.metadata for f in seen], [None, {b"note": b"plain", b"empty": b""}, extension])
        fields = [pa.field("ü", pa.int32(), nullable=False, metadata={"k": "ß"}), pa.field("", pa.utf8())]
        own = pa.schema(fields, metadata={"": "no key", "a": ""})
        batch = pa.record_batch([pa.array([1], pa.int32()), pa.array(["x"])], schema=own)
        self.same_batch(batch, batch_in(*INNER.copy(*batch_out(batch), "cpu")))

    def test_an_offset_at_the_root(self):
        """pyarrow gives a sliced struct out so; its own batches refuse that."""
        struct = pa.StructArray.from_arrays([pa.array([1, 2, 3, 4]), pa.array(["a", None, "c", "d"])], ["i", "s"])
        for device in ("cpu", "sim"):
            there = array_out(struct.slice(1, 2))
            self.assertEqual(there[0].array.offset, 1)
            again = batch_in(*INNER.copy(*INNER.copy(*there, device), "cpu"))
            self.assertEqual(again.to_pylist(), [{"i": 2, "s": None}, {"i": 3, "s": "c"}])

    def test_nulls_at_the_root(self):
        """Rows of a batch are never null: refused as a batch, taken as an array."""
        struct = pa.StructArray.from_arrays([pa.array([1, 2])], ["i"], mask=pa.array([False, True]))
        self.assert_fails(22, "cannot be null", INNER.copy, *array_out(struct), "cpu")
        self.same(struct, array_in(*rust.passed(array_out(struct))))

    def test_what_is_there_is_not_copied(self):
        batch = pa.record_batch([pa.array([1, 2, 3])], ["x"])
        again = batch_in(*INNER.copy(*batch_out(batch), "cpu"))
        self.assertEqual(again.column(0).buffers()[1].address, batch.column(0).buffers()[1].address)
        there = INNER.copy(*batch_out(again), "sim")
        address = there[0].array.children[0].contents.buffers[1]
        there = INNER.copy(*there, "sim")
        self.assertEqual(there[0].array.children[0].contents.buffers[1], address)
        self.assertNotEqual(there[0].device_type, CPU)
        for struct in there:
            release(struct)

    def test_the_device_is_refused(self):
        """pyarrow knows no such device: it takes the schema and leaves the array."""
        out, schema = rust.batch([INT], 5, "sim")
        with self.assertRaises(KeyError):
            batch_in(out, schema)
        self.assertTrue(released(schema) and not released(out))
        release(out)
