//! What is live on a device, and which mistakes its users have made.

use std::time::Duration;

use super::SimDevice;
use crate::error::Error;

/// The state of a [`SimDevice`], from [`SimDevice::report`].
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct SimReport {
    /// Device allocations that were not freed.
    pub live_allocations: usize,
    /// Their bytes, as requested.
    pub live_bytes: usize,
    /// Device allocations whose free waits in a queue.
    pub pending_frees: usize,
    /// Bytes of device memory in quarantine, red zones included.
    pub quarantined_bytes: usize,
    /// Host allocations that were not freed.
    pub live_host_allocations: usize,
    /// Their bytes.
    pub live_host_bytes: usize,
    /// Events that were not released.
    pub live_events: usize,
    /// Queued operations that have not completed.
    pub pending_operations: usize,
    /// The time that threads have spent filling fresh and freed memory so far
    /// ([`SimConfig::with_fill`](super::SimConfig::with_fill)), first use of the memory included. Host memory is filled
    /// whatever that says.
    pub fill_time: Duration,
    /// The time that threads have spent running queued copies so far, on the device's worker in
    /// [`SimMode::Async`](super::SimMode::Async).
    pub copy_time: Duration,
    /// Mistakes: double frees and releases, dead events used, invalid accesses, damaged
    /// red zones, host memory freed under a copy.
    pub violations: Vec<String>,
    /// The error that ended the device, if it has failed.
    pub error: Option<Error>,
}

impl SimReport {
    /// Whether nothing is live and there were no mistakes.
    pub fn is_clean(&self) -> bool {
        self.live_allocations == 0
            && self.live_host_allocations == 0
            && self.live_events == 0
            && self.violations.is_empty()
    }
}

impl SimDevice {
    /// Returns what is live and which mistakes were made so far. Checks all red zones. In a child of the process (`fork`), which
    /// has nothing of the device, only the error says so.
    pub fn report(&self) -> SimReport {
        let core = self.core();
        if let Err(forked) = core.check_process() {
            return SimReport {
                error: Some(forked),
                ..SimReport::default()
            };
        }
        self.check();
        let state = core.state();
        let (live_allocations, live_bytes) = state.memory.owned_total();
        SimReport {
            live_allocations,
            live_bytes,
            pending_frees: state.memory.freeing(),
            quarantined_bytes: state.memory.quarantined_bytes(),
            live_host_allocations: state.host.0.len(),
            live_host_bytes: state.host.0.values().map(|block| block.bytes).sum(),
            live_events: state.events.live(),
            pending_operations: state.queues.values().map(|q| q.pending.len()).sum(),
            fill_time: core.clock.fill_time(),
            copy_time: core.clock.copy_time(),
            violations: state.violations.clone(),
            error: state.error.clone(),
        }
    }

    /// Checks the red zones around all allocations. Repairs damage and adds it to the violations of
    /// the [report](Self::report). Does nothing in a child of the process (`fork`), which has none of the memory.
    pub fn check(&self) {
        let core = self.core();
        if core.is_forked() {
            return;
        }
        let mut state = core.state();
        for offset in state.memory.damaged(&core.mapping) {
            let address = core.mapping.device(offset);
            state
                .violations
                .push(format!("red zone damaged around {address:p}"));
        }
    }

    /// Panics unless the [report](Self::report) is clean. For tests.
    #[track_caller]
    pub fn assert_clean(&self) {
        let report = self.report();
        assert!(report.is_clean(), "{self:?} is not clean: {report:#?}");
    }
}
