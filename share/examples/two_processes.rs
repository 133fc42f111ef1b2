//! Sends a table of TPC-H to a child process without a copy, which computes on it, and says what that took:
//! `cargo run -p arrow-device-share --example two_processes`. The child may be another program, such as one in Python:
//! `cargo run -p arrow-device-share --example two_processes -- python3 share/examples/subscriber.py`.

use std::io::{BufRead, BufReader, Write};
use std::os::fd::AsFd;
use std::process::{Command, Stdio};

use arrow_array::cast::AsArray;
use arrow_array::types::Decimal128Type;
use arrow_array::{Array, RecordBatch};
use arrow_device_share::{
    Publisher, PublisherOptions, Subscriber, SubscriberOptions, shared_cpu, socket_pair,
};
use rustix::time::{ClockId, clock_gettime};
use tpchgen::generators::LineItemGenerator;
use tpchgen_arrow::LineItemArrow;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

const SCALE: f64 = 0.1;
const ROWS: usize = 8192;

fn main() -> Result<()> {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    match arguments.split_first() {
        Some((child, [])) if child == "child" => subscribe(),
        Some((program, rest)) => publish(Command::new(program).args(rest)),
        None => publish(Command::new(std::env::current_exe()?).arg("child")),
    }
}

/// The parent: makes the table in shared memory, and sends it.
fn publish(child: &mut Command) -> Result<()> {
    let (here, there) = socket_pair()?;
    let mut child = child
        .stdin(Stdio::from(there))
        .stdout(Stdio::piped())
        .spawn()?;
    let publisher = Publisher::over_with(
        here,
        PublisherOptions {
            leases: 4,
            ..Default::default()
        },
    )?;
    println!(
        "process {} sends lineitem of TPC-H, scale {SCALE}, to process {} ...",
        std::process::id(),
        child.id()
    );

    // What the child says: after each batch, when it had it; then what it has computed.
    let lines = BufReader::new(child.stdout.take().ok_or("the child has an output")?).lines();
    let mut lines = lines.map(|line| line.map_err(Box::<dyn std::error::Error>::from));
    let mut line = || lines.next().unwrap_or(Err("the child has gone".into()));

    let table = LineItemArrow::new(LineItemGenerator::new(SCALE, 1, 1)).with_batch_size(ROWS);
    let (mut expected, mut took, mut bytes) = (0, Vec::new(), 0);
    for batch in table {
        let batch = batch?;
        expected += revenue(&batch);
        // A producer that fills the device's memory itself has no copy here either.
        let batch = shared_cpu().upload(&batch)?;
        bytes += batch.get_array_memory_size();
        let sent = now();
        publisher.send(&batch)?;
        took.push(line()?.parse::<u64>()? - sent);
        if took.len() % 20 == 0 {
            println!("  {} batches, {:.1} MB", took.len(), bytes as f64 / 1e6);
        }
    }
    let copied = publisher.stats().copied_bytes;
    publisher.finish()?;
    let (rows, copied_there, computed) = (line()?, line()?, line()?);
    let status = child.wait()?;
    if !status.success() {
        return Err(format!("the child: {status}").into());
    }
    took.sort_unstable();
    println!(
        "{rows} rows in {} batches, {:.1} MB",
        took.len(),
        bytes as f64 / 1e6
    );
    println!("{copied} bytes copied to send them, {copied_there} to receive them");
    println!(
        "{:.0} microseconds from send to a readable batch, at best {:.0}",
        took[took.len() / 2] as f64 / 1e3,
        took[0] as f64 / 1e3
    );
    println!(
        "sum(l_extendedprice * l_discount): {} here, {} there",
        money(expected),
        money(computed.parse()?)
    );
    match computed.parse::<i128>()? == expected {
        true => println!("The results are equal."),
        false => return Err("the results differ".into()),
    }
    Ok(())
}

/// The child: reads the batches where they are.
fn subscribe() -> Result<()> {
    // SAFETY: the publisher is this program.
    let options = unsafe { SubscriberOptions::trusting() };
    let subscriber =
        Subscriber::over_with(std::io::stdin().as_fd().try_clone_to_owned()?, options)?;
    let before = arrow_device::Devices::cpu().stats();
    let (mut rows, mut sum, mut out) = (0, 0, std::io::stdout().lock());
    for batch in subscriber {
        let batch = batch?.to_host()?;
        let received = now();
        rows += batch.num_rows();
        sum += revenue(&batch);
        writeln!(out, "{received}")?;
        out.flush()?;
    }
    let copied = arrow_device::Devices::cpu().stats().since(&before);
    writeln!(
        out,
        "{rows}\n{}\n{sum}",
        copied.host_copied_bytes + copied.bytes_to_device
    )?;
    Ok(())
}

/// The sum of price times discount, in hundredths of cents.
fn revenue(batch: &RecordBatch) -> i128 {
    let column = |name| {
        batch
            .column_by_name(name)
            .map(|of| of.as_primitive::<Decimal128Type>())
    };
    let (Some(prices), Some(discounts)) = (column("l_extendedprice"), column("l_discount")) else {
        return 0;
    };
    debug_assert_eq!(prices.null_count() + discounts.null_count(), 0);
    prices
        .values()
        .iter()
        .zip(discounts.values())
        .map(|(price, discount)| price * discount)
        .sum()
}

fn money(hundredths: i128) -> String {
    format!("{:.2}", hundredths as f64 / 1e4)
}

/// Nanoseconds of a clock that both processes read.
fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
