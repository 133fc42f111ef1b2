//! [`HostToDeviceExec`]: the upload.

use std::fmt;
use std::sync::Arc;

use datafusion_common::Result;
use datafusion_physical_plan::ExecutionPlan;

use super::to_host::passing;
use crate::operator::{DeviceOperator, DeviceTask};
use crate::spec::DeviceSpec;
use crate::stream::SendableDeviceStream;
use crate::upload::{Target, upload};

/// The operator that uploads a host plan's batches to a device. Uploads run ahead of the operator
/// that reads them.
///
/// Transfers of small batches are dominated by a cost per batch, so small batches are first joined, which copies them once on the
/// host. The session's [`DeviceOptions`](crate::DeviceOptions) say how far: up to 131,072 rows or 16 MiB by default, whichever
/// comes first. [`with_target`](Self::with_target) sets it for one node. Batches of half as many rows or bytes, or more, are
/// uploaded as they are, and so is everything whose join could fail or cost more than it saves: dictionaries, run-end encoded
/// columns, unions and list views, and the batches of a plan whose input is unbounded, where waiting for more rows would
/// delay those that are there. Rows are kept back until there are enough of them, the plan has ended, or they have waited for
/// [`upload_wait_ms`](crate::DeviceOptions::upload_wait_ms), so a limit is best pushed below this node, as DataFusion does where the nodes between allow it. To the CPU, where an upload copies nothing, all
/// batches pass as they are.
#[derive(Clone, Debug, Default)]
pub struct HostToDeviceExec {
    /// `None`: that of the session.
    target: Option<(usize, usize)>,
}

impl HostToDeviceExec {
    /// Sets how far this node joins small batches, instead of the session's [`DeviceOptions`](crate::DeviceOptions): up to so
    /// many rows or bytes, whichever comes first. 0 rows uploads all batches as they are.
    #[must_use]
    pub fn with_target(self, rows: usize, bytes: usize) -> Self {
        Self {
            target: Some((rows, bytes)),
        }
    }

    /// Returns how far this node joins small batches, in rows and bytes, or `None` if the session's options say it.
    pub fn target(&self) -> Option<(usize, usize)> {
        self.target
    }

    /// Returns the node of the upload of `input`, a plan on the host, to a device.
    pub fn above(
        self,
        input: Arc<dyn ExecutionPlan>,
        device: impl Into<DeviceSpec>,
    ) -> Arc<dyn ExecutionPlan> {
        Arc::new(passing(input, device, self).into_transition())
    }
}

impl DeviceOperator for HostToDeviceExec {
    fn name(&self) -> &str {
        "HostToDeviceExec"
    }

    fn describe(&self, _: &dyn ExecutionPlan, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.target {
            Some((rows, bytes)) => {
                write!(f, ", upload_rows={rows}, upload_bytes={bytes}")
            }
            None => Ok(()),
        }
    }

    fn execute(&self, task: &DeviceTask<'_>) -> Result<SendableDeviceStream> {
        let (memory, mut target) = (task.reservation(), Target::of_task(task.context));
        (target.rows, target.bytes) = self.target.unwrap_or((target.rows, target.bytes));
        let (input, partition) = (task.child(0)?, task.partition);
        upload(input, partition, task.device, task.context, target, memory)
    }
}
