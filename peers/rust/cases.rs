//! Arrays and batches of every type. The first [`COMMON`] variants have the same number of rows in every type, so that
//! they can be columns of a batch.

use std::collections::HashMap;
use std::ffi::{CString, c_char};
use std::ptr;
use std::sync::{Arc, OnceLock};

use arrow_array::{Array, ArrayRef, RecordBatch, RecordBatchOptions, make_array};
use arrow_schema::{DataType, Field, Schema, SchemaRef};

use crate::answer::Outcome;
use crate::live::counted;
use crate::support::{self, Nulls};

/// Variants that have the same number of rows in every type: they come first.
const SAME_ROWS: usize = 19;

/// The rows of a long array.
const LONG: usize = 300;

/// Slices of a long array: first row and number of rows.
const SLICES: [(usize, usize); 7] = [
    (0, 8),
    (1, 0),
    (3, 5),
    (7, 61),
    (13, 150),
    (LONG - 63, 63),
    (LONG, 0),
];

/// The first [`SAME_ROWS`] variants of a type.
fn same_rows(data_type: &DataType, seed: u64) -> Vec<(String, ArrayRef)> {
    let mut cases = vec![];
    for nulls in [Nulls::None, Nulls::Some, Nulls::All] {
        for rows in [0, 1, LONG] {
            cases.push((
                format!("{rows} rows, nulls {nulls:?}"),
                support::array(data_type, rows, nulls, seed),
            ));
        }
    }
    let long = support::array(data_type, LONG, Nulls::Some, seed + 1);
    cases.extend(
        SLICES.map(|(offset, rows)| (format!("slice({offset}, {rows})"), long.slice(offset, rows))),
    );
    cases.push((
        "slice(51, 230).slice(9, 133)".into(),
        long.slice(51, 230).slice(9, 133),
    ));
    for nulls in [Nulls::None, Nulls::All] {
        let sliced = support::array(data_type, 90, nulls, seed + 2).slice(9, 77);
        cases.push((format!("slice(9, 77), nulls {nulls:?}"), sliced));
    }
    cases
}

/// Slices by the C struct's own offset: first row and number of rows, out of [`CUT_ROWS`].
const CUTS: [(usize, usize); 6] = [(0, 8), (1, 0), (3, 5), (7, 61), (13, 500), (1000, 0)];
const CUT_ROWS: usize = 1000;

/// How many variants every type has with the same number of rows.
pub(crate) const COMMON: usize = SAME_ROWS + CUTS.len();

/// The rows of a batch without columns.
const BARE_ROWS: usize = 5;

pub(crate) struct Type {
    name: CString,
    data_type: DataType,
    seed: u64,
    cases: OnceLock<Vec<Case>>,
}

pub(crate) struct Case {
    name: CString,
    /// What is uploaded.
    pub whole: ArrayRef,
    /// The rows of it that are given out.
    pub cut: Option<(usize, usize)>,
}

impl Case {
    /// What a peer must see.
    pub(crate) fn value(&self) -> ArrayRef {
        match self.cut {
            Some((offset, rows)) => self.whole.slice(offset, rows),
            None => self.whole.clone(),
        }
    }
}

fn types() -> &'static [Type] {
    static TYPES: OnceLock<Vec<Type>> = OnceLock::new();
    TYPES.get_or_init(|| {
        let all = support::all_types().into_iter().zip(1..);
        let types = all.map(|((name, data_type), seed)| Type {
            name: CString::new(name).unwrap_or_default(),
            data_type,
            seed: seed * 100,
            cases: OnceLock::new(),
        });
        types.collect()
    })
}

impl Type {
    pub(crate) fn at(index: u64) -> Outcome<&'static Type> {
        types()
            .get(index as usize)
            .ok_or("there is no such type".into())
    }

    pub(crate) fn case(&self, index: u64) -> Outcome<&Case> {
        let found = self.cases().get(index as usize);
        found.ok_or("the type has no such variant".into())
    }

    fn cases(&self) -> &[Case] {
        self.cases.get_or_init(|| {
            let whole = same_rows(&self.data_type, self.seed);
            let others =
                support::cases(&self.data_type, self.seed).split_off(support::cases::SAME_ROWS);
            let seed = self.seed + 4;
            let long = support::array(&self.data_type, CUT_ROWS, Nulls::Some, seed);
            let cuts = CUTS.map(|cut| {
                (
                    format!("C offset and rows {cut:?}"),
                    long.clone(),
                    Some(cut),
                )
            });
            let plain = |cases: Vec<(String, ArrayRef)>| {
                cases.into_iter().map(|(name, array)| (name, array, None))
            };
            let all = plain(whole).chain(cuts).chain(plain(others));
            let cases = all.map(|(name, whole, cut)| Case {
                name: CString::new(name).unwrap_or_default(),
                whole,
                cut,
            });
            cases.collect()
        })
    }

    /// The field of a lone array.
    pub(crate) fn field(&self) -> Field {
        Field::new("läne", self.data_type.clone(), true)
            .with_metadata(pairs(&[("note", "ünicode")]))
    }
}

fn pairs(pairs: &[(&str, &str)]) -> HashMap<String, String> {
    let owned = |(k, v): &(&str, &str)| ((*k).to_owned(), (*v).to_owned());
    pairs.iter().map(owned).collect()
}

/// The columns of a batch: a type each. Metadata is on the schema and on two of every three fields.
#[derive(Clone)]
pub(crate) struct Columns(Vec<&'static Type>);

impl Columns {
    /// # Safety
    /// `list` has `n` numbers.
    pub(crate) unsafe fn listed(list: *const u64, n: usize) -> Outcome<Self> {
        // SAFETY: the caller guarantees that `list` has `n` numbers (see `# Safety`).
        let types = (0..n).map(|i| Type::at(unsafe { *list.add(i) }));
        types.collect::<Outcome<_>>().map(Self)
    }

    pub(crate) fn schema(&self) -> SchemaRef {
        let field = |(i, t): (usize, &&Type)| {
            let field = Field::new(format!("c{i}"), t.data_type.clone(), true);
            match i % 3 {
                0 => field,
                1 => field.with_metadata(pairs(&[("note", "plain"), ("empty", "")])),
                _ => field.with_metadata(pairs(&[
                    ("ARROW:extension:name", "tests.opaque"),
                    ("ARROW:extension:metadata", "{\"a\": 1}"),
                ])),
            }
        };
        let fields: Vec<Field> = self.0.iter().enumerate().map(field).collect();
        let metadata = pairs(&[("origin", "peers"), ("ключ", "значение"), ("empty", "")]);
        Arc::new(Schema::new(fields).with_metadata(metadata))
    }

    /// A variant of each type, whose buffers are counted; and its slice if the variant is cut on the device.
    pub(crate) fn whole(&self, variant: u64) -> Outcome<(RecordBatch, Option<(usize, usize)>)> {
        let mut columns = Vec::new();
        let (mut rows, mut cut) = (BARE_ROWS, None);
        for t in &self.0 {
            let case = t.case(variant)?;
            columns.push(make_array(counted(&case.whole.to_data())));
            (rows, cut) = (case.whole.len(), case.cut);
        }
        let options = RecordBatchOptions::new().with_row_count(Some(rows));
        let batch = RecordBatch::try_new_with_options(self.schema(), columns, &options)?;
        Ok((batch, cut))
    }

    /// What a peer must see of it.
    pub(crate) fn value(&self, variant: u64) -> Outcome<RecordBatch> {
        let (batch, cut) = self.whole(variant)?;
        Ok(match cut {
            Some((offset, rows)) => batch.slice(offset, rows),
            None => batch,
        })
    }
}

/// How many types there are.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn peers_types() -> u64 {
    types().len() as u64
}

/// A type's name; null if there is none.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn peers_type_name(index: u64) -> *const c_char {
    Type::at(index).map_or(ptr::null(), |t| t.name.as_ptr())
}

/// How many variants have the same number of rows in every type; they come first.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn peers_common() -> u64 {
    COMMON as u64
}

/// A variant's name; null if there is none.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn peers_case_name(index: u64, case: u64) -> *const c_char {
    let found = Type::at(index).and_then(|t| t.case(case));
    found.map_or(ptr::null(), |case| case.name.as_ptr())
}
