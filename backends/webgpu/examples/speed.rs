//! Upload and download of a batch beside plain wgpu in the same process, in turns. Prints the rates and, for each case, the median of
//! the ratios of neighbouring rounds, where 1 is as long as plain wgpu takes and less is faster, with their middle half, and the ratio of
//! the fastest rounds, which other programs disturb least.
//!
//! ```sh
//! cargo run --release -p arrow-device-wgpu --example speed
//! ```
//!
//! Plain wgpu is `write_buffer`, a submission and a wait; and a copy to a new buffer, its mapping, a wait and a memcpy. Its buffers in
//! device memory are there before, and used before. Of 1,000 columns each has a buffer of its own: a loop does the same for each of them,
//! and with one wait, all are submitted and waited for together.
//!
//! With a number, it takes that many rounds of each case, and prints for `benches/report`, with tabs: size and direction,
//! ratio, its quartiles, the ratio of the fastest rounds, and the two rates in GB/s.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use arrow_array::{Array, Int64Array, RecordBatch};
use arrow_device::Device;
use arrow_device_wgpu::{WgpuConfig, WgpuDevice, wgpu};
use wgpu::{BufferDescriptor, BufferUsages, MapMode, PollType};

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// A batch, and how many rounds of it are taken if none are named.
struct Case {
    name: &'static str,
    columns: usize,
    /// How many of them plain wgpu submits and waits for together.
    together: usize,
    rows: usize,
    rounds: usize,
}

const CASES: [Case; 5] = [
    case("1 MiB", 1, 1, 1 << 17, 401),
    case("16 MiB", 1, 1, 1 << 21, 101),
    case("96 MiB", 1, 1, 12 << 20, 31),
    case("1,000 x 1,000", 1000, 1, 1000, 31),
    case("1,000 x 1,000, one wait", 1000, 1000, 1000, 31),
];

const fn case(
    name: &'static str,
    columns: usize,
    together: usize,
    rows: usize,
    rounds: usize,
) -> Case {
    Case {
        name,
        columns,
        together,
        rows,
        rounds,
    }
}

fn main() -> Result<()> {
    let device = WgpuConfig::best().open()?;
    let rounds = std::env::args()
        .nth(1)
        .map(|rounds| rounds.parse())
        .transpose()?;
    if rounds.is_none() {
        println!("{:?}", device.backend());
        println!(
            "| case | direction | plain GB/s | arrow-device GB/s | time / plain | of rounds, middle half | of the fastest |"
        );
        println!("| --- | --- | --- | --- | --- | --- | --- |");
    }
    for case in &CASES {
        let bytes = case.columns * case.rows * 8;
        for (direction, samples) in measure(&device, case, rounds.unwrap_or(case.rounds))? {
            let sorted = |of: fn(&(f64, f64)) -> f64| {
                let mut values: Vec<f64> = samples.iter().map(of).collect();
                values.sort_by(f64::total_cmp);
                values
            };
            let (plain, ours) = (sorted(|s| s.0), sorted(|s| s.1));
            let ratios = sorted(|s| s.1 / s.0);
            let count = ratios.len();
            let (ratio, low, high) = (ratios[count / 2], ratios[count / 4], ratios[3 * count / 4]);
            let best = ours[0] / plain[0];
            let rate = |seconds: &[f64]| bytes as f64 / seconds[count / 2] / 1e9;
            let (plain, ours) = (rate(&plain), rate(&ours));
            let name = case.name;
            match rounds {
                Some(_) => {
                    println!("{name} {direction}\t{ratio}\t{low}\t{high}\t{best}\t{plain}\t{ours}")
                }
                None => println!(
                    "| {name} | {direction} | {plain:.2} | {ours:.2} | {ratio:.2} | {low:.2} to {high:.2} | {best:.2} |"
                ),
            }
        }
    }
    Ok(())
}

/// A program's own buffers, and copies of columns to and from them.
struct Plain<'a> {
    device: &'a wgpu::Device,
    queue: &'a wgpu::Queue,
    together: usize,
    buffers: Vec<wgpu::Buffer>,
}

impl<'a> Plain<'a> {
    fn new(device: &'a Device, columns: &[Vec<u8>], together: usize) -> Result<Self> {
        let device = WgpuDevice::of(device)?;
        let (device, queue) = (device.device(), device.queue());
        let buffer = |column: &Vec<u8>| {
            device.create_buffer(&BufferDescriptor {
                label: None,
                size: column.len() as u64,
                usage: BufferUsages::STORAGE | BufferUsages::COPY_SRC | BufferUsages::COPY_DST,
                mapped_at_creation: false,
            })
        };
        let buffers = columns.iter().map(buffer).collect();
        Ok(Self {
            device,
            queue,
            together,
            buffers,
        })
    }

    fn up(&self, columns: &[Vec<u8>]) -> Result<()> {
        for (buffers, columns) in self
            .buffers
            .chunks(self.together)
            .zip(columns.chunks(self.together))
        {
            for (buffer, column) in buffers.iter().zip(columns) {
                self.queue.write_buffer(buffer, 0, column);
            }
            self.queue.submit([]);
            self.device.poll(PollType::wait_indefinitely())?;
        }
        Ok(())
    }

    fn down(&self, columns: &mut [Vec<u8>]) -> Result<()> {
        for (buffers, columns) in self
            .buffers
            .chunks(self.together)
            .zip(columns.chunks_mut(self.together))
        {
            let mut encoder = self.device.create_command_encoder(&Default::default());
            let copied = |buffer: &wgpu::Buffer| {
                let read = self.device.create_buffer(&BufferDescriptor {
                    label: None,
                    size: buffer.size(),
                    usage: BufferUsages::MAP_READ | BufferUsages::COPY_DST,
                    mapped_at_creation: false,
                });
                encoder.copy_buffer_to_buffer(buffer, 0, &read, 0, buffer.size());
                read
            };
            let reads: Vec<_> = buffers.iter().map(copied).collect();
            self.queue.submit([encoder.finish()]);
            for read in &reads {
                read.map_async(MapMode::Read, .., |_| {});
            }
            self.device.poll(PollType::wait_indefinitely())?;
            for (read, column) in reads.iter().zip(columns) {
                column.copy_from_slice(&read.get_mapped_range(..)?);
            }
        }
        Ok(())
    }
}

/// Seconds of plain wgpu and of this crate, of each round.
type Samples = Vec<(f64, f64)>;

fn measure(device: &Device, case: &Case, rounds: usize) -> Result<[(&'static str, Samples); 2]> {
    let column = |c: i64| {
        Arc::new(Int64Array::from_iter_values(
            (0..case.rows as i64).map(|row| row ^ c),
        )) as Arc<dyn Array>
    };
    let names = (0..case.columns as i64).map(|c| (format!("c{c}"), column(c)));
    let batch = RecordBatch::try_from_iter(names)?;
    // Memory of its own for each direction, as the other side has: nobody finds more of it in the caches.
    let host_up = vec![vec![1_u8; case.rows * 8]; case.columns];
    let mut host_down = host_up.clone();
    let plain = Plain::new(device, &host_up, case.together)?;
    let on_device = device.upload(&batch)?;
    let (mut up, mut down) = (Samples::new(), Samples::new());
    for round in 0..rounds + 2 {
        let mut sample = [0.0; 4];
        // The order changes from round to round.
        for way in 0..4 {
            let way = (way + round) % 4;
            let start = Instant::now();
            match way {
                0 => plain.up(&host_up)?,
                1 => {
                    let sent = device.upload(&batch)?;
                    sent.wait()?;
                    sample[way] = start.elapsed().as_secs_f64();
                    drop(sent);
                    continue;
                }
                2 => plain.down(&mut host_down)?,
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
    assert_eq!(host_up, host_down);
    assert_eq!(on_device.to_host()?, batch);
    Ok([("up", up), ("down", down)])
}
