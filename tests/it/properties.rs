//! Arrays and batches of any shape survive the way to a device and back, and in and out of C structs, cut anywhere.

use crate::simkit::*;
use crate::support::*;
use crate::support_c::Foreign;
use crate::support_c::sim::places;
use arrow_array::{Array, ArrayRef, RecordBatch};
use arrow_device::device::sim::{SimConfig, SimMode};
use arrow_device::{DeviceArray, ExportOptions, ImportOptions, SyncPolicy, Validation};
use proptest::prelude::*;

/// Fractions of what is there: offset and length of a slice.
type Cut = (f64, f64);

fn arb_cuts() -> impl Strategy<Value = Vec<Cut>> {
    proptest::collection::vec((0.0..=1.0, 0.0..=1.0), 0..4)
}

fn place_of(cut: Cut, rows: usize) -> (usize, usize) {
    let offset = (cut.0 * rows as f64) as usize;
    (offset, (cut.1 * (rows - offset) as f64) as usize)
}

/// `PROPTEST_CASES` overrides the number.
pub(crate) fn config() -> ProptestConfig {
    let few = ProptestConfig::with_cases(128);
    match std::env::var_os("PROPTEST_CASES") {
        Some(_) => ProptestConfig::default(),
        None => few,
    }
}

fn is_same(
    expected: &dyn Array,
    down: arrow_device::Result<ArrayRef>,
) -> Result<(), TestCaseError> {
    let down = failure_free(down)?;
    let valid = down.to_data().validate_full();
    prop_assert!(valid.is_ok(), "{:?}", valid);
    same(expected, &down).map_err(TestCaseError::fail)
}

fn is_same_batch(
    expected: &RecordBatch,
    down: arrow_device::Result<RecordBatch>,
) -> Result<(), TestCaseError> {
    same_batch(expected, &failure_free(down)?).map_err(TestCaseError::fail)
}

fn failure_free<T>(result: arrow_device::Result<T>) -> Result<T, TestCaseError> {
    result.map_err(|e| TestCaseError::fail(e.to_string()))
}

#[test]
fn arrays() {
    let sims = MODES.map(Sim::new);
    proptest!(config(), |(case in arb_array(), cuts in arb_cuts())| {
        for sim in &sims {
            let mut expected = case.array();
            let mut up = failure_free(sim.upload_array(&expected))?;
            for cut in std::iter::once((0.0, 1.0)).chain(cuts.iter().copied()) {
                let (offset, rows) = place_of(cut, expected.len());
                expected = expected.slice(offset, rows);
                up = failure_free(up.slice(offset, rows))?;
                is_same(&expected, up.to_host())?;
            }
        }
    });
    sims.iter().for_each(Sim::assert_done);
}

#[test]
fn batches() {
    let peer = |mode| SimConfig {
        mode,
        peer_access: true,
        ..SimConfig::default()
    };
    let (from, to) = (Sim::new(SimMode::Deferred), Sim::with(peer(SimMode::Async)));
    proptest!(config(), |(case in arb_batch(), cuts in arb_cuts())| {
        let mut expected = case.batch();
        let mut up = failure_free(from.upload(&expected))?;
        for cut in cuts {
            let (offset, rows) = place_of(cut, expected.num_rows());
            expected = expected.slice(offset, rows);
            up = failure_free(up.slice(offset, rows))?;
            is_same_batch(&expected, up.to_host())?;
        }
        is_same_batch(&expected, up.compact().and_then(|copy| copy.to_host()))?;
        let there = failure_free(up.to_device(&to))?;
        let half = expected.num_rows() / 2;
        let rest = expected.num_rows() - half;
        is_same_batch(&expected.slice(half, rest), there.slice(half, rest).and_then(|part| part.to_host()))?;
    });
    for sim in [&from, &to] {
        sim.synchronize().unwrap();
    }
    for sim in [&from, &to] {
        sim.assert_done();
    }
}

/// From C structs with offsets at any level, and out again.
#[test]
fn imports() {
    let places = places();
    proptest!(config(), |(case in arb_array(), cuts in arb_cuts(), full in any::<bool>())| {
        let made = case.made();
        for place in &places {
            let mut foreign = Foreign::part(&made.around, made.offset, made.rows.len(), &place.device);
            let full = if full { Validation::Full } else { Validation::default() };
            let mut at = failure_free(foreign.import(&ImportOptions { validation: full, ..place.options.clone() }))?;
            let mut expected = made.rows.slice(case.slice.0, case.slice.1);
            at = failure_free(at.slice(case.slice.0, case.slice.1))?;
            for cut in std::iter::once((0.0, 1.0)).chain(cuts.iter().copied()) {
                let (offset, rows) = place_of(cut, expected.len());
                expected = expected.slice(offset, rows);
                at = failure_free(at.slice(offset, rows))?;
                let exported = failure_free(at.export_array(&ExportOptions::new(SyncPolicy::Event)))?;
                // SAFETY: the struct comes from an export of this crate, whose values are valid, and the type is the exported one.
                let again = unsafe { DeviceArray::import_as(exported, foreign.field(), &place.options) };
                let again = failure_free(again)?;
                for down in [at.to_host(), again.to_host(), again.compact().and_then(|a| a.to_host())] {
                    is_same(&expected, down)?;
                }
            }
            drop(at);
            foreign.assert_released_by(&place.device, "imports");
        }
    });
    places
        .iter()
        .for_each(crate::support_c::sim::Place::assert_clean);
}
