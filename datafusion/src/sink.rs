//! The results of plans as device streams.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

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
use arrow_device::Device;
use arrow_device::DeviceRecordBatch;
use arrow_device::DeviceRecordBatchReader;
use arrow_device::ExportOptions;
use arrow_device::async_stream::{BlockingReader, DeviceRecordBatchStream};
use arrow_device::{ArrowDeviceType, FFI_ArrowDeviceArrayStream};

/// Runs a plan, and gives its result on a device: what is there already stays, what is on the host goes up. Batches of
/// several partitions come as they are ready.
///
/// For the async device stream, give the answer to [`produce`](arrow_device::async_stream::produce). Of a DataFrame it takes
/// `create_physical_plan()` and `task_ctx()`. All partitions are polled by whoever polls the stream; a `RepartitionExec` or
/// `CoalescePartitionsExec` in the plan gives them tasks of their own.
///
/// DataFusion's plans need a Tokio runtime: it must be current here and wherever the stream is polled.
///
/// # Errors
/// [`DataFusionError::Execution`] outside a Tokio runtime; what the plan says. Later errors come in the stream.
pub fn execute_on_device(
    plan: Arc<dyn ExecutionPlan>,
    context: Arc<TaskContext>,
    device: &Device,
) -> Result<SendableDeviceStream> {
    runtime()?;
    let config = ConfigOptions::default();
    let plan = on_device(DeviceTransitions.optimize(plan, &config)?, device);
    let partitions = plan.output_partitioning().partition_count();
    let start = |partition| execute_child(&plan, partition, context.clone());
    let streams: Vec<_> = (0..partitions).map(start).collect::<Result<_>>()?;
    Ok(Box::pin(Merged {
        schema: plan.schema(),
        device_type: device.id().device_type,
        streams,
        next: 0,
    }))
}

fn runtime() -> Result<Handle> {
    Handle::try_current()
        .map_err(|e| DataFusionError::Execution(format!("a plan runs in a Tokio runtime: {e}")))
}

/// Streams of one schema as one.
struct Merged {
    schema: SchemaRef,
    device_type: ArrowDeviceType,
    streams: Vec<SendableDeviceStream>,
    /// Who is asked first.
    next: usize,
}

impl Stream for Merged {
    type Item = arrow_device::Result<DeviceRecordBatch>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let Self { streams, next, .. } = &mut *self;
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
/// that is current here, and must outlive the stream: a runtime that has ended drops the plan's tasks, and the result may
/// be cut short. On a thread of a multi-threaded runtime the read blocks that thread; on the only thread of a runtime it is an
/// error.
///
/// # Errors
/// [`DataFusionError::Execution`] outside a Tokio runtime; what the plan says.
pub fn export_plan(
    plan: Arc<dyn ExecutionPlan>,
    context: Arc<TaskContext>,
    device: &Device,
    options: ExportOptions,
) -> Result<FFI_ArrowDeviceArrayStream> {
    let runtime = runtime()?;
    let (schema, device_type) = (plan.schema(), device.id().device_type);
    let reader = execute_on_device(plan, context, device)?.into_blocking_reader();
    let driven = Driven {
        reader: Some(reader),
        schema,
        device_type,
        runtime,
    };
    FFI_ArrowDeviceArrayStream::new(driven, options).map_err(to_datafusion)
}

/// A plan's result, read and dropped within its runtime.
struct Driven {
    /// Present until dropped.
    reader: Option<BlockingReader<SendableDeviceStream>>,
    schema: SchemaRef,
    device_type: ArrowDeviceType,
    runtime: Handle,
}

impl Iterator for Driven {
    type Item = arrow_device::Result<DeviceRecordBatch>;

    fn next(&mut self) -> Option<Self::Item> {
        let reader = self.reader.as_mut()?;
        let _within = self.runtime.enter();
        // On a worker of the runtime: others take over its tasks, and no budget of the task's runs out.
        tokio::task::block_in_place(|| reader.next())
    }
}

impl Drop for Driven {
    fn drop(&mut self) {
        let _within = self.runtime.enter();
        self.reader = None;
    }
}

impl DeviceRecordBatchReader for Driven {
    fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }

    fn device_type(&self) -> ArrowDeviceType {
        self.device_type
    }
}
