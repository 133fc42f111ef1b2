//! Import and export on the CPU, small enough for Miri: `cargo +nightly miri test --test miri_interchange`.

use std::sync::Arc;
use std::thread;

use crate::support::producer::into_arrow;
use crate::support::types::{dictionary, fixed_list, list, map, run_ends, structure, union};
use crate::support::{Nulls, Variant, array, assert_same, assert_same_batch, batch};
use crate::support_c::export::upload_data;
use crate::support_c::sim::cpu;
use crate::support_c::{CArray, CDeviceArray, DICTIONARY, Foreign, Moved, take};
use arrow_array::{Array, ArrayRef, Int32Array, RecordBatch, make_array};
use arrow_device::{
    DeviceArray, DeviceRecordBatch, DeviceRecordBatchReader, DeviceRecordBatchStreamReader,
    DeviceRecordBatches, Devices, ExportOptions, FFI_ArrowDeviceArray, FFI_ArrowDeviceArrayStream,
    ReleasePolicy, SyncPolicy,
};
use arrow_schema::{DataType, Field};

fn types() -> Vec<DataType> {
    use DataType::*;
    vec![
        Null,
        Boolean,
        Int32,
        Utf8,
        Utf8View,
        list(Utf8),
        fixed_list(Int16, 2),
        structure(vec![("a", Int32), ("s", structure(vec![("b", Boolean)]))]),
        map(Utf8, Int32, false),
        union(arrow_schema::UnionMode::Sparse, vec![Int32, Utf8]),
        union(arrow_schema::UnionMode::Dense, vec![Int32, Utf8]),
        dictionary(Int8, Utf8),
        run_ends(Int32, Utf8),
    ]
}

fn field(data_type: &DataType) -> Arc<Field> {
    Arc::new(Field::new("", data_type.clone(), true))
}

fn options() -> ExportOptions {
    ExportOptions::new(SyncPolicy::Event)
}

fn import(array: FFI_ArrowDeviceArray, data_type: &DataType) -> DeviceArray {
    // SAFETY: the struct comes from an export of this crate or of arrow-rs, whose values are valid, and the type is the exported one.
    unsafe { DeviceArray::import_as(array, field(data_type), &cpu().options) }.unwrap()
}

#[test]
fn out_and_in() {
    let exports = [
        options(),
        ExportOptions {
            counts_nulls: false,
            ..options()
        },
        ExportOptions {
            release: ReleasePolicy::Synchronize,
            ..options()
        },
    ];
    // Under Miri, which takes seconds for each, they take turns.
    let mut turn = exports.iter().cycle();
    for data_type in types() {
        let whole = array(&data_type, 7, Nulls::Some, 1);
        let both = Variant::Both(3).of(&whole, 1).unwrap();
        for array in [whole.slice(1, 5), whole.slice(7, 0), both.array()] {
            let up = Devices::cpu().upload_array(&array).unwrap();
            let exports = turn.by_ref().take(if cfg!(miri) { 1 } else { 3 });
            for export in exports {
                let again = import(up.export_array(export).unwrap(), &data_type);
                let n = again.len();
                let slice = again.slice(n / 3, n / 2).unwrap();
                let slice = import(slice.export_array(export).unwrap(), &data_type);
                assert_same(&array, &again.to_host().unwrap(), &data_type);
                drop(again);
                let expected = array.slice(n / 3, n / 2);
                assert_same(&expected, &slice.to_host().unwrap(), &data_type);
            }
        }
    }
}

#[test]
fn with_arrow() {
    let place = cpu();
    for data_type in types() {
        let array = array(&data_type, 9, Nulls::Some, 1);
        let up = place.device.upload_array(&array).unwrap();
        let (exported, schema) = up.export(SyncPolicy::Event).unwrap();
        drop(up);
        // SAFETY: the struct comes from an export of this crate, whose values are valid, and the type is the exported one.
        let data = unsafe { arrow_array::ffi::from_ffi(into_arrow(exported), &schema) }.unwrap();
        assert_same(&array, &make_array(data), &data_type);
        let theirs = arrow_data::ffi::FFI_ArrowArray::new(&array.to_data());
        let (cpu_type, none) = (arrow_device::ArrowDeviceType::CPU, std::ptr::null_mut());
        // SAFETY: the array is in host memory, and ready.
        let theirs = unsafe { FFI_ArrowDeviceArray::new(theirs, cpu_type, -1, none) };
        let ours = import(theirs, &data_type);
        assert_same(&array, &ours.to_host().unwrap(), &data_type);
    }
}

fn small() -> RecordBatch {
    batch(&types(), 6, Nulls::Some, 2)
}

#[test]
fn children_outlive_their_parent() {
    for parent_first in [true, false] {
        let up = Devices::cpu().upload(&small()).unwrap();
        let mut exported = up.export_array(&options()).unwrap();
        drop(up);
        let root: *mut CArray = std::ptr::from_mut::<FFI_ArrowDeviceArray>(&mut exported).cast();
        // SAFETY: the export is live and has these children; each struct is moved once.
        let mut moved: Vec<Moved> = unsafe {
            (0..(*root).n_children as usize)
                .map(|i| Moved(take(*(*root).children.add(i))))
                .collect()
        };
        if parent_first {
            drop(exported);
            // Grandchildren and a dictionary, out of children that go before them.
            let mut deeper = vec![];
            for child in &mut moved {
                // SAFETY: the children are this export's, which is not released yet; each struct is moved once.
                unsafe {
                    for i in 0..child.0.n_children as usize {
                        deeper.push(Moved(take(*child.0.children.add(i))));
                    }
                    if !child.0.dictionary.is_null() {
                        deeper.push(Moved(take(child.0.dictionary)));
                    }
                }
            }
            assert!(deeper.len() > 5);
            thread::scope(|scope| {
                for child in moved.drain(..) {
                    scope.spawn(move || drop(child));
                }
            });
            drop(deeper);
        } else {
            thread::scope(|scope| {
                for child in moved.drain(..) {
                    scope.spawn(move || drop(child));
                }
            });
            drop(exported);
        }
    }
}

/// The second release of a struct that stayed where it is.
#[test]
fn released_twice() {
    let words = dictionary(DataType::Int8, DataType::Utf8);
    let data_type = structure(vec![("a", DataType::Int32), ("b", words)]);
    let up = Devices::cpu()
        .upload_array(&array(&data_type, 5, Nulls::Some, 1))
        .unwrap();
    let mut exported = up.export_array(&options()).unwrap();
    drop(up);
    let root: *mut CArray = std::ptr::from_mut::<FFI_ArrowDeviceArray>(&mut exported).cast();
    // SAFETY: the export is live and has these children; the root is released last.
    unsafe {
        let release = (*root).release.unwrap();
        for child in [*(*root).children.add(1), *(*root).children, root] {
            release(child);
            assert!((*child).release.is_none());
            if child != root {
                release(child);
            }
        }
    }
    assert!(exported.is_released());
}

#[test]
fn batches() {
    let place = cpu();
    let batch = small();
    let up = place.device.upload(&batch).unwrap().slice(1, 4).unwrap();
    let exported = up.export_array(&options()).unwrap();
    let schema = up.schema();
    // SAFETY: the struct comes from an export of this crate, whose values are valid, and the type is the exported one.
    let again = unsafe { DeviceRecordBatch::import_as(exported, schema, &place.options) }.unwrap();
    let moved = thread::spawn(move || again.to_host().unwrap())
        .join()
        .unwrap();
    assert_same_batch(&batch.slice(1, 4), &moved, "batch");
}

/// Out and in as a C stream, then read on the host.
#[test]
fn a_stream() {
    let place = cpu();
    let types = [
        list(DataType::Utf8),
        dictionary(DataType::Int8, DataType::Utf8),
    ];
    let batch = batch(&types, 5, Nulls::Some, 1);
    let up = place.device.upload(&batch).unwrap();
    let both = [up.slice(1, 3), Ok(up)];
    let device_type = place.device.id().device_type;
    let both = DeviceRecordBatches::new(both, batch.schema(), device_type);
    let stream = FFI_ArrowDeviceArrayStream::new(both, options()).unwrap();
    // SAFETY: the stream comes from an export of this crate, whose values are valid.
    let reader = unsafe { DeviceRecordBatchStreamReader::new(stream, place.options.clone()) };
    let mut host = reader.unwrap().into_host_reader();
    for expected in [batch.slice(1, 3), batch] {
        assert_same_batch(&expected, &host.next().unwrap().unwrap(), "batch");
    }
    assert!(host.next().is_none());
}

#[test]
fn foreign_arrays() {
    let place = cpu();
    for data_type in types() {
        let whole: ArrayRef = array(&data_type, 7, Nulls::Some, 4);
        for variant in [Variant::Whole, Variant::Both(3)] {
            let made = variant.of(&whole, 4).unwrap();
            let mut foreign = Foreign::part(&made.around, made.offset, 7, &place.device);
            if foreign.root().n_buffers > 0 {
                foreign.device_array.reserved = [1, 2, 3];
            }
            let imported = foreign.import(&place.options).unwrap();
            let back = thread::spawn(move || imported.to_host().unwrap())
                .join()
                .unwrap();
            assert_same(&whole, &back, &data_type);
            drop(back);
            foreign.assert_released("imported");
        }
    }
}

#[test]
fn malformed() {
    let place = cpu();
    let words = dictionary(DataType::Int8, DataType::Utf8);
    let data_type = structure(vec![("a", DataType::Int32), ("b", words)]);
    let data = array(&data_type, 5, Nulls::Some, 1).to_data();
    let spoils: [fn(&mut Foreign); 8] = [
        |f| f.release(&[]),
        |f| f.release(&[1, DICTIONARY]),
        |f| f.root().children = std::ptr::null_mut(),
        |f| f.set_child(&[], 0, std::ptr::null_mut()),
        |f| f.at(&[1]).dictionary = std::ptr::null_mut(),
        |f| f.at(&[0]).buffers = std::ptr::null_mut(),
        |f| f.at(&[0]).length = i64::MAX,
        |f| f.root().n_children = i64::MIN,
    ];
    for (i, spoil) in spoils.into_iter().enumerate() {
        let mut foreign = Foreign::new(&data, &place.device);
        spoil(&mut foreign);
        foreign.import(&place.options).unwrap_err();
        foreign.assert_released(&format!("spoil {i}"));
    }
}

/// Misaligned values and a mask at another bit than the values.
#[test]
fn copies() {
    let place = cpu();
    let ints = Int32Array::from(vec![Some(1), None, Some(3), None, Some(5)]);
    let data = ints.to_data().into_builder().offset(2).len(3);
    let data = data
        .nulls(ints.nulls().map(|n| n.slice(1, 3)))
        .build()
        .unwrap();
    let array = upload_data(&Devices::cpu(), &data);
    let exported = array.export_array(&options()).unwrap();
    let again = import(exported, &DataType::Int32);
    assert_same(&make_array(data), &again.to_host().unwrap(), "mask");

    let bytes = arrow_buffer::Buffer::from_vec((0..13u8).collect::<Vec<_>>());
    let mut foreign = Foreign::new(&Int32Array::from(vec![0, 0, 0]).to_data(), &place.device);
    foreign.set_buffer(&[], 1, bytes.as_ptr().wrapping_add(1).cast());
    let host = foreign.import(&place.options).unwrap().to_host().unwrap();
    assert_same(
        &Int32Array::from_iter_values([0x04030201, 0x08070605, 0x0C0B0A09]),
        &host,
        "misaligned",
    );
}

const _: () = assert!(size_of::<CDeviceArray>() == 128);
