//! Partitions that run side by side, as one stream.

use std::any::Any;
use std::future::{pending, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use arrow_schema::SchemaRef;
use datafusion_common::{DataFusionError, Result};
use datafusion_execution::TaskContext;
use datafusion_physical_plan::{ExecutionPlan, ExecutionPlanProperties};
use futures_core::Stream;
use tokio::runtime::Handle;
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinSet;

use super::child::execute_child_apart;
use super::memory::DeviceReservation;
use super::stream::SendableDeviceStream;
use arrow_device::async_stream::DeviceRecordBatchStream;
use arrow_device::{ArrowDeviceType, Device, DeviceRecordBatch, Error};

type Item = arrow_device::Result<DeviceRecordBatch>;

/// Starts all partitions of a plan, each on a task of its own of the current Tokio runtime, and returns their batches, on
/// `device`, in the order in which they are ready. The batches of one partition keep their order.
///
/// Each task is one batch ahead of the reader: it asks its partition for the next batch once the reader has taken the one before, so
/// that a batch that waits to be taken is one that its node has reserved. Dropping the stream aborts the tasks. If the runtime ends before them,
/// the stream ends with [`Error::Cancelled`], and never as if the plan had ended; a task that panics ends it with
/// [`Error::Panic`].
pub(super) fn merged(
    plan: &Arc<dyn ExecutionPlan>,
    device: &Device,
    context: &Arc<TaskContext>,
) -> Result<SendableDeviceStream> {
    let runtime = Handle::try_current()
        .map_err(|e| DataFusionError::Execution(format!("a plan needs a Tokio runtime: {e}")))?;
    let partitions = plan.output_partitioning().partition_count();
    let start = |partition| {
        let memory = DeviceReservation::new(context, plan.name(), partition, device);
        execute_child_apart(plan, partition, device, context.clone(), memory)
    };
    let streams: Vec<_> = (0..partitions).map(start).collect::<Result<_>>()?;
    // The permits bound it: there is one for each partition.
    let (sender, receiver) = mpsc::unbounded_channel();
    let mut tasks = JoinSet::new();
    for stream in streams {
        tasks.spawn_on(run(stream, sender.clone(), runtime.clone()), &runtime);
    }
    Ok(Box::pin(Merged {
        schema: plan.schema(),
        device_type: device.id().device_type,
        open: Some(Open { receiver, tasks }),
    }))
}

/// Whether a partition has come to its end.
struct Ended(bool);

/// Runs a partition to its end, or until nobody reads it.
async fn run(
    mut stream: SendableDeviceStream,
    sender: UnboundedSender<(Item, OwnedSemaphorePermit)>,
    runtime: Handle,
) -> Ended {
    let ahead = Arc::new(Semaphore::new(1));
    // The reader drops the permit with which a batch comes when it takes the batch.
    while let Ok(permit) = ahead.clone().acquire_owned().await {
        let Some(item) = poll_fn(|cx| stream.as_mut().poll_next(cx)).await else {
            return Ended(accepts_tasks(&runtime));
        };
        if !accepts_tasks(&runtime) || sender.send((item, permit)).is_err() {
            break;
        }
    }
    Ended(false)
}

/// Whether `runtime` has not begun to drop its tasks. A runtime that shuts down first refuses new tasks and then drops those that
/// it has. To a plan the closed channels of its dropped tasks look like the end of its inputs. So if this returns true, what the
/// plan returned before was made of all its input.
fn accepts_tasks(runtime: &Handle) -> bool {
    let task = runtime.spawn(pending::<()>());
    // A refused task is dropped at once.
    let refused = task.is_finished();
    task.abort();
    !refused
}

/// The partitions' batches.
struct Merged {
    schema: SchemaRef,
    device_type: ArrowDeviceType,
    /// `None` after the end or an error.
    open: Option<Open>,
}

struct Open {
    receiver: UnboundedReceiver<(Item, OwnedSemaphorePermit)>,
    tasks: JoinSet<Ended>,
}

impl Open {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Item>> {
        // First the tasks: what went wrong with one is not to wait for the others' batches.
        let mut running = true;
        while let Poll::Ready(task) = self.tasks.poll_join_next(cx) {
            match task {
                Some(Ok(Ended(true))) => {}
                Some(Err(e)) if e.is_panic() => {
                    return Poll::Ready(Some(Err(panicked(&*e.into_panic()))));
                }
                Some(_) => {
                    let operation = "reading a plan's result after the end of its Tokio runtime, which must outlive it,";
                    return Poll::Ready(Some(Err(Error::Cancelled { operation })));
                }
                None => {
                    running = false;
                    break;
                }
            }
        }
        match self.receiver.poll_recv(cx) {
            // The last task is about to end.
            Poll::Ready(None) if running => Poll::Pending,
            Poll::Ready(next) => Poll::Ready(next.map(|(item, _)| item)),
            Poll::Pending => Poll::Pending,
        }
    }
}

fn panicked(payload: &(dyn Any + Send)) -> Error {
    let text = payload.downcast_ref::<&str>().copied();
    let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
    Error::Panic {
        operation: "a partition of a plan",
        message: text.unwrap_or("no text").to_owned().into(),
    }
}

impl Stream for Merged {
    type Item = Item;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Item>> {
        let Some(open) = &mut self.open else {
            return Poll::Ready(None);
        };
        let next = ready!(open.poll(cx));
        if !matches!(next, Some(Ok(_))) {
            self.open = None;
        }
        Poll::Ready(next)
    }
}

impl DeviceRecordBatchStream for Merged {
    fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }

    fn device_type(&self) -> ArrowDeviceType {
        self.device_type
    }
}
