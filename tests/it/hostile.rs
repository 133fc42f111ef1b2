//! What producers can make an import cost: in proportion to what they send, and nothing that stays.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use crate::support::alloc::bytes;
use crate::support_c::export::upload_data;
use crate::support_c::sim::{Place, cpu, places, simulated};
use crate::support_c::{CArray, Foreign, empty};
use arrow_array::{Array, ArrayRef, Int32Array, StringArray, make_array};
use arrow_buffer::Buffer;
use arrow_data::ArrayData;
use arrow_device::device::sim::SimMode;
use arrow_device::{
    ArrowDeviceType, DeviceArray, DeviceId, DeviceRecordBatch, Devices, Error,
    FFI_ArrowDeviceArray, ImportOptions, Validation,
};
use arrow_schema::{DataType, Field, Fields, Schema};

fn ints() -> ArrayRef {
    Arc::new(Int32Array::from(vec![1, 2, 3]))
}

/// Page-locked memory without a backend: one device while it is used, and no memory for an id after that.
#[test]
fn unknown_ids_cost_nothing_that_stays() {
    let options = ImportOptions {
        devices: Some(Devices::new()),
        ..Default::default()
    };
    let ids = if cfg!(miri) { 100 } else { 20_000 };
    let import = |device_type, id| {
        let mut foreign = Foreign::new(&ints().to_data(), &Devices::cpu());
        (
            foreign.device_array.device_type,
            foreign.device_array.device_id,
        ) = (device_type, id);
        let imported = foreign.import(&options).unwrap();
        let device = imported.device().clone();
        drop(imported);
        foreign.assert_released("page-locked");
        device
    };
    // What is made once.
    drop(import(ArrowDeviceType::CUDA_HOST.value(), 1));
    let ((), _, kept) = bytes(|| {
        for id in 0..ids {
            drop(import(ArrowDeviceType::CUDA_HOST.value(), id));
            drop(import(ArrowDeviceType::ROCM_HOST.value(), id));
        }
    });
    assert!(kept < 1 << 14, "{kept} bytes are kept");
    // Nor after many that were used at once: the next new one drops what is left of them.
    let ((), _, kept) = bytes(|| {
        let used: Vec<_> = (1..ids / 10)
            .map(|id| import(ArrowDeviceType::CUDA_HOST.value(), id))
            .collect();
        drop(used);
        drop(import(ArrowDeviceType::CUDA_HOST.value(), ids));
    });
    assert!(kept < 1 << 14, "{kept} bytes are kept of those");
    // One that is used stays the same one, whatever comes between.
    let used = import(ArrowDeviceType::CUDA_HOST.value(), 7);
    for id in 0..100 {
        let device = import(ArrowDeviceType::CUDA_HOST.value(), id);
        assert_eq!(device == used, id == 7, "{id}");
    }
}

/// What a factory says of an id is not kept.
#[test]
fn unknown_ids_of_a_factory_cost_nothing_that_stays() {
    let devices = Devices::new();
    let asked = Arc::new(AtomicUsize::new(0));
    let count = asked.clone();
    devices.register(ArrowDeviceType::CUDA, move |id| {
        count.fetch_add(1, Relaxed);
        Err(Error::DeviceNotAvailable {
            device: DeviceId::new(ArrowDeviceType::CUDA, id),
            reason: "there is none".into(),
        })
    });
    let get = |id| {
        devices
            .get(DeviceId::new(ArrowDeviceType::CUDA, id))
            .unwrap_err()
    };
    let ((), _, kept) = bytes(|| (0..20_000).for_each(|id| drop(get(id))));
    assert!(kept < 1 << 10, "{kept} bytes are kept");
    assert!(get(3).to_string().contains("there is none"));
    assert_eq!(asked.load(Relaxed), 20_001);
}

/// Types that share their children: refused wherever one comes in or goes out.
#[test]
fn types_that_grow_by_sharing_are_refused() {
    let leaf = Arc::new(Field::new("i", DataType::Int32, true));
    let shared = (0..22).fold(leaf, |child, _| {
        let fields = Fields::from(vec![child.clone(), child]);
        Arc::new(Field::new("s", DataType::Struct(fields), true))
    });
    let refused = |outcome: Result<(), Error>| {
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains("2^18"), "{error}");
    };
    let options = ImportOptions::default();
    let mut foreign = Foreign::new(&ints().to_data(), &Devices::cpu());
    // SAFETY: the type is refused before anything is read of the struct.
    refused(unsafe { DeviceArray::import_as(foreign.take(), shared.clone(), &options) }.map(drop));
    foreign.assert_released("array");
    let schema = Arc::new(Schema::new(vec![shared.clone()]));
    let mut foreign = Foreign::new(&ints().to_data(), &Devices::cpu());
    // SAFETY: the type is refused before anything is read of the struct.
    refused(unsafe { DeviceRecordBatch::import_as(foreign.take(), schema, &options) }.map(drop));
    foreign.assert_released("batch");
}

/// Binary views with `n` buffers of which all but one are the same bytes.
fn many_buffers(n: usize) -> ArrayData {
    let bytes = Buffer::from(vec![b'x'; 16]);
    let views = (0..4u128).map(|i| 16 | 0x7878_7878 << 32 | (i * (n as u128 / 4)) << 64);
    let mut buffers = vec![Buffer::from_vec(views.collect())];
    buffers.resize(n + 1, bytes);
    let data = ArrayData::builder(DataType::BinaryView)
        .len(4)
        .buffers(buffers);
    data.build().unwrap()
}

/// A million buffers: one slot each, and no more on the way to the host than arrow-rs's own buffers.
#[test]
fn many_buffers_cost_what_they_are() {
    let n = if cfg!(miri) { 100 } else { 1_000_000 };
    let data = many_buffers(n);
    let mut foreign = Foreign::new(&data, &Devices::cpu());
    let (imported, allocated, _) = bytes(|| foreign.import(&cpu().options).unwrap());
    assert!(
        allocated <= 32 * n + 4096,
        "{allocated} bytes for {n} buffers"
    );
    let (host, allocated, _) = bytes(|| imported.to_host().unwrap().to_data());
    assert!(allocated <= 256 * n, "{allocated} bytes for {n} buffers");
    assert_eq!(host.buffers().len(), n + 1);
    drop((imported, host));
    foreign.assert_released("buffers");
    let mut foreign = Foreign::new(&many_buffers(n / 10), &Devices::cpu());
    let full = ImportOptions {
        validation: Validation::Full,
        ..cpu().options
    };
    drop(foreign.import(&full).unwrap());
    foreign.assert_released("buffers, validated");
    // From a device, where their sizes are read first.
    let Some(place) = simulated(SimMode::Async) else {
        return;
    };
    let data = many_buffers(20_000);
    let up = upload_data(&place.device, &data);
    let back = up.to_host().unwrap();
    assert_eq!(back.as_ref(), make_array(data).as_ref());
    drop((up, back));
    place.assert_clean();
}

/// Structs of many children, which share one C struct.
#[test]
fn many_children_cost_what_they_are() {
    let n = if cfg!(miri) { 100 } else { (1 << 18) - 1 };
    let child = ints().to_data();
    let buffers: [*const std::ffi::c_void; 2] =
        [std::ptr::null(), child.buffers()[0].as_ptr().cast()];
    unsafe extern "C" fn release(array: *mut CArray) {
        // SAFETY: the struct is a live one of this test.
        unsafe { (*array).release = None };
    }
    let mut child = CArray {
        length: 3,
        n_buffers: 2,
        buffers: buffers.as_ptr().cast_mut(),
        release: Some(release),
        ..empty()
    };
    let mut children = vec![&raw mut child; n];
    let mask: [*const std::ffi::c_void; 1] = [std::ptr::null()];
    let field = Arc::new(Field::new("i", DataType::Int32, true));
    let schema = Arc::new(Schema::new(vec![field; n]));
    let root = CArray {
        length: 3,
        n_buffers: 1,
        buffers: mask.as_ptr().cast_mut(),
        n_children: n as i64,
        children: children.as_mut_ptr(),
        release: Some(release),
        ..empty()
    };
    let mut array = crate::support_c::CDeviceArray {
        array: root,
        device_id: -1,
        device_type: 1,
        sync_event: std::ptr::null_mut(),
        reserved: [0; 3],
    };
    // SAFETY: `array` has the layout of `struct ArrowDeviceArray`, has no other owner, and what it
    // points to outlives the import.
    let array = unsafe { FFI_ArrowDeviceArray::from_raw((&raw mut array).cast()) };
    let (batch, allocated, _) = bytes(|| {
        // SAFETY: the struct complies with the interface: it was built above, and what it points to outlives the import.
        unsafe { DeviceRecordBatch::import_as(array, schema, &ImportOptions::default()) }.unwrap()
    });
    // A node and two buffers each.
    assert!(
        allocated <= 256 * n + 4096,
        "{allocated} bytes for {n} children"
    );
    assert_eq!(
        batch.columns().map(|column| column.len()).sum::<usize>(),
        3 * n
    );
    assert_eq!(batch.to_host().unwrap().num_columns(), n);
}

/// One list of buffers that many children share is counted for each.
#[test]
fn shared_lists_of_buffers_are_bounded() {
    if cfg!(miri) {
        return;
    }
    let data = many_buffers(100_000);
    let mut inner = Foreign::new(&data, &Devices::cpu());
    let n = 100;
    let mut children = vec![std::ptr::from_mut(inner.root()); n];
    let field = Field::new("v", DataType::BinaryView, true);
    let data_type = DataType::Struct(vec![field; n].into());
    let builder = ArrayData::builder(data_type.clone()).len(4);
    let columns = vec![many_buffers(1); n];
    // SAFETY: each column is valid and has four rows.
    let data = unsafe { builder.child_data(columns).build_unchecked() };
    let mut foreign = Foreign::new(&data, &Devices::cpu());
    foreign.root().children = children.as_mut_ptr();
    let error = foreign.import(&cpu().options).unwrap_err().to_string();
    assert!(error.contains("2^22"), "{error}");
    foreign.assert_released("shared buffers");
}

/// A struct of `n` times the same child of texts with nulls, that child, and what one copy of it takes in
/// bytes.
fn one_child_many_times(n: usize, place: &Place) -> (Foreign, Foreign, usize) {
    let rows = 1 << 15;
    let texts = (0..rows).map(|row| (row % 3 > 0).then_some("text"));
    let child: ArrayRef = Arc::new(StringArray::from_iter(texts));
    let once = rows / 8 + (rows + 1) * 4 + child.to_data().buffers()[1].len();
    let mut child = Foreign::new(&child.to_data(), &place.device);
    let fields = vec![Field::new("t", DataType::Utf8, true); n];
    let none = StringArray::new_null(0).to_data();
    let data = ArrayData::builder(DataType::Struct(fields.into())).child_data(vec![none; n]);
    // The event is recorded last.
    let mut foreign = Foreign::new(&data.build().unwrap(), &place.device);
    foreign.root().length = rows as i64;
    for i in 0..n {
        foreign.set_child(&[], i, child.root());
    }
    (foreign, child, once)
}

/// However often a child is named, its bytes are not copied where the host can read them. Elsewhere they come down once for the null
/// counts, which are right for all, and once for the values.
#[test]
fn one_child_many_times_is_checked_once() {
    let n = if cfg!(miri) { 3 } else { 256 };
    for place in places() {
        let (mut foreign, mut child, once) = one_child_many_times(n, &place);
        let mut shifted = *child.root();
        if place.sim.is_some() {
            // One child that has the other's rows but the first 16, of which 6 are null.
            shifted.offset += 16;
            shifted.length -= 16;
            shifted.null_count -= 6;
            foreign.set_child(&[], 100, &raw mut shifted);
            foreign.root().length = shifted.length;
        }
        let before = place.device.stats();
        let full = ImportOptions {
            validation: Validation::Full,
            ..place.options.clone()
        };
        let (imported, allocated, _) = bytes(|| foreign.import(&full).unwrap());
        if place.sim.is_some() {
            let down = place.device.stats().since(&before).bytes_to_host;
            // All bitmaps once; the bitmaps and values of the two children.
            assert!(down as usize <= 3 * once, "{down} bytes for {once}");
        } else {
            assert!(allocated < 2048 * n + once, "{allocated} bytes");
        }
        drop(imported);
        foreign.assert_released_by(&place.device, "one child");
        drop((foreign, child));
        place.assert_clean();
    }
}
