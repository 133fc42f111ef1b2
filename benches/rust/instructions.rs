//! Runs a case for callgrind: `instructions CASE KIND COLUMNS ROWS N`.

use std::hint::black_box;

use arrow_device_benches::{batches, cases};
use cases::{Input, Result};

/// What callgrind counts (`--toggle-collect`).
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn counted(case: usize, input: &Input, n: usize) -> bool {
    black_box(cases::CASES[case].1(input, n)).is_ok()
}

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [case, kind, columns, rows, n] = arguments.as_slice() else {
        return Err("usage: instructions CASE KIND COLUMNS ROWS N".into());
    };
    let index = cases::CASES
        .iter()
        .position(|(name, _)| name == case)
        .ok_or("no such case")?;
    let (columns, rows, n) = (columns.parse()?, rows.parse()?, n.parse()?);
    let input = Input::new(match kind.as_str() {
        "mixed" => batches::mixed(columns, rows)?,
        _ => batches::integers(columns, rows)?,
    })?;
    // What happens once only is not counted.
    cases::CASES[index].1(&input, 2)?;
    if counted(index, &input, n) {
        Ok(())
    } else {
        Err("the case failed".into())
    }
}
