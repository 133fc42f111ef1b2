//! The fuzz target `protocol`.
#![cfg_attr(fuzzing, no_main)]

arrow_device_fuzz::program!("protocol");
