//! What is refused, by its member's name; the deleter is called once all the same.

use std::ptr;

use arrow_device::dlpack::{DLManagedTensor, DLManagedTensorVersioned, DLTensor};
use arrow_device::{ArrowDeviceType as T, Devices, Error};

use crate::dlpack::kit::{CPU, Calls, Form, INT32, numbers, produce};

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
    let Error::InvalidInput { path, message } = &e else {
        panic!("{e:?}");
    };
    assert_eq!(path, member);
    assert!(message.contains(text), "{e}");
    assert_eq!(calls.get(), 1, "{e}");
}

/// An address of no number.
const ODD: *mut i64 = ptr::without_provenance_mut(3);
/// More elements than bytes can be counted.
const WIDE: i64 = i64::MAX / 4 + 1;

fn set(first: *mut i64, n: i64) {
    // SAFETY: the tensor has one dimension, so shape and strides have one number.
    unsafe { *first = n }
}

type Spoil = fn(&mut DLTensor);

/// The member that the error names, what it says, and what is wrong.
const MEMBERS: [(&str, &str, Spoil); 17] = [
    ("device", "sim", |t| t.device.device_type = T::EXT_DEV),
    ("device", "99", |t| t.device.device_type = T::new(99)),
    ("ndim", "-1", |t| t.ndim = -1),
    ("ndim", "65", |t| t.ndim = 65),
    ("ndim", "2147483647", |t| t.ndim = i32::MAX),
    ("shape", "0x0", |t| t.shape = ptr::null_mut()),
    ("shape", "0x3", |t| t.shape = ODD),
    ("strides", "0x3", |t| t.strides = ODD),
    ("shape[0]", "-3", |t| set(t.shape, -3)),
    ("shape[0]", "do not fit", |t| set(t.shape, i64::MAX)),
    ("shape[0]", "do not fit", |t| set(t.shape, WIDE)),
    ("dtype", "2 lanes", |t| t.dtype.lanes = 2),
    ("dtype", "code 5", |t| t.dtype.code = 5),
    ("data", "12 bytes", |t| t.data = ptr::null_mut()),
    ("data", "12 bytes", |t| {
        (t.data, t.byte_offset) = (ptr::null_mut(), 64);
    }),
    ("byte_offset", "18446744073709551615", |t| {
        t.byte_offset = u64::MAX;
    }),
    ("strides[0]", "is 2", |t| set(t.strides, 2)),
];

#[test]
fn members() {
    for (member, text, spoil) in MEMBERS {
        let member = format!("dl_tensor.{member}");
        refused::<DLManagedTensor>(&member, text, |f| spoil(f.tensor_mut()));
        refused::<DLManagedTensorVersioned>(&member, text, |f| spoil(f.tensor_mut()));
    }
}

#[test]
fn versions() {
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
        let data = one.as_mut_ptr().cast();
        let tensor = produce::<DLManagedTensorVersioned>(data, CPU, INT32, &[1, 1], one, &calls);
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
