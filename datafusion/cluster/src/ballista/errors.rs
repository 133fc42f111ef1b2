//! [`OnDeviceError`]: what a device's error does to a query.

use std::error::Error;
use std::io;

use ballista_core::error::BallistaError;
use datafusion::error::DataFusionError;

/// What Ballista does with a task that fails with an error of a device, such as one that is gone, or because memory is exhausted.
///
/// Ballista tries a task again if it failed with an IO error, and fails the query for any other.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum OnDeviceError {
    /// The query fails with the error.
    #[default]
    Fail,
    /// The task fails with an IO error around the device's error, so that Ballista tries it again, on any executor, until it has
    /// failed as often as the scheduler allows (`task_max_failures`, by default 4 times).
    Retry,
}

impl OnDeviceError {
    pub(super) fn apply(self, e: DataFusionError) -> DataFusionError {
        if !is_of_device(&e) {
            return e;
        }
        // Ballista shows the fields of errors, and looks for the deepest error of DataFusion; so the text is all that remains.
        let text = e.to_string();
        match self {
            Self::Fail => DataFusionError::Execution(text),
            Self::Retry => DataFusionError::IoError(io::Error::other(text)),
        }
    }
}

/// Whether a device caused an error, or that there is none; or a lack of memory, of which the error does not say whose.
fn is_of_device(e: &DataFusionError) -> bool {
    let mut cause: Option<&(dyn Error + 'static)> = Some(e);
    while let Some(e) = cause {
        if e.is::<arrow_device::Error>()
            || matches!(
                e.downcast_ref(),
                Some(DataFusionError::ResourcesExhausted(_))
            )
        {
            return true;
        }
        // Ballista's errors do not say what caused them.
        cause = match e.downcast_ref::<BallistaError>() {
            Some(BallistaError::ArrowError(e)) => Some(e),
            Some(BallistaError::DataFusionError(e)) => Some(&**e),
            Some(_) => None,
            None => e.source(),
        };
    }
    false
}
