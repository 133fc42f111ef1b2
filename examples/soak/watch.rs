//! Memory, open files and threads of this process.

use std::fmt;
use std::time::{Duration, Instant};

use crate::streams::Result;

/// By how much memory may be more in the last part of a run than in its second fifth: what the allocator keeps differs.
const MEMORY_MARGIN: u64 = 6 << 20;
/// The first part of a run, in which pools fill.
const WARM: f64 = 0.2;

/// What a process has.
#[derive(Clone, Copy, Debug)]
struct Sample {
    /// The share of the run that was done.
    at: f64,
    /// Bytes of memory that are resident.
    memory: u64,
    files: u64,
    threads: u64,
}

impl Sample {
    fn take(at: f64) -> Result<Self> {
        let status = std::fs::read_to_string("/proc/self/status")?;
        let field = |name: &str| -> Result<u64> {
            let line = status.lines().find_map(|line| line.strip_prefix(name));
            let number = line.and_then(|line| line.split_whitespace().next());
            let number = number.ok_or_else(|| format!("/proc/self/status has no {name}"))?;
            Ok(number.parse()?)
        };
        Ok(Self {
            at,
            memory: field("VmRSS:")? << 10,
            threads: field("Threads:")?,
            // Without the one that lists them, and those that NVIDIA's driver opens and closes as it likes.
            files: std::fs::read_dir("/proc/self/fd")?
                .flatten()
                .filter_map(|file| std::fs::read_link(file.path()).ok())
                .filter(|to| {
                    !to.ends_with("fd") && !to.to_string_lossy().starts_with("/dev/nvidia")
                })
                .count() as u64,
        })
    }
}

impl fmt::Display for Sample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (memory, files, threads) = (mib(self.memory), self.files, self.threads);
        write!(
            f,
            "{memory} of memory, {files} open files, {threads} threads"
        )
    }
}

fn mib(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

/// Samples of one run.
pub(crate) struct Watch {
    start: Sample,
    samples: Vec<Sample>,
}

impl Watch {
    pub(crate) fn start() -> Result<Self> {
        let start = Sample::take(0.0)?;
        println!("At the start: {start}.");
        Ok(Self {
            start,
            samples: Vec::new(),
        })
    }

    pub(crate) fn sample(&mut self, at: f64) -> Result<()> {
        self.samples.push(Sample::take(at)?);
        Ok(())
    }

    /// The last sample.
    pub(crate) fn last(&self) -> impl fmt::Display {
        *self.samples.last().unwrap_or(&self.start)
    }

    /// Compares the last two fifths of the run with the second: the median of the memory, and the most files and threads.
    pub(crate) fn check_level(&self) -> Result<()> {
        let part = |from: f64, to: f64| -> Result<Vec<Sample>> {
            let within = self.samples.iter().filter(|s| (from..to).contains(&s.at));
            let part: Vec<Sample> = within.copied().collect();
            match part.len() {
                0..5 => Err(
                    "the run is too short to say whether something grows; use more --batches"
                        .into(),
                ),
                _ => Ok(part),
            }
        };
        let (early, late) = (part(WARM, 2.0 * WARM)?, part(1.0 - 2.0 * WARM, f64::MAX)?);
        let memory = |part: &[Sample]| {
            let mut all: Vec<u64> = part.iter().map(|sample| sample.memory).collect();
            all.sort_unstable();
            all[all.len() / 2]
        };
        let most = |part: &[Sample], of: fn(&Sample) -> u64| part.iter().map(of).max();
        let (before, after) = (memory(&early), memory(&late));
        let margin = MEMORY_MARGIN + before / 20;
        println!(
            "Memory was {} early on and {} late; {} more would be too much.",
            mib(before),
            mib(after),
            mib(margin)
        );
        if after > before + margin {
            let (before, after) = (mib(before), mib(after));
            return Err(format!("memory grew from {before} to {after}").into());
        }
        type Of = fn(&Sample) -> u64;
        for (what, of) in [
            ("open files", (|s| s.files) as Of),
            ("threads", |s| s.threads),
        ] {
            let (before, after) = (most(&early, of), most(&late, of));
            // Short-lived ones come together by chance.
            if after > before.map(|most| most + 2) {
                let [before, after] = [before, after].map(Option::unwrap_or_default);
                return Err(format!("{what} grew from at most {before} to {after}").into());
            }
        }
        Ok(())
    }

    /// All files that were opened are closed, and all threads have ended that end when they are idle: those of the device that was
    /// there at the start stay.
    pub(crate) fn check_end(&self) -> Result<()> {
        let end = Instant::now() + Duration::from_secs(20);
        // The device's worker, and a runtime's.
        let threads = self.start.threads + 2;
        loop {
            let now = Sample::take(1.0)?;
            if now.files <= self.start.files && now.threads <= threads {
                println!("At the end: {now}.");
                return Ok(());
            }
            if Instant::now() > end {
                return Err(format!("at the start: {}; at the end: {now}", self.start).into());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}
