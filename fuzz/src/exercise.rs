//! Every safe accessor of a device array, at every depth.

use arrow_array::{Array, ArrayRef};
use arrow_buffer::{ArrowNativeType, i256};
use arrow_device::device::DevicePtr;
use arrow_device::{
    DeviceArray, DeviceRecordBatch, DeviceSlice, Error, Queue, SyncPolicy, Validation,
    check_for_cudf,
};

use arrow_schema::DataType;

use crate::check::{comparable, read};
use crate::input::Input;
use crate::support::compare::same;
use crate::world::World;

/// Arrays at all depths that one input looks at.
const ARRAYS: usize = 64;

/// What holds of an array whose values are valid.
pub(crate) fn array(world: &World, array: &DeviceArray, input: &mut Input<'_>) {
    let mut left = ARRAYS;
    at_depth(world, array, input, &mut left);
}

fn at_depth(world: &World, array: &DeviceArray, input: &mut Input<'_>, left: &mut usize) {
    if *left == 0 {
        return;
    }
    *left -= 1;
    let host = array.to_host().expect("a valid array comes to the host");
    assert_eq!(host.len(), array.len());
    assert_eq!(host.data_type(), array.data_type());
    read(&host);
    if let Some(nulls) = array.null_count() {
        assert_eq!(nulls, nulls_of(&host), "the null count of {array:?}");
    }
    structure(array);
    loans(world, array);
    operation(world, array, &host, input);
    for i in 0..=array.num_children() {
        let child = array.child(i);
        assert_eq!(child.is_some(), i < array.num_children());
        if let Some(child) = child {
            at_depth(world, &child, input, left);
        }
    }
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
    assert_eq!(
        array.dictionary().is_some(),
        matches!(array.data_type(), DataType::Dictionary(..))
    );
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
    loan(&queue, array.sizes_on::<i32>(&queue));
    loan(&queue, array.sizes_on::<i64>(&queue));
    loan(&queue, array.type_ids_on(&queue));
    if let Ok(Some(bits)) = array.validity_on(&queue) {
        assert_eq!(bits.len(), array.len());
        touch(
            &queue,
            bits.address(),
            (bits.bit_offset() + bits.len()).div_ceil(8),
        );
    }
    if let Ok(bits) = array.booleans_on(&queue) {
        touch(
            &queue,
            bits.address(),
            (bits.bit_offset() + bits.len()).div_ceil(8),
        );
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

fn loan<T: ArrowNativeType>(queue: &Queue, values: arrow_device::Result<DeviceSlice<'_, T>>) {
    let Ok(values) = values else { return };
    assert_eq!(values.address().address() % align_of::<T>(), 0);
    touch(queue, values.address(), values.len() * size_of::<T>());
}

/// Reads memory as a kernel would. Addresses that do not hold that much end the device, or the process.
fn touch(queue: &Queue, address: DevicePtr, bytes: usize) {
    if bytes == 0 {
        return;
    }
    let sum = |bytes: &[u8]| _ = std::hint::black_box(bytes.iter().fold(0u8, |sum, b| sum ^ b));
    match queue.as_sim() {
        // SAFETY: the kernel only reads.
        Ok(sim) => unsafe {
            sim.launch(move |memory| memory.read(address, bytes).map(sum))
                .expect("the device is alive");
        },
        // SAFETY: a loan says that the host's memory is there; AddressSanitizer looks.
        Err(_) => sum(unsafe { std::slice::from_raw_parts(address.as_ptr().cast(), bytes) }),
    }
}

/// One operation that makes another array, whose rows are the host's.
fn operation(world: &World, array: &DeviceArray, host: &ArrayRef, input: &mut Input<'_>) {
    let n = array.len();
    let choice = input.u8();
    let same_rows = |what: &str, made: &DeviceArray, expected: &dyn Array| {
        let made = made.to_host().unwrap_or_else(|e| panic!("{what}: {e}"));
        read(&made);
        if comparable(expected) {
            same(expected, &made).unwrap_or_else(|e| panic!("{what} of {array:?}: {e}"));
        }
    };
    match choice % 8 {
        0 => {
            let offset = usize::from(input.u8()).min(n);
            let length = usize::from(input.u8()).min(n - offset);
            let slice = array.slice(offset, length).expect("inside");
            same_rows("slice", &slice, &host.slice(offset, length));
        }
        1 => {
            let whole = array.slice(n / 2, n - n / 2).expect("inside");
            match whole.compact() {
                Ok(compact) => same_rows("compact", &compact, &host.slice(n / 2, n - n / 2)),
                Err(e) => too_large(n, &e),
            }
        }
        2 => {
            let to = &world.places[usize::from(choice / 8) % 3].device;
            match array.to_device(to) {
                Ok(there) => same_rows("to_device", &there, host),
                Err(e) => too_large(n, &e),
            }
        }
        3 => {
            // Rows of a child beyond those that its parent needs are not validated: no safe call reaches their
            // values, but a size that they state is refused.
            if let Err(e) = array.resolve_sizes() {
                assert!(matches!(e, Error::InvalidInput { .. }), "{e}");
            }
            let nulls = array.resolve_null_counts().expect("nulls of a valid array");
            assert_eq!(nulls, nulls_of(host), "counted nulls of {array:?}");
        }
        4 => {
            let part = array.slice(n / 4, n / 2).expect("inside");
            let (c, schema) = part
                .export(SyncPolicy::Event)
                .expect("a valid array goes out");
            assert_eq!(c.array().null_count(), nulls_of(&host.slice(n / 4, n / 2)));
            let place = world.places.iter().find(|p| p.device == *array.device());
            let validation = [Validation::Structure, Validation::Full][usize::from(choice / 8) % 2];
            // Page-locked memory without a backend: any place.
            let options = place.unwrap_or(&world.places[0]).options(validation);
            // SAFETY: both come from `export`.
            let again = unsafe { DeviceArray::import_with(c, &schema, &options) };
            same_rows(
                "export",
                &again.expect("our own export"),
                &host.slice(n / 4, n / 2),
            );
        }
        5 => {
            if let Ok(batch) = DeviceRecordBatch::try_from(array.clone()) {
                let _ = check_for_cudf(&batch);
                let all: Vec<usize> = (0..batch.num_columns()).rev().collect();
                let batch = batch.project(&all).and_then(|b| b.slice(n / 2, n - n / 2));
                let batch = batch.expect("its own columns");
                let rows = batch.to_host().expect("a valid batch comes to the host");
                rows.columns().iter().for_each(|column| read(column));
            }
        }
        6 => {
            assert!(array.is_ready().is_ok());
            array.wait().expect("its events complete");
            assert!(array.is_ready().expect("waited for"));
            assert!(array.ready_event().expect("waited for").is_none());
        }
        _ => {
            let data = array.to_host_data().expect("as to_host");
            let to = &world.places[usize::from(choice / 8) % 3].device;
            match to.upload_data(data) {
                Ok(there) => same_rows("upload_data", &there, host),
                Err(e) => too_large(n, &e),
            }
        }
    }
}

/// Rows without bytes can be more than any memory could hold in another form.
fn too_large(rows: usize, e: &arrow_device::Error) {
    assert!(rows > 1 << 28, "{e}");
}
