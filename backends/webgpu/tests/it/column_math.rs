//! What the example computes: the same as arrow-rs, whatever is null, and however batches are cut.

use std::fs::File;
use std::path::Path;
use std::sync::Arc;

use arrow_array::types::{Date32Type, Decimal128Type};
use arrow_array::{Array, ArrayRef, PrimitiveArray, RecordBatch};
use arrow_device::{Device, DeviceRecordBatch};
use arrow_schema::{Field, Schema};
use parquet::arrow::ArrowWriter;

use crate::random::Random;
use crate::{Result, chart, cpu, input, query};

/// A column that mostly satisfies the query's condition, with nulls if `nulls`.
fn decimals(
    random: &mut Random,
    rows: usize,
    usual: std::ops::Range<i64>,
    nulls: bool,
) -> ArrayRef {
    let mut value = || {
        if nulls && random.below(5) == 0 {
            return None;
        }
        let digits = 10i64.pow(15) - 1;
        Some(i128::from(match random.below(8) {
            // Anything that a decimal of 15 digits can be.
            0 => random.next() as i64 % digits,
            1 => [usual.start - 1, usual.end, -1, 0, digits, -digits][random.below(6)],
            _ => usual.start + random.below((usual.end - usual.start) as usize) as i64,
        }))
    };
    let values: PrimitiveArray<Decimal128Type> = (0..rows).map(|_| value()).collect();
    Arc::new(values.with_precision_and_scale(15, 2).unwrap())
}

fn batch(random: &mut Random, rows: usize) -> RecordBatch {
    let nulls = |random: &mut Random| random.below(3) > 0;
    let dates = nulls(random);
    let date = |_| {
        let day = 8760 + random.below(380) as i32;
        (!dates || random.below(7) > 0).then_some(day)
    };
    let dates: PrimitiveArray<Date32Type> = (0..rows).map(date).collect();
    let mut decimals = |usual| {
        let nulls = nulls(random);
        decimals(random, rows, usual, nulls)
    };
    let columns = vec![
        Arc::new(dates) as ArrayRef,
        decimals(5..8),
        decimals(100..2400),
        decimals(90_000..10_500_000),
    ];
    let types = query::COLUMNS.iter().zip(query::TYPES);
    let fields: Vec<_> = types.map(|(name, t)| Field::new(*name, t, true)).collect();
    RecordBatch::try_new(Arc::new(Schema::new(fields)), columns).unwrap()
}

fn on_gpu(device: &Device, batches: &[RecordBatch]) -> Result<RecordBatch> {
    let batches = batches.iter().map(|batch| device.upload(batch));
    let batches: Vec<DeviceRecordBatch> = batches.collect::<std::result::Result<_, _>>()?;
    Ok(query::Query::new(device)?.run(&batches)?.to_host()?)
}

#[test]
fn batches_with_nulls() -> Result<()> {
    let Some(device) = crate::rigs::try_open() else {
        return Ok(());
    };
    let random = &mut Random(6);
    for _ in 0..40 {
        let batches: Vec<_> = (0..random.below(4))
            .map(|_| {
                let rows = [0, 1, 31, 256, 300, 20_000][random.below(6)];
                batch(random, rows)
            })
            .collect();
        assert_eq!(on_gpu(&device, &batches)?, cpu::query(&batches)?);
    }
    Ok(())
}

/// Slices of what is on the device, whose values and bits begin anywhere.
#[test]
fn slices() -> Result<()> {
    let Some(device) = crate::rigs::try_open() else {
        return Ok(());
    };
    let (random, query) = (&mut Random(7), query::Query::new(&device)?);
    let whole = batch(random, 5000);
    let on_device = device.upload(&whole)?;
    for i in 0..60 {
        let offset = if i < 40 { i } else { random.below(4000) };
        let rows = random.below(5000 - offset);
        let result = query.run(&[on_device.slice(offset, rows)?])?.to_host()?;
        assert_eq!(
            result,
            cpu::query(&[whole.slice(offset, rows)])?,
            "{rows} rows at {offset}"
        );
    }
    Ok(())
}

#[test]
fn no_row_is_selected() -> Result<()> {
    let Some(device) = crate::rigs::try_open() else {
        return Ok(());
    };
    let none = batch(&mut Random(8), 100).slice(0, 0);
    for batches in [vec![], vec![none]] {
        let result = on_gpu(&device, &batches)?;
        assert_eq!((result.num_rows(), result.column(0).null_count()), (1, 1));
        assert_eq!(result, cpu::query(&batches)?);
    }
    Ok(())
}

/// The input that the example makes: with more rows than a workgroup for each 256, and with more partial sums than the last shader has
/// invocations.
#[test]
fn lineitem() -> Result<()> {
    let Some(device) = crate::rigs::try_open() else {
        return Ok(());
    };
    let whole = input::generate(0.02)?;
    let expected = cpu::query(&whole)?;
    assert_eq!(expected.column(0).null_count(), 0);
    let third = whole[0].num_rows() / 3;
    let rest = whole[0].num_rows() - 2 * third;
    let cuts = [(0, third), (third, third), (2 * third, rest)];
    let thirds = cuts.map(|(offset, rows)| whole[0].slice(offset, rows));
    assert_eq!(on_gpu(&device, &whole)?, expected);
    assert_eq!(on_gpu(&device, &thirds)?, expected);
    Ok(())
}

#[test]
fn files() -> Result<()> {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("lineitem.parquet");
    let written = batch(&mut Random(9), 1000);
    // In another order, and with a column that the query does not read.
    let mut fields: Vec<_> = written.schema().fields().iter().rev().cloned().collect();
    fields.push(Arc::new(fields[0].as_ref().clone().with_name("l_tax")));
    let mut columns: Vec<_> = written.columns().iter().rev().cloned().collect();
    columns.push(columns[0].clone());
    let file = RecordBatch::try_new(Arc::new(Schema::new(fields)), columns)?;
    let write = |batch: &RecordBatch| -> Result<()> {
        let mut writer = ArrowWriter::try_new(File::create(&path)?, batch.schema(), None)?;
        writer.write(batch)?;
        writer.close()?;
        Ok(())
    };
    write(&file)?;
    let read = input::read(&path)?;
    assert_eq!(read.iter().map(RecordBatch::num_rows).sum::<usize>(), 1000);
    assert_eq!(read[0].columns(), written.columns());

    let refused = |columns: &[usize], renamed: &[&str]| -> Result<String> {
        let batch = file.project(columns)?;
        let fields = batch.schema().fields().to_vec();
        let fields: Vec<_> = fields
            .iter()
            .zip(renamed)
            .map(|(f, name)| f.as_ref().clone().with_name(*name))
            .collect();
        write(&RecordBatch::try_new(
            Arc::new(Schema::new(fields)),
            batch.columns().to_vec(),
        )?)?;
        Ok(input::read(&path).unwrap_err().to_string())
    };
    let error = refused(&[0, 1, 2], &["l_extendedprice", "l_quantity", "l_discount"])?;
    assert!(
        error.contains("lineitem.parquet") && error.contains("l_shipdate"),
        "{error}"
    );
    let error = refused(
        &[0, 1, 2, 4],
        &["l_extendedprice", "l_quantity", "l_discount", "l_shipdate"],
    )?;
    assert!(error.contains("l_shipdate is of type"), "{error}");
    std::fs::remove_file(path)?;
    Ok(())
}

#[test]
fn pictures() -> Result<()> {
    let lines = [("up & down", vec![(4096.0, 0.01), (16384.0, 2.0)])];
    let picture = chart::draw("a < b", &["on lavapipe".into()], &lines)?;
    assert!(picture.starts_with("<svg") && picture.ends_with("</svg>\n"));
    assert!(picture.contains("a &lt; b") && picture.contains("up &amp; down"));
    assert!(
        !picture.contains("NaN") && !picture.contains("inf"),
        "{picture}"
    );
    Ok(())
}
