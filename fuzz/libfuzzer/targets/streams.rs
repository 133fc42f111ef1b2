//! The fuzz target `streams`.
#![cfg_attr(fuzzing, no_main)]

arrow_device_fuzz::program!("streams");
