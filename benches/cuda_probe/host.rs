//! The host's own part: copying with several threads, and page-locking.

use std::alloc::{Layout, alloc, dealloc};
use std::ffi::c_void;
use std::sync::Barrier;
use std::time::Instant;

use arrow_device::cuda::cudarc::driver::sys;

use crate::Probe;
use crate::data::fill;
use crate::raw::{Locked, check};
use crate::stats::{Res, Sample, Table, rate, since, size, time, total_only};

/// Copies with `threads` threads, each its own part, over and over; answers the seconds from the
/// first thread's start to the last one's end. The first round is not counted.
fn copy_rounds(threads: usize, dst: &mut [u8], src: &[u8], rounds: usize) -> Res<Sample> {
    let part = src.len().div_ceil(threads).next_multiple_of(4096);
    let parts: Vec<_> = dst.chunks_mut(part).zip(src.chunks(part)).collect();
    let together = Barrier::new(parts.len());
    let spans = std::thread::scope(|scope| {
        let workers: Vec<_> = parts
            .into_iter()
            .map(|(dst, src)| {
                let together = &together;
                scope.spawn(move || {
                    let mut spans = Vec::with_capacity(rounds + 1);
                    for _ in 0..=rounds {
                        together.wait();
                        let start = Instant::now();
                        dst.copy_from_slice(src);
                        spans.push((start, Instant::now()));
                    }
                    spans
                })
            })
            .collect();
        let spans = workers.into_iter().map(|worker| worker.join());
        spans.collect::<Result<Vec<Vec<(Instant, Instant)>>, _>>()
    })
    .map_err(|_| "a copying thread panicked")?;
    let seconds = (1..=rounds).filter_map(|round| {
        let start = spans.iter().map(|spans| spans[round].0).min()?;
        let end = spans.iter().map(|spans| spans[round].1).max()?;
        Some(end.duration_since(start).as_secs_f64())
    });
    Ok(Sample::new(seconds.collect()))
}

pub(crate) fn copies(probe: &Probe) -> Res<()> {
    let bytes = probe.bytes(512 << 20, 1 << 20);
    let rounds = if probe.quick { 2 } else { 10 };
    let mut locked = Locked::new(bytes)?;
    let mut ordinary = vec![0u8; bytes];
    fill(&mut ordinary, 3);
    locked.bytes_mut().fill(0xaa);
    let most = probe.cores.min(16);
    println!(
        "memcpy of {} by T threads, each its own part, warm pages, {rounds} rounds.",
        size(bytes)
    );
    println!("T goes to 16 or to the number of cores, here {most}.\n");
    let head = ["T", "median", "p10", "p90", "best", "rate"];
    let mut into = Table::new(&head);
    let mut from = Table::new(&head);
    for threads in 1..=most {
        let row = |sample: Sample| {
            [
                threads.to_string(),
                time(sample.median()),
                time(sample.low()),
                time(sample.high()),
                time(sample.best()),
                rate(bytes, sample.median()),
            ]
        };
        let sample = copy_rounds(threads, locked.bytes_mut(), &ordinary, rounds)?;
        into.row(row(sample));
        let sample = copy_rounds(threads, &mut ordinary, locked.bytes_mut(), rounds)?;
        from.row(row(sample));
    }
    println!("from ordinary into page-locked memory");
    into.print();
    println!("from page-locked into ordinary memory");
    from.print();
    Ok(())
}

/// The pages of memory that is registered.
#[derive(Clone, Copy)]
enum Pages {
    Small,
    Huge,
}

/// A block of ordinary memory on pages of one kind, as far as the kernel does as asked.
struct Block {
    ptr: *mut u8,
    layout: Layout,
}

impl Block {
    fn new(bytes: usize, pages: Pages) -> Res<Self> {
        // Where huge pages start.
        let layout = Layout::from_size_align(bytes, 2 << 20)?;
        // SAFETY: the size is not 0.
        let ptr = unsafe { alloc(layout) };
        if ptr.is_null() {
            return Err("out of memory".into());
        }
        advise(ptr, bytes, pages);
        Ok(Self { ptr, layout })
    }

    /// Writes to every page, with some threads.
    fn touch(&self, threads: usize) {
        let bytes = self.layout.size();
        let part = bytes.div_ceil(threads).next_multiple_of(2 << 20);
        let start = self.ptr.expose_provenance();
        std::thread::scope(|scope| {
            for from in (0..bytes).step_by(part) {
                scope.spawn(move || {
                    for at in (from..bytes.min(from + part)).step_by(4096) {
                        let page = std::ptr::with_exposed_provenance_mut::<u8>(start + at);
                        // SAFETY: within the block, each page by one thread. Volatile, so that it
                        // is done although nobody reads it.
                        unsafe { page.write_volatile(1) };
                    }
                });
            }
        });
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        // SAFETY: the memory came from `alloc` with this layout, and is freed once.
        unsafe { dealloc(self.ptr, self.layout) };
    }
}

#[cfg(target_os = "linux")]
fn advise(ptr: *mut u8, bytes: usize, pages: Pages) {
    let advice = match pages {
        Pages::Small => libc::MADV_NOHUGEPAGE,
        Pages::Huge => libc::MADV_HUGEPAGE,
    };
    // What came of it is printed. SAFETY: the range is ours; the advice changes no content.
    unsafe { libc::madvise(ptr.cast(), bytes, advice) };
}

#[cfg(not(target_os = "linux"))]
fn advise(_: *mut u8, _: usize, _: Pages) {}

/// Bytes of the process on huge pages.
fn huge_bytes() -> Option<usize> {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup").ok()?;
    let line = text
        .lines()
        .find(|line| line.starts_with("AnonHugePages:"))?;
    let kib: usize = line.split_whitespace().nth(1)?.parse().ok()?;
    Some(kib << 10)
}

pub(crate) fn locking(probe: &Probe) -> Res<()> {
    let rounds = if probe.quick { 2 } else { 3 };
    println!("Page-locking. Medians, with the lowest and the highest of {rounds} rounds.\n");
    println!("cuMemHostAlloc, fresh memory");
    let mut table = Table::new(&[
        "bytes", "allocate", "low", "high", "per GiB", "free", "low", "high", "per GiB",
    ]);
    for bytes in [
        probe.bytes(64 << 20, 1 << 18),
        probe.bytes(1 << 30, 1 << 20),
    ] {
        let (mut made, mut freed) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            let start = Instant::now();
            let locked = Locked::new(bytes)?;
            made.push(since(start));
            let start = Instant::now();
            locked.free()?;
            freed.push(since(start));
        }
        let cells = [made, freed].map(|seconds| cells(seconds, bytes));
        table.row(std::iter::once(size(bytes)).chain(cells.into_iter().flatten()));
    }
    table.print();

    let bytes = probe.bytes(1 << 30, 4 << 20);
    let threads = probe.cores.min(8);
    println!("cuMemHostRegister of {} of ordinary memory", size(bytes));
    println!(
        "touch: one write to each page by {threads} threads. on huge pages: as /proc/self says after it."
    );
    let mut table = Table::new(&[
        "pages",
        "on huge pages",
        "touch",
        "low",
        "high",
        "per GiB",
        "register",
        "low",
        "high",
        "per GiB",
        "unregister",
        "low",
        "high",
        "per GiB",
    ]);
    for (name, pages, touched) in [
        ("4 KiB, resident", Pages::Small, true),
        ("4 KiB, not touched", Pages::Small, false),
        ("huge, resident", Pages::Huge, true),
        ("huge, not touched", Pages::Huge, false),
    ] {
        let (mut touch, mut register, mut undone) = (Vec::new(), Vec::new(), Vec::new());
        let mut huge = None;
        for _ in 0..rounds {
            let before = huge_bytes();
            let block = Block::new(bytes, pages)?;
            let start = Instant::now();
            if touched {
                block.touch(threads);
                touch.push(since(start));
            }
            let ptr: *mut c_void = block.ptr.cast();
            const PORTABLE: u32 = 1;
            let start = Instant::now();
            // SAFETY: the block lives until it is unregistered.
            let code = unsafe { sys::cuMemHostRegister_v2(ptr, bytes, PORTABLE) };
            check("cuMemHostRegister", code)?;
            register.push(since(start));
            huge = huge_bytes()
                .zip(before)
                .map(|(now, before)| now.saturating_sub(before));
            let start = Instant::now();
            // SAFETY: the memory was registered above, and no queued work uses it.
            let code = unsafe { sys::cuMemHostUnregister(ptr) };
            check("cuMemHostUnregister", code)?;
            undone.push(since(start));
        }
        let cells = [touch, register, undone].map(|seconds| cells(seconds, bytes));
        let first = [name.to_owned(), huge.map_or("unknown".into(), size)];
        table.row(first.into_iter().chain(cells.into_iter().flatten()));
    }
    table.print();
    Ok(())
}

/// Median, lowest, highest, and the median per GiB.
fn cells(seconds: Vec<f64>, bytes: usize) -> [String; 4] {
    if seconds.is_empty() {
        return ["-", "-", "-", "-"].map(str::to_owned);
    }
    let highest = seconds.iter().copied().fold(0.0, f64::max);
    let sample = Sample::new(seconds);
    let per_gib = sample.median() * (1u64 << 30) as f64 / bytes as f64;
    [sample.median(), sample.best(), highest, per_gib].map(time)
}

/// One copy by some threads; the seconds until all are done, their start included.
///
/// # Safety
/// `dst` is valid for as many bytes as `src` has, and nothing else uses it.
pub(crate) unsafe fn copy_once(threads: usize, dst: u64, src: &[u8]) -> Res<[f64; 2]> {
    let part = src.len().div_ceil(threads).next_multiple_of(4096);
    let start = Instant::now();
    std::thread::scope(|scope| {
        for (i, src) in src.chunks(part).enumerate() {
            scope.spawn(move || {
                let at = std::ptr::with_exposed_provenance_mut::<u8>(dst as usize + i * part);
                // SAFETY: the caller guarantees that `dst` has as many bytes as `src` (see
                // `# Safety`); each thread has its own part.
                unsafe { at.copy_from_nonoverlapping(src.as_ptr(), src.len()) };
            });
        }
    });
    Ok(total_only(since(start)))
}
