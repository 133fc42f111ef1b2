//! Every safe accessor of a device array, at every depth.

use arrow_array::{Array, ArrayRef};
use arrow_buffer::{ArrowNativeType, i256};
use arrow_device::device::DevicePtr;
use arrow_device::{Device, DeviceArray, Error, Loan, Queue};
use arrow_schema::DataType;

use crate::check::{comparable, read};
use crate::support::compare::same;
use crate::world::World;

/// Arrays at all depths that one input looks at.
const ARRAYS: usize = 64;

/// What holds of an array whose values are valid, at every depth. Answers its rows.
pub(crate) fn array(world: &World, array: &DeviceArray) -> ArrayRef {
    at_depth(world, array, &mut { ARRAYS })
}

fn at_depth(world: &World, array: &DeviceArray, left: &mut usize) -> ArrayRef {
    let host = array.to_host().expect("a valid array comes to the host");
    assert_eq!(
        (host.len(), host.data_type()),
        (array.len(), array.data_type())
    );
    read(&host);
    if let Some(nulls) = array.null_count() {
        assert_eq!(nulls, nulls_of(&host), "the null count of {array:?}");
    }
    structure(array);
    loans(world, array);
    manners(world, array, &host);
    for i in 0..=array.num_children() {
        let child = array.child(i);
        assert_eq!(child.is_some(), i < array.num_children());
        if let Some(child) = child.filter(|_| *left > 0) {
            *left -= 1;
            at_depth(world, &child, left);
        }
    }
    host
}

/// A copy of a part, counts, waits.
fn manners(world: &World, array: &DeviceArray, host: &ArrayRef) {
    let n = array.len();
    let part = array.slice(n / 2, n - n / 2).expect("inside");
    match part.compact() {
        Ok(copy) if comparable(host) => {
            let copy = copy.to_host().expect("valid");
            same(&host.slice(n / 2, n - n / 2), &copy).unwrap_or_else(|e| panic!("{array:?}: {e}"));
        }
        Ok(_) => {}
        // Rows without bytes can be more than any memory could hold in another form; page-locked memory may have no backend.
        Err(Error::NotSupported { .. }) if world.place_of(array.device()).is_none() => {}
        Err(e) => assert!(n > 1 << 28, "{e}"),
    }
    // Rows of a child beyond those that its parent needs are not validated: no safe call reaches their values, but a size that
    // they state is refused.
    if let Err(e) = array.resolve_sizes() {
        assert!(matches!(e, Error::InvalidInput { .. }), "{e}");
    }
    let nulls = array.resolve_null_counts().expect("nulls of a valid array");
    assert_eq!(nulls, nulls_of(host), "counted nulls of {array:?}");
    array.wait().expect("its events complete");
    assert!(array.is_ready().expect("waited for"));
    assert!(array.ready_event(None).expect("waited for").is_none());
}

/// As the C interface has it: all rows of the null type are null.
pub(crate) fn nulls_of(host: &dyn Array) -> usize {
    match host.data_type() {
        DataType::Null => host.len(),
        _ => host.null_count(),
    }
}

/// What reads no memory.
pub(crate) fn structure(array: &DeviceArray) {
    let _ = format!("{array:?}");
    let n = array.len();
    assert_eq!(array.is_empty(), n == 0);
    assert!(array.null_count().is_none_or(|n| n <= array.len()));
    let _ = array.field();
    for i in 0..array.num_buffers() + 2 {
        let Some(buffer) = array.buffer(i) else {
            continue;
        };
        assert!(i < array.num_buffers());
        let n = buffer.len();
        for (offset, len) in [(0, n), (n / 2, n - n / 2), (n, 0)] {
            buffer.slice(offset, len).expect("a part of the buffer");
        }
        assert!(buffer.slice(n, 1).is_err() && buffer.slice(usize::MAX, usize::MAX).is_err());
    }
    let n = array.len();
    for (offset, len) in [(0, n), (n, 0), (n / 3, n / 2), (n - n.min(1), n.min(1))] {
        let slice = array.slice(offset, len).expect("a part of the array");
        assert_eq!(slice.len(), len);
    }
    assert!(array.slice(n, 1).is_err() && array.slice(1, usize::MAX).is_err());
    assert!(array.child(array.num_children()).is_none());
    if let Some(child) = array.child(0) {
        assert!(child.get_array_memory_size() <= array.get_array_memory_size());
    }
}

/// Typed access, as work on a queue uses it.
pub(crate) fn loans(world: &World, array: &DeviceArray) {
    let queue = array.device().default_queue();
    macro_rules! values {
        ($($t:ty)*) => { $( loan(&queue, array.values_on::<$t>(&queue)); )* };
    }
    values!(i8 i16 i32 i64 u8 u16 u32 u64 half::f16 f32 f64 i128 u128 i256
        arrow_buffer::IntervalDayTime arrow_buffer::IntervalMonthDayNano);
    loan(&queue, array.offsets_on::<i32>(&queue));
    loan(&queue, array.offsets_on::<i64>(&queue));
    loan(&queue, array.bytes_on(&queue));
    if let Ok(Some(bits)) = array.validity_on(&queue) {
        assert_eq!(bits.len(), array.len());
        touch_bits(&queue, &bits);
    }
    if let Ok(bits) = array.booleans_on(&queue) {
        touch_bits(&queue, &bits);
    }
    for i in 0..array.num_buffers() {
        let Some(buffer) = array.buffer(i) else {
            continue;
        };
        let loan = buffer.on(&queue).expect("a queue of the same device");
        touch(&queue, loan.address(), buffer.len());
    }
    let elsewhere = world
        .places
        .iter()
        .find(|place| place.device != *array.device());
    let elsewhere = elsewhere.expect("there are three").device.default_queue();
    // Without a bitmap nothing is lent.
    assert!(!matches!(array.validity_on(&elsewhere), Ok(Some(_))));
}

fn loan<T: ArrowNativeType>(queue: &Queue, values: arrow_device::Result<Loan<'_, T>>) {
    let Ok(values) = values else { return };
    assert_eq!(values.address().address() % align_of::<T>(), 0);
    touch(queue, values.address(), values.len() * size_of::<T>());
}

fn touch_bits(queue: &Queue, bits: &Loan<'_, bool>) {
    touch(
        queue,
        bits.address(),
        (bits.bit_offset() + bits.len()).div_ceil(8),
    );
}

/// Lets what is queued next run late, on a GPU: simulated devices are late by themselves.
pub(crate) fn delay(queue: &Queue) {
    #[cfg(feature = "cuda")]
    crate::gpu::delay(queue);
    let _ = queue;
}

/// Another queue than that on which the memory was made, each second time on a GPU.
pub(crate) fn other_queue(device: &Device) -> Option<Queue> {
    #[cfg(feature = "cuda")]
    if crate::gpu::is_used(device) && crate::gpu::random() % 2 == 0 {
        return Some(device.new_queue().expect("the device is alive"));
    }
    let _ = device;
    None
}

/// Reads memory as a kernel would. Addresses that do not hold that much end the device, or the process.
fn touch(queue: &Queue, address: DevicePtr, bytes: usize) {
    if bytes == 0 {
        return;
    }
    #[cfg(feature = "cuda")]
    if crate::gpu::touch(queue, address, bytes) {
        return;
    }
    let sum = |bytes: &[u8]| _ = std::hint::black_box(bytes.iter().fold(0u8, |sum, b| sum ^ b));
    match queue.as_sim() {
        // SAFETY: the kernel only reads.
        Ok(sim) => unsafe {
            sim.launch(move |memory| memory.slice(address, bytes).map(sum))
                .expect("the device is alive");
        },
        // SAFETY: a loan says that the host's memory is there; AddressSanitizer looks.
        Err(_) => sum(unsafe { std::slice::from_raw_parts(address.as_ptr().cast(), bytes) }),
    }
}
