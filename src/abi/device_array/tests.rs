use super::*;
use crate::abi::guard::ReleaseFn;
use arrow_array::{Array, Int32Array};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

unsafe extern "C-unwind" fn count(array: *mut CArray) {
    // SAFETY: `counted` put a strong count there; the callback runs once and takes it.
    let calls = unsafe { Arc::from_raw((*array).private_data.cast::<AtomicUsize>()) };
    calls.fetch_add(1, Ordering::Relaxed);
    // SAFETY: the struct is being released.
    unsafe { (*array).release = None };
}

unsafe extern "C-unwind" fn count_and_panic(array: *mut CArray) {
    // SAFETY: `count` takes the strong count, once; its mark is undone here, as if the panic had
    // come before it.
    unsafe {
        count(array);
        (*array).release = Some(count_and_panic);
    }
    panic!("release failed");
}

fn counted(release: ReleaseFn<CArray>) -> (FFI_ArrowDeviceArray, Arc<AtomicUsize>) {
    let calls = Arc::new(AtomicUsize::new(0));
    let array = CArray {
        length: 3,
        release: Some(release),
        private_data: Arc::into_raw(calls.clone()).cast_mut().cast(),
        ..CArray::empty()
    };
    // SAFETY: no buffers, no event; the callback may run anywhere.
    let array = unsafe {
        FFI_ArrowDeviceArray::new(
            array.into_arrow(),
            ArrowDeviceType::EXT_DEV,
            7,
            ptr::null_mut(),
        )
    };
    (array, calls)
}

#[test]
fn drop_releases_once() {
    let (array, calls) = counted(count);
    assert_eq!(calls.load(Ordering::Relaxed), 0);
    drop(array);
    assert_eq!(calls.load(Ordering::Relaxed), 1);
    assert_eq!(Arc::strong_count(&calls), 1);
}

#[test]
fn a_panicking_release_stays_inside_drop() {
    let (array, calls) = counted(count_and_panic);
    drop(array);
    assert_eq!(calls.load(Ordering::Relaxed), 1);
}

#[test]
fn from_raw_leaves_the_source_released() {
    let (mut source, calls) = counted(count);
    // SAFETY: `source` is valid and the only copy.
    let taken = unsafe { FFI_ArrowDeviceArray::from_raw(&raw mut source) };
    assert!(source.is_released() && !taken.is_released());
    assert_eq!((source.device_id(), source.device_type().value()), (0, 0));
    assert_eq!((taken.device_id(), taken.array().len()), (7, 3));
    drop(source);
    assert_eq!(calls.load(Ordering::Relaxed), 0);
    drop(taken);
    assert_eq!(calls.load(Ordering::Relaxed), 1);
}

#[test]
fn from_raw_of_a_released_struct_is_empty() {
    let mut dangling = FFI_ArrowDeviceArray::empty();
    dangling.array.n_buffers = 1;
    dangling.array.buffers = ptr::dangling_mut();
    // SAFETY: released, so its other members do not count.
    let taken = unsafe { FFI_ArrowDeviceArray::from_raw(&raw mut dangling) };
    assert_eq!(taken.array().num_buffers(), 0);
}

#[test]
fn cpu_arrays_share_their_buffers() {
    let values = Int32Array::from(vec![Some(1), None, Some(3)]);
    let array =
        FFI_ArrowDeviceArray::from(CArray::from_arrow(FFI_ArrowArray::new(&values.to_data())));
    assert_eq!(
        (array.device_type(), array.device_id()),
        (ArrowDeviceType::CPU, -1)
    );
    assert!(array.sync_event().is_null() && array.reserved == [0; 3]);
    assert_eq!((array.array().len(), array.array().null_count()), (3, 1));
    assert_eq!(array.array().buffer(1), values.values().inner().as_ptr());
    let text = format!("{array:?}");
    assert!(
        text.contains("CPU (1)") && text.contains("null_count: 1"),
        "{text}"
    );
}

#[test]
fn unknown_device_types_survive() {
    // SAFETY: no buffers, no event.
    let mut source = unsafe {
        FFI_ArrowDeviceArray::new(
            CArray::from(counted(count).0).into_arrow(),
            ArrowDeviceType::new(-77),
            i64::MIN,
            ptr::null_mut(),
        )
    };
    // SAFETY: `source` is valid and the only copy.
    let taken = unsafe { FFI_ArrowDeviceArray::from_raw(&raw mut source) };
    assert_eq!(
        (taken.device_type().value(), taken.device_id()),
        (-77, i64::MIN)
    );
    assert!(format!("{taken:?}").contains("unknown device type (-77)"));
}

#[test]
fn any_thread_may_hold_and_release() {
    fn anywhere<T: Send + Sync>(_: &T) {}
    let (array, calls) = counted(count);
    anywhere(&array);
    std::thread::spawn(move || drop(array)).join().unwrap();
    assert_eq!(calls.load(Ordering::Relaxed), 1);
}
