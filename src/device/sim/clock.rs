//! What the simulation itself costs.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The time that threads have spent in the simulated device's own work.
#[derive(Debug, Default)]
pub(super) struct Clock {
    /// Nanoseconds.
    filling: AtomicU64,
    copying: AtomicU64,
    /// What a test does meanwhile.
    #[cfg(test)]
    pub(super) meanwhile: std::sync::OnceLock<Meanwhile>,
}

#[cfg(test)]
pub(super) struct Meanwhile(pub(super) Box<dyn Fn() + Send + Sync>);

#[cfg(test)]
impl std::fmt::Debug for Meanwhile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Meanwhile")
    }
}

impl Clock {
    /// Runs work that fills fresh or freed memory.
    pub(super) fn filling<T>(&self, work: impl FnOnce() -> T) -> T {
        self.timed(&self.filling, work)
    }

    /// Runs queued copies.
    pub(super) fn copying<T>(&self, work: impl FnOnce() -> T) -> T {
        self.timed(&self.copying, work)
    }

    pub(super) fn fill_time(&self) -> Duration {
        Duration::from_nanos(self.filling.load(Ordering::Relaxed))
    }

    pub(super) fn copy_time(&self) -> Duration {
        Duration::from_nanos(self.copying.load(Ordering::Relaxed))
    }

    fn timed<T>(&self, total: &AtomicU64, work: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let result = work();
        #[cfg(test)]
        if let Some(Meanwhile(meanwhile)) = self.meanwhile.get() {
            meanwhile();
        }
        let took = u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        total.fetch_add(took, Ordering::Relaxed);
        result
    }
}
