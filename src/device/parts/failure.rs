//! The failure after which a device cannot be used.

use std::sync::OnceLock;

use crate::error::{Error, Result};

/// What every error after a failure ends with.
const FINAL: &str = "; the device cannot be used any more in this process";

/// The failure after which a device cannot be used: the first one is remembered, and reported by every operation from then on,
/// as by a CUDA context.
///
/// Runtimes differ in what follows failed work: some let later work run, on wrong data, and some end the process. A backend
/// that finds failed work thus sets the failure, checks it wherever work is queued or waited for, and gives the runtime no
/// more work.
///
/// ```
/// use arrow_device::device::{DeviceId, device_error, parts::Failure};
/// use arrow_device::abi::ArrowDeviceType;
///
/// let device = DeviceId::new(ArrowDeviceType::OPENCL, 0);
/// let failure = Failure::new();
/// failure.check()?; // first in every operation
/// # Ok::<(), arrow_device::Error>(())?;
///
/// failure.set(device_error(device, "clWaitForEvents", -14, "a kernel failed"));
/// failure.set(device_error(device, "clFlush", -36, "a later failure, which follows from the first one"));
/// let text = failure.check().unwrap_err().to_string();
/// assert!(text.contains("a kernel failed; the device cannot be used any more in this process"));
/// # Ok::<(), arrow_device::Error>(())
/// ```
#[derive(Debug, Default)]
pub struct Failure(OnceLock<Error>);

impl Failure {
    /// Makes one for a device that works.
    pub const fn new() -> Self {
        Self(OnceLock::new())
    }

    /// Remembers a failure, unless there is one already. The message of an [`Error::Device`] gets a note that the device cannot
    /// be used any more.
    pub fn set(&self, mut error: Error) {
        if let Error::Device { message, .. } = &mut error {
            message.to_mut().push_str(FINAL);
        }
        let _ = self.0.set(error);
    }

    /// Returns the failure as an error, if there is one. Costs an atomic load while there is none.
    pub fn check(&self) -> Result<()> {
        self.0.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Returns whether there is a failure.
    pub fn is_set(&self) -> bool {
        self.0.get().is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_failure_is_kept_by_all_threads() {
        let failure = Failure::new();
        assert!(failure.check().is_ok() && !failure.is_set());
        let failed = std::thread::scope(|scope| {
            let set = |i: usize| {
                let failure = &failure;
                scope.spawn(move || {
                    failure.set(Error::argument(format!("failure {i}")));
                    failure.check().unwrap_err().to_string()
                })
            };
            let threads: Vec<_> = (0..4).map(set).collect();
            threads
                .into_iter()
                .map(|t| t.join().unwrap())
                .collect::<Vec<_>>()
        });
        assert!(failure.is_set());
        assert!(failed.iter().all(|text| *text == failed[0]), "{failed:?}");
    }
}
