//! What is refused, by its member's name; the deleter is called once all the same.

use std::ptr;

use arrow_device::dlpack::{DLManagedTensor, DLManagedTensorVersioned};
use arrow_device::{ArrowDeviceType, Devices, Error};

use crate::dlpack::kit::{Calls, Form, numbers};

#[track_caller]
fn refused<F: Form>(member: &str, text: &str, spoil: impl FnOnce(&mut F)) {
    let calls = Calls::default();
    let tensor = numbers::<F>(vec![1, 2, 3], &calls);
    // SAFETY: the tensor was just made, and only this test has it.
    spoil(unsafe { &mut *tensor });
    let queue = Devices::cpu().default_queue();
    // SAFETY: what is wrong with the tensor can be seen in the struct, and is refused before
    // anything else is read.
    let e = unsafe { F::import(tensor, &queue) }.unwrap_err();
    match &e {
        Error::InvalidInput { path, message } => {
            assert_eq!(
                (path.as_ref(), message.contains(text)),
                (member, true),
                "{e}"
            );
        }
        _ => panic!("{e:?}"),
    }
    assert_eq!(calls.get(), 1, "{e}");
}

fn both<F: Form>() {
    let nowhere = ptr::without_provenance_mut::<i64>(3);
    let first = |form: &mut F, n: i64| {
        // SAFETY: the tensor has one dimension, so the shape has one number.
        unsafe { *form.tensor().shape = n }
    };
    refused::<F>("dl_tensor.device", "sim", |f| {
        f.tensor_mut().device.device_type = ArrowDeviceType::EXT_DEV
    });
    refused::<F>("dl_tensor.device", "99", |f| {
        f.tensor_mut().device.device_type = ArrowDeviceType::new(99)
    });
    refused::<F>("dl_tensor.ndim", "-1", |f| f.tensor_mut().ndim = -1);
    refused::<F>("dl_tensor.ndim", "65", |f| f.tensor_mut().ndim = 65);
    refused::<F>("dl_tensor.ndim", "2147483647", |f| {
        f.tensor_mut().ndim = i32::MAX
    });
    refused::<F>("dl_tensor.shape", "0x0", |f| {
        f.tensor_mut().shape = ptr::null_mut()
    });
    refused::<F>("dl_tensor.shape", "0x3", |f| f.tensor_mut().shape = nowhere);
    refused::<F>("dl_tensor.strides", "0x3", |f| {
        f.tensor_mut().strides = nowhere
    });
    refused::<F>("dl_tensor.shape[0]", "-3", |f| first(f, -3));
    refused::<F>("dl_tensor.shape[0]", "do not fit", |f| first(f, i64::MAX));
    refused::<F>("dl_tensor.shape[0]", "do not fit", |f| {
        first(f, i64::MAX / 4 + 1)
    });
    refused::<F>("dl_tensor.dtype", "2 lanes", |f| {
        f.tensor_mut().dtype.lanes = 2
    });
    refused::<F>("dl_tensor.dtype", "code 5", |f| {
        f.tensor_mut().dtype.code = 5
    });
    refused::<F>("dl_tensor.data", "12 bytes", |f| {
        f.tensor_mut().data = ptr::null_mut()
    });
    refused::<F>("dl_tensor.data", "12 bytes", |f| {
        (f.tensor_mut().data, f.tensor_mut().byte_offset) = (ptr::null_mut(), 64)
    });
    refused::<F>("dl_tensor.byte_offset", "18446744073709551615", |f| {
        f.tensor_mut().byte_offset = u64::MAX
    });
    refused::<F>("dl_tensor.strides[0]", "is 2", |f| {
        // SAFETY: the tensor has one dimension, so the strides have one number.
        unsafe { *f.tensor().strides = 2 }
    });
}

#[test]
fn unversioned() {
    both::<DLManagedTensor>();
}

#[test]
fn versioned() {
    both::<DLManagedTensorVersioned>();
    for (major, minor) in [(0, 8), (2, 0), (u32::MAX, 0)] {
        refused::<DLManagedTensorVersioned>("version", &format!("{major}.{minor}"), |f| {
            (f.version.major, f.version.minor) = (major, minor);
            // Of another version nothing else may be looked at.
            f.flags = u64::MAX;
            f.dl_tensor.ndim = -5;
            f.dl_tensor.shape = ptr::without_provenance_mut(1);
        });
    }
}

/// A size of a list, and rows, that Arrow cannot count.
#[test]
fn large_dimensions() {
    for (shape, member) in [
        ([2i64, 1 << 31], "dl_tensor.shape[1]"),
        ([1 << 40, 1 << 30], "dl_tensor.shape[1]"),
        ([1 << 61, 0], "dl_tensor.shape[0]"),
        ([0, 1 << 40], "dl_tensor.shape[1]"),
    ] {
        let calls = Calls::default();
        let mut one = vec![0i32];
        let tensor = crate::dlpack::kit::produce::<DLManagedTensorVersioned>(
            one.as_mut_ptr().cast(),
            crate::dlpack::kit::CPU,
            crate::dlpack::kit::INT32,
            &[1, 1],
            one,
            &calls,
        );
        let queue = Devices::cpu().default_queue();
        // SAFETY: the tensor was just made, and its shape has two numbers; it is refused before its
        // memory is read.
        let e = unsafe {
            ptr::copy_nonoverlapping(shape.as_ptr(), (*tensor).dl_tensor.shape, 2);
            Form::import(tensor, &queue)
        }
        .unwrap_err();
        assert!(e.to_string().contains(member), "{shape:?}: {e}");
        assert_eq!(calls.get(), 1);
    }
}

#[test]
fn no_struct_at_all() {
    fn one<F: Form>(name: &str) {
        let queue = Devices::cpu().default_queue();
        for tensor in [ptr::null_mut(), ptr::without_provenance_mut::<F>(9)] {
            // SAFETY: the pointer is refused before it is followed.
            let e = unsafe { F::import(tensor, &queue) }.unwrap_err();
            assert!(e.to_string().contains(name), "{e}");
        }
    }
    one::<DLManagedTensor>("DLManagedTensor");
    one::<DLManagedTensorVersioned>("DLManagedTensorVersioned");
}
