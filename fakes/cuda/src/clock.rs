//! The engine as a clock: copies and calls that take the time that they are said to take.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What takes how long; 0 is free.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Rates {
    /// Bytes per second to the device.
    pub(crate) up: f64,
    /// Bytes per second from the device.
    pub(crate) down: f64,
    /// Nanoseconds of a call that is not a query.
    pub(crate) call: u64,
    /// Nanoseconds of a query of a pointer or an event.
    pub(crate) query: u64,
}

impl Rates {
    /// Reads rates as the environment variable has them; the error says what is wrong.
    fn parse(text: &str) -> Result<Self, String> {
        let mut rates = Self::default();
        for part in text.split(',').filter(|part| !part.trim().is_empty()) {
            let wrong = || format!("FAKE_CUDA_CLOCK: not a rate: {part:?}");
            let (name, value) = part.split_once('=').ok_or_else(wrong)?;
            let value: f64 = value.trim().parse().map_err(|_| wrong())?;
            if !value.is_finite() || value < 0.0 {
                return Err(wrong());
            }
            match name.trim() {
                "up" => rates.up = value,
                "down" => rates.down = value,
                "call" => rates.call = value as u64,
                "query" => rates.query = value as u64,
                _ => return Err(wrong()),
            }
        }
        Ok(rates)
    }
}

/// Bytes that a piece of work copies each way.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Bytes {
    pub(crate) up: usize,
    pub(crate) down: usize,
}

/// Whether any engine has a clock.
static ACTIVE: AtomicBool = AtomicBool::new(false);

/// Returns the time, if any engine has a clock.
pub(crate) fn now() -> Option<Instant> {
    ACTIVE.load(Ordering::Relaxed).then(Instant::now)
}

/// The clock of an engine.
#[derive(Default)]
pub(crate) struct Clock(Mutex<Hands>);

#[derive(Default)]
struct Hands {
    rates: Rates,
    /// Until when the copies of each direction take that are under way: up, down.
    busy_until: [Option<Instant>; 2],
}

impl Clock {
    /// A clock as the environment has it; the error says what is wrong there.
    pub(crate) fn from_environment() -> Result<Self, String> {
        let clock = Self::default();
        if let Ok(text) = std::env::var("FAKE_CUDA_CLOCK") {
            clock.set(Rates::parse(&text)?);
        }
        Ok(clock)
    }

    fn hands(&self) -> MutexGuard<'_, Hands> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn set(&self, rates: Rates) {
        self.hands().rates = rates;
        if rates != Rates::default() {
            ACTIVE.store(true, Ordering::Relaxed);
        }
    }

    /// Whether copying these bytes takes time.
    pub(crate) fn times(&self, bytes: Bytes) -> bool {
        if now().is_none() {
            return false;
        }
        let rates = self.hands().rates;
        (rates.up > 0.0 && bytes.up > 0) || (rates.down > 0.0 && bytes.down > 0)
    }

    /// Enters copies that can begin at `ready` behind those that are under way in the same
    /// direction. Returns when they end.
    pub(crate) fn copy(&self, bytes: Bytes, ready: Instant) -> Instant {
        let mut hands = self.hands();
        let rates = hands.rates;
        let ways = [(bytes.up, rates.up), (bytes.down, rates.down)];
        let mut end = ready;
        for (until, (bytes, rate)) in hands.busy_until.iter_mut().zip(ways) {
            if bytes == 0 || rate <= 0.0 {
                continue;
            }
            let begin = until.map_or(ready, |until| until.max(ready));
            let time = Duration::try_from_secs_f64(bytes as f64 / rate).unwrap_or(Duration::MAX);
            // Beyond all times, it is free rather than stuck.
            let ends = begin.checked_add(time).unwrap_or(begin);
            *until = Some(ends);
            end = end.max(ends);
        }
        end
    }

    /// Lets a call that began at this time take as long as it is said to take.
    pub(crate) fn spend(&self, begin: Instant, query: bool) {
        let rates = self.hands().rates;
        let nanos = if query { rates.query } else { rates.call };
        /// Below this, a sleep is not precise enough.
        const SPIN: Duration = Duration::from_micros(50);
        let end = Duration::from_nanos(nanos);
        while let Some(left) = end
            .checked_sub(begin.elapsed())
            .filter(|left| !left.is_zero())
        {
            match left.checked_sub(SPIN) {
                Some(sleep) if !sleep.is_zero() => std::thread::sleep(sleep),
                _ => std::hint::spin_loop(),
            }
        }
    }
}

/// Makes the calling thread, which runs the engine's work, wake when it is to, and not up to 50
/// microseconds later, as is the default.
pub(crate) fn wake_in_time() {
    thread_local! {
        static DONE: () = {
            // SAFETY: this call takes numbers only, and concerns this thread only.
            unsafe { libc::prctl(libc::PR_SET_TIMERSLACK, 1000 as libc::c_ulong) };
        };
    }
    DONE.with(|()| {});
}
