//! Batches, and oddities that are legal.

use super::*;
use crate::async_stream::kit::produce;
use crate::support::types::structure;
use crate::support::{all_types, assert_same, assert_same_batch, variants};
use crate::support_c::sim::{cpu, places, simulated};
use crate::support_c::{CArray, DICTIONARY, c, take};
use arrow_array::{Array, StringArray, make_array};
use arrow_data::ArrayData;
use arrow_data::ffi::FFI_ArrowArray;
use arrow_device::async_stream::AsyncDeviceRecordBatchStream;
use arrow_device::device::Backend;
use arrow_device::device::sim::SimMode;
use arrow_device::{
    ArrowDeviceType, DeviceRecordBatch, DeviceRecordBatches, Devices, ExportOptions, SyncPolicy,
    Validation,
};
use futures::StreamExt;
use std::ffi::c_void;
use std::future::Future;
use std::pin::Pin;
use std::ptr;
use std::task::{Context, Poll, Waker};

/// Out and in again.
fn again(array: &DeviceArray, options: &arrow_device::ImportOptions) -> DeviceArray {
    let field = Arc::new(arrow_schema::Field::new(
        "",
        array.data_type().clone(),
        true,
    ));
    let export = arrow_device::ExportOptions::new(arrow_device::SyncPolicy::Event);
    let exported = array.export_array(&export).unwrap();
    // SAFETY: the struct comes from an export of this crate, whose values are valid, and the type is the exported one.
    unsafe { DeviceArray::import_as(exported, field, options) }.unwrap()
}

/// Batches: a struct whose rows cannot be null.
#[test]
fn batches() {
    let data_type = structure(vec![("a", DataType::Int32), ("b", DataType::Utf8)]);
    for place in places() {
        let data = array(&data_type, 100, Nulls::Some, 3).to_data();
        assert!(data.null_count() > 0);
        for null_count in [-1, data.null_count() as i64] {
            let mut foreign = Foreign::new(&data, &place.device);
            foreign.root().null_count = null_count;
            let error = foreign
                .import_batch(&place.options)
                .unwrap_err()
                .to_string();
            assert!(
                error.contains("array.null_count: the rows of a record batch"),
                "{error}"
            );
            foreign.assert_released("nulls");
        }
        // A struct array may have them.
        let mut foreign = Foreign::new(&data, &place.device);
        let imported = foreign.import(&place.options).unwrap();
        assert_same(&make_array(data), &imported.to_host().unwrap(), "struct");
        drop(imported);
        // 3.3.4: a mask without nulls, counted or not, and a root that starts at row 13.
        let plain = array(&data_type, 100, Nulls::None, 3);
        for null_count in [-1, 0] {
            let masked = plain.to_data().into_builder();
            let set = arrow_buffer::NullBuffer::new_valid(100);
            let masked = masked.nulls(Some(set)).build().unwrap();
            let mut foreign = Foreign::new(&masked, &place.device);
            let mask = foreign_mask(&mut foreign, &place);
            foreign.set_buffer(&[], 0, mask);
            let root = foreign.root();
            (root.null_count, root.offset, root.length) = (null_count, 13, 80);
            let batch = foreign.import_batch(&place.options).unwrap();
            assert_eq!(
                (batch.num_rows(), batch.column(0).unwrap().offset()),
                (80, 13)
            );
            let back = batch.to_host().unwrap();
            let expected = plain.slice(13, 80);
            let expected = arrow_array::cast::AsArray::as_struct(&expected).columns();
            for (expected, column) in expected.iter().zip(back.columns()) {
                assert_same(expected, column, format!("a column on {place}"));
            }
            drop((batch, back));
            foreign.assert_released("offset");
        }
        // Not a struct.
        let mut foreign = Foreign::new(&ints().to_data(), &place.device);
        let schema = arrow_schema::ffi::FFI_ArrowSchema::try_from(&*foreign.field()).unwrap();
        // SAFETY: what is wrong with the struct is what an import checks without relying on it.
        let result = unsafe {
            arrow_device::DeviceRecordBatch::import(foreign.take(), &schema, &place.options)
        };
        result.unwrap_err();
        foreign.assert_released("no struct");
        place.assert_clean();
    }
}

/// A mask of ones for 100 rows.
fn foreign_mask(foreign: &mut Foreign, place: &Place) -> *const std::ffi::c_void {
    let ones = arrow_array::UInt8Array::from(vec![0xFF; 16]);
    let ones = place.device.upload_array(&ones).unwrap().buffer(1).unwrap();
    let address = ones.address().as_ptr();
    foreign.keep(ones);
    address
}

/// Legal oddities.
#[test]
fn oddities_are_accepted() {
    use DataType::*;
    for place in places() {
        // Null pointers where there is nothing to point to (3.3.5), out and in again.
        let empty_texts: ArrayRef = Arc::new(StringArray::from(vec!["", "", ""]));
        let mut foreign = Foreign::new(&empty_texts.to_data(), &place.device);
        foreign.set_buffer(&[], 2, ptr::null());
        let imported = foreign.import(&place.options).unwrap();
        assert_same(&empty_texts, &imported.to_host().unwrap(), "empty texts");
        let again = again(&imported, &place.options);
        assert_same(&empty_texts, &again.to_host().unwrap(), "empty texts again");
        drop(again);
        drop(imported);
        foreign.assert_released("empty texts");
        // Null counts of null arrays.
        for null_count in [-1, 0, 3] {
            let nulls = array(&Null, 3, Nulls::None, 1);
            let mut foreign = Foreign::new(&nulls.to_data(), &place.device);
            foreign.root().null_count = null_count;
            let imported = foreign.import(&place.options).unwrap();
            assert_eq!(imported.null_count(), Some(3));
            assert_same(&nulls, &imported.to_host().unwrap(), "nulls");
        }
        // Nobody counted: without a mask there are none, with one it is unknown until asked for.
        let mut foreign = Foreign::new(&Int32Array::from(vec![1, 2]).to_data(), &place.device);
        foreign.root().null_count = -1;
        assert_eq!(
            foreign.import(&place.options).unwrap().null_count(),
            Some(0)
        );
        let mut foreign = Foreign::new(&ints().to_data(), &place.device);
        foreign.root().null_count = -1;
        let imported = foreign.import(&place.options).unwrap();
        assert_eq!(imported.null_count(), None);
        assert_same(&ints(), &imported.to_host().unwrap(), "uncounted");
        assert_eq!(imported.resolve_null_counts().unwrap(), 1);
        assert_eq!(imported.null_count(), Some(1));
        drop(imported);
        place.assert_clean();
    }
}

/// Sets every pointer to null, and members that need not be 0 to another value.
fn without_buffers(foreign: &mut Foreign, path: &mut Vec<usize>, data: &ArrayData) {
    let n = foreign.at(path).n_buffers as usize;
    (0..n).for_each(|i| foreign.set_buffer(path, i, ptr::null()));
    let node = foreign.at(path);
    (node.null_count, node.offset) = (-1, 3);
    let is_dictionary = matches!(data.data_type(), DataType::Dictionary(..));
    for (i, child) in data.child_data().iter().enumerate() {
        path.push(if is_dictionary { DICTIONARY } else { i });
        without_buffers(foreign, path, child);
        path.pop();
    }
}

/// What strict consumers want of an array without rows and its descendants. Returns the addresses of offsets.
fn strict(array: &CArray, data_type: &DataType, context: &str) -> Vec<(*const c_void, u8)> {
    let mut found = vec![];
    let layout = arrow_data::layout(data_type);
    assert_eq!(
        (array.length, array.offset, array.null_count),
        (0, 0, 0),
        "{context}"
    );
    let kinds = layout.buffers.len() + usize::from(layout.can_contain_null_mask);
    let n = array.n_buffers as usize;
    if layout.variadic {
        // SAFETY: the export is live, and has the buffers that its struct says.
        let sizes = unsafe { *array.buffers.add(n - 1) };
        assert!(n > kinds && !sizes.is_null(), "{context}");
    } else {
        assert_eq!(n, kinds, "{context}");
    }
    use DataType::*;
    let width = match data_type {
        Utf8 | Binary | List(_) | Map(_, _) => 4,
        LargeUtf8 | LargeBinary | LargeList(_) => 8,
        _ => 0,
    };
    // SAFETY: the export is live, and has the buffers and children that its struct says.
    unsafe {
        if width > 0 {
            let offsets = *array.buffers.add(1);
            assert!(
                !offsets.is_null() && offsets.addr() % usize::from(width) == 0,
                "{context}"
            );
            found.push((offsets, width));
        }
        let children: Vec<&DataType> = match data_type {
            List(f) | LargeList(f) | ListView(f) | LargeListView(f) => vec![f.data_type()],
            FixedSizeList(f, _) | Map(f, _) => vec![f.data_type()],
            Struct(fields) => fields.iter().map(|f| f.data_type()).collect(),
            Union(fields, _) => fields.iter().map(|(_, f)| f.data_type()).collect(),
            RunEndEncoded(ends, values) => vec![ends.data_type(), values.data_type()],
            _ => vec![],
        };
        assert_eq!(array.n_children as usize, children.len(), "{context}");
        for (i, child) in children.into_iter().enumerate() {
            found.extend(strict(&**array.children.add(i), child, context));
        }
        if let Dictionary(_, values) = data_type {
            found.extend(strict(&*array.dictionary, values, context));
        }
    }
    found
}

/// Every type without rows and without any buffer, at every depth: exports have the offset that the format demands.
#[test]
fn without_rows_and_buffers() {
    let elsewhere = simulated(SimMode::Async).map_or_else(Devices::cpu, |sim| sim.device);
    // Page-locked memory without its backend, too.
    for (place, pinned) in places()
        .into_iter()
        .map(|place| (place, false))
        .chain([(cpu(), true)])
    {
        for (name, data_type) in all_types() {
            let context = format!("{name} on {place}, {pinned}");
            let empty = arrow_array::new_empty_array(&data_type);
            let mut foreign = Foreign::new(&empty.to_data(), &place.device);
            without_buffers(&mut foreign, &mut vec![], &empty.to_data());
            foreign.device_array.reserved = [1, -1, 7];
            if pinned {
                foreign.device_array.device_type = ArrowDeviceType::CUDA_HOST.value();
                foreign.device_array.device_id = 4711;
            }
            let imported = foreign.import(&place.options).expect(&context);
            assert_same(&empty, &imported.to_host().expect(&context), &context);
            // What is made of it, too.
            let host = Devices::cpu().upload_array(&imported.to_host().unwrap());
            let compact = match pinned {
                // It has no memory to give.
                true => Ok(imported.clone()),
                false => imported.compact(),
            };
            for other in [host, compact, imported.to_device(&elsewhere)] {
                let wait = ExportOptions::new(SyncPolicy::Wait);
                let mut exported = other.expect(&context).export_array(&wait).expect(&context);
                strict(&c(&mut exported).array, &data_type, &context);
            }
            imported.wait().unwrap();
            let before = place.device.stats();
            let (exported, schema) = imported.export(SyncPolicy::Wait).expect(&context);
            let mut exported = exported;
            let cost = place.device.stats().since(&before);
            assert_eq!(c(&mut exported).reserved, [0; 3], "{context}");
            let offsets = strict(&c(&mut exported).array, &data_type, &context);
            let made = u64::from(place.sim.is_some() && !offsets.is_empty());
            assert_eq!(cost.allocations, made, "{context}");
            for (address, width) in offsets {
                let of: ArrayRef = match width {
                    4 => Arc::new(Int32Array::from(vec![5])),
                    _ => Arc::new(arrow_array::Int64Array::from(vec![5])),
                };
                let mut probe = Foreign::new(&of.to_data(), &place.device);
                probe.set_buffer(&[], 1, address);
                let value = probe.import(&place.options).expect(&context).to_host();
                let value = value.unwrap().to_data();
                assert!(
                    value.buffers()[0].iter().all(|byte| *byte == 0),
                    "{context}"
                );
            }
            if place.sim.is_none() {
                // SAFETY: `CDeviceArray` starts with the struct that arrow-rs has, and is moved out.
                let theirs = unsafe {
                    let array = take(&mut c(&mut exported).array);
                    let array = std::mem::transmute::<CArray, FFI_ArrowArray>(array);
                    arrow_array::ffi::from_ffi(array, &schema)
                };
                let theirs = theirs.expect(&context);
                theirs.validate_full().expect(&context);
                assert_eq!(theirs.len(), 0, "{context}");
            }
            drop((exported, imported));
            foreign.assert_released_by(&place.device, &context);
        }
        place.assert_clean();
    }
}

/// Below lists of no text, beside nulls that are counted: one wait and one allocation, and in a task no wait.
#[test]
fn offsets_are_made_where_nulls_are_counted() {
    let lists = DataType::new_list(DataType::Utf8, true);
    let empty: ArrayRef = make_array({
        let texts = array(&DataType::Utf8, 0, Nulls::None, 1).to_data();
        let data = ArrayData::builder(lists.clone()).len(80);
        let data = data.add_buffer(arrow_buffer::Buffer::from_vec(vec![0; 81]));
        data.child_data(vec![texts]).build().unwrap()
    });
    let ints = array(&DataType::Int32, 90, Nulls::Some, 1);
    let fields = [
        arrow_schema::Field::new("l", lists, true),
        arrow_schema::Field::new("i", DataType::Int32, true),
    ];
    let schema = Arc::new(Schema::new(fields.to_vec()));
    for place in places() {
        let mut foreign = Foreign::new(&empty.to_data(), &place.device);
        foreign.set_buffer(&[0], 1, ptr::null());
        let lists = foreign.import(&place.options).unwrap();
        let cut = || {
            place
                .device
                .upload_array(&ints)
                .unwrap()
                .slice(3, 80)
                .unwrap()
        };
        let batch = |cut| DeviceRecordBatch::try_new(schema.clone(), &[lists.clone(), cut]);
        let expected = [empty.clone(), ints.slice(3, 80)].to_vec();
        let expected = arrow_array::RecordBatch::try_new(schema.clone(), expected).unwrap();
        for in_task in [false, true] {
            let batch = batch(cut()).unwrap();
            place.device.synchronize().unwrap();
            let before = place.device.stats();
            let back = match in_task {
                false => {
                    let out = batch
                        .export_array(&ExportOptions::new(SyncPolicy::Event))
                        .unwrap();
                    let (schema, options) = (schema.clone(), &place.options);
                    // SAFETY: the struct comes from an export of this crate, and the schema is the exported one.
                    unsafe { DeviceRecordBatch::import_as(out, schema, options) }.unwrap()
                }
                true => sent(batch.clone(), &place),
            };
            let cost = place.device.stats().since(&before);
            if place.sim.is_some() {
                let waits = u64::from(!in_task);
                assert_eq!((cost.allocations, cost.host_waits), (1, waits), "{place}");
            }
            assert_same_batch(&expected, &back.to_host().unwrap(), "a batch");
        }
        drop(lists);
        foreign.assert_released_by(&place.device, "lists");
        place.assert_clean();
    }
}

/// A batch by an asynchronous stream.
fn sent(batch: DeviceRecordBatch, place: &Place) -> DeviceRecordBatch {
    // SAFETY: the handler goes to this crate's own producer, which keeps to the interface.
    let (handler, opening) =
        unsafe { AsyncDeviceRecordBatchStream::handler(1, place.options.clone()) };
    let (schema, device_type) = (batch.schema(), batch.device().id().device_type);
    let batches = futures::stream::iter([Ok(batch)]);
    let batches = DeviceRecordBatches::from_stream(batches, schema, device_type);
    let options = ExportOptions::new(SyncPolicy::Event);
    let producing = std::pin::pin!(produce(batches, handler, options));
    let consuming = std::pin::pin!(async { opening.await.unwrap().next().await.unwrap() });
    let mut both = futures::future::join(producing, consuming);
    loop {
        let mut cx = Context::from_waker(Waker::noop());
        match Pin::new(&mut both).poll(&mut cx) {
            Poll::Ready((produced, consumed)) => {
                produced.unwrap();
                return consumed.unwrap();
            }
            // A deferred device works when it is told to.
            Poll::Pending => _ = place.sim.as_ref().map(|sim| sim.synchronize()),
        }
    }
}

/// As polars gives it: with the pointer of a validity bitmap, which is null.
#[test]
fn null_arrays_with_a_pointer() {
    for place in places() {
        for (data_type, path) in [
            (DataType::Null, vec![]),
            (structure(vec![("n", DataType::Null)]), vec![0]),
        ] {
            let nulls = array(&data_type, 3, Nulls::None, 1);
            for pointer in [ptr::null(), ptr::dangling()] {
                let list: Box<[*const c_void; 1]> = Box::new([pointer]);
                let mut foreign = Foreign::new(&nulls.to_data(), &place.device);
                let node = foreign.at(&path);
                (node.n_buffers, node.buffers) = (1, list.as_ptr().cast_mut());
                let imported = foreign.import(&place.options);
                if !pointer.is_null() {
                    let e = imported.unwrap_err().to_string();
                    assert!(e.contains("buffers[0]: is not null"), "{e}");
                    continue;
                }
                let imported = imported.unwrap();
                assert_same(&nulls, &imported.to_host().unwrap(), "nulls");
                let (mut out, _schema) = imported.export(SyncPolicy::Event).unwrap();
                let mut node = &c(&mut out).array;
                for &i in &path {
                    // SAFETY: the export is live and has this child.
                    node = unsafe { &**node.children.add(i) };
                }
                assert_eq!((node.n_buffers, node.null_count), (0, 3), "{place}");
                assert!(node.buffers.is_null(), "{place}");
            }
        }
        place.assert_clean();
    }
}

/// The offset of an array whose rows nobody can reach says nothing, wherever it is.
#[test]
fn offsets_that_are_not_reached() {
    use crate::support::types::map;
    let data_type = map(DataType::Utf8, DataType::Int32, false);
    let maps = array(&data_type, 4, Nulls::None, 1).to_data();
    for place in places() {
        let full = ImportOptions {
            validation: Validation::Full,
            ..place.options.clone()
        };
        let mut foreign = Foreign::new(&maps, &place.device);
        let zeros = place
            .device
            .upload_array(&Int32Array::from(vec![0; 5]))
            .unwrap();
        foreign.set_buffer(&[], 1, zeros.buffer(1).unwrap().address().as_ptr());
        foreign.keep(zeros);
        foreign.at(&[0]).length = 0;
        let mut wild = vec![0; maps.child_data()[0].len() + 1];
        wild[0] = 1 << 20;
        let wild = place.device.upload_array(&Int32Array::from(wild)).unwrap();
        foreign.set_buffer(&[0, 0], 1, wild.buffer(1).unwrap().address().as_ptr());
        foreign.keep(wild);
        let imported = foreign.import(&full).unwrap();
        let back = imported.to_host().unwrap().to_data();
        back.validate_full().unwrap();
        assert_eq!((back.len(), back.child_data()[0].len()), (4, 0), "{place}");
        drop((imported, back));
        foreign.assert_released_by(&place.device, "a map");
        place.assert_clean();
    }
}

/// Offsets at every level, and children longer than their parents need.
#[test]
fn variants_are_accepted() {
    for place in places() {
        let full = ImportOptions {
            validation: Validation::Full,
            ..place.options.clone()
        };
        for (i, (name, data_type)) in all_types().into_iter().enumerate() {
            let whole = array(&data_type, 40, Nulls::Some, i as u64);
            for (k, made) in variants(&whole, i as u64).into_iter().enumerate() {
                let context = format!("{name}, {:?} on {place}", made.variant);
                let rows = made.rows.len();
                // Trusted, uncounted or checked.
                let way = (i + k) % 3;
                let options = if way == 2 { &full } else { &place.options };
                let mut foreign = Foreign::part(&made.around, made.offset, rows, &place.device);
                if way == 1 && data_type != DataType::Null {
                    foreign.root().null_count = -1;
                }
                let imported = foreign.import(options).expect(&context);
                imported.resolve_null_counts().expect(&context);
                assert_eq!(imported.null_count(), Some(nulls(&made.rows)), "{context}");
                for (offset, rows) in [(0, rows), (rows / 3, rows / 2)] {
                    let context = format!("{context}, slice({offset}, {rows})");
                    let expected = made.rows.slice(offset, rows);
                    let part = imported.slice(offset, rows).unwrap();
                    assert_same(&expected, &part.to_host().expect(&context), &context);
                    let again = again(&part, options).to_host().expect(&context);
                    assert_same(&expected, &again, &context);
                }
                drop(imported);
                foreign.assert_released_by(&place.device, &context);
            }
        }
        place.assert_clean();
    }
}

/// By the array's own validity bitmap.
fn nulls(array: &dyn Array) -> usize {
    match array.data_type() {
        DataType::Null => array.len(),
        _ => array.null_count(),
    }
}

/// Values at odd addresses: typed access refuses, the host gets an aligned copy, which is counted.
#[test]
fn misaligned_values() {
    for place in places() {
        let bytes: Vec<u8> = [0u8]
            .into_iter()
            .chain((1..=3i64).flat_map(i64::to_le_bytes))
            .collect();
        let shifted = arrow_array::UInt8Array::from(bytes);
        let shifted = place
            .device
            .upload_array(&shifted)
            .unwrap()
            .buffer(1)
            .unwrap();
        let expected: ArrayRef = Arc::new(arrow_array::Int64Array::from(vec![1, 2, 3]));
        let mut foreign = Foreign::new(&expected.to_data(), &place.device);
        foreign.set_buffer(&[], 1, shifted.address().offset(1).as_ptr());
        if place.sim.is_none() {
            // Counters of its own.
            foreign.device_array.device_type = 3;
            foreign.device_array.device_id = 4711;
        }
        let imported = foreign.import(&place.options).unwrap();
        let device = imported.device().clone();
        let error = imported
            .values_on::<i64>(&device.default_queue())
            .unwrap_err();
        assert!(
            error.to_string().contains("not aligned to 8 bytes"),
            "{error}"
        );
        let before = device.stats();
        assert_same(&expected, &imported.to_host().unwrap(), "misaligned");
        let delta = device.stats().since(&before);
        let copied = if place.sim.is_some() { 0 } else { 24 };
        assert_eq!(delta.host_copied_bytes, copied, "{place}");
        drop((imported, shifted));
        foreign.assert_released("misaligned");
        place.assert_clean();
    }
}
