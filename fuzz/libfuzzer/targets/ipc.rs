//! The fuzz target `ipc`.
#![cfg_attr(fuzzing, no_main)]

arrow_device_fuzz::program!("ipc");
