//! Runs cases for callgrind: `instructions CASE[,CASE...] KIND COLUMNS ROWS N`. Each case runs
//! twice: what happens once only is done in the first run, which is not for counting.

use arrow_device_benches::{batches, cases};
use cases::{Input, Result};

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [names, kind, columns, rows, n] = arguments.as_slice() else {
        return Err("usage: instructions CASE[,CASE...] KIND COLUMNS ROWS N".into());
    };
    let input = Input::new(batches::named(kind, columns.parse()?, rows.parse()?)?)?;
    for name in names.split(',') {
        let case = cases::case(name).ok_or_else(|| format!("no case is called {name}"))?;
        case(&input, 2)?;
        case(&input, n.parse()?)?;
    }
    Ok(())
}
