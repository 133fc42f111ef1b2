"""Every type in every variant, as array and as batch: this crate to pyarrow, pyarrow to this crate."""

import os
import tempfile

import pyarrow as pa

import cases
import known
from cases import COMMON, TYPES
from peer_case import (
    COMPARED,
    PeerCase,
    array_in,
    array_out,
    batch_in,
    batch_out,
    field_in,
    plain,
    release,
    released,
    schema_in,
)
from rust import RustError

SEEN = [t for t, name in enumerate(TYPES) if name not in known.NO_CLASS]


def each_case(types=SEEN):
    for t in types:
        for case, name in enumerate(cases.case_names(t)):
            yield t, case, name


def changed(t: int) -> bool:
    return TYPES[t] in known.CHANGED


class Table(PeerCase):
    """The tests look at what they are meant to look at."""

    def test_every_type_and_variant_is_there(self):
        self.assertEqual(len(TYPES), 113)
        self.assertEqual(len(set(TYPES)), len(TYPES))
        named = [known.NO_CLASS, known.CHANGED, known.UNSORTED, known.IPC_WRONG]
        for names in [*named, known.NOT_FROM_VALUES]:
            self.assertEqual(set(names) - set(TYPES), set())
        self.assertEqual(COMMON, 25)
        for t in range(len(TYPES)):
            # Types without a validity bitmap of their own have no variant whose rows are all null.
            self.assertIn(len(cases.case_names(t)), (COMMON + 7, COMMON + 8))

    def test_no_type_of_pyarrow_is_missing(self):
        """Every type id of pyarrow is that of an array of this crate, except those without a class."""
        ids = {value for name, value in vars(pa.lib).items() if name.startswith("Type_")}
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
            visit(array_in(*cases.array(t, 0)).type)
        names = {value: name for name, value in vars(pa.lib).items() if name.startswith("Type_")}
        missing = {names[i] for i in ids - ours}
        self.assertEqual(missing, {"Type_INTERVAL_MONTHS", "Type_INTERVAL_DAY_TIME"})


class ArraysFromRust(PeerCase):
    def test_values(self):
        """Against the same values through arrow-rs's own plain interface; then back as they came."""
        for t, case, name in each_case():
            with self.subTest(type=TYPES[t], case=name):
                array = array_in(*cases.array(t, case))
                array.validate(full=True)
                reference = plain(t, case)
                if TYPES[t] in known.UNSORTED:
                    self.assertFalse(reference.type.keys_sorted)
                    self.assertTrue(array.type.keys_sorted)
                    self.assertEqual(reference.to_pylist(), array.to_pylist())
                else:
                    self.same(reference, array)
                cases.check_array(*array_out(array), t, case, changed(t))
                COMPARED.value += 1

    def test_no_class(self):
        """pyarrow refuses what it has no class for, and releases it."""
        for name, (exception, text) in known.NO_CLASS.items():
            with self.assertRaises(exception) as refused:
                array_in(*cases.array(TYPES.index(name), 3))
            self.assertEqual(str(refused.exception), text)

    def test_only_known_types_change(self):
        """Without allowance for pyarrow's names and metadata, the types that change are told from those that do not."""
        for t in SEEN:
            with self.subTest(type=TYPES[t]):
                out = array_out(array_in(*cases.array(t, 3)))
                if not changed(t):
                    cases.check_array(*out, t, 3)
                    continue
                with self.assertRaises(RustError) as difference:
                    cases.check_array(*out, t, 3)
                self.assertIn("array: type: expected", difference.exception.text)

    def test_a_wrong_value_is_found(self):
        """The comparison on each side sees a difference."""
        t = TYPES.index("Int32")
        with self.assertRaisesRegex(RustError, r"array: row \d+: (null|value): expected .*, actual"):
            cases.check_array(*cases.array(t, 19), t, 9)
        with self.assertRaisesRegex(RustError, "length: expected 1, actual 300"):
            cases.check_array(*cases.array(t, 2), t, 1)
        with self.assertRaises(AssertionError):
            self.same(plain(t, 2), plain(t, 5))
        with self.assertRaises(AssertionError):
            self.same(pa.array([0.0]), pa.array([-0.0]))


class ArraysToRust(PeerCase):
    """Arrays in memory that pyarrow allocated itself, in the layout that it chooses."""

    def own(self, t: int, array: pa.Array, rebuilt_by: set[str]) -> pa.Array:
        text, other = known.NOT_FROM_VALUES.get(TYPES[t], (None, None))
        try:
            own = pa.array(array.to_pylist(), array.type)
            if TYPES[t] == "Float32":
                cases.check_array(*array_out(own), t, self.case)
            rebuilt_by.add("values")
            return own
        except (pa.ArrowException, ValueError, OverflowError, RustError) as refused:
            if text is None or text not in str(refused) and other != "take":
                raise
            if text in str(refused):
                rebuilt_by.add(other)
        if other == "take":
            return array.take(pa.array(range(len(array)), pa.int64()))
        if len(array) == 0:
            return array  # pyarrow cannot make it
        half = len(array) // 2
        return pa.concat_arrays([array.slice(0, half), array.slice(half)])

    def test_values(self):
        for t in SEEN:
            rebuilt_by = set()
            for self.case, name in enumerate(cases.case_names(t)):
                with self.subTest(type=TYPES[t], case=name):
                    array = array_in(*cases.array(t, self.case))
                    own = self.own(t, array, rebuilt_by)
                    own.validate(full=True)
                    self.assertEqual(own.type, array.type)
                    cases.check_array(*array_out(own), t, self.case, changed(t))
                    COMPARED.value += 1
            expected = known.NOT_FROM_VALUES.get(TYPES[t], (None, "values"))[1]
            with self.subTest(type=TYPES[t]):
                self.assertIn(expected, rebuilt_by, "built by another way than the table says")

    def test_slices_of_pyarrow(self):
        """Offsets that pyarrow puts into the C struct itself, cut again on this side."""
        for t in SEEN:
            with self.subTest(type=TYPES[t]):
                whole = array_in(*cases.array(t, 19))  # 8 rows of 1000
                for offset, rows in [(0, 8), (1, 6), (3, 5), (7, 1)]:
                    out, schema = array_out(whole.slice(offset, rows))
                    with cases.Held.take(out, schema) as held:
                        again = array_in(*held.export())
                    self.same(whole.slice(offset, rows), again)


class Batches(PeerCase):
    def references(self, types: list[int]) -> list[pa.RecordBatch]:
        """The common variants as arrow-rs writes them to an IPC stream."""
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "reference.arrows")
            cases.write_ipc(types, path)
            with pa.OSFile(path) as file:
                return list(pa.ipc.open_stream(file))

    def test_one_column(self):
        for t in SEEN:
            if TYPES[t] in known.IPC_WRONG:
                continue
            references = self.references([t])
            self.assertEqual(len(references), COMMON)
            for variant, reference in enumerate(references):
                with self.subTest(type=TYPES[t], case=cases.case_names(t)[variant]):
                    batch = batch_in(*cases.batch([t], variant))
                    batch.validate(full=True)
                    self.same_batch(reference, batch)
                    cases.check_batch(*batch_out(batch), [t], variant, changed(t))
                    # As arrow-rs wrote it, read by pyarrow: other buffers.
                    cases.check_batch(*batch_out(reference), [t], variant, changed(t))
                    COMPARED.value += 2

    def test_ipc_is_wrong_where_the_table_says(self):
        for name in known.IPC_WRONG:
            with self.subTest(type=name):
                t, wrong = TYPES.index(name), 0
                for variant, reference in enumerate(self.references([t])):
                    try:
                        reference.validate(full=True)
                        self.same_batch(reference, batch_in(*cases.batch([t], variant)))
                    except (pa.ArrowInvalid, AssertionError):
                        wrong += 1
                self.assertGreater(wrong, 0)

    def test_all_columns(self):
        """One batch with a column of every type, those among them that pyarrow cannot show."""
        types = list(range(len(TYPES)))
        for variant in range(COMMON):
            with self.subTest(variant=variant):
                batch = batch_in(*cases.batch(types, variant))
                self.assertEqual(batch.num_columns, len(TYPES))
                for t in SEEN:
                    column = batch.column(t)
                    column.validate(full=True)
                    # Another export of the same case.
                    self.same(batch_in(*cases.batch([t], variant)).column(0), column)
                cases.check_batch(*batch_out(batch), types, variant, True)
                COMPARED.value += 1

    def test_a_batch_without_columns(self):
        """Rows, but nothing in them: only the length goes over."""
        out, schema = batch_out(pa.RecordBatch.from_struct_array(pa.array([{}] * 5, pa.struct([]))))
        with cases.Held.take(out, schema) as held:
            self.assertEqual(len(held), 5)
            again = batch_in(*held.export())
        self.assertEqual((again.num_rows, again.num_columns), (5, 0))

    def test_metadata(self):
        """Names, nullability and metadata of schema and fields, in both directions."""
        types = [TYPES.index(name) for name in ("Int32", "Utf8", "FixedSizeBinary(16)")]
        out, schema = cases.batch(types, 2)
        seen = schema_in(schema)
        release(out)
        self.assertTrue(released(out))
        self.assertEqual(
            seen.metadata, {b"origin": b"peers", "ключ".encode(): "значение".encode(), b"empty": b""}
        )
        self.assertEqual(seen.names, ["c0", "c1", "c2"])
        self.assertIsNone(seen.field(0).metadata)
        self.assertEqual(seen.field(1).metadata, {b"note": b"plain", b"empty": b""})
        extension = {b"ARROW:extension:name": b"tests.opaque", b"ARROW:extension:metadata": b'{"a": 1}'}
        self.assertEqual(seen.field(2).metadata, extension)
        own = pa.schema(
            [pa.field("ü", pa.int32(), nullable=False, metadata={"k": "ß"}), pa.field("", pa.utf8())],
            metadata={"": "no key", "a": ""},
        )
        batch = pa.record_batch([pa.array([1], pa.int32()), pa.array(["x"])], schema=own)
        with cases.Held.take(*batch_out(batch)) as held:
            out, schema = held.export()
        release(out)
        again = field_in(schema)
        self.assertEqual(pa.schema(again.type).to_string(), pa.schema(list(own)).to_string())
        self.assertEqual(again.metadata, own.metadata)
