//! Between this crate's arrays and the C structs.

// The rest of this room uses all of both.
#[allow(dead_code)]
pub(crate) mod schema;
#[allow(dead_code)]
pub(crate) mod validate;
