//! Small host batches are joined before they are uploaded: a transfer of a hundred batches of 50 rows takes many times as
//! long as one of 5,000 rows. `BatchCoalescer` of arrow-select joins them, at the price of one copy on the host.

use arrow_array::{RecordBatch, RecordBatchIterator, RecordBatchReader, record_batch};
use arrow_device::{Devices, upload_reader};
use arrow_select::coalesce::BatchCoalescer;

/// Joins batches of at most `rows / 2` rows into batches of `rows` rows.
fn joined(mut reader: impl RecordBatchReader, rows: usize) -> impl RecordBatchReader {
    let schema = reader.schema();
    let coalescer = BatchCoalescer::new(schema.clone(), rows);
    let mut coalescer = coalescer.with_biggest_coalesce_batch_size(Some(rows / 2));
    let batches = std::iter::from_fn(move || {
        loop {
            if let Some(batch) = coalescer.next_completed_batch() {
                return Some(Ok(batch));
            }
            let pushed = match reader.next() {
                Some(batch) => batch.and_then(|batch| coalescer.push_batch(batch)),
                None if coalescer.is_empty() => return None,
                None => coalescer.finish_buffered_batch(),
            };
            if let Err(e) = pushed {
                return Some(Err(e));
            }
        }
    });
    RecordBatchIterator::new(batches, schema)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let device = Devices::simulated()?;
    let batch = record_batch!(("id", Int64, [1, 2, 3]))?;
    let batches = || -> Vec<RecordBatch> { vec![batch.clone(); 1000] };
    let small = || RecordBatchIterator::new(batches().into_iter().map(Ok), batch.schema());

    for (name, reader) in [
        (
            "as they are",
            Box::new(small()) as Box<dyn RecordBatchReader>,
        ),
        ("joined", Box::new(joined(small(), 1024))),
    ] {
        let before = device.stats();
        let mut rows = 0;
        for on_device in upload_reader(reader, &device) {
            rows += on_device?.num_rows();
        }
        let cost = device.stats().since(&before);
        println!("{name}: {rows} rows in {} uploads", cost.allocations);
        assert_eq!(rows, 3000);
        assert_eq!(cost.allocations, if name == "joined" { 3 } else { 1000 });
    }
    Ok(())
}
