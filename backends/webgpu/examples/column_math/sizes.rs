//! The rates of copies to the GPU and back, by their size.

use std::hint::black_box;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use arrow_array::{Array, ArrayRef, Int64Array};
use arrow_device::Device;

use crate::{Result, chart};

/// The least time of measuring one size.
const SECONDS: f64 = 0.3;

/// Measures, prints a table, and draws a picture into the file.
pub(crate) fn measure(device: &Device, adapter: &[String], path: &Path) -> Result<()> {
    let names = ["to the GPU", "back", "copy on the host"];
    let mut lines = names.map(|name| (name, Vec::new()));
    println!("GB/s by bytes of one column, waits included; the median of at least 9");
    println!(
        "{:>10} {:>18} {:>18} {:>18}",
        "bytes", names[0], names[1], names[2]
    );
    for power in 12..=26 {
        let bytes = 1usize << power;
        let column: ArrayRef = Arc::new(Int64Array::from_iter_values(0..bytes as i64 / 8));
        let up = || -> Result<_> {
            let column = device.upload_array(&*column)?;
            device.synchronize()?;
            Ok(column)
        };
        let on_gpu = up()?;
        let values = column.to_data().buffers()[0].clone();
        let mut copy = vec![0u8; bytes];
        let rates = [
            rate(bytes, || up().map(drop))?,
            rate(bytes, || {
                on_gpu.to_host()?;
                Ok(())
            })?,
            rate(bytes, || {
                black_box(&mut copy).copy_from_slice(black_box(&values));
                Ok(())
            })?,
        ];
        println!(
            "{bytes:>10} {:>18.3} {:>18.3} {:>18.3}",
            rates[0], rates[1], rates[2]
        );
        for ((_, points), rate) in lines.iter_mut().zip(rates) {
            points.push((bytes as f64, rate));
        }
    }
    let picture = chart::draw("Copies to the GPU and back", adapter, &lines)?;
    std::fs::write(path, picture).map_err(|e| format!("{}: {e}", path.display()))?;
    println!("The picture is in {}", path.display());
    Ok(())
}

/// Returns GB/s: the median over runs.
fn rate(bytes: usize, mut work: impl FnMut() -> Result<()>) -> Result<f64> {
    work()?; // memory for reuse, and shaders
    let (begin, mut seconds) = (Instant::now(), Vec::new());
    while seconds.len() < 9 || begin.elapsed().as_secs_f64() < SECONDS {
        let start = Instant::now();
        work()?;
        seconds.push(start.elapsed().as_secs_f64());
    }
    seconds.sort_by(f64::total_cmp);
    Ok(bytes as f64 / seconds[seconds.len() / 2].max(1e-9) / 1e9)
}
