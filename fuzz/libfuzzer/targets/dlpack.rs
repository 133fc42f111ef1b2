//! The fuzz target `dlpack`.
#![cfg_attr(fuzzing, no_main)]

arrow_device_fuzz::program!("dlpack");
