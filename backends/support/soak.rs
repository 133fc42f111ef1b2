//! Many small batches through streams to the device and back, from several threads: memory, open files and threads stay level.
//! `ARROW_DEVICE_SOAK_BATCHES=100000` asks for more of them.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use arrow_device::{Device, Devices};

use crate::fork_kit::alone;
use crate::rigs::{NAME, all, register};
use crate::streams::{Kept, Result, Totals, Worker, check_clean};
use crate::suite::assert_clean;
use crate::watch::Watch;

const SAMPLES: u64 = 100;

#[test]
fn everything_stays_level() {
    alone("soak::everything_stays_level", || {
        if !all().is_empty() {
            register(Devices::global());
            soak(&Devices::open(NAME).unwrap()).unwrap();
        }
    });
}

fn soak(device: &Device) -> Result<()> {
    let batches = match std::env::var("ARROW_DEVICE_SOAK_BATCHES") {
        Ok(number) => number.parse()?,
        Err(_) => 5_000,
    };
    let (done, stop, kept) = (AtomicU64::new(0), AtomicBool::new(false), Kept::default());
    let mut watch = Watch::start()?;
    let work = |seed| -> Result<Totals> {
        let mut worker = Worker::new(device, seed, &kept)?;
        while done.load(Ordering::Relaxed) < batches && !stop.load(Ordering::Relaxed) {
            let came = worker.stream();
            stop.fetch_or(came.is_err(), Ordering::Relaxed);
            done.fetch_add(came?, Ordering::Relaxed);
        }
        Ok(worker.totals)
    };
    let totals = std::thread::scope(|scope| -> Result<Totals> {
        let workers = [0, 1].map(|seed| scope.spawn(move || work(seed)));
        let mut sampled = 0;
        while !workers.iter().all(|worker| worker.is_finished()) {
            std::thread::sleep(Duration::from_millis(2));
            let now = done.load(Ordering::Relaxed).min(batches);
            if now * SAMPLES / batches > sampled {
                sampled = now * SAMPLES / batches;
                watch.sample(now as f64 / batches as f64)?;
            }
        }
        let mut totals = Totals::default();
        for worker in workers {
            totals += worker.join().map_err(|_| "a thread panicked")??;
        }
        Ok(totals)
    })?;
    println!("{batches} batches: {totals}; {}.", watch.last());
    drop(kept);
    check_clean(device)?;
    // A sanitizer keeps what was freed.
    if std::env::var_os("ASAN_OPTIONS").is_none() {
        watch.check_level()?;
        watch.check_end()?;
    }
    assert_clean(device);
    Ok(())
}
