//! Random safe operations in the memories of a GPU, on several threads, with streams that are late at random: every row must be
//! arrow-rs's.
//!
//! ```text
//! cargo run --release -p arrow-device-fuzz --features cuda --bin cuda_operations -- --seconds 60 --threads 16
//! ```

use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use arrow_device_fuzz::cuda;

const USAGE: &str = "usage: cuda_operations [--seconds N] [--threads N] [--seed N] [--input N]";

fn main() -> ExitCode {
    let (mut seconds, mut threads, mut seed, mut only) = (10, 4, 1, 0);
    let mut arguments = std::env::args().skip(1);
    while let Some(name) = arguments.next() {
        let into = match name.as_str() {
            "--seconds" => &mut seconds,
            "--threads" => &mut threads,
            "--seed" => &mut seed,
            "--input" => &mut only,
            _ => return end(2, USAGE),
        };
        match arguments.next().map(|value| value.parse()) {
            Some(Ok(value)) => *into = value,
            _ => return end(2, USAGE),
        }
    }
    let counts = match cuda::open() {
        Ok(counts) => counts,
        Err(e) => return end(1, &e.to_string()),
    };
    let (done, failed) = (AtomicU64::new(0), AtomicU64::new(0));
    let start = Instant::now();
    let over = || start.elapsed() >= Duration::from_secs(seconds) || failed.load(Relaxed) > 0;
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let (done, failed) = (&done, &failed);
            scope.spawn(move || {
                for i in 0.. {
                    if over() {
                        break;
                    }
                    let number = match only {
                        0 => (seed << 40) + (thread << 32) + i,
                        only => only,
                    };
                    let input = cuda::input(number);
                    if std::panic::catch_unwind(|| cuda::run(&input)).is_err() {
                        failed.fetch_add(1, Relaxed);
                        println!("FAILED: this one, or one that ran then: --input {number}");
                    }
                    done.fetch_add(1, Relaxed);
                }
            });
        }
        for second in 1.. {
            std::thread::sleep(Duration::from_secs(1));
            if over() {
                break;
            }
            if second % 10 == 0 {
                println!("After {second} s: {} inputs.", done.load(Relaxed));
            }
        }
    });
    let left = cuda::left();
    let (delays, reads) = (counts.delays.load(Relaxed), counts.reads.load(Relaxed));
    println!(
        "{} inputs on {threads} threads: {delays} late streams, {reads} buffers read on the device.",
        done.into_inner()
    );
    if delays == 0 || reads == 0 {
        return end(1, "nothing was tried: more --seconds, more --threads");
    }
    match (failed.into_inner(), left.is_empty()) {
        (0, true) => end(0, "all rows are arrow-rs's, and all device memory is freed"),
        (0, false) => end(1, &format!("not freed: {}", left.join(", "))),
        (n, _) => end(1, &format!("{n} inputs failed")),
    }
}

fn end(status: u8, why: &str) -> ExitCode {
    println!("cuda_operations: {why}");
    ExitCode::from(status)
}
