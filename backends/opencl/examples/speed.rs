//! Upload and download of a batch beside plain `clEnqueueSVMMemcpy` of the same columns, into memory that was allocated and
//! touched before; in turns in one process. Prints the rates and, for each size, the median of the ratios of neighbouring
//! rounds, where 1 is as fast as plain copies, with their middle half, and the ratio of the fastest rounds, which other programs disturb
//! least.
//!
//! ```sh
//! cargo run --release -p arrow-device-opencl --example speed
//! ```
//!
//! With a number, it takes that many rounds of each size from 16 MiB on, and prints for `benches/report`, with tabs: size and direction,
//! ratio, its quartiles, the ratio of the fastest rounds, and the two rates in GB/s.

use std::ffi::c_void;
use std::hint::black_box;
use std::ptr::null;
use std::sync::Arc;
use std::time::Instant;

use arrow_array::{Array, Int64Array, RecordBatch};
use arrow_device::{Device, Queue};
use arrow_device_opencl::opencl_sys::cl_context;
use arrow_device_opencl::{OpenClConfig, OpenClDevice, OpenClMemory, OpenClQueue};
use cl3::command_queue::{enqueue_svm_mem_cpy, finish};
use cl3::error_codes::ClError;
use cl3::event::release_event;
use cl3::memory::{CL_MEM_READ_WRITE, svm_alloc, svm_free};
use cl3::types::{CL_NON_BLOCKING, cl_command_queue};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const COLUMNS: usize = 8;

fn main() -> Result<()> {
    let device = OpenClConfig::new(0)
        .with_memory(OpenClMemory::Svm)
        .with_idle_limit(1 << 30)
        .open()?;
    if let Some(rounds) = std::env::args().nth(1) {
        for mib in [16, 64, 256] {
            for Figures {
                direction,
                plain,
                ours,
                ratio,
                middle,
                best,
            } in measure(&device, mib << 20, rounds.parse()?)?
            {
                println!(
                    "{mib} MiB {direction}\t{ratio}\t{}\t{}\t{best}\t{plain}\t{ours}",
                    middle.0, middle.1
                );
            }
        }
        return Ok(());
    }
    println!("{}", OpenClDevice::of(&device)?.info());
    println!(
        "| bytes | direction | plain GB/s | arrow-device GB/s | ratio | of rounds, middle half |"
    );
    println!("| --- | --- | --- | --- | --- | --- | --- |");
    for (mib, rounds) in [(1, 401), (16, 101), (64, 41), (256, 21)] {
        for Figures {
            direction,
            plain,
            ours,
            ratio,
            middle,
            best,
        } in measure(&device, mib << 20, rounds)?
        {
            println!(
                "| {mib} MiB | {direction} | {plain:.2} | {ours:.2} | {ratio:.2} | {:.2} to {:.2} | {best:.2} |",
                middle.0, middle.1
            );
        }
    }
    Ok(())
}

/// What the rounds of one size and direction come to: rates in GB/s, and ratios of rates.
struct Figures {
    direction: &'static str,
    plain: f64,
    ours: f64,
    ratio: f64,
    middle: (f64, f64),
    best: f64,
}

/// A program's own memory, and copies of columns to and from it.
struct Plain {
    context: cl_context,
    queue: cl_command_queue,
    memory: *mut c_void,
}

impl Plain {
    fn new(queue: &Queue, bytes: usize) -> Result<Self> {
        let context = OpenClDevice::of(queue.device())?.context();
        // SAFETY: the context is live.
        let memory = unsafe { svm_alloc(context, CL_MEM_READ_WRITE, bytes, 0) };
        Ok(Self {
            context,
            queue: OpenClQueue::of(queue)?.handle(),
            memory: memory.map_err(ClError)?,
        })
    }

    /// Copies the columns to the device, or from it to `host`, and waits.
    fn copy(&self, columns: &mut [&mut [i64]], up: bool) -> Result<()> {
        let mut at = 0;
        for column in columns {
            let (bytes, host) = (size_of_val(*column), column.as_mut_ptr().cast::<c_void>());
            let device = self.memory.wrapping_byte_add(at);
            let (to, from) = if up { (device, host) } else { (host, device) };
            // SAFETY: both have room for the bytes, and live until `finish` below.
            unsafe {
                let event =
                    enqueue_svm_mem_cpy(self.queue, CL_NON_BLOCKING, to, from, bytes, 0, null());
                release_event(event.map_err(ClError)?).map_err(ClError)?;
            }
            at += bytes;
        }
        Ok(finish(self.queue).map_err(ClError)?)
    }
}

impl Drop for Plain {
    fn drop(&mut self) {
        // SAFETY: `new` allocated the memory, and `copy` has waited.
        let _ = unsafe { svm_free(self.context, self.memory) };
    }
}

fn measure(device: &Device, bytes: usize, rounds: usize) -> Result<[Figures; 2]> {
    let rows = (bytes / COLUMNS / 8) as i64;
    let column = |c: i64| {
        Arc::new(Int64Array::from_iter_values((0..rows).map(|row| row ^ c))) as Arc<dyn Array>
    };
    let names = (0..COLUMNS as i64).map(|c| (format!("c{c}"), column(c)));
    let batch = RecordBatch::try_from_iter(names)?;
    // Memory of its own for each direction, as the other side has: nobody finds more of it in the caches.
    let mut host = vec![vec![1i64; rows as usize]; 2 * COLUMNS];
    let mut host: Vec<&mut [i64]> = host.iter_mut().map(|column| &mut column[..]).collect();
    let (host_up, host_down) = host.split_at_mut(COLUMNS);
    let queue = device.new_queue()?;
    let (plain_up, plain_down) = (Plain::new(&queue, bytes)?, Plain::new(&queue, bytes)?);

    plain_down.copy(host_down, true)?; // memory that was never written is read faster
    let on_device = device.upload(&batch)?;
    let (mut up, mut down) = (Vec::new(), Vec::new());
    for round in 0..rounds + 2 {
        let mut sample = [0.0; 4];
        // The order changes from round to round.
        for way in 0..4 {
            let way = (way + round) % 4;
            let start = Instant::now();
            match way {
                0 => plain_up.copy(host_up, true)?,
                1 => {
                    let sent = device.upload(&batch)?;
                    device.synchronize()?;
                    sample[way] = start.elapsed().as_secs_f64();
                    drop(sent);
                    device.synchronize()?;
                    continue;
                }
                2 => plain_down.copy(host_down, false)?,
                _ => {
                    let back = on_device.to_host()?;
                    sample[way] = start.elapsed().as_secs_f64();
                    drop(black_box(back));
                    continue;
                }
            }
            sample[way] = start.elapsed().as_secs_f64();
        }
        // The first rounds touch memory for the first time.
        if round >= 2 {
            up.push((sample[0], sample[1]));
            down.push((sample[2], sample[3]));
        }
    }
    assert_eq!(on_device.to_host()?, batch);
    Ok([("up", up), ("down", down)].map(|(direction, samples)| {
        let sorted = |of: fn(&(f64, f64)) -> f64| {
            let mut values: Vec<f64> = samples.iter().map(of).collect();
            values.sort_by(f64::total_cmp);
            values
        };
        let (plain, ours, ratio) = (sorted(|s| s.0), sorted(|s| s.1), sorted(|s| s.0 / s.1));
        let rate = |seconds: &[f64]| bytes as f64 / seconds[rounds / 2] / 1e9;
        Figures {
            direction,
            plain: rate(&plain),
            ours: rate(&ours),
            ratio: ratio[rounds / 2],
            middle: (ratio[rounds / 4], ratio[3 * rounds / 4]),
            best: plain[0] / ours[0],
        }
    }))
}
