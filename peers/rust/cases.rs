//! Arrays of every type, and comparisons with them.
//!
//! A case is a type and a variant of it, both by number: see [`peers_type_name`] and [`peers_case_name`]. The first
//! [`peers_common_cases`] variants have the same number of rows in every type, so that they can be columns of a batch.
//! Functions answer 0 or an errno; `peers_last_error` has the text. `device` is a name as in `arrow_device.h`.

mod answer;
mod balance;
mod changed;
mod check;
mod give;
mod held;

use std::collections::HashMap;
use std::ffi::{CString, c_char};
use std::ptr;
use std::sync::{Arc, OnceLock};

use arrow_array::{Array, ArrayRef};
use arrow_schema::{DataType, Field, Schema, SchemaRef};

use crate::support;
use answer::{Failure, Outcome};

/// Variants of `support::cases` that have the same number of rows in every type: they come first.
const SAME_ROWS: usize = 19;

/// Slices by the C struct's own offset: first row and number of rows, out of [`CUT_ROWS`].
const CUTS: [(usize, usize); 6] = [(0, 8), (1, 0), (3, 5), (7, 61), (13, 500), (1000, 0)];
const CUT_ROWS: usize = 1000;

pub(crate) struct Type {
    name: CString,
    pub data_type: DataType,
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
        all.map(|((name, data_type), seed)| Type {
            name: CString::new(name).unwrap_or_default(),
            data_type,
            seed: seed * 100,
            cases: OnceLock::new(),
        })
        .collect()
    })
}

impl Type {
    pub(crate) fn at(index: u64) -> Outcome<&'static Type> {
        let found = usize::try_from(index).ok().and_then(|i| types().get(i));
        found.ok_or_else(|| Failure::invalid(format!("there is no type {index}")))
    }

    pub(crate) fn case(&self, index: u64) -> Outcome<&Case> {
        let found = usize::try_from(index)
            .ok()
            .and_then(|i| self.cases().get(i));
        found.ok_or_else(|| Failure::invalid(format!("{:?} has no case {index}", self.name)))
    }

    fn cases(&self) -> &[Case] {
        self.cases.get_or_init(|| {
            let named = |name: String, whole, cut| Case {
                name: CString::new(name).unwrap_or_default(),
                whole,
                cut,
            };
            let mut plain = support::cases(&self.data_type, self.seed);
            let offset_cases = plain.split_off(SAME_ROWS);
            let long = support::array(
                &self.data_type,
                CUT_ROWS,
                support::Nulls::Some,
                self.seed + 4,
            );
            let cuts = CUTS.iter().map(|&cut| {
                (
                    format!("C offset and rows {cut:?}"),
                    long.clone(),
                    Some(cut),
                )
            });
            let plain = plain.into_iter().map(|(name, array)| (name, array, None));
            let offset_cases = offset_cases.into_iter().map(|(name, a)| (name, a, None));
            let all = plain.chain(cuts).chain(offset_cases);
            all.map(|(name, array, cut)| named(name, array, cut))
                .collect()
        })
    }

    /// The field of a lone array.
    pub(crate) fn field(&self) -> Field {
        Field::new("läne", self.data_type.clone(), true)
            .with_metadata(pairs(&[("note", "ünicode")]))
    }
}

/// How many variants every type has with the same number of rows.
pub(crate) const COMMON: usize = SAME_ROWS + CUTS.len();

fn pairs(pairs: &[(&str, &str)]) -> HashMap<String, String> {
    let owned = |(k, v): &(&str, &str)| ((*k).to_owned(), (*v).to_owned());
    pairs.iter().map(owned).collect()
}

/// A schema with one column of each type. Metadata is on the schema and on two of every three fields.
pub(crate) fn schema(types: &[&Type]) -> SchemaRef {
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
    let fields: Vec<Field> = types.iter().enumerate().map(field).collect();
    let metadata = pairs(&[("origin", "peers"), ("ключ", "значение"), ("empty", "")]);
    Arc::new(Schema::new(fields).with_metadata(metadata))
}

/// The types that a caller lists.
///
/// # Safety
/// `list` is null or has `n` numbers.
unsafe fn listed(list: *const u64, n: u64) -> Outcome<Vec<&'static Type>> {
    if list.is_null() && n > 0 {
        return Err(Failure::invalid("the list of types is null"));
    }
    if n > 4096 {
        return Err(Failure::invalid(format!("{n} types are too many")));
    }
    // SAFETY: the caller guarantees that `list` is null or has `n` numbers (see `# Safety`); it is not null unless `n` is 0.
    (0..n as usize)
        .map(|i| Type::at(unsafe { *list.add(i) }))
        .collect()
}

/// How many types there are.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn peers_type_count() -> u64 {
    types().len() as u64
}

/// A type's name; null if there is none.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn peers_type_name(index: u64) -> *const c_char {
    Type::at(index).map_or(ptr::null(), |t| t.name.as_ptr())
}

/// How many variants a type has.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn peers_case_count(index: u64) -> u64 {
    let count = answer::no_panic(|| Type::at(index).map_or(0, |t| t.cases().len()));
    count.unwrap_or(0) as u64
}

/// How many variants have the same number of rows in every type; they come first.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn peers_common_cases() -> u64 {
    COMMON as u64
}

/// A variant's name; null if there is none.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn peers_case_name(index: u64, case: u64) -> *const c_char {
    let name = answer::no_panic(|| {
        let found = Type::at(index).and_then(|t| t.case(case));
        found.map_or(ptr::null(), |case| case.name.as_ptr())
    });
    name.unwrap_or(ptr::null())
}
