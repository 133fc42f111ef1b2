//! Results of plans as device streams, and as readers ([`BlockingReader`]).

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;

use arrow_device::{
    ArrowDeviceType, Device, DeviceRecordBatch, DeviceRecordBatchReader, Error, ExportOptions,
    FFI_ArrowDeviceArrayStream, Result,
};
use arrow_schema::SchemaRef;
use datafusion_execution::TaskContext;
use datafusion_physical_plan::ExecutionPlan;
use futures::StreamExt;
use futures::executor::{block_on, enter};
use tokio::task::block_in_place;

use super::inputs::merged;
use super::metrics::to_datafusion;
use super::place::with_output_on;
use super::stream::SendableDeviceStream;

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
) -> datafusion_common::Result<SendableDeviceStream> {
    let plan = with_output_on(plan, &device.into())?;
    merged(&plan, device, &context, None)
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
) -> datafusion_common::Result<FFI_ArrowDeviceArrayStream> {
    let reader = BlockingReader::new(execute_on_device(plan, context, device)?);
    FFI_ArrowDeviceArrayStream::new(reader, options).map_err(to_datafusion)
}

/// Reads a stream of device batches, such as the result of [`execute_on_device`](crate::execute_on_device), as a
/// [`DeviceRecordBatchReader`]. Reading a batch blocks the thread until there is one.
///
/// | thread that reads | what happens |
/// | --- | --- |
/// | one of the program's own, or one in `tokio::task::spawn_blocking` | it polls the stream and sleeps between polls |
/// | a worker of a multi-threaded Tokio runtime, or one in its `block_on` | the same, within [`tokio::task::block_in_place`]: other threads take over the worker's tasks, the stream's producer among them |
/// | the thread of a current-thread Tokio runtime, or one in a `LocalSet` | [`Error::InvalidArgument`], and the stream is dropped: no other thread could run the tasks that the batch may depend on; read in `spawn_blocking` instead |
/// | a thread of another executor | the same as for a thread of the program's own; if no other thread can run the stream's producer, the read never returns |
/// | a thread within an executor of the crate `futures` | [`Error::InvalidArgument`], too |
///
/// Tokio reports the third case by a panic, which is caught: a panic hook sees it, and with `panic = "abort"` it ends the
/// process. If the stream's polls need a current Tokio runtime, the reading thread must have one.
///
/// ```
/// use arrow_device::async_stream::DeviceRecordBatchStream;
/// use arrow_device::{DeviceRecordBatch, DeviceRecordBatches, Result};
/// use arrow_device_datafusion::BlockingReader;
/// use tokio::sync::mpsc;
///
/// # #[tokio::main(flavor = "multi_thread", worker_threads = 2)]
/// # async fn main() -> Result<()> {
/// # let batch = arrow_array::RecordBatch::new_empty(std::sync::Arc::new(arrow_schema::Schema::empty()));
/// # let batch = arrow_device::Devices::cpu().upload(&batch)?;
/// let (schema, device_type) = (batch.schema(), batch.device().id().device_type);
/// let (sender, mut receiver) = mpsc::channel::<Result<DeviceRecordBatch>>(4);
/// tokio::spawn(async move { while sender.send(Ok(batch.clone())).await.is_ok() {} });
///
/// let received = futures::stream::poll_fn(move |cx| receiver.poll_recv(cx));
/// let received = DeviceRecordBatches::from_stream(received, schema, device_type);
/// let reader = BlockingReader::new(Box::pin(received));
/// assert_eq!(reader.take(1000).filter(Result::is_ok).count(), 1000);
/// # Ok(())
/// # }
/// ```
pub struct BlockingReader {
    /// `None` after its end or an error.
    stream: Option<SendableDeviceStream>,
    schema: SchemaRef,
    device_type: ArrowDeviceType,
}

impl BlockingReader {
    /// Makes a reader of a stream.
    pub fn new(stream: SendableDeviceStream) -> Self {
        Self {
            schema: stream.schema(),
            device_type: stream.device_type(),
            stream: Some(stream),
        }
    }
}

impl Iterator for BlockingReader {
    type Item = Result<DeviceRecordBatch>;

    fn next(&mut self) -> Option<Self::Item> {
        let stream = self.stream.as_mut()?;
        let next = waiting(|| block_on(stream.next()));
        let next = next.unwrap_or_else(|e| Some(Err(e)));
        if !matches!(next, Some(Ok(_))) {
            self.stream = None;
        }
        next
    }
}

impl DeviceRecordBatchReader for BlockingReader {
    fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }

    fn device_type(&self) -> ArrowDeviceType {
        self.device_type
    }
}

impl fmt::Debug for BlockingReader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BlockingReader")
            .field("schema", &self.schema)
            .field("device_type", &self.device_type)
            .finish_non_exhaustive()
    }
}

/// Runs `wait`, which blocks this thread, where that holds up no task of a Tokio runtime.
///
/// On a worker thread two things would otherwise never happen: the task that this worker woke last would not run, since no
/// other worker may run it; and a source that is pending because the task's cooperative budget is spent would not be woken,
/// since that happens when the task yields.
fn waiting<T>(wait: impl FnOnce() -> T) -> Result<T> {
    let refused = || {
        Error::InvalidArgument(
            "a blocking reader was read on a thread that must run other tasks meanwhile, of a Tokio runtime with no other thread or of an \
             executor of futures: read it in tokio::task::spawn_blocking, or on a multi-threaded runtime"
                .into(),
        )
    };
    drop(enter().map_err(|_| refused())?);
    let mut wait = Some(wait);
    let run = || block_in_place(|| wait.take().map(|wait| wait()));
    // Unwind safety: a panic in `wait` is resumed, and nothing that it touched is used here.
    match catch_unwind(AssertUnwindSafe(run)) {
        Ok(Some(result)) => Ok(result),
        Err(panic) if wait.is_none() => resume_unwind(panic),
        // Tokio has not run `wait`.
        _ => Err(refused()),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::task::Poll;

    use arrow_device::DeviceRecordBatches;
    use arrow_schema::Schema;
    use futures::stream::{self, Stream};

    use super::*;

    fn reader(
        stream: impl Stream<Item = Result<DeviceRecordBatch>> + Send + 'static,
    ) -> BlockingReader {
        let schema = Arc::new(Schema::empty());
        let stream = DeviceRecordBatches::from_stream(stream, schema, ArrowDeviceType::CPU);
        BlockingReader::new(Box::pin(stream))
    }

    #[test]
    fn a_stream_is_not_asked_after_its_end_or_an_error() {
        for fails in [false, true] {
            let mut polls = 0;
            let stream = stream::poll_fn(move |_| {
                polls += 1;
                assert_eq!(polls, 1, "asked again");
                Poll::Ready(fails.then(|| Err(Error::InvalidArgument("no".into()))))
            });
            let mut reader = reader(stream);
            assert_eq!(reader.next().is_some(), fails);
            assert!(reader.next().is_none());
        }
    }

    #[test]
    fn a_reader_is_refused_within_an_executor_of_futures() {
        let mut reader = reader(stream::pending());
        let refused = block_on(async { reader.next() });
        assert!(matches!(refused, Some(Err(Error::InvalidArgument(_)))));
        assert!(reader.next().is_none());
    }

    /// A panic of the stream is the reader's own, on a worker as elsewhere.
    #[test]
    fn a_panic_of_the_stream_on_a_worker_is_the_readers() {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .build()
            .unwrap();
        let read = async {
            reader(stream::poll_fn(|_| panic!("inside the stream"))).next();
        };
        let panic = runtime.block_on(async { tokio::spawn(read).await.unwrap_err() });
        assert_eq!(
            *panic.into_panic().downcast::<&str>().unwrap(),
            "inside the stream"
        );
    }
}
