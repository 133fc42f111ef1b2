//! What comes in: shapes, types, strides and places that are accepted.

use arrow_array::{Array, FixedSizeListArray, Float32Array, Int8Array, Int32Array};
use arrow_device::dlpack::{DLDataType, DLManagedTensor, DLManagedTensorVersioned};
use arrow_device::{Devices, Result};
use arrow_schema::DataType;

use crate::dlpack::kit::{CPU, Calls, Form, Held, INT32, numbers, plain, produce};
use crate::support::{assert_same, types::fixed_list};

fn import<F: Form>(tensor: *mut F) -> Result<arrow_array::ArrayRef> {
    let queue = Devices::cpu().default_queue();
    // SAFETY: the tests' tensors are valid, and nobody writes to their memory.
    unsafe { F::import(tensor, &queue) }?.to_host()
}

/// Every type that Arrow has, and no other.
#[test]
fn types() {
    use DLDataType as D;
    let accepted = [
        (D::INT, 8, DataType::Int8),
        (D::INT, 16, DataType::Int16),
        (D::INT, 32, DataType::Int32),
        (D::INT, 64, DataType::Int64),
        (D::UINT, 8, DataType::UInt8),
        (D::UINT, 16, DataType::UInt16),
        (D::UINT, 32, DataType::UInt32),
        (D::UINT, 64, DataType::UInt64),
        (D::FLOAT, 16, DataType::Float16),
        (D::FLOAT, 32, DataType::Float32),
        (D::FLOAT, 64, DataType::Float64),
        (D::BOOL, 8, DataType::Int8),
    ];
    for code in 0..20u8 {
        for bits in [0, 1, 4, 8, 16, 24, 32, 64, 80, 128] {
            for lanes in [0, 1, 2] {
                let calls = Calls::default();
                let tensor = numbers::<DLManagedTensorVersioned>(vec![7; 8], &calls);
                // SAFETY: the tensor was just made, and only this test has it.
                let dl = unsafe { (*tensor).tensor_mut() };
                dl.dtype = DLDataType { code, bits, lanes };
                // SAFETY: the shape has one number, and the memory has room for two elements of 128
                // bits.
                unsafe { *dl.shape = 2 };
                let known = accepted
                    .iter()
                    .find(|a| (a.0, a.1, 1) == (code, bits, lanes));
                match (import(tensor), known) {
                    (Ok(array), Some((_, _, expected))) => {
                        assert_eq!((array.data_type(), array.len()), (expected, 2));
                    }
                    (Err(e), None) => {
                        let text = e.to_string();
                        assert!(text.contains("dl_tensor.dtype"), "{text}");
                    }
                    (other, _) => panic!("{code} {bits} {lanes}: {other:?}"),
                }
                assert_eq!(calls.get(), 1);
            }
        }
    }
}

#[test]
fn dimensions() {
    let values: Vec<f32> = (0..24).map(|i| i as f32).collect();
    let make = |shape: &[i64]| {
        let mut values = values.clone();
        let data = values.as_mut_ptr().cast();
        let dtype = DLDataType {
            code: DLDataType::FLOAT,
            bits: 32,
            lanes: 1,
        };
        produce::<DLManagedTensorVersioned>(data, CPU, dtype, shape, values, &Calls::default())
    };
    // None: one value.
    let one = import(make(&[])).unwrap();
    assert_same(&Float32Array::from(vec![0.0]), &one, "scalar");

    let matrix = import(make(&[8, 3])).unwrap();
    assert_eq!(*matrix.data_type(), fixed_list(DataType::Float32, 3));
    let lists: &FixedSizeListArray = matrix.as_any().downcast_ref().unwrap();
    assert_same(
        &Float32Array::from(vec![15.0, 16.0, 17.0]),
        &lists.value(5),
        "row",
    );

    let cube = import(make(&[2, 3, 4])).unwrap();
    assert_eq!(
        *cube.data_type(),
        fixed_list(fixed_list(DataType::Float32, 4), 3)
    );
    assert_eq!(cube.len(), 2);
    let lists: &FixedSizeListArray = cube.as_any().downcast_ref().unwrap();
    let inner = lists.value(1);
    let inner: &FixedSizeListArray = inner.as_any().downcast_ref().unwrap();
    assert_same(
        &Float32Array::from(vec![20.0, 21.0, 22.0, 23.0]),
        &inner.value(2),
        "row",
    );

    // No elements, in whichever dimension.
    for (shape, rows) in [
        (vec![0], 0),
        (vec![0, 3], 0),
        (vec![5, 0], 5),
        (vec![2, 0, 3], 2),
    ] {
        let array = import(make(&shape)).unwrap();
        assert_eq!(array.len(), rows, "{shape:?}");
        array.to_data().validate_full().unwrap();
    }
    // As many dimensions as types nest, and out again.
    let deep = import(make(&[1; 64])).unwrap();
    let column = Devices::cpu().upload_array(&deep).unwrap();
    let tensor = column.export_dlpack(&plain()).unwrap();
    assert_eq!(tensor.shape(), [1; 64]);
    let held = Held::<DLManagedTensorVersioned>::new(tensor);
    assert_eq!(
        (held.strides(), held.bytes()),
        (&[1i64; 64][..], vec![0; 4])
    );
}

/// Dimensions out: the shape, and strides of compact rows.
#[test]
fn dimensions_out() {
    let field = |t| crate::support::types::field("item", t);
    let values = Int32Array::from_iter_values(0..24);
    let inner =
        FixedSizeListArray::new(field(DataType::Int32), 4, std::sync::Arc::new(values), None);
    let outer = inner.data_type().clone();
    let outer = FixedSizeListArray::new(field(outer), 3, std::sync::Arc::new(inner), None);
    let column = Devices::cpu().upload_array(&outer).unwrap();
    let tensor = column.slice(1, 1).unwrap().export_dlpack(&plain()).unwrap();
    assert_eq!(tensor.shape(), [1, 3, 4]);
    let held = Held::<DLManagedTensor>::new(tensor);
    assert_eq!(held.strides(), [12, 4, 1]);
    let expected: Vec<u8> = (12i32..24).flat_map(i32::to_ne_bytes).collect();
    assert_eq!(held.bytes(), expected);
    // A slice within: the child is further in.
    let part = column.child(0).unwrap().slice(2, 3).unwrap();
    let held = Held::<DLManagedTensor>::new(part.export_dlpack(&plain()).unwrap());
    assert_eq!(
        (held.shape(), held.bytes()),
        (
            &[3i64, 4][..],
            (8i32..20).flat_map(i32::to_ne_bytes).collect()
        )
    );
}

/// Strides that say the same as none.
#[test]
fn strides() {
    let accepted: &[(&[i64], &[i64])] = &[
        (&[6], &[1]),
        (&[1], &[99]),
        (&[0], &[-3]),
        (&[2, 3], &[3, 1]),
        (&[2, 1], &[1, 77]),
        (&[1, 3], &[-5, 1]),
        (&[0, 3], &[17, 18]),
        (&[3, 0], &[17, 18]),
    ];
    for (shape, strides) in accepted {
        for null in [false, true] {
            let calls = Calls::default();
            let values = vec![1, 2, 3, 4, 5, 6];
            let tensor = produce_with(values, shape, strides, null, &calls);
            let array = import(tensor).unwrap_or_else(|e| panic!("{shape:?} {strides:?}: {e}"));
            assert_eq!(array.len() as i64, shape[0]);
            drop(array);
            assert_eq!(calls.get(), 1);
        }
    }
    let refused: &[(&[i64], &[i64], &str)] = &[
        (&[3], &[2], "strides[0]"),
        (&[3], &[-1], "strides[0]"),
        (&[3], &[0], "strides[0]"),
        (&[2, 3], &[1, 2], "strides[1]"),
        (&[2, 3], &[4, 1], "strides[0]"),
        (&[2, 1, 3], &[6, 9, 1], "strides[0]"),
    ];
    for (shape, strides, member) in refused {
        let calls = Calls::default();
        let tensor = produce_with(vec![0; 12], shape, strides, false, &calls);
        let text = import(tensor).unwrap_err().to_string();
        assert!(
            text.contains(member) && text.contains("contiguous"),
            "{text}"
        );
        assert_eq!(calls.get(), 1);
    }
}

fn produce_with(
    mut values: Vec<i32>,
    shape: &[i64],
    strides: &[i64],
    null: bool,
    calls: &Calls,
) -> *mut DLManagedTensorVersioned {
    let data = values.as_mut_ptr().cast();
    let tensor = produce::<DLManagedTensorVersioned>(data, CPU, INT32, shape, values, calls);
    // SAFETY: the tensor was just made, only this test has it, and it has as many strides.
    unsafe {
        let dl = (*tensor).tensor_mut();
        for (i, stride) in strides.iter().enumerate() {
            *dl.strides.add(i) = *stride;
        }
        if null {
            dl.strides = std::ptr::null_mut();
        }
    }
    tensor
}

/// Where the numbers are, and what does not matter.
#[test]
fn places() {
    type Change = fn(&mut DLManagedTensorVersioned);
    let changes: [(&[i32], Change); 6] = [
        (&[3, 4, 5, 6], |f| f.dl_tensor.byte_offset = 12),
        // Between the numbers: as an import through the C interface, it comes to the host all the same.
        (&[0x0300_0000, 0x0400_0000], |f| {
            f.dl_tensor.byte_offset = 9;
        }),
        (&[0, 1], |f| f.dl_tensor.device.device_id = 7),
        (&[0, 1], |f| f.dl_tensor.device.device_id = -1),
        (&[0, 1], |f| (f.flags, f.version.minor) = (3, 99)),
        (&[0, 1], |f| (f.flags, f.version.minor) = (2, 3)),
    ];
    let calls = Calls::default();
    for (expected, change) in changes {
        let tensor = numbers::<DLManagedTensorVersioned>((0..10).collect(), &calls);
        // SAFETY: the tensor was just made, only this test has it, and it has so many numbers.
        unsafe {
            change(&mut *tensor);
            *(*tensor).tensor().shape = expected.len() as i64;
        }
        let expected = Int32Array::from(expected.to_vec());
        assert_same(&expected, &import(tensor).unwrap(), "numbers");
    }
    // Booleans of a byte.
    let mut bytes = vec![1u8, 0, 1];
    let data = bytes.as_mut_ptr().cast();
    let bools = DLDataType {
        code: DLDataType::BOOL,
        bits: 8,
        lanes: 1,
    };
    let tensor = produce::<DLManagedTensorVersioned>(data, CPU, bools, &[3], bytes, &calls);
    let expected = Int8Array::from(vec![1, 0, 1]);
    assert_same(&expected, &import(tensor).unwrap(), "booleans");
    assert_eq!(calls.get(), 7);
}
