//! The fuzz target `schemas`.
#![cfg_attr(fuzzing, no_main)]

arrow_device_fuzz::program!("schemas");
