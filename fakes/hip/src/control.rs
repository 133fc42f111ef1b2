//! What tests steer the library with, and the version that it plays; see the crate's documentation.

use std::ffi::c_int;
use std::panic::catch_unwind;
use std::sync::OnceLock;

use crate::contexts;
use crate::driver::driver;
use crate::ffi::UNKNOWN;

/// HIP 7.1.
const DEFAULT_VERSION: c_int = 70151831;

/// As `hipRuntimeGetVersion` answers it.
pub(crate) fn version() -> c_int {
    static VERSION: OnceLock<c_int> = OnceLock::new();
    *VERSION.get_or_init(|| {
        let set = std::env::var("HIP_ON_CUDA_VERSION").ok();
        set.and_then(|set| set.parse().ok())
            .unwrap_or(DEFAULT_VERSION)
    })
}

/// Whether the numbers are those of HIP 5.
pub(crate) fn is_hip_5() -> bool {
    version() < 60_000_000
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn hip_on_cuda_release(ordinal: c_int) -> c_int {
    let released = catch_unwind(|| contexts::release(driver().ok()?, ordinal));
    match released {
        Ok(None) => -1,
        Ok(Some(outcome)) => outcome.err().unwrap_or(0),
        Err(_) => UNKNOWN,
    }
}
