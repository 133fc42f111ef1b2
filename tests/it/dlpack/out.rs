//! What goes out: types, places, the struct's members.

use std::collections::HashMap;
use std::sync::Arc;

use arrow_array::{Array, FixedSizeListArray, Int8Array, Int16Array, Int32Array, new_empty_array};
use arrow_data::ArrayData;
use arrow_device::dlpack::{
    DLDataType, DLDevice, DLManagedTensor, DLManagedTensorVersioned, DLPackVersion, DlpackOptions,
};
use arrow_device::{ArrowDeviceType, Device, DeviceArray, DeviceBuffer, DeviceId, Devices, Error};
use arrow_schema::{DataType, Field, IntervalUnit};

use crate::dlpack::kit::{CPU, Form, Held, plain};
use crate::support::{Nulls, assert_same};
use crate::support_c::export::upload_data;

/// What the values of a type come back as; `None` if the type does not go out.
fn comes_back(data_type: &DataType) -> Option<DataType> {
    use DataType as T;
    Some(match data_type {
        T::Int8 | T::Int16 | T::Int32 | T::Int64 => data_type.clone(),
        T::UInt8 | T::UInt16 | T::UInt32 | T::UInt64 => data_type.clone(),
        T::Float16 | T::Float32 | T::Float64 => data_type.clone(),
        T::Date32 | T::Time32(_) | T::Interval(IntervalUnit::YearMonth) => T::Int32,
        T::Date64 | T::Time64(_) | T::Timestamp(_, _) | T::Duration(_) => T::Int64,
        T::FixedSizeList(field, size) if *field.data_type() != T::Boolean => {
            let item = comes_back(field.data_type())?;
            T::FixedSizeList(crate::support::types::field("item", item), *size)
        }
        _ => return None,
    })
}

/// The same bytes under another type of the same layout.
fn relabel(data: &ArrayData, data_type: &DataType) -> ArrayData {
    let mut children = data.child_data().to_vec();
    if let DataType::FixedSizeList(field, _) = data_type {
        children = vec![relabel(&children[0], field.data_type())];
    }
    let builder = data.clone().into_builder().data_type(data_type.clone());
    // What nulls hide goes out as it is.
    builder.child_data(children).nulls(None).build().unwrap()
}

/// Out and in again.
pub(crate) fn round_trip<F: Form>(column: &DeviceArray) -> arrow_device::Result<DeviceArray> {
    let tensor = column.export_dlpack(&plain())?;
    let held = Held::<F>::new(tensor);
    // SAFETY: the export waited for the data, and nobody writes to the tensor's memory.
    unsafe { F::import(held.into_raw(), &column.device().default_queue()) }
}

/// Every type, whole and sliced, out of `device` and in again.
pub(crate) fn every_type(device: &Device) {
    let mut went = 0;
    // Miri takes minutes for all.
    let step = if cfg!(miri) { 6 } else { 1 };
    for (name, data_type) in crate::support::all_types().into_iter().step_by(step) {
        let whole = crate::support::array(&data_type, 37, Nulls::None, 5);
        let both = crate::support::Variant::Both(11)
            .of(&whole, 5)
            .unwrap()
            .array();
        for array in [whole, both] {
            for (offset, rows) in [(0, 37), (1, 30), (9, 1), (8, 16), (5, 0)] {
                let host = array.slice(offset, rows);
                let column = device.upload_array(&array).unwrap();
                let column = column.slice(offset, rows).unwrap();
                let context = format!("{name} on {device}, {rows} rows from {offset}");
                match comes_back(&data_type) {
                    Some(expected) => {
                        let expected = relabel(&host.to_data(), &expected);
                        let expected = arrow_array::make_array(expected);
                        for back in [
                            round_trip::<DLManagedTensorVersioned>(&column),
                            round_trip::<DLManagedTensor>(&column),
                        ] {
                            let back = back.unwrap();
                            assert_eq!(back.null_count(), Some(0));
                            assert_same(&expected, &back.to_host().unwrap(), &context);
                        }
                        went += 1;
                    }
                    None => {
                        let refused = column.export_dlpack(&plain()).unwrap_err().to_string();
                        assert!(refused.contains("has no type in DLPack"), "{refused}");
                        assert!(refused.contains(&data_type.to_string()), "{refused}");
                    }
                }
            }
        }
    }
    assert!(went * step > 5 * 30, "{went}");
}

#[test]
fn every_type_on_the_cpu() {
    every_type(&Devices::cpu());
}

#[test]
fn members() {
    let column = Devices::cpu()
        .upload_array(&Int16Array::from_iter_values(0..10))
        .unwrap();
    let address = column.buffer(1).unwrap().address().address();
    let column = column.slice(3, 5).unwrap();
    let tensor = column.export_dlpack(&plain()).unwrap();
    assert_eq!(tensor.shape(), [5]);
    assert_eq!(tensor.address().address(), address + 6);
    assert_eq!(
        tensor.data_type(),
        DLDataType {
            code: DLDataType::INT,
            bits: 16,
            lanes: 1
        }
    );
    let versioned = Held::<DLManagedTensorVersioned>::new(tensor);
    assert_eq!(versioned.version, DLPackVersion { major: 1, minor: 3 });
    // Read-only, and not a copy.
    assert_eq!(versioned.flags, 1);
    let unversioned = Held::<DLManagedTensor>::new(column.export_dlpack(&plain()).unwrap());
    for tensor in [&versioned.dl_tensor, &unversioned.dl_tensor] {
        // The slice's own address: not everybody looks at `byte_offset`.
        assert_eq!((tensor.data.addr(), tensor.byte_offset), (address + 6, 0));
        assert_eq!((tensor.device, tensor.ndim), (CPU, 1));
        assert_eq!(
            tensor.dtype,
            DLDataType {
                code: DLDataType::INT,
                bits: 16,
                lanes: 1
            }
        );
    }
    assert_eq!(
        (versioned.shape(), versioned.strides()),
        (&[5i64][..], &[1i64][..])
    );
    let expected: Vec<u8> = (3i16..8).flat_map(i16::to_ne_bytes).collect();
    assert_eq!(versioned.bytes(), expected);
    assert_eq!(unversioned.bytes(), expected);
}

#[test]
fn a_copy_may_be_written_to() {
    let cpu = Devices::cpu();
    let values = Int16Array::from_iter_values(0..10);
    let whole = cpu.upload_array(&values).unwrap();
    let column = whole.slice(3, 5).unwrap();
    let tensor = column
        .export_dlpack(&DlpackOptions {
            copy: true,
            ..plain()
        })
        .unwrap();
    let copy = Held::<DLManagedTensorVersioned>::new(tensor);
    assert_eq!(copy.flags, DLManagedTensorVersioned::IS_COPIED);
    assert_eq!(copy.shape(), [5]);
    // SAFETY: it is a copy of five numbers, which nothing else uses.
    unsafe { copy.dl_tensor.data.cast::<i16>().write(-1) };
    let expected: Vec<u8> = [-1i16, 4, 5, 6, 7]
        .iter()
        .flat_map(|n| n.to_ne_bytes())
        .collect();
    assert_eq!(copy.bytes(), expected);
    assert_same(&values, &whole.to_host().unwrap(), "the column");
    // What has no tensor is refused as it is without a copy.
    for column in [
        up(&Int16Array::from(vec![Some(1), None])),
        up(&arrow_array::StringArray::from(vec!["a"])),
    ] {
        let e = column.export_dlpack(&plain()).unwrap_err().to_string();
        let of_copy = column
            .export_dlpack(&DlpackOptions {
                copy: true,
                ..plain()
            })
            .unwrap_err();
        assert_eq!(of_copy.to_string(), e);
    }
}

/// `arrow.bool8` is DLPack's type for booleans, also within lists.
#[test]
fn booleans_of_a_byte() {
    let metadata = HashMap::from([
        ("ARROW:extension:name".to_owned(), "arrow.bool8".to_owned()),
        ("ARROW:extension:metadata".to_owned(), String::new()),
    ]);
    let field = Field::new_list_field(DataType::Int8, true).with_metadata(metadata);
    let field = Arc::new(field);
    let values = Int8Array::from(vec![1, 0, 0, 1]);
    let flat = up(&values).with_field(field.clone()).unwrap();
    let lists = FixedSizeListArray::new(field.clone(), 2, Arc::new(values), None);
    for column in [flat, up(&lists)] {
        for tensor in [
            column.export_dlpack(&plain()),
            column.export_dlpack(&DlpackOptions {
                copy: true,
                ..plain()
            }),
        ] {
            let tensor = tensor.unwrap();
            assert_eq!(
                tensor.data_type(),
                DLDataType {
                    code: DLDataType::BOOL,
                    bits: 8,
                    lanes: 1
                }
            );
            let raw = tensor.into_versioned();
            let queue = Devices::cpu().default_queue();
            // SAFETY: the tensor was just made, and nothing writes to its memory.
            let again = unsafe { DeviceArray::import_dlpack(raw, &queue) }.unwrap();
            assert_same(
                &column.to_host().unwrap(),
                &again.to_host().unwrap(),
                "booleans",
            );
            match again.data_type() {
                DataType::FixedSizeList(item, 2) => assert_eq!(*item, field),
                _ => assert_eq!(again.field().unwrap().metadata(), field.metadata()),
            }
        }
    }
    // Bytes are no booleans.
    let bytes = up(&Int8Array::from(vec![1]))
        .export_dlpack(&plain())
        .unwrap();
    assert_eq!(
        bytes.data_type(),
        DLDataType {
            code: DLDataType::INT,
            bits: 8,
            lanes: 1
        }
    );
}

#[test]
fn nothing_in_it() {
    let cpu = Devices::cpu();
    let empty = cpu
        .upload_array(&new_empty_array(&DataType::Float32))
        .unwrap();
    let some = cpu.upload_array(&Int32Array::from(vec![1, 2])).unwrap();
    for column in [empty, some.slice(2, 0).unwrap()] {
        let held = Held::<DLManagedTensorVersioned>::new(column.export_dlpack(&plain()).unwrap());
        assert!(held.dl_tensor.data.is_null() && held.dl_tensor.byte_offset == 0);
        assert_eq!((held.shape(), held.strides()), (&[0i64][..], &[1i64][..]));
    }
}

fn up(array: &dyn Array) -> DeviceArray {
    Devices::cpu().upload_array(array).unwrap()
}

fn held<F: Form>(column: &DeviceArray) -> Held<F> {
    let options = DlpackOptions {
        nulls_ignored: true,
        ..plain()
    };
    Held::new(column.export_dlpack(&options).unwrap())
}

#[test]
fn nulls() {
    let values: Int32Array = (0..30).map(|i| (i % 4 != 1).then_some(i)).collect();
    let column = up(&values);
    let refused = column.export_dlpack(&plain()).unwrap_err();
    assert!(matches!(refused, Error::InvalidArgument(_)));
    let text = refused.to_string();
    assert!(
        text.contains("8 of 30") && text.contains("DlpackOptions::nulls_ignored"),
        "{text}"
    );
    // A slice of which nobody knows how many are null, and there are none.
    let part = column.slice(2, 3).unwrap();
    assert_eq!(part.null_count(), None);
    assert_eq!(part.export_dlpack(&plain()).unwrap().shape(), [3]);
    let some = column.slice(3, 11).unwrap();
    assert!(some.export_dlpack(&plain()).is_err());
    // Said to be known: the values, and beside them the mask from its byte on.
    let bytes = held::<DLManagedTensorVersioned>(&some).bytes();
    for (i, value) in bytes.chunks(4).enumerate() {
        let value = i32::from_ne_bytes(value.try_into().unwrap());
        assert!(
            values.is_null(i + 3) || values.value(i + 3) == value,
            "row {i}"
        );
    }
    // The mask is buffer 0 of a column that starts there.
    let packed = some.compact().unwrap();
    let bits = packed.buffer(0).unwrap().slice(0, 2).unwrap();
    let mask = bits.export_dlpack(
        DLDataType {
            code: DLDataType::UINT,
            bits: 8,
            lanes: 1,
        },
        &plain(),
    );
    let bytes = Held::<DLManagedTensorVersioned>::new(mask.unwrap()).bytes();
    for i in 0..some.len() {
        let is_valid = bytes[i / 8] >> (i % 8) & 1 == 1;
        assert_eq!(is_valid, values.is_valid(i + 3), "row {i}");
    }
}

/// The mask of an array of arrow-rs may start elsewhere than the values.
#[test]
fn masks_that_start_elsewhere() {
    let whole = crate::support::array(&DataType::Int32, 20, Nulls::Some, 3);
    let made = crate::support::Variant::Sliced(5).of(&whole, 3).unwrap();
    let data = made.data();
    assert_ne!(
        data.nulls().map(|nulls| nulls.offset()),
        Some(data.offset())
    );
    let column = upload_data(&Devices::cpu(), &data);
    let expected = &data.buffers()[0][data.offset() * 4..][..80];
    assert_eq!(held::<DLManagedTensor>(&column).bytes(), expected);
}

#[test]
fn lists_of_one_size_with_nulls() {
    let list = crate::support::types::fixed_list(DataType::Int16, 3);
    for nulls in [Nulls::Some, Nulls::All] {
        let column = up(&crate::support::array(&list, 20, nulls, 2));
        let e = column.export_dlpack(&plain()).unwrap_err();
        assert!(e.to_string().contains("are null"), "{e}");
        assert_eq!(held::<DLManagedTensor>(&column).shape(), [20, 3]);
    }
    // Nulls of the items only.
    let items: Int16Array = (0..6).map(|i| (i != 4).then_some(i)).collect();
    let field = crate::support::types::field("item", DataType::Int16);
    let items = std::sync::Arc::new(items);
    let column = up(&arrow_array::FixedSizeListArray::new(field, 3, items, None));
    let e = column.export_dlpack(&plain()).unwrap_err();
    assert!(e.to_string().contains("1 of 6"), "{e}");
    assert!(column.slice(0, 1).unwrap().export_dlpack(&plain()).is_ok());
}

#[test]
fn buffers() {
    let bytes = arrow_buffer::Buffer::from_vec((0u8..24).collect::<Vec<_>>());
    let buffer = DeviceBuffer::from(bytes);
    let part = buffer.slice(4, 16).unwrap();
    use DLDataType as D;
    let of = |code, bits, lanes| D { code, bits, lanes };
    for (dtype, shape) in [
        (of(D::BFLOAT, 16, 1), 8),
        (of(D::COMPLEX, 64, 1), 2),
        (of(D::BOOL, 8, 1), 16),
        (of(D::FLOAT, 32, 4), 1),
    ] {
        let tensor = part.export_dlpack(dtype, &plain()).unwrap();
        assert_eq!((tensor.shape(), tensor.data_type()), (&[shape][..], dtype));
        let held = Held::<DLManagedTensorVersioned>::new(tensor);
        assert_eq!(held.dl_tensor.data.addr(), buffer.address().address() + 4);
    }
    for (bits, lanes) in [(4, 1), (0, 1), (24, 1), (8, 0)] {
        let e = part.export_dlpack(of(D::INT, bits, lanes), &plain());
        assert!(matches!(e.unwrap_err(), Error::InvalidArgument(_)));
    }
    let none = part.slice(0, 0).unwrap();
    let none = none.export_dlpack(of(D::INT, 32, 1), &plain()).unwrap();
    assert_eq!(none.shape(), [0]);
    let held = Held::<DLManagedTensorVersioned>::new(none);
    assert!(held.dl_tensor.data.is_null(), "no elements, no address");
}

#[test]
fn devices() {
    use ArrowDeviceType as T;
    let of = |device_type, id| DLDevice::try_from(DeviceId::new(device_type, id)).unwrap();
    assert_eq!(of(T::CPU, -1), CPU);
    for shared in [T::CUDA_HOST, T::ROCM_HOST, T::CUDA_MANAGED] {
        let device = of(shared, 3);
        assert_eq!((device.device_type, device.device_id), (shared, 0));
    }
    for own in [T::CUDA, T::ROCM, T::EXT_DEV, T::ONEAPI] {
        let device = of(own, 3);
        assert_eq!((device.device_type, device.device_id), (own, 3));
        assert_eq!(DeviceId::from(device), DeviceId::new(own, 3));
        assert!(DLDevice::try_from(DeviceId::new(own, 1 << 31)).is_err());
    }
}
