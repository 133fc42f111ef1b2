//! The first device of the real driver, if there is one.

use std::io::Write;
use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::time::{Duration, Instant};

use arrow_device::{Devices, Error};

use crate::gpu_suite::Place;

/// What must be there: a list, separated by commas.
pub(crate) const REQUIRE: &str = "ARROW_DEVICE_REQUIRE";
pub(crate) const SKIPPED: &str = "skipped: no CUDA device: ";

/// A test that takes longer hangs.
const PATIENCE: Duration = Duration::from_secs(180);

pub(crate) fn places() -> Vec<Place> {
    let alone = Alone::new();
    if let Err(e) = Devices::open("cuda:0") {
        let reason = match e {
            Error::DeviceNotAvailable { reason, .. } => reason.into_owned(),
            e => e.to_string(),
        };
        let required = std::env::var(REQUIRE).unwrap_or_default();
        let required = required.split(',').any(|name| name.trim() == "cuda");
        assert!(!required, "{REQUIRE} asks for CUDA: {reason}");
        static ONCE: Once = Once::new();
        ONCE.call_once(|| say(&format!("{SKIPPED}{reason}")));
        return Vec::new();
    }
    let devices = arrow_device::cuda::device_count().unwrap();
    vec![Place {
        ordinal: 0,
        others: (1..devices).collect(),
        rows: 60_000,
        lazy: false,
        pools: true,
        share: 1,
        balance: None,
        // The driver does not tell what it has given to whom.
        unclean: Box::new(|| None),
        alone: Some(Box::new(alone)),
    }]
}

/// One line, also from tests whose output the harness keeps to itself.
fn say(line: &str) {
    let _ = writeln!(std::io::stderr(), "{line}");
}

/// The test that runs now, and since when.
static RUNNING: Mutex<Option<(String, Instant)>> = Mutex::new(None);

fn running() -> MutexGuard<'static, Option<(String, Instant)>> {
    RUNNING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// While it lives no other test uses the device, and a hang ends the program.
struct Alone(#[allow(dead_code)] MutexGuard<'static, ()>);

impl Alone {
    fn new() -> Self {
        static ALONE: Mutex<()> = Mutex::new(());
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        let name = std::thread::current().name().unwrap_or("?").to_owned();
        *running() = Some((name, Instant::now()));
        static WATCH: Once = Once::new();
        WATCH.call_once(|| drop(std::thread::spawn(watch)));
        Self(alone)
    }
}

impl Drop for Alone {
    fn drop(&mut self) {
        *running() = None;
    }
}

fn watch() {
    loop {
        std::thread::sleep(Duration::from_secs(1));
        if let Some((name, since)) = &*running() {
            if since.elapsed() > PATIENCE {
                say(&format!("{name} hangs"));
                std::process::abort();
            }
        }
    }
}
