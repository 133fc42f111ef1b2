//! Who keeps what, and until when.

use std::sync::Weak;

use arrow_array::Int32Array;
use arrow_device::dlpack::{DLManagedTensor, DLManagedTensorVersioned};
use arrow_device::{DeviceArray, Devices};

use crate::dlpack::kit::{Calls, Form, Held, numbers, plain};
use crate::support::assert_same;

/// A column of the CPU, and what tells whether its memory was let go.
fn watched() -> (DeviceArray, Weak<Vec<i64>>) {
    let (values, watch) = crate::simkit::watched(100);
    (Devices::cpu().upload_array(&values).unwrap(), watch)
}

fn tensors_keep_the_memory<F: Form>() {
    let (column, watch) = watched();
    let tensor = column.export_dlpack(&plain()).unwrap();
    let held = Held::<F>::new(tensor);
    let again = Held::<F>::new(column.export_dlpack(&plain()).unwrap());
    drop(column);
    assert_eq!(watch.strong_count(), 1);
    drop(again);
    assert_eq!(watch.strong_count(), 1);
    let expected: Vec<u8> = (0i64..100).flat_map(i64::to_ne_bytes).collect();
    assert_eq!(held.bytes(), expected);
    // Deleted on another thread.
    std::thread::spawn(move || drop(held)).join().unwrap();
    assert_eq!(watch.strong_count(), 0);

    // Never given to a consumer.
    let (column, watch) = watched();
    let tensor = column.export_dlpack(&plain()).unwrap();
    drop(column);
    assert_eq!(watch.strong_count(), 1);
    drop(tensor);
    assert_eq!(watch.strong_count(), 0);
}

#[test]
fn tensors_keep_memory() {
    tensors_keep_the_memory::<DLManagedTensor>();
    tensors_keep_the_memory::<DLManagedTensorVersioned>();
}

fn arrays_keep_the_tensor<F: Form>() {
    let queue = Devices::cpu().default_queue();
    let calls = Calls::default();
    let tensor = numbers::<F>((0..50).collect(), &calls);
    // SAFETY: the tensor is valid, and nobody writes to its memory.
    let column = unsafe { F::import(tensor, &queue) }.unwrap();
    let (part, buffer) = (column.slice(10, 5).unwrap(), column.buffer(1).unwrap());
    // Out again: the same memory, kept by whoever comes last.
    let out = Held::<F>::new(part.export_dlpack(&plain()).unwrap());
    let host = part.to_host().unwrap();
    drop((column, part, buffer));
    let expected = Int32Array::from_iter_values(10..15);
    assert_same(&expected, &host, "host");
    drop(host);
    assert_eq!((calls.get(), out.bytes().len()), (0, 20));
    std::thread::spawn(move || drop(out)).join().unwrap();
    assert_eq!(calls.get(), 1);

    // Without a deleter nothing is called.
    let tensor = numbers::<F>(vec![1], &calls);
    // SAFETY: the tensor was just made, and only this test has it.
    let deleter = unsafe { (*tensor).deleter_mut().take() };
    // SAFETY: the tensor is valid, and nobody writes to its memory.
    drop(unsafe { F::import(tensor, &queue) }.unwrap());
    assert_eq!(calls.get(), 1);
    // SAFETY: this is the tensor's own deleter, which has not been called yet.
    unsafe { deleter.unwrap()(tensor) };

    // A deleter that panics does no harm.
    unsafe extern "C-unwind" fn panics<F: Form>(_: *mut F) {
        panic!("deleter");
    }
    let tensor = numbers::<F>(vec![1], &calls);
    // SAFETY: the tensor was just made, and only this test has it.
    let deleter = unsafe { (*tensor).deleter_mut().replace(panics::<F>) };
    // SAFETY: the tensor is valid, and nobody writes to its memory.
    drop(unsafe { F::import(tensor, &queue) }.unwrap());
    // SAFETY: this is the tensor's own deleter, which has not been called yet.
    unsafe { deleter.unwrap()(tensor) };
    assert_eq!(calls.get(), 3);
}

#[test]
fn arrays_keep_tensors() {
    arrays_keep_the_tensor::<DLManagedTensor>();
    arrays_keep_the_tensor::<DLManagedTensorVersioned>();
}
