//! The results of plans as device streams.

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

/// Runs a plan, and gives its result on a device: what is there already stays, what is on the host goes up. Batches of
/// several partitions come as they are ready.
///
/// For the async device stream, give the answer to [`produce`](arrow_device::async_stream::produce). Of a DataFrame it takes
/// `create_physical_plan()` and `task_ctx()`. All partitions are polled by whoever polls the stream; a `RepartitionExec` or
/// `CoalescePartitionsExec` in the plan gives them tasks of their own.
///
/// DataFusion's plans need a Tokio runtime: the one that is current here runs the plan's tasks, wherever the stream is polled,
/// and must outlive the stream. Once it shuts down, the next item is [`Error::Cancelled`], never an end
/// or a batch that was made of a part of the rows. This check spawns one empty task on the runtime for each item.
///
/// A current-thread runtime runs tasks only inside its `block_on`. It must be driven while the stream is read on other threads:
/// the plan's tasks make no progress otherwise, and the checks' tasks, one small allocation for each item, stay in the runtime's
/// queue until it runs.
///
/// # Errors
/// [`DataFusionError::Execution`] outside a Tokio runtime; what the plan says. Later errors come in the stream.
pub fn execute_on_device(
    plan: Arc<dyn ExecutionPlan>,
    context: Arc<TaskContext>,
    device: &Device,
) -> Result<SendableDeviceStream> {
    let runtime = Handle::try_current()
        .map_err(|e| DataFusionError::Execution(format!("a plan runs in a Tokio runtime: {e}")))?;
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

/// Streams of one schema as one, polled and dropped within their runtime.
struct Merged {
    schema: SchemaRef,
    device_type: ArrowDeviceType,
    /// None after the end or an error.
    streams: Vec<SendableDeviceStream>,
    /// Who is asked first.
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
                    // Another one stands in its place: all are asked again.
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

/// Whether `runtime` has not begun to drop its tasks. When it shuts down it first refuses new tasks, and then drops those that it
/// has. If they were a plan's, their closed channels look to the plan like ends of its inputs. So what a plan gave before this
/// returns true was made of all its input, and an end is the plan's own.
fn accepts_tasks(runtime: &Handle) -> bool {
    let task = runtime.spawn(pending::<()>());
    // One that is refused is dropped at once.
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

/// Runs a plan, and gives its result as a C device stream. Its consumer's thread drives the plan, with the Tokio runtime
/// that is current here, and must outlive the stream: once it shuts down, the consumer gets ECANCELED, never an end that looks like
/// the plan's. [`BlockingReader`](arrow_device::async_stream::BlockingReader) says on which threads the result may be read: a worker of a
/// multi-threaded runtime is one of them, the thread of a current-thread runtime is not, and gets an error. A current-thread
/// runtime must be driven on its own thread while the result is read, as [`execute_on_device`] says.
///
/// # Errors
/// [`DataFusionError::Execution`] outside a Tokio runtime; what the plan says.
pub fn export_plan(
    plan: Arc<dyn ExecutionPlan>,
    context: Arc<TaskContext>,
    device: &Device,
    options: ExportOptions,
) -> Result<FFI_ArrowDeviceArrayStream> {
    let reader = execute_on_device(plan, context, device)?.into_blocking_reader();
    FFI_ArrowDeviceArrayStream::new(reader, options).map_err(to_datafusion)
}
