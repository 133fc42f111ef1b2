//! T1: the same work on 1, 2, 4 and 8 threads. `threads ROUNDS` prints a line for each figure, separated by tabs: row, what, the
//! median of the rounds' ratios to one thread, its limit, the quartiles, and the ratio of the best times.

use std::sync::Barrier;
use std::time::{Duration, Instant};

use arrow_array::RecordBatch;
use arrow_device::device::sim::{SimConfig, SimDevice};
use arrow_device::{Device, DeviceRecordBatch, Devices, ExportOptions, ImportOptions, SyncPolicy};
use arrow_device_benches::batches;
use arrow_device_benches::cases::Result;

const OPTIONS: ExportOptions = ExportOptions::new(SyncPolicy::Event);
const THREADS: [usize; 4] = [1, 2, 4, 8];
const MOST: usize = THREADS[THREADS.len() - 1];

/// A thread's device, its batches, and options that find the device.
struct Producer {
    device: Device,
    host: RecordBatch,
    there: DeviceRecordBatch,
    imports: ImportOptions,
}

/// Once.
type Work = fn(&Producer) -> Result<()>;

/// What is done, by whether it moves bytes on the device.
const WORK: [(&str, Work); 4] = [
    ("export + import", exchange),
    ("upload", upload),
    ("download", download),
    ("copy", copy),
];

fn exchange(producer: &Producer) -> Result<()> {
    let array = producer.there.export_array(&OPTIONS)?;
    let schema = producer.there.schema();
    // SAFETY: this crate has just exported the struct from a batch of this schema.
    drop(unsafe { DeviceRecordBatch::import_as(array, schema, &producer.imports) }?);
    Ok(())
}

fn upload(producer: &Producer) -> Result<()> {
    producer.device.upload(&producer.host)?.wait()?;
    Ok(())
}

fn download(producer: &Producer) -> Result<()> {
    drop(producer.there.to_host()?);
    Ok(())
}

fn copy(producer: &Producer) -> Result<()> {
    producer.there.compact()?.wait()?;
    Ok(())
}

/// Runs `work` so many times in all, on so many threads. Returns the time from the first's start to the last's end.
fn run(producers: &[Producer], threads: usize, times: usize, work: Work) -> Result<Duration> {
    let start = Barrier::new(threads);
    let spent = std::thread::scope(|scope| {
        let threads: Vec<_> = producers[..threads]
            .iter()
            .map(|producer| {
                let start = &start;
                scope.spawn(move || {
                    start.wait();
                    let begin = Instant::now();
                    (0..times / threads).try_for_each(|_| work(producer))?;
                    Ok((begin, Instant::now()))
                })
            })
            .collect();
        let ends = threads.into_iter().map(|thread| {
            let spent: Result<_> = thread.join().map_err(|_| "a thread panicked")?;
            spent
        });
        ends.collect::<Result<Vec<(Instant, Instant)>>>()
    })?;
    let begin = spent.iter().map(|(begin, _)| *begin).min();
    let end = spent.iter().map(|(_, end)| *end).max();
    Ok(end
        .zip(begin)
        .map_or(Duration::ZERO, |(end, begin)| end - begin))
}

/// Returns how many times fill some 20 milliseconds, a multiple of the threads.
fn times(producers: &[Producer], work: Work) -> Result<usize> {
    run(producers, 1, MOST, work)?;
    let one = run(producers, 1, MOST, work)?.as_secs_f64() / MOST as f64;
    let times = (0.02 / one.max(1e-9)) as usize;
    Ok(times.clamp(MOST, 100_000).next_multiple_of(MOST))
}

fn quantile(sorted: &[f64], part: f64) -> f64 {
    sorted[((sorted.len() - 1) as f64 * part).round() as usize]
}

fn measure(place: &str, producers: &[Producer], rounds: usize) -> Result<()> {
    for (name, work) in WORK {
        let times = times(producers, work)?;
        let mut took = vec![[0f64; THREADS.len()]; rounds];
        for (round, took) in took.iter_mut().enumerate() {
            for i in 0..THREADS.len() {
                // All take turns to be the first.
                let i = (i + round) % THREADS.len();
                took[i] = run(producers, THREADS[i], times, work)?.as_secs_f64();
            }
        }
        for (i, threads) in THREADS.iter().enumerate().skip(1) {
            let mut ratios: Vec<f64> = took.iter().map(|took| took[i] / took[0]).collect();
            ratios.sort_by(f64::total_cmp);
            let best = |i: usize| {
                took.iter()
                    .map(|took| took[i])
                    .fold(f64::INFINITY, f64::min)
            };
            println!(
                "T1\t{place}, {name}, {threads} threads\t{}\t{}\t{}\t{}\t{}",
                quantile(&ratios, 0.5),
                1.05,
                quantile(&ratios, 0.25),
                quantile(&ratios, 0.75),
                best(i) / best(0),
            );
        }
    }
    Ok(())
}

/// One producer for each thread, with a batch of its own, on devices that `device` opens.
fn producers(device: impl Fn() -> Result<Device>) -> Result<Vec<Producer>> {
    let all = (0..MOST).map(|_| {
        let (device, host) = (device()?, batches::named("mixed", 10, 1000)?);
        let devices = Devices::new();
        if device.id() != Devices::cpu().id() {
            devices.add(device.clone())?;
        }
        let there = device.upload(&host)?;
        there.wait()?;
        Ok(Producer {
            device,
            host,
            there,
            imports: ImportOptions::default().with_devices(devices),
        })
    });
    all.collect()
}

fn simulated() -> Result<Device> {
    Ok(Device::new(SimDevice::new(SimConfig::default())?)?)
}

fn main() -> Result<()> {
    let rounds = std::env::args().nth(1).map_or(Ok(15), |n| n.parse())?;
    let one = simulated()?;
    measure("CPU", &producers(|| Ok(Devices::cpu()))?, rounds)?;
    measure(
        "one simulated device",
        &producers(|| Ok(one.clone()))?,
        rounds,
    )?;
    measure("a simulated device each", &producers(simulated)?, rounds)
}
