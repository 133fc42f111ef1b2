//! The fuzz target `manifests`.
#![cfg_attr(fuzzing, no_main)]

arrow_device_fuzz::program!("manifests");
