//! The fuzz target `operations`.
#![cfg_attr(fuzzing, no_main)]

arrow_device_fuzz::program!("operations");
