//! What device arrays and batches offer as those of arrow-rs do.

mod constructors;
mod loans;
mod manners;
mod memory;

use std::sync::Arc;

use crate::support_c::sim::Place;
use arrow_array::StringArray;
use arrow_device::{
    DeviceArray, DeviceRecordBatch, Error, ExportOptions, SyncPolicy, TransferStats,
};
use arrow_schema::{DataType, Field, Schema, SchemaRef};

/// Rows of a column that is copied from where it is.
const ROWS: usize = 1 << 17;

/// What some work on this thread costs, on whichever device; other tests use the CPU too.
fn counted<T>(work: impl FnOnce() -> T) -> (T, TransferStats) {
    TransferStats::scope(work)
}

#[track_caller]
pub(crate) fn refused<T>(result: Result<T, Error>, words: &[&str]) {
    match result {
        Err(Error::InvalidArgument(text)) => {
            let missing: Vec<_> = words.iter().filter(|word| !text.contains(**word)).collect();
            assert!(missing.is_empty(), "{missing:?} not in: {text}");
        }
        Err(e) => panic!("{e}"),
        Ok(_) => panic!("accepted"),
    }
}

fn schema_of(columns: &[DeviceArray]) -> SchemaRef {
    let field = |(i, column): (usize, &DeviceArray)| {
        Field::new(format!("c{i}"), column.data_type().clone(), true)
    };
    Arc::new(Schema::new(
        columns.iter().enumerate().map(field).collect::<Vec<_>>(),
    ))
}

fn batch_of(columns: &[DeviceArray]) -> DeviceRecordBatch {
    DeviceRecordBatch::try_new(schema_of(columns), columns).unwrap()
}

/// Text as a foreign producer hands it over: the size of its bytes is stored in device memory.
fn text(place: &Place) -> DeviceArray {
    let up = place.device.upload_array(&strings()).unwrap();
    let exported = up
        .export_array(&ExportOptions::new(SyncPolicy::Wait))
        .unwrap();
    let field = Arc::new(Field::new("", DataType::Utf8, true));
    // SAFETY: the struct comes from an export of this crate, and the type is the exported one.
    unsafe { DeviceArray::import_as(exported, field, &place.options) }.unwrap()
}

fn strings() -> StringArray {
    StringArray::from(vec![Some("one"), None, Some(""), Some("three")])
}
