//! The fuzz target `async_streams`.
#![cfg_attr(fuzzing, no_main)]

arrow_device_fuzz::program!("async_streams");
