//! The fuzz target `import`.
#![cfg_attr(fuzzing, no_main)]

arrow_device_fuzz::program!("import");
