//! The C structs of the specification.

mod device_type;

pub use device_type::ArrowDeviceType;
