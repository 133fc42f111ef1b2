//! Many small batches through streams to the device and back, from several threads: memory, open files, threads and Vulkan objects stay
//! level. `ARROW_DEVICE_SOAK_BATCHES=100000` asks for more of them.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::interposer::account::{live, misuses};
use crate::interposer::interposed;
use crate::streams::{Result, Worker};
use crate::watch::Watch;
use arrow_device::Devices;
use arrow_device_vulkan::register;

const THREADS: u64 = 2;
const SAMPLES: u64 = 100;

/// The most objects of one kind at any time: the device keeps up to 1,024 buffers for reuse, each thread may hold all batches of a
/// stream, which are at most 200, and 32 are kept.
const MOST: usize = 2_000;

#[test]
fn everything_stays_level() {
    if interposed("soak::everything_stays_level") {
        soak().unwrap();
    }
}

fn soak() -> Result<()> {
    register(Devices::global());
    let device = Devices::open("vulkan:0")?;
    let batches = match std::env::var("ARROW_DEVICE_SOAK_BATCHES") {
        Ok(number) => number.parse()?,
        Err(_) => 5_000,
    };
    let before = live().get("buffer").copied().unwrap_or(0);
    let (done, stop) = (AtomicU64::new(0), AtomicBool::new(false));
    let kept = crate::streams::Kept::default();
    let mut watch = Watch::start()?;
    let start = Instant::now();
    let mut most = BTreeMap::new();
    let totals = std::thread::scope(|scope| -> Result<crate::streams::Totals> {
        let workers: Vec<_> = (0..THREADS)
            .map(|seed| {
                let (device, kept, done, stop) = (&device, &kept, &done, &stop);
                scope.spawn(move || -> Result<crate::streams::Totals> {
                    let mut worker = Worker::new(device, seed, kept)?;
                    while done.load(Ordering::Relaxed) < batches && !stop.load(Ordering::Relaxed) {
                        match worker.stream() {
                            Ok(came) => done.fetch_add(came, Ordering::Relaxed),
                            Err(e) => {
                                stop.store(true, Ordering::Relaxed);
                                return Err(e);
                            }
                        };
                    }
                    Ok(worker.totals)
                })
            })
            .collect();
        let mut sampled = 0;
        while !workers.iter().all(|worker| worker.is_finished()) {
            std::thread::sleep(Duration::from_millis(2));
            let now = done.load(Ordering::Relaxed).min(batches);
            for (kind, objects) in live() {
                let most = most.entry(kind).or_insert(0);
                *most = objects.max(*most);
            }
            if now * SAMPLES / batches > sampled {
                sampled = now * SAMPLES / batches;
                watch.sample(now as f64 / batches as f64)?;
            }
        }
        let mut totals = crate::streams::Totals::default();
        for worker in workers {
            totals += worker.join().map_err(|_| "a thread panicked")??;
        }
        Ok(totals)
    })?;
    println!(
        "{batches} batches in {:?}: {totals}; {}.",
        start.elapsed(),
        watch.last()
    );
    println!("At most {most:?}.");
    assert!(most.values().all(|most| *most <= MOST), "{most:?}");
    drop(kept);
    crate::streams::check_clean(&device)?;
    // A sanitizer keeps what was freed.
    if std::env::var_os("ASAN_OPTIONS").is_none() {
        watch.check_level()?;
        watch.check_end()?;
    }
    // The device keeps what it makes for reuse, memory excepted.
    let end = Instant::now() + Duration::from_secs(20);
    let buffers = || live().get("buffer").copied().unwrap_or(0);
    while buffers() > before && Instant::now() < end {
        device.trim();
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(buffers(), before, "left: {:?}", live());
    assert!(misuses().is_empty(), "{:?}", misuses());
    Ok(())
}
