//! What a publisher sends of a batch: where it lies, if that is in one shareable allocation, and its dictionaries by themselves.

use std::sync::Arc;

use arrow_device::{DeviceArray, DeviceBuffer, DeviceRecordBatch};
use arrow_schema::DataType;

use crate::device::region_of;
use crate::error::Result;
use crate::manifest::{Parts, is_cut};
use crate::region::Region;

/// An array in one allocation, or in none if it has no bytes.
#[derive(Debug, Default)]
pub(crate) struct Described {
    pub(crate) parts: Parts,
    pub(crate) region: Option<Arc<Region>>,
}

/// A batch, and the values of its dictionaries in the order of [`slots`](crate::manifest::slots).
#[derive(Debug, Default)]
pub(crate) struct Description {
    pub(crate) batch: Described,
    pub(crate) dictionaries: Vec<(Described, DeviceArray)>,
}

/// Returns where a batch lies, or `None` if it must be copied first: where it lies in several allocations, or in one that
/// cannot be shared. Reads nothing, unless the batch has sizes that are stored in device memory and not known yet.
pub(crate) fn describe(batch: &DeviceRecordBatch) -> Result<Option<Description>> {
    batch.as_struct().resolve_sizes()?;
    let mut of = Description::default();
    // Arrow counts rows in an `i64`, which the core checks.
    of.batch.parts.rows = batch.num_rows() as i64;
    let add = |column| of.batch.add(&column, &mut of.dictionaries);
    let all = batch.columns().try_for_each(add);
    Ok(all.map(|()| of))
}

impl Described {
    /// Adds an array; `None` if it does not lie where the others do.
    fn add(
        &mut self,
        array: &DeviceArray,
        dictionaries: &mut Vec<(Self, DeviceArray)>,
    ) -> Option<()> {
        let (data_type, len) = (array.data_type(), array.len());
        let layout = arrow_data::layout(data_type);
        let first = if is_cut(data_type) { 0 } else { array.offset() };
        let validity = array.validity();
        let bit = validity.as_ref().map_or(first, |bits| bits.bit_offset());
        let nulls = array.null_count().map_or(-1, |nulls| nulls as i64);
        self.parts.nodes.push_back([len as i64, nulls]);
        self.parts.starts.push_back([first as u64, bit as u64]);
        let has_bitmap = usize::from(layout.can_contain_null_mask);
        if has_bitmap > 0 {
            self.buffer(validity.as_ref().map(|bits| bits.buffer()))?;
        }
        for i in has_bitmap..array.num_buffers() {
            let mut buffer = array.buffer(i);
            if let (DataType::Union(_, _), true) = (data_type, is_cut(data_type)) {
                // The type ids, of a byte each.
                let ids = buffer.as_ref().map(|ids| ids.slice(array.offset(), len));
                buffer = ids.transpose().ok()?;
            }
            self.buffer(buffer.as_ref())?;
        }
        if layout.variadic {
            let views = array.num_buffers() as i64 - 2;
            self.parts.variadic.push_back(views);
        }
        if let DataType::Dictionary(_, _) = data_type {
            let values = array.child(0)?;
            let mut described = Self::default();
            described.parts.rows = values.len() as i64;
            described.add(&values, dictionaries)?;
            dictionaries.push((described, values));
            return Some(());
        }
        (0..array.num_children()).try_for_each(|i| self.add(&array.child(i)?, dictionaries))
    }

    fn buffer(&mut self, buffer: Option<&DeviceBuffer>) -> Option<()> {
        let Some(buffer) = buffer.filter(|buffer| !buffer.is_empty()) else {
            self.parts.buffers.push_back([0, 0]);
            return Some(());
        };
        let (region, start) = region_of(buffer)?;
        let of_all = self.region.get_or_insert_with(|| region.clone());
        if !Arc::ptr_eq(of_all, &region) {
            return None;
        }
        let place = [start as i64, buffer.len() as i64];
        self.parts.buffers.push_back(place);
        Some(())
    }
}
