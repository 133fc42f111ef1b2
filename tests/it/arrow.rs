// For the root of a test program: the arrow crates that arrow-device is built with, under their plain names, which those of the default
// major version have already.
#[cfg(feature = "arrow-58")]
extern crate arrow_array_58 as arrow_array;
#[cfg(feature = "arrow-60")]
extern crate arrow_array_60 as arrow_array;
#[cfg(feature = "arrow-58")]
extern crate arrow_buffer_58 as arrow_buffer;
#[cfg(feature = "arrow-60")]
extern crate arrow_buffer_60 as arrow_buffer;
#[cfg(feature = "arrow-58")]
extern crate arrow_data_58 as arrow_data;
#[cfg(feature = "arrow-60")]
extern crate arrow_data_60 as arrow_data;
#[cfg(feature = "arrow-58")]
extern crate arrow_schema_58 as arrow_schema;
#[cfg(feature = "arrow-60")]
extern crate arrow_schema_60 as arrow_schema;
