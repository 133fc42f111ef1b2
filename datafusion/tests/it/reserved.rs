//! What an operator's polls allocate, and what it keeps, in the session's memory pool.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use arrow_device::async_stream::DeviceRecordBatchStream;
use arrow_device::{ArrowDeviceType, Device, DeviceBufferMut, DeviceRecordBatch};
use arrow_device_datafusion::{
    DeviceExec, DevicePlan, DeviceReservation, DeviceSpec, SendableDeviceStream, execute_child,
};
use datafusion::arrow::datatypes::SchemaRef;
use datafusion::common::{DataFusionError, Result};
use datafusion::execution::TaskContext;
use datafusion::execution::memory_pool::MemoryPool;
use datafusion::physical_plan::{PlanProperties, collect};
use futures::{Stream, StreamExt};

use crate::kit::*;
use crate::memory::{assert_refused, limited, recorded};

/// What a poll of a test's operator does: `Pending` is polled again.
type Step = Poll<Option<arrow_device::Result<DeviceRecordBatch>>>;

/// The operator's state: its input, its device and its reservation.
struct State {
    input: SendableDeviceStream,
    device: Device,
    memory: DeviceReservation,
    kept: Vec<DeviceBufferMut>,
    batches: Vec<DeviceRecordBatch>,
    polls: usize,
}

impl State {
    fn allocated(&self, bytes: usize) -> DeviceBufferMut {
        DeviceBufferMut::allocate(&self.device.default_queue(), bytes).unwrap()
    }

    /// A batch of 128 bytes.
    fn made(&self) -> Step {
        Poll::Ready(Some(self.device.upload(&numbers(0, 16))))
    }
}

type Steps = fn(&mut State, &mut Context<'_>) -> Step;

/// An operator of which a test says what its polls do.
#[derive(Clone)]
struct StepExec {
    child: Plan,
    device: DeviceSpec,
    steps: Steps,
}

impl fmt::Debug for StepExec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StepExec")
    }
}

impl DevicePlan for StepExec {
    fn name(&self) -> &str {
        "StepExec"
    }

    fn device(&self) -> &DeviceSpec {
        &self.device
    }

    fn properties(&self) -> &Arc<PlanProperties> {
        self.child.properties()
    }

    fn children(&self) -> Vec<&Plan> {
        vec![&self.child]
    }

    fn with_children(&self, mut children: Vec<Plan>) -> Result<Arc<dyn DevicePlan>> {
        let child = children.remove(0);
        Ok(Arc::new(Self {
            child,
            ..self.clone()
        }))
    }

    fn execute_device(
        &self,
        partition: usize,
        device: &Device,
        context: Arc<TaskContext>,
    ) -> Result<SendableDeviceStream> {
        let state = State {
            memory: DeviceReservation::new(&context, "StepExec", partition, device),
            input: execute_child(&self.child, partition, device, context)?,
            device: device.clone(),
            kept: Vec::new(),
            batches: Vec::new(),
            polls: 0,
        };
        Ok(Box::pin(Stepping(state, self.steps)))
    }
}

struct Stepping(State, Steps);

impl Stream for Stepping {
    type Item = arrow_device::Result<DeviceRecordBatch>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Step {
        let Self(state, steps) = &mut *self;
        state.polls += 1;
        let step = steps(state, cx);
        if step.is_pending() {
            cx.waker().wake_by_ref();
        }
        step
    }
}

impl DeviceRecordBatchStream for Stepping {
    type Batch = DeviceRecordBatch;

    fn schema(&self) -> SchemaRef {
        self.0.input.schema()
    }

    fn device_type(&self) -> ArrowDeviceType {
        self.0.device.id().device_type
    }
}

/// The operator over a table of five batches of 128 bytes, with a download.
async fn stepping(sim: &Sim, steps: Steps) -> Plan {
    let batches: Vec<_> = (0..5).map(|i| numbers(i * 16, 16)).collect();
    stepping_over(scan(device_table(sim, &[batches])).await, sim, steps)
}

fn stepping_over(child: Plan, sim: &Sim, steps: Steps) -> Plan {
    let device = sim.into();
    let node = StepExec {
        child,
        device,
        steps,
    };
    with_transitions(Arc::new(DeviceExec::new(Arc::new(node))))
}

/// What the operator may have beside the two batches that are on their way to the host.
const DOWN: usize = 2 * 128;
const SCRATCH: usize = 64 << 10;

/// A filter that finds nothing in many batches.
#[tokio::test]
async fn scratch_that_is_freed_is_not_reserved() {
    let all_at_once: Steps = |state, _| match state.polls {
        1 => {
            (0..100).for_each(|_| drop(state.allocated(SCRATCH)));
            state.made()
        }
        _ => Poll::Ready(None),
    };
    let over_many_polls: Steps = |state, _| match state.polls {
        ..=100 => {
            // From one poll to the next one piece is held.
            state.kept.clear();
            state.kept.push(state.allocated(SCRATCH));
            Poll::Pending
        }
        101 => {
            state.kept.clear();
            state.made()
        }
        _ => Poll::Ready(None),
    };
    for (steps, peak) in [(all_at_once, 128), (over_many_polls, SCRATCH)] {
        let sim = Sim::new();
        let plan = stepping(&sim, steps).await;
        let (context, pool) = limited(peak + DOWN);
        let found = collect(plan.clone(), context).await.unwrap();
        assert_eq!(numbers_of(&found), (0..16).collect::<Vec<i64>>());
        assert_eq!(metric(&plan, "StepExec", "peak_mem_used"), Some(peak));
        assert_eq!(pool.reserved(), 0);
    }
}

/// What the operator frees is its input, which others have reserved, and not its own memory.
#[tokio::test]
async fn a_freed_input_makes_no_room() {
    let steps: Steps = |state, cx| match state.input.poll_next_unpin(cx) {
        Poll::Ready(Some(batch)) => {
            let input = batch?;
            state.kept.push(state.allocated(SCRATCH));
            drop(input);
            Poll::Pending
        }
        Poll::Ready(None) => Poll::Ready(None),
        Poll::Pending => Poll::Pending,
    };
    let sim = Sim::new();
    let child = scan(host_table(&[(0..5)
        .map(|i| numbers(i * 8192, 8192))
        .collect()]))
    .await;
    let plan = stepping_over(child, &sim, steps);
    let (context, pool) = recorded();
    assert_eq!(collect(plan.clone(), context).await.unwrap().len(), 0);
    assert_eq!(
        metric(&plan, "StepExec", "peak_mem_used"),
        Some(5 * SCRATCH)
    );
    assert_eq!(pool.reserved(), 0);
}

#[tokio::test]
async fn memory_that_stays_is_refused() {
    let all_at_once: Steps = |state, _| {
        (0..100).for_each(|_| state.kept.push(state.allocated(SCRATCH)));
        state.made()
    };
    let over_many_polls: Steps = |state, _| {
        state.kept.push(state.allocated(SCRATCH));
        assert!(state.polls <= 10, "not refused");
        Poll::Pending
    };
    for steps in [all_at_once, over_many_polls] {
        let sim = Sim::new();
        let plan = stepping(&sim, steps).await;
        let (context, pool) = limited(10 * SCRATCH - 1);
        let device = sim.id().to_string();
        let parts = ["StepExec, partition 0", &device];
        assert_refused(collect(plan.clone(), context).await, &parts);
        assert_eq!(pool.reserved(), 0);
        drop(plan);
        sim.assert_done();
    }
}

/// A join that reserves its table and its input before it has them.
const JOIN: Steps = |state, cx| {
    while state.kept.is_empty() {
        match std::task::ready!(state.input.poll_next_unpin(cx)) {
            Some(batch) => {
                state.memory.grow(128).map_err(ours_of)?;
                state.batches.push(batch?);
            }
            None => {
                let table = state.memory.allocate(SCRATCH, || state.allocated(SCRATCH));
                state.kept.push(table.map_err(ours_of)?);
                return state.made();
            }
        }
    }
    Poll::Ready(None)
};

fn ours_of(e: DataFusionError) -> arrow_device::Error {
    arrow_device::Error::from(datafusion::arrow::error::ArrowError::ExternalError(
        Box::new(e),
    ))
}

#[tokio::test]
async fn what_an_operator_reserves_is_reserved_once() {
    const ALL: usize = SCRATCH + 5 * 128 + 128;
    let sim = Sim::new();
    let plan = stepping(&sim, JOIN).await;
    let (context, pool) = recorded();
    assert_eq!(collect(plan.clone(), context).await.unwrap().len(), 1);
    let peaks = pool.peaks();
    // The inputs that it keeps make no room for the batch that it makes.
    assert!(
        peaks.contains(&("StepExec[0]".to_string(), ALL)),
        "{peaks:?}"
    );

    let (context, pool) = limited(ALL + DOWN);
    assert_eq!(collect(plan.clone(), context).await.unwrap().len(), 1);
    assert_eq!(pool.reserved(), 0);
    let before = sim.stats();
    let (context, pool) = limited(SCRATCH + 5 * 128 - 1);
    assert_refused(collect(plan.clone(), context).await, &["65536 bytes"]);
    assert_eq!(pool.reserved(), 0);
    assert_eq!(
        sim.stats().since(&before).allocations,
        0,
        "before it allocates"
    );
}
