//! What operators reserve for what they keep, limits of a device's memory, and queries that take turns because of them.

use std::task::Wake;

use arrow_device_datafusion::DeviceMemory;
use datafusion::execution::memory_pool::MemoryConsumer;

use crate::kit::*;
use crate::memory::{assert_refused, limited, recorded};
use crate::operator::{State, Step, again, from_datafusion, operator};

type Steps = fn(&mut State, &mut Context<'_>) -> Step;

/// A batch of 128 bytes.
fn made(state: &State) -> Step {
    Poll::Ready(Some(state.queue.device().upload(&numbers(0, 16))))
}

/// The operator over a table of five batches of 128 bytes, with a download.
async fn stepping(sim: &Sim, steps: Steps) -> Plan {
    let child = scan(device_table(sim, &[batches(0, 5)])).await;
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
    // From one poll to the next one piece is held.
    let over_many_polls: Steps = |state, cx| {
        state.kept.clear();
        match state.polls {
            ..=100 => {
                state.kept.push(state.allocated(SCRATCH));
                again(cx)
            }
            101 => made(state),
            _ => Poll::Ready(None),
        }
    };
    for steps in [all_at_once, over_many_polls] {
        let plan = stepping(&Sim::new(), steps).await;
        let (context, pool) = limited(128 + DOWN);
        let found = collect(plan.clone(), context).await.unwrap();
        assert_eq!(numbers_of(&found), multiples(16, 1));
        assert_eq!(metric(&plan, "StepExec", "peak_mem_used"), Some(128));
        assert_eq!(pool.reserved(), 0);
    }
}

/// A join that reserves its table and its input before it has them.
#[tokio::test]
async fn what_an_operator_reserves_is_reserved_once() {
    const ALL: usize = SCRATCH + 5 * 128 + 128;
    let join: Steps = |state, cx| {
        while state.kept.is_empty() {
            match ready!(state.next(cx)) {
                Some(batch) => {
                    state.memory.grow(128).map_err(from_datafusion)?;
                    state.batches.push(batch?);
                }
                None => {
                    state.memory.grow(SCRATCH).map_err(from_datafusion)?;
                    state.kept.push(state.allocated(SCRATCH));
                    return made(state);
                }
            }
        }
        Poll::Ready(None)
    };
    let sim = Sim::new();
    let plan = stepping(&sim, join).await;
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

fn reservation(context: &Arc<TaskContext>, partition: usize, device: &Device) -> DeviceReservation {
    DeviceReservation::new(context, "JoinExec", partition, device)
}

/// Nodes that cannot be refused may take a pool beyond its limit: that is no reason to refuse nothing.
#[test]
fn an_operator_reserves_what_it_keeps() {
    let sim = Sim::new();
    let (context, pool) = limited(1000);
    let kept = reservation(&context, 7, &sim);
    kept.grow(600).unwrap();
    let id = sim.id().to_string();
    let parts = ["JoinExec, partition 7", "401 bytes", &id, "JoinExec[7]"];
    assert_refused(kept.grow(401), &parts);
    assert_eq!((kept.size(), pool.reserved()), (600, 600));
    kept.shrink(100);
    assert_eq!(pool.reserved(), 500);
    kept.shrink(501);
    assert_eq!((kept.size(), pool.reserved()), (0, 0));
    kept.grow(1000).unwrap();
    let other = MemoryConsumer::new("other").register(&pool);
    other.grow(1000);
    kept.grow(0).unwrap();
    kept.grow(1).unwrap_err();
    kept.shrink(500);
    kept.grow(0).unwrap();
    assert_eq!((kept.size(), pool.reserved()), (500, 1500));
    drop((kept, other));
    assert_eq!(pool.reserved(), 0);
}

/// More than is left is all that is left, also while another thread gives back.
#[test]
fn two_threads_give_back() {
    let sim = Sim::new();
    // This pool has no lock that would have them take turns.
    let (context, pool) = limited(1000);
    let kept = reservation(&context, 0, &sim);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                for _ in 0..100_000 {
                    kept.grow(1).unwrap();
                    kept.shrink(2);
                }
            });
        }
    });
    kept.shrink(usize::MAX);
    assert_eq!((kept.size(), pool.reserved()), (0, 0));
}

/// A stream ends in such a pool, and a device error stays one.
#[tokio::test]
async fn a_pool_beyond_its_limit_refuses_only_more() {
    let sim = Sim::new();
    for fault in [false, true] {
        let (context, pool) = limited(1000);
        let other = MemoryConsumer::new("other").register(&pool);
        let plan = scan(host_table(&[batches(0, 3)])).await;
        let stream = execute_on_device(plan, context, &sim).unwrap();
        let n = if fault { 0 } else { 2 };
        let taken = stream.enumerate().map(|(i, batch)| {
            if i == n {
                other.grow(1000);
                sim.sim
                    .faults()
                    .fail_nth(FaultOp::Allocate, u64::from(fault));
            }
            batch
        });
        let found: Vec<_> = taken.collect().await;
        let ok = found.iter().filter(|batch| batch.is_ok()).count();
        assert_eq!(found.len() - ok, usize::from(fault), "{found:?}");
        drop((found, other));
        sim.sim.faults().clear();
        assert_eq!(pool.reserved(), 0);
    }
}

/// No query is overtaken.
const EVER: u64 = 3_600_000;

fn taking_turns(memory: &str, idle_ms: u64) -> Arc<TaskContext> {
    task(config(|options| {
        (options.memory, options.idle_ms) = (memory.parse().unwrap(), idle_ms);
    }))
}

#[test]
fn a_limit_is_of_all_devices_or_of_one() {
    let (a, b) = (Sim::new(), Sim::new());
    for (text, of_a, of_b) in [
        ("100".to_owned(), true, true),
        (format!("{}=100", a.id()), true, false),
        (format!(" {}=1000, sim=100 ", a.id()), false, true),
        (format!("cuda=1,{}=100", b.id()), false, true),
    ] {
        let limit: DeviceMemory = text.parse().unwrap();
        let shown = limit.to_string();
        assert_eq!(shown, text.replace(' ', ""));
        assert_eq!(shown.parse::<DeviceMemory>().unwrap(), limit);
        let context = taking_turns(&text, EVER);
        for (sim, limited) in [(&a, of_a), (&b, of_b)] {
            let kept = reservation(&context, 0, sim);
            kept.grow(100).unwrap();
            // What another partition has, this one has not.
            let other = reservation(&context, 1, sim);
            assert_eq!(other.grow(1).is_err(), limited, "{text}");
        }
    }
    for text in ["many", "cuda=", "no such=1"] {
        assert!(text.parse::<DeviceMemory>().is_err(), "{text}");
    }
}

/// Starts a query of five batches.
async fn started(sim: &Sim, memory: &str, idle_ms: u64) -> SendableRecordBatchStream {
    let plan = double(scan(device_table(sim, &[batches(0, 5)])).await, sim);
    execute_stream(with_transitions(plan), taking_turns(memory, idle_ms)).unwrap()
}

/// One query at a time where the memory has a limit; one that nobody polls is not waited for, since it may wait for this one.
#[tokio::test]
async fn queries_take_turns() {
    let sim = Sim::new();
    let limit = "1000000";
    let mut first = started(&sim, limit, EVER).await;
    first.next().await.unwrap().unwrap();
    let mut second = started(&sim, limit, EVER).await;
    assert!(second.next().now_or_never().is_none());
    // Not where there is no limit, and not for ever.
    assert_eq!(started(&sim, "", EVER).await.count().await, 5);
    let overtakes = started(&sim, limit, 50).await.count();
    assert_eq!(timeout(LONG, overtakes).await.unwrap(), 5);
    assert!(second.next().now_or_never().is_none());
    // It is woken.
    let second = tokio::spawn(second.count());
    tokio::task::yield_now().await;
    assert_eq!(first.count().await, 4);
    assert_eq!(timeout(LONG, second).await.unwrap().unwrap(), 5);
    // One that is dropped has no turn any more.
    let mut first = started(&sim, limit, EVER).await;
    first.next().await.unwrap().unwrap();
    drop(first);
    let second = started(&sim, limit, EVER).await.count();
    assert_eq!(timeout(LONG, second).await.unwrap(), 5);
}

/// Counts, and then may panic.
struct Woken(AtomicUsize, bool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, SeqCst);
        if self.1 {
            std::panic::resume_unwind(Box::new("no report of it"));
        }
    }
}

#[tokio::test]
async fn tasks_that_wait_are_known_once_and_woken_one_by_one() {
    let sim = Sim::new();
    let mut first = started(&sim, "1000000", EVER).await;
    first.next().await.unwrap().unwrap();
    let mut waiting = Vec::new();
    for panics in [true, false] {
        let woken = Arc::new(Woken(AtomicUsize::new(0), panics));
        let waker = Waker::from(woken.clone());
        let mut stream = started(&sim, "1000000", EVER).await;
        for _ in 0..100 {
            let mut cx = Context::from_waker(&waker);
            assert!(stream.poll_next_unpin(&mut cx).is_pending());
        }
        // Here, among those that wait, and at the timer.
        assert_eq!(Arc::strong_count(&woken), 4);
        waiting.push((woken, stream));
    }
    drop(first);
    for (woken, _) in waiting {
        assert_eq!(woken.0.load(SeqCst), 1);
    }
}
