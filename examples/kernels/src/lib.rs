//! The programs of the pages about kernels of other crates, compiled and run as tests of the documentation: each by its feature.

#[cfg(feature = "burn")]
#[doc = include_str!("../../../docs/guide/burn.md")]
pub mod burn {}

#[cfg(feature = "candle")]
#[doc = include_str!("../../../docs/guide/candle.md")]
pub mod candle {}

#[cfg(feature = "cubecl")]
#[doc = include_str!("../../../docs/guide/cubecl.md")]
pub mod cubecl {}

#[cfg(feature = "cuda-core")]
#[doc = include_str!("../../../docs/guide/cuda-core.md")]
pub mod cuda_core {}
