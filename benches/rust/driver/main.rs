//! What this crate asks of the CUDA driver, on the stand-in of the tests: `driver counts` prints
//! figures as `counts` does; `driver model` prints times that the stand-in keeps as a clock: row,
//! what, measured milliseconds, milliseconds of the ideal (or nothing), what that is, driver calls.

mod calls;
mod fake;
mod model;

use arrow_device_benches::cases::Result;

fn main() -> Result<()> {
    match std::env::args().nth(1).as_deref() {
        Some("counts") => calls::print(),
        Some("model") => model::print(),
        _ => Err("usage: driver counts|model".into()),
    }
}
