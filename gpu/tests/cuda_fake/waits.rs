//! How threads wait.

use crate::fake::{Group, LAZY, MODES};
use crate::rig::Rig;
use crate::support::{assert_same_batch, wide_batch};
use crate::vendor::{Config, MEMORIES};

/// All events of such a device say that whoever waits for them sleeps, and those of another do not.
#[test]
fn waits_that_sleep() {
    for mode in MODES {
        for memory in MEMORIES {
            for blocking in [false, true] {
                let group = Group::open(1, mode);
                let config = Config::new(group.ordinal()).with_memory(memory);
                let rig = Rig::of(group, &config.with_blocking_waits(blocking));
                let batch = wide_batch(8, 300);
                let up = rig.upload(&batch).unwrap();
                assert_same_batch(&batch, &up.to_host().unwrap(), "a download");
                let event = rig.default_queue().record().unwrap().unwrap();
                event.wait().unwrap();
                let events = group.live("events");
                assert!(events > 0);
                let sleeping = if blocking { events } else { 0 };
                assert_eq!(group.live("blocking events"), sleeping, "{memory:?}");
                // All work of the context, which a call waits for that spins, has ended by then.
                let queue = rig.new_queue().unwrap();
                let other = rig.upload_on(&batch, &queue).unwrap();
                let before = ["cuCtxRecordEvent", "cuEventSynchronize"].map(|c| group.calls(c));
                rig.synchronize().unwrap();
                let after = ["cuCtxRecordEvent", "cuEventSynchronize"].map(|c| group.calls(c));
                let slept = u64::from(blocking);
                assert_eq!([after[0] - before[0], after[1] - before[1]], [slept; 2]);
                assert!(other.is_ready().unwrap());
                drop((up, event, other, queue));
                rig.end();
            }
        }
    }
}

/// An error of the wait is that of the call which follows.
#[test]
fn a_wait_that_fails() {
    let group = Group::open(1, LAZY);
    let config = Config::new(group.ordinal()).with_blocking_waits(true);
    let rig = Rig::of(group, &config);
    group.fail("cuCtxSynchronize", 1, 999);
    assert!(rig.synchronize().is_err());
    assert_eq!(group.clear(), 1);
    // Without an event the call waits by itself.
    group.fail("cuEventCreate", 1, 2);
    rig.synchronize().unwrap();
    group.clear();
    rig.end();
}
