//! What is live on a device, and which mistakes its users have made.

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
    /// Host allocations that were not freed.
    pub live_host_allocations: usize,
    /// Their bytes.
    pub live_host_bytes: usize,
    /// Events that were not released.
    pub live_events: usize,
    /// Queued operations that have not completed.
    pub pending_operations: usize,
    /// Mistakes: double frees and releases, dead events used, invalid accesses, host memory freed
    /// under a copy.
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
    /// Returns what is live and which mistakes were made so far. In a child of the process (`fork`), which has nothing of the
    /// device, only the error says so.
    pub fn report(&self) -> SimReport {
        let core = &self.core;
        if let Err(forked) = core.check_process() {
            return SimReport {
                error: Some(forked),
                ..SimReport::default()
            };
        }
        let state = core.state();
        let (live_allocations, live_bytes) = state.memory.owned_total();
        SimReport {
            live_allocations,
            live_bytes,
            live_host_allocations: state.host.len(),
            live_host_bytes: state.host.values().map(|memory| memory.bytes()).sum(),
            live_events: state.events.len(),
            pending_operations: state.queues.values().map(|q| q.pending.len()).sum(),
            violations: state.violations.clone(),
            error: state.error.clone(),
        }
    }

    /// Panics unless the [report](Self::report) is clean. For tests.
    #[track_caller]
    pub fn assert_clean(&self) {
        let report = self.report();
        assert!(report.is_clean(), "{self:?} is not clean: {report:#?}");
    }
}
