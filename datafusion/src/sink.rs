//! Results of plans as device streams.

use std::sync::Arc;

use datafusion_common::Result;
use datafusion_execution::TaskContext;
use datafusion_physical_plan::ExecutionPlan;

use super::blocking::BlockingReader;
use super::metrics::to_datafusion;
use super::parallel::merged;
use super::place::with_output_on;
use super::stream::SendableDeviceStream;
use arrow_device::{Device, ExportOptions, FFI_ArrowDeviceArrayStream};

/// Runs a plan and returns its result as a stream of batches on a device. Batches that are on the
/// host are uploaded; those on the device stay there.
///
/// A DataFrame's `create_physical_plan()` and `task_ctx()` return the arguments. For an async C
/// stream, pass the result to [`produce`](arrow_device::async_stream::produce).
///
/// Each partition runs on a task of its own, one batch ahead of the reader. The batches
/// of a partition keep their order, so a plan of one partition, which DataFusion makes of a query
/// with `ORDER BY`, comes in its order. Those of several partitions come as they are ready. Dropping
/// the stream aborts the tasks.
///
/// The current Tokio runtime of this call runs the tasks, wherever the stream is polled, and must
/// outlive the stream. Once it shuts down, the stream ends with
/// [`Error::Cancelled`](arrow_device::Error::Cancelled), and never as if the plan had ended, nor
/// with a batch made of only some of the rows. To find out, each task spawns one empty task on the
/// runtime for each batch. A current-thread runtime runs tasks only inside its `block_on`, and must
/// be in there while other threads read the stream.
///
/// # Errors
/// Returns [`DataFusionError::Execution`](datafusion_common::DataFusionError::Execution) outside a Tokio runtime, and the plan's error if it
/// cannot be started. Later errors are items of the stream.
pub fn execute_on_device(
    plan: Arc<dyn ExecutionPlan>,
    context: Arc<TaskContext>,
    device: &Device,
) -> Result<SendableDeviceStream> {
    let plan = with_output_on(plan, &device.into())?;
    merged(&plan, device, &context, true)
}

/// Runs a plan and returns its result as a C device stream. The consumer's calls drive the plan,
/// together with the current Tokio runtime of this call.
///
/// The runtime must outlive the stream: once it shuts down, the consumer gets ECANCELED, and never
/// an end that looks like the plan's.
/// [`BlockingReader`] describes which threads may read
/// the result: a worker of a multi-threaded runtime may, and the thread of a current-thread runtime
/// gets an error. A current-thread runtime must be in its `block_on`, on its own thread, while the
/// result is read (see [`execute_on_device`]).
///
/// # Errors
/// Returns [`DataFusionError::Execution`](datafusion_common::DataFusionError::Execution) outside a Tokio runtime, and the plan's error if it
/// cannot be started.
pub fn export_plan(
    plan: Arc<dyn ExecutionPlan>,
    context: Arc<TaskContext>,
    device: &Device,
    options: ExportOptions,
) -> Result<FFI_ArrowDeviceArrayStream> {
    let reader = BlockingReader::new(execute_on_device(plan, context, device)?);
    FFI_ArrowDeviceArrayStream::new(reader, options).map_err(to_datafusion)
}
