//! Fuzz targets of arrow-device. Each is a function of bytes, [`run`] by name: under libFuzzer by the
//! programs in `fuzz_targets/`, and on stable Rust by whoever replays inputs.
//!
//! | target | what it does |
//! | --- | --- |
//! | `import` | imports arrays of any type with hostile members, then calls every safe accessor at every depth |
//! | `schemas` | imports hostile `ArrowSchema`s, and exports what was accepted |
//! | `streams` | reads streams whose producers fail, repeat, return nothing or release early; exports readers to hostile consumers |
//! | `async_streams` | the same for the async device stream, in both directions |
//! | `dlpack` | tensors in and out |
//! | `operations` | sequences of safe operations on arrays, whose results must equal those of arrow-rs |
//!
//! A target panics if it finds a defect. AddressSanitizer finds reads and writes outside of allocations
//! and leaks on the host; the simulated devices find them on a device.
//!
//! Inputs are read front to back with [`arbitrary::Unstructured`], integers by fixed widths, so that the
//! program `seeds` can write inputs that decode to given arrays.

mod async_streams;
mod check;
mod constructors;
mod contract;
mod dlpack;
mod exercise;
mod foreign;
mod import;
mod input;
mod kinds;
mod operations;
mod panics;
#[cfg(feature = "seeds")]
mod put;
mod schemas;
#[cfg(feature = "seeds")]
pub mod seeds;
mod sketch;
mod streams;
mod world;

// The stand-ins of the tests of async streams, and what they name.
#[path = "../../tests/async_stream/kit/mod.rs"]
mod peers;
#[path = "../../tests/it/simkit/mod.rs"]
mod simkit;

/// What the crate's own tests use, too.
#[allow(dead_code, unused_imports)]
#[path = "."]
mod support {
    #[path = "../../tests/it/support/cases.rs"]
    mod cases;
    #[path = "../../tests/it/support/compare.rs"]
    pub(crate) mod compare;
    #[path = "../../tests/it/support/gen.rs"]
    pub(crate) mod r#gen;
    #[path = "../../tests/dlpack/kit.rs"]
    pub(crate) mod kit;
    #[path = "../../tests/it/support/rng.rs"]
    mod rng;
    #[path = "../../tests/it/support/types.rs"]
    pub(crate) mod types;
    #[path = "../../tests/it/support/values.rs"]
    mod values;
    #[path = "../../tests/it/support/variants.rs"]
    mod variants;
}

type Target = fn(&mut input::Input<'_>);

/// The targets by name.
pub const TARGETS: [(&str, Target); 6] = [
    ("import", import::target),
    ("schemas", schemas::target),
    ("streams", streams::target),
    ("async_streams", async_streams::target),
    ("dlpack", dlpack::target),
    ("operations", operations::target),
];

/// Runs a target on one input.
///
/// # Panics
/// If the target finds a defect, also where a panic of this crate was caught on its way.
pub fn run(target: &str, data: &[u8]) {
    let found = TARGETS.iter().find(|(name, _)| *name == target);
    let (_, target) = found.unwrap_or_else(|| panic!("no target {target:?}"));
    panics::watched(|| target(&mut input::Input::new(data)));
}

/// The program of a target.
#[macro_export]
macro_rules! program {
    ($target:literal) => {
        #[cfg(fuzzing)]
        libfuzzer_sys::fuzz_target!(
            init: $crate::init(),
            |data: &[u8]| $crate::run($target, data)
        );

        /// Replays the files that are named.
        #[cfg(not(fuzzing))]
        fn main() {
            for file in std::env::args_os().skip(1) {
                eprintln!("{}", file.display());
                $crate::run($target, &std::fs::read(file).expect("the input is readable"));
            }
        }
    };
}

/// Prepares the process for fuzzing.
pub fn init() {
    panics::watch();
}
