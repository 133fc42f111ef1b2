//! What an operator allocates for its batches, and what it keeps, in the session's memory pool.

use std::task::{Context, Poll, ready};

use arrow_device::Error;
use datafusion::arrow::error::ArrowError;
use datafusion::common::DataFusionError;
use datafusion::physical_plan::collect;

use crate::kit::*;
use crate::memory::{assert_refused, limited, recorded};
use crate::operator::{State, Step, again, operator};

type Steps = fn(&mut State, &mut Context<'_>) -> Step;

/// A batch of 128 bytes.
fn made(state: &State) -> Step {
    Poll::Ready(Some(state.queue.device().upload(&numbers(0, 16))))
}

/// The operator over a table of five batches of 128 bytes, with a download.
async fn stepping(sim: &Sim, steps: Steps) -> Plan {
    let child = scan(device_table(sim, &[batches(0, 5)])).await;
    stepping_over(child, sim, steps)
}

fn stepping_over(child: Plan, sim: &Sim, steps: Steps) -> Plan {
    with_transitions(operator("StepExec", vec![child], sim, steps))
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
            made(state)
        }
        _ => Poll::Ready(None),
    };
    let over_many_polls: Steps = |state, cx| match state.polls {
        ..=100 => {
            // From one poll to the next one piece is held.
            state.kept.clear();
            state.kept.push(state.allocated(SCRATCH));
            again(cx)
        }
        101 => {
            state.kept.clear();
            made(state)
        }
        _ => Poll::Ready(None),
    };
    for steps in [all_at_once, over_many_polls] {
        let sim = Sim::new();
        let plan = stepping(&sim, steps).await;
        let (context, pool) = limited(128 + DOWN);
        let found = collect(plan.clone(), context).await.unwrap();
        assert_eq!(numbers_of(&found), (0..16).collect::<Vec<i64>>());
        assert_eq!(metric(&plan, "StepExec", "peak_mem_used"), Some(128));
        assert_eq!(pool.reserved(), 0);
    }
}

/// A join that reserves its table and its input before it has them.
const JOIN: Steps = |state, cx| {
    while state.kept.is_empty() {
        match ready!(state.next(cx)) {
            Some(batch) => {
                state.memory.grow(128).map_err(ours_of)?;
                state.batches.push(batch?);
            }
            None => {
                state.memory.grow(SCRATCH).map_err(ours_of)?;
                state.kept.push(state.allocated(SCRATCH));
                return made(state);
            }
        }
    }
    Poll::Ready(None)
};

fn ours_of(e: DataFusionError) -> Error {
    Error::from(ArrowError::ExternalError(Box::new(e)))
}

#[tokio::test]
async fn what_an_operator_reserves_is_reserved_once() {
    const ALL: usize = SCRATCH + 5 * 128 + 128;
    let sim = Sim::new();
    let plan = stepping(&sim, JOIN).await;
    let (context, pool) = recorded();
    assert_eq!(collect(plan.clone(), context).await.unwrap().len(), 1);
    // The inputs that it keeps make no room for the batch that it makes.
    assert_eq!(pool.peaks()["StepExec[0]"], ALL);

    let (context, pool) = limited(ALL + DOWN);
    assert_eq!(collect(plan.clone(), context).await.unwrap().len(), 1);
    assert_eq!(pool.reserved(), 0);
    let before = sim.stats();
    let (context, pool) = limited(SCRATCH + 5 * 128 - 1);
    assert_refused(collect(plan.clone(), context).await, &["65536 bytes"]);
    assert_eq!(pool.reserved(), 0);
    let made = sim.stats().since(&before).allocations;
    assert_eq!(made, 0, "before it allocates");
}
