//! Results of plans as device streams.

use std::future::pending;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use arrow_schema::SchemaRef;
use datafusion_common::config::ConfigOptions;
use datafusion_common::{DataFusionError, Result};
use datafusion_execution::TaskContext;
use datafusion_physical_optimizer::PhysicalOptimizerRule;
use datafusion_physical_plan::{ExecutionPlan, ExecutionPlanProperties};
use futures_core::Stream;
use tokio::runtime::Handle;

use super::metrics::to_datafusion;
use super::plan::execute_child;
use super::rule::{DeviceTransitions, on_device};
use super::stream::SendableDeviceStream;
use arrow_device::async_stream::DeviceRecordBatchStream;
use arrow_device::{
    ArrowDeviceType, Device, DeviceRecordBatch, Error, ExportOptions, FFI_ArrowDeviceArrayStream,
};

/// Runs a plan and returns its result as a stream of batches on a device. Batches that are on the
/// host are uploaded; those on the device stay there. Batches of several partitions come in the
/// order in which they are ready.
///
/// A DataFrame's `create_physical_plan()` and `task_ctx()` return the arguments. For an async C
/// stream, pass the result to [`produce`](arrow_device::async_stream::produce). Polling the stream
/// polls all partitions; a `RepartitionExec` or `CoalescePartitionsExec` in the plan runs them in
/// tasks of their own.
///
/// DataFusion's plans need a Tokio runtime. The current runtime of this call runs the plan's tasks,
/// wherever the stream is polled, and must outlive the stream. Once it shuts down, the next item is
/// [`Error::Cancelled`], and never an end or a batch made of only some of the rows. To find out,
/// the stream spawns one empty task on the runtime for each item.
///
/// A current-thread runtime runs tasks only inside its `block_on`, and must be in there while other
/// threads read the stream. Otherwise the plan's tasks make no progress, and the empty tasks, one
/// small allocation each, stay in the runtime's queue.
///
/// # Errors
/// Returns [`DataFusionError::Execution`] outside a Tokio runtime, and the plan's error if it
/// cannot be started. Later errors are items of the stream.
pub fn execute_on_device(
    plan: Arc<dyn ExecutionPlan>,
    context: Arc<TaskContext>,
    device: &Device,
) -> Result<SendableDeviceStream> {
    let runtime = Handle::try_current()
        .map_err(|e| DataFusionError::Execution(format!("a plan needs a Tokio runtime: {e}")))?;
    let config = ConfigOptions::default();
    let plan = on_device(DeviceTransitions.optimize(plan, &config)?, device);
    let partitions = plan.output_partitioning().partition_count();
    let start = |partition| execute_child(&plan, partition, context.clone());
    let streams: Vec<_> = (0..partitions).map(start).collect::<Result<_>>()?;
    Ok(Box::pin(Merged {
        schema: plan.schema(),
        device_type: device.id().device_type,
        next: 0,
        runtime,
        streams,
    }))
}

/// Merges streams of one schema. They are polled and dropped within their runtime.
struct Merged {
    schema: SchemaRef,
    device_type: ArrowDeviceType,
    /// Empty after the end or an error.
    streams: Vec<SendableDeviceStream>,
    /// The stream to poll first.
    next: usize,
    runtime: Handle,
}

impl Merged {
    fn poll_any(&mut self, cx: &mut Context<'_>) -> Poll<Option<<Self as Stream>::Item>> {
        let Self { streams, next, .. } = self;
        let mut asked = 0;
        while asked < streams.len() {
            let i = *next % streams.len();
            match streams[i].as_mut().poll_next(cx) {
                Poll::Pending => {
                    asked += 1;
                    *next = i + 1;
                }
                Poll::Ready(None) => {
                    drop(streams.swap_remove(i));
                    // Another stream has taken its place, so all are polled again.
                    asked = 0;
                }
                Poll::Ready(Some(item)) => {
                    *next = i + 1;
                    if item.is_err() {
                        streams.clear();
                    }
                    return Poll::Ready(Some(item));
                }
            }
        }
        match streams.is_empty() {
            true => Poll::Ready(None),
            false => Poll::Pending,
        }
    }
}

impl Stream for Merged {
    type Item = arrow_device::Result<DeviceRecordBatch>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if self.streams.is_empty() {
            return Poll::Ready(None);
        }
        let runtime = self.runtime.clone();
        let _within = runtime.enter();
        let next = ready!(self.poll_any(cx));
        if !accepts_tasks(&runtime) {
            self.streams.clear();
            let operation = "reading a plan's result after the end of its Tokio runtime, which must outlive it,";
            return Poll::Ready(Some(Err(Error::Cancelled { operation })));
        }
        Poll::Ready(next)
    }
}

impl Drop for Merged {
    fn drop(&mut self) {
        let _within = self.runtime.enter();
        self.streams.clear();
    }
}

/// Whether `runtime` has not begun to drop its tasks. A runtime that shuts down first refuses new
/// tasks and then drops those that it has. To a plan the closed channels of its dropped tasks look
/// like the end of its inputs. So if this returns true, what the plan returned before was made of
/// all its input.
fn accepts_tasks(runtime: &Handle) -> bool {
    let task = runtime.spawn(pending::<()>());
    // A refused task is dropped at once.
    let refused = task.is_finished();
    task.abort();
    !refused
}

impl DeviceRecordBatchStream for Merged {
    type Batch = DeviceRecordBatch;

    fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }

    fn device_type(&self) -> ArrowDeviceType {
        self.device_type
    }
}

/// Runs a plan and returns its result as a C device stream. The consumer's calls drive the plan,
/// together with the current Tokio runtime of this call.
///
/// The runtime must outlive the stream: once it shuts down, the consumer gets ECANCELED, and never
/// an end that looks like the plan's.
/// [`BlockingReader`](arrow_device::async_stream::BlockingReader) describes which threads may read
/// the result: a worker of a multi-threaded runtime may, and the thread of a current-thread runtime
/// gets an error. A current-thread runtime must be in its `block_on`, on its own thread, while the
/// result is read (see [`execute_on_device`]).
///
/// # Errors
/// Returns [`DataFusionError::Execution`] outside a Tokio runtime, and the plan's error if it
/// cannot be started.
pub fn export_plan(
    plan: Arc<dyn ExecutionPlan>,
    context: Arc<TaskContext>,
    device: &Device,
    options: ExportOptions,
) -> Result<FFI_ArrowDeviceArrayStream> {
    let reader = execute_on_device(plan, context, device)?.into_blocking_reader();
    FFI_ArrowDeviceArrayStream::new(reader, options).map_err(to_datafusion)
}
