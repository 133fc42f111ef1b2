//! Property-test strategies. They yield descriptions that build the array, so that failures shrink and print well.

use std::collections::HashMap;

use arrow_array::{Array, ArrayRef, RecordBatch};
use arrow_schema::{DataType, Field, FieldRef, Fields, UnionMode};
use proptest::prelude::*;
use proptest::sample::select;

use super::r#gen::{Nulls, array, batch};
use super::types::{dictionary, flat_types, map, run_ends, union};
use super::variants::{Made, Variant};

fn arb_field(data_type: impl Strategy<Value = DataType>) -> impl Strategy<Value = FieldRef> {
    (data_type, any::<bool>(), any::<bool>()).prop_map(|(data_type, required, noted)| {
        // Nulls of these are in their values, so that "required" would say nothing.
        let nullable = !required
            || matches!(
                data_type,
                DataType::Null | DataType::Union(..) | DataType::RunEndEncoded(..)
            );
        let field = Field::new("f", data_type, nullable);
        let note = HashMap::from([("note".to_owned(), "ü".to_owned())]);
        if noted {
            field.with_metadata(note).into()
        } else {
            field.into()
        }
    })
}

/// Any type, with at most `depth` levels of children.
pub(crate) fn arb_data_type(depth: u32) -> impl Strategy<Value = DataType> {
    use DataType::*;
    let flat: Vec<DataType> = flat_types().into_iter().map(|(_, t)| t).collect();
    select(flat).prop_recursive(depth, 12, 3, |inner| {
        let field = || arb_field(inner.clone());
        let several = || prop::collection::vec(inner.clone(), 1..4);
        let key = || {
            select(vec![
                Int8, Int16, Int32, Int64, UInt8, UInt16, UInt32, UInt64,
            ])
        };
        let mode = || prop_oneof![Just(UnionMode::Sparse), Just(UnionMode::Dense)];
        prop_oneof![
            field().prop_map(List),
            field().prop_map(LargeList),
            field().prop_map(ListView),
            field().prop_map(LargeListView),
            (field(), 0..4).prop_map(|(f, size)| FixedSizeList(f, size)),
            prop::collection::vec(field(), 0..4).prop_map(|fields| {
                let named = fields
                    .iter()
                    .enumerate()
                    .map(|(i, f)| f.as_ref().clone().with_name(format!("f{i}")));
                Struct(named.collect::<Fields>())
            }),
            (select(vec![Utf8, Int32]), inner.clone(), any::<bool>())
                .prop_map(|(k, v, sorted)| map(k, v, sorted)),
            (mode(), several()).prop_map(|(mode, types)| union(mode, types)),
            (key(), inner.clone()).prop_map(|(key, value)| dictionary(key, value)),
            (select(vec![Int16, Int32, Int64]), inner.clone())
                .prop_map(|(ends, value)| run_ends(ends, value)),
        ]
    })
}

fn arb_nulls() -> impl Strategy<Value = Nulls> {
    prop_oneof![2 => Just(Nulls::None), 4 => Just(Nulls::Some), 1 => Just(Nulls::All)]
}

/// `rows`, then a slice (offset, length) of it: mostly all rows.
fn arb_rows() -> impl Strategy<Value = (usize, (usize, usize))> {
    (0usize..200).prop_flat_map(|rows| {
        let slice = (0..=rows).prop_flat_map(move |offset| (Just(offset), 0..=rows - offset));
        (Just(rows), prop_oneof![Just((0, rows)), slice])
    })
}

fn arb_variant() -> impl Strategy<Value = Variant> {
    prop_oneof![
        2 => Just(Variant::Whole),
        2 => (0usize..20).prop_map(Variant::Sliced),
        1 => Just(Variant::LongChildren),
        3 => (0usize..20).prop_map(Variant::Both),
        1 => Just(Variant::AllNull),
    ]
}

/// What an array is made of.
#[derive(Clone, Debug)]
pub(crate) struct ArrayCase {
    pub data_type: DataType,
    pub rows: usize,
    pub nulls: Nulls,
    pub seed: u64,
    pub variant: Variant,
    pub slice: (usize, usize),
}

impl ArrayCase {
    /// All rows, of which the case is a slice.
    pub(crate) fn made(&self) -> Made {
        let whole = array(&self.data_type, self.rows, self.nulls, self.seed);
        let made = self.variant.of(&whole, self.seed);
        made.unwrap_or_else(|| Variant::Whole.of(&whole, 0).unwrap())
    }

    pub(crate) fn array(&self) -> ArrayRef {
        self.made().array().slice(self.slice.0, self.slice.1)
    }
}

pub(crate) fn arb_array() -> impl Strategy<Value = ArrayCase> {
    let case = (
        arb_data_type(3),
        arb_rows(),
        arb_nulls(),
        any::<u64>(),
        arb_variant(),
    );
    case.prop_map(
        |(data_type, (rows, slice), nulls, seed, variant)| ArrayCase {
            data_type,
            rows,
            nulls,
            seed,
            variant,
            slice,
        },
    )
}

/// What a batch is made of. The seed says in which variants its columns are.
#[derive(Clone, Debug)]
pub(crate) struct BatchCase {
    pub types: Vec<DataType>,
    pub rows: usize,
    pub nulls: Nulls,
    pub seed: u64,
    pub slice: (usize, usize),
}

impl BatchCase {
    pub(crate) fn batch(&self) -> RecordBatch {
        batch(&self.types, self.rows, self.nulls, self.seed).slice(self.slice.0, self.slice.1)
    }
}

/// Up to five columns, or none.
pub(crate) fn arb_batch() -> impl Strategy<Value = BatchCase> {
    let types = prop::collection::vec(arb_data_type(2), 0..6);
    let case = (types, arb_rows(), arb_nulls(), any::<u64>());
    case.prop_map(|(types, (rows, slice), nulls, seed)| BatchCase {
        types,
        rows,
        nulls,
        seed,
        slice,
    })
}
