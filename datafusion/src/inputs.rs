//! What device operators read from: a partition of a child, and partitions that run side by side, as one stream.

use std::any::Any;
use std::future::pending;
use std::sync::Arc;
use std::task::{Poll, ready};

use arrow_device::{Device, Error};
use datafusion_common::{DataFusionError, Result};
use datafusion_execution::TaskContext;
use datafusion_physical_plan::{ExecutionPlan, ExecutionPlanProperties};
use futures::stream::{Stream, StreamExt, empty, poll_fn, select_all};
use tokio::runtime::Handle;
use tokio::sync::mpsc::{Sender, channel};
use tokio::task::JoinSet;

use super::exec::DeviceExec;
use super::memory::DeviceReservation;
use super::metrics::DeviceMetrics;
use super::plugin::DeviceTask;
use super::stream::{Item, SendableDeviceStream, device_stream};
use super::transfer::{host_stream, on_device};
use super::transitions::to_host::DeviceToHostExec;
use super::upload::{Target, typed_as, upload, upload_rows, with_types};

impl DeviceTask<'_> {
    /// Starts the partition of the same number of child number `child`, and returns its batches, on [`device`](Self::device).
    ///
    /// # Errors
    /// Returns an error if there is no such child, and the child's error if it cannot be started.
    pub fn input(&self, child: usize) -> Result<SendableDeviceStream> {
        self.input_partition(child, self.partition)
    }

    /// As [`input`](Self::input), for any partition of the child: a join reads all partitions of the side that it builds a table of, say.
    ///
    /// A child whose description fits the device runs there and moves nothing; that is so of all children once
    /// [`DeviceRule`](super::DeviceRule) has run. Without the rule the results are the same: the batches of a child on
    /// another device are moved, and those of a child on the host are uploaded, and the operator's metrics count it.
    ///
    /// # Errors
    /// As [`input`](Self::input).
    pub fn input_partition(&self, child: usize, partition: usize) -> Result<SendableDeviceStream> {
        let (child, device, context) = (self.child(child)?, self.device, self.context);
        let fits = |node: &&DeviceExec| node.device().fits(device) && !node.runs_on_host(context);
        if let Some(node) = device_node(child).filter(fits) {
            return node.execute_on(partition, device, context, Some(&self.target));
        }
        let name = format!("input {}", child.name());
        let memory = DeviceReservation::new(context, &name, partition, device);
        let target = self.target.clone();
        execute_child_apart(child, partition, device, context, target, memory)
    }

    pub(super) fn child(&self, child: usize) -> Result<&Arc<dyn ExecutionPlan>> {
        let of = self.node.children().get(child).copied();
        of.ok_or_else(|| DataFusionError::Internal(format!("{} has no child {child}", self.name)))
    }
}

/// Starts a partition of a child of an operator on its own device, which may be another one of its type if the partition is not the operator's,
/// and returns its batches on `device`.
pub(super) fn execute_child_apart(
    child: &Arc<dyn ExecutionPlan>,
    partition: usize,
    device: &Device,
    context: &Arc<TaskContext>,
    target: Target,
    memory: DeviceReservation,
) -> Result<SendableDeviceStream> {
    match device_node(child) {
        Some(node) if !node.runs_on_host(context) => {
            let own = node.open(partition, context)?;
            let stream = node.execute_on(partition, &own, context, Some(&target))?;
            match own == *device {
                true => Ok(stream),
                false => Ok(on_device(stream, device, memory)),
            }
        }
        _ => upload(child, partition, device, context, target, memory),
    }
}

/// The device operator that a child is, or that it downloads.
fn device_node(child: &Arc<dyn ExecutionPlan>) -> Option<&DeviceExec> {
    let down = child.downcast_ref::<DeviceToHostExec>();
    DeviceExec::of(down.map_or(child, DeviceToHostExec::input))
}

/// Starts all partitions of a plan, each on a task of its own of the current Tokio runtime, and returns their batches, on
/// `device`, in the order in which they are ready. The batches of one partition keep their order.
///
/// Each task is one batch ahead of the reader: it asks its partition for the next batch once the reader has taken the one before, so
/// that a batch that waits to be taken is one that its node has reserved. Dropping the stream aborts the tasks. If the runtime ends before them,
/// the stream ends with [`Error::Cancelled`], and never as if the plan had ended; a task that panics ends it with
/// [`Error::Panic`].
///
/// With a target, rows of the host go up as it says, and the batches have the types that those of all partitions have on the device, or else those of the
/// target. Without one, they have the plan's.
pub(super) fn merged(
    plan: &Arc<dyn ExecutionPlan>,
    device: &Device,
    context: &Arc<TaskContext>,
    target: Option<Target>,
) -> Result<SendableDeviceStream> {
    let runtime = Handle::try_current()
        .map_err(|e| DataFusionError::Execution(format!("a plan needs a Tokio runtime: {e}")))?;
    let partitions = plan.output_partitioning().partition_count();
    let device_type = device.id().device_type;
    let memory = |partition| DeviceReservation::new(context, plan.name(), partition, device);
    let strict = target.is_none();
    let target = target.unwrap_or_else(|| Target::of_task(context));
    let start = |i| execute_child_apart(plan, i, device, context, target.clone(), memory(i));
    let mut streams: Vec<_> = (0..partitions).map(start).collect::<Result<_>>()?;
    let typed = |stream: &SendableDeviceStream| typed_as(&plan.schema(), &stream.schema());
    let of_all = streams.first().map(typed).filter(|_| !strict);
    let of_all = of_all.filter(|schema| streams.iter().all(|stream| typed(stream) == *schema));
    let schema = of_all.unwrap_or_else(|| with_types(&plan.schema(), |_, own| (target.types)(own)));
    for (i, stream) in streams.iter_mut().enumerate() {
        if typed(stream) != schema {
            // arrow-rs casts them, on the host.
            let own =
                std::mem::replace(stream, device_stream(empty(), schema.clone(), device_type));
            let none = DeviceMetrics::new(&<_>::default(), i);
            let rows = host_stream(own, device, plan.schema(), none, memory(i), usize::MAX);
            *stream = upload_rows(rows, plan.schema(), device, target.clone(), memory(i))?;
        }
    }
    let tasks = streams.into_iter().map(|stream| on_task(stream, &runtime));
    Ok(device_stream(select_all(tasks), schema, device_type))
}

/// A partition's batches, from a task that runs it.
fn on_task(
    stream: SendableDeviceStream,
    runtime: &Handle,
) -> impl Stream<Item = Item> + Send + Unpin + use<> {
    let (sender, mut batches) = channel(1);
    let mut task = JoinSet::new();
    task.spawn_on(run(stream, sender, runtime.clone()), runtime);
    poll_fn(move |cx| {
        // What went wrong with the task does not wait for the batches before.
        let running = match task.poll_join_next(cx) {
            Poll::Pending => true,
            Poll::Ready(None | Some(Ok(true))) => false,
            Poll::Ready(Some(Err(e))) if e.is_panic() => {
                let (operation, text) = ("a partition of a plan", text_of(&*e.into_panic()));
                let message = text.into();
                return Poll::Ready(Some(Err(Error::Panic { operation, message })));
            }
            Poll::Ready(_) => {
                let operation = "reading a plan's result after the end of its Tokio runtime, which must outlive it,";
                return Poll::Ready(Some(Err(Error::Cancelled { operation })));
            }
        };
        match ready!(batches.poll_recv(cx)) {
            // The task is about to end.
            None if running => Poll::Pending,
            next => Poll::Ready(next),
        }
    })
}

/// Runs a partition until nobody reads it, or to its end, and returns whether it has come there.
async fn run(mut stream: SendableDeviceStream, sender: Sender<Item>, runtime: Handle) -> bool {
    while let Ok(next) = sender.reserve().await {
        let item = stream.next().await;
        // What the plan returned may be made of some of its input only.
        if !accepts_tasks(&runtime) {
            return false;
        }
        match item {
            Some(item) => next.send(item),
            None => return true,
        }
    }
    false
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

/// What a panic says.
pub(super) fn text_of(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("no text").to_owned()
}
