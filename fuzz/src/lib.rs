//! Fuzz targets of arrow-device. Each is a function of bytes, [`run`] by name: under libFuzzer by the programs in `libfuzzer/`, and
//! on stable Rust by `tests/replay.rs`.
//!
//! | target | what it does |
//! | --- | --- |
//! | `import` | imports arrays of any type with hostile members, then calls every safe accessor at every depth |
//! | `schemas` | imports hostile `ArrowSchema`s, and exports what was accepted |
//! | `streams` | reads streams whose producers fail, repeat, return nothing or release early; exports readers to hostile consumers |
//! | `async_streams` | the same for the async device stream, in both directions |
//! | `dlpack` | tensors in and out |
//! | `manifests` | descriptions of batches from another process, and the memory that comes along, changed anywhere |
//! | `protocol` | packets in any order, to a subscriber and to a publisher |
//! | `operations` | sequences of safe operations on arrays, whose results must equal those of arrow-rs |
//!
//! A target panics if it finds a defect. AddressSanitizer finds reads and writes outside of allocations and leaks on the host; the
//! simulated devices find them on a device.
//!
//! Inputs are read front to back, integers by fixed widths: kept inputs decode to what they always did. Targets know no devices but
//! those of their `World`. With the feature `cuda`, the program `cuda_operations` runs random operations in the memories of a GPU, on several threads.

mod async_streams;
mod check;
#[cfg(feature = "cuda")]
pub mod cuda;
mod dlpack;
mod exercise;
mod foreign;
#[cfg(feature = "cuda")]
mod gpu;
mod import;
mod input;
mod kinds;
mod operations;
mod panics;
mod schemas;
mod share;
mod sketch;
mod streams;
mod world;

/// What the crate's own tests use, too. This is the only place that says where they are.
#[allow(dead_code, unused_imports)]
#[path = "../../tests/it"]
mod shared {
    #[path = "async_stream/kit/mod.rs"]
    pub(crate) mod peers;
    #[path = "../../share/tests/it/raw.rs"]
    pub(crate) mod raw;
    #[path = "simkit/mod.rs"]
    pub(crate) mod simkit;
    #[path = "support_c/mod.rs"]
    pub(crate) mod support_c;
    #[path = "dlpack/kit.rs"]
    pub(crate) mod tensors;

    /// What needs no other crates than these.
    pub(crate) mod support {
        pub(crate) mod c_stream;
        pub(crate) mod cases;
        pub(crate) mod compare;
        pub(crate) mod r#gen;
        pub(crate) mod producer;
        mod rng;
        pub(crate) mod types;
        mod values;
        pub(crate) mod variants;
    }
}

use shared::{peers, raw, simkit, support, support_c, tensors};

type Target = fn(&mut input::Input<'_>);

/// The targets by name.
pub const TARGETS: [(&str, Target); 8] = [
    ("import", import::target),
    ("schemas", schemas::target),
    ("streams", streams::target),
    ("async_streams", async_streams::target),
    ("dlpack", dlpack::target),
    ("operations", operations::target),
    ("manifests", share::manifests),
    ("protocol", share::protocol),
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
