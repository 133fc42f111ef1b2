//! Many small batches to the device and back, from several threads: memory, open files and threads stay level.
//! `ARROW_DEVICE_SOAK_BATCHES=100000` asks for more of them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::fork_kit::alone;
use crate::rigs::{assert_clean, try_open};
use crate::streams::Result;
use crate::watch::Watch;
use arrow_array::{Int64Array, RecordBatch, StringArray};

const THREADS: u64 = 2;
const SAMPLES: u64 = 100;

fn batch(seed: u64) -> RecordBatch {
    let rows = 1 + seed % 500;
    let numbers: Int64Array = (0..rows as i64).map(|i| (i % 7 > 0).then_some(i)).collect();
    let words: StringArray = (0..rows).map(|i| Some(format!("{seed} {i}"))).collect();
    RecordBatch::try_from_iter([("a", Arc::new(numbers) as _), ("b", Arc::new(words) as _)])
        .unwrap()
}

#[test]
fn everything_stays_level() {
    alone("soak::everything_stays_level", || soak().unwrap());
}

fn soak() -> Result<()> {
    let Some(device) = try_open() else {
        return Ok(());
    };
    let batches = match std::env::var("ARROW_DEVICE_SOAK_BATCHES") {
        Ok(number) => number.parse()?,
        Err(_) => 5_000,
    };
    let done = AtomicU64::new(0);
    let mut watch = Watch::start()?;
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|_| {
                let (device, done) = (&device, &done);
                scope.spawn(move || {
                    loop {
                        let number = done.fetch_add(1, Ordering::Relaxed);
                        if number >= batches {
                            return;
                        }
                        let sent = batch(number);
                        let up = device.upload(&sent).unwrap();
                        match number % 10 {
                            // One that nobody waits for.
                            0 => drop(up.start_to_host().unwrap()),
                            _ => assert_eq!(up.to_host().unwrap(), sent),
                        }
                    }
                })
            })
            .collect();
        let mut sampled = 0;
        while !threads.iter().all(|thread| thread.is_finished()) {
            std::thread::sleep(Duration::from_millis(2));
            let now = done.load(Ordering::Relaxed).min(batches);
            if now * SAMPLES / batches > sampled {
                sampled = now * SAMPLES / batches;
                watch.sample(now as f64 / batches as f64)?;
            }
        }
        Result::Ok(())
    })?;
    println!("{batches} batches; {}", watch.last());
    // A sanitizer keeps what was freed.
    if std::env::var_os("ASAN_OPTIONS").is_none() {
        watch.check_level()?;
        watch.check_end()?;
    }
    assert_clean(&device);
    Ok(())
}
