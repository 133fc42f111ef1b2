//! The programs of the pages about kernels of other crates, compiled and run as tests of the documentation: each by its feature.

#[cfg(feature = "cubecl")]
#[doc = include_str!("../../../docs/guide/cubecl.md")]
pub mod cubecl {}
