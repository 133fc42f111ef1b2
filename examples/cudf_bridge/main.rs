//! Lets cuDF sort and group a batch on the GPU. The rest of the program knows nothing of cuDF: README.md says how to build the library between
//! them.
//!
//! ```text
//! cargo run -p examples --features cuda --example cudf_bridge -- LIBRARY [DEVICE]
//! ```

mod bridge;

use std::collections::BTreeMap;
use std::error::Error;
use std::path::Path;
use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::types::Int64Type;
use arrow_array::{ArrayRef, Int64Array, RecordBatch, StringArray};
use arrow_device::Devices;

use crate::bridge::Cudf;

const ROWS: i64 = 100_000;
const CITY: i32 = 0;
const AMOUNT: i32 = 1;

/// A city and an amount.
type Row = (Option<String>, Option<i64>);

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let (library, device) = match arguments.as_slice() {
        [library] => (library, "cuda:0"),
        [library, device] => (library, device.as_str()),
        _ => return Err("usage: cudf_bridge LIBRARY [DEVICE]".into()),
    };
    let device = Devices::open(device)?;
    // SAFETY: whoever starts the program names the library that `build` has made.
    let cudf = unsafe { Cudf::load(Path::new(library)) }?;

    let batch = sales()?;
    let on_device = device.upload(&batch)?;

    // Both results are in memory of cuDF's, which is freed when they are dropped.
    let sorted = cudf.sort(&on_device, AMOUNT)?.to_host()?;
    let mut expected = rows(&batch);
    expected.sort_by_key(|(_, amount)| (amount.is_none(), *amount));
    assert!(rows(&sorted) == expected, "the rows are not in order");

    let sums = cudf.sum(&on_device, CITY, AMOUNT)?.to_host()?;
    let mut found = rows(&sums);
    found.sort();
    let mut expected: BTreeMap<_, Option<i64>> = BTreeMap::new();
    for (city, amount) in rows(&batch) {
        let sum = expected.entry(city).or_default();
        // The sum of nothing but nulls is null.
        *sum = sum.map_or(amount, |sum| Some(sum + amount.unwrap_or(0)));
    }
    assert_eq!(found, expected.into_iter().collect::<Vec<_>>());

    println!("{device}: {ROWS} rows sorted by cuDF, and summed in these groups:");
    for (city, sum) in found {
        println!("{city:?}: {sum:?}");
    }
    Ok(())
}

/// No two amounts are the same, so that there is one order.
fn sales() -> Result<RecordBatch, Box<dyn Error>> {
    let names = ["Kyiv", "Lima", "Oslo", "Quito"];
    let city: StringArray = (0..ROWS)
        .map(|i| names.get(i as usize % 5).copied())
        .collect();
    let amount: Int64Array = (0..ROWS)
        .map(|i| (i != 12_345).then_some(i * 7919 % 100_003))
        .collect();
    Ok(RecordBatch::try_from_iter([
        ("city", Arc::new(city) as ArrayRef),
        ("amount", Arc::new(amount)),
    ])?)
}

fn rows(batch: &RecordBatch) -> Vec<Row> {
    let city = batch.column(0).as_string::<i32>().iter();
    let amount = batch.column(1).as_primitive::<Int64Type>().iter();
    city.map(|city| city.map(str::to_owned))
        .zip(amount)
        .collect()
}
