//! Foreign arrays that break a rule: each is refused with an error that names the place, and every node is released
//! exactly once. "2.3.n" and "3.3.n" are known defects of other implementations that the case replays.

#[path = "../support/mod.rs"]
mod support;
#[path = "../support_c/mod.rs"]
mod support_c;

mod devices;
mod legal;
mod structure;
mod values;

use std::sync::Arc;

use arrow_array::{ArrayRef, Int32Array};
use arrow_schema::DataType;
use support::types::structure as struct_of;
use support::{Nulls, array};
use support_c::Foreign;
use support_c::sim::Place;

fn ints() -> ArrayRef {
    Arc::new(Int32Array::from(vec![Some(1), None, Some(3), Some(4)]))
}

fn of(data_type: DataType) -> ArrayRef {
    array(&data_type, 4, Nulls::Some, 3)
}

fn pair() -> ArrayRef {
    of(struct_of(vec![
        ("a", DataType::Int32),
        ("b", DataType::Utf8),
    ]))
}

/// Imports what must be refused, and checks text and releases.
#[track_caller]
fn refused(place: &Place, mut foreign: Foreign, expected: &str, context: &str) {
    let error = match foreign.import(&place.options) {
        Ok(_) => panic!("{context}: accepted"),
        Err(e) => e.to_string(),
    };
    assert!(
        error.contains(expected),
        "{context}: \"{error}\" lacks \"{expected}\""
    );
    assert!(
        foreign.device_array.array.release.is_none(),
        "{context}: not consumed"
    );
    foreign.assert_released(context);
}
