//! DLPack tensors: hostile ones in, arrays of all types out.
//!
//! The contract of a tensor: the struct is there; `shape`, and `strides` if they are not null, have `ndim`
//! numbers if that is a number of dimensions that Arrow has; on the CPU the memory has the bytes that
//! the shape says, from `byte_offset` on. A simulated device knows its own.

use arrow_array::{Array, UInt8Array};
use arrow_device::dlpack::{
    DLDataType, DLDevice, DLManagedTensor, DLManagedTensorVersioned, DLTensor, DlpackOptions,
    DlpackStream, DlpackTensor,
};
use arrow_device::{ArrowDeviceType, Error, ReleasePolicy};

use crate::input::Input;
use crate::kinds;
use crate::operations::{self, generated};
use crate::tensors::{Calls, Form, Held, produce};
use crate::world::{Place, World};

pub(crate) fn target(input: &mut Input<'_>) {
    let world = World::enter();
    let flags = input.u8();
    let place = &world.places[usize::from(flags >> 2) % 3];
    match flags & 3 {
        0 => tensor_in::<DLManagedTensorVersioned>(&world, place, input),
        1 => tensor_in::<DLManagedTensor>(&world, place, input),
        2 => array_out::<DLManagedTensorVersioned>(&world, place, input),
        _ => array_out::<DLManagedTensor>(&world, place, input),
    }
    world.assert_clean();
}

/// Dimensions that an import may count.
const MOST: usize = 64;

fn tensor_in<F: Form>(world: &World, place: &Place, input: &mut Input<'_>) {
    let dtype = DLDataType {
        code: [0, 1, 2, 6, 0, 1, 2, input.u8()][input.choice(8)],
        bits: [8, 16, 32, 64, 8, 32, 64, input.u8()][input.choice(8)],
        lanes: [1, 1, 1, input.u16()][input.choice(4)],
    };
    let shape: Vec<i64> = (0..input.choice(6)).map(|_| input.count()).collect();
    let fixed = input.u8();
    let byte_offset = match fixed & 3 {
        0 => u64::try_from(input.count()).unwrap_or(u64::MAX),
        _ => 0,
    };
    let device = DLDevice {
        device_type: match input.u8() {
            255 => ArrowDeviceType::new(input.choice(20) as i32),
            _ => place.device.id().device_type,
        },
        device_id: match input.u8() {
            255 => input.i32(),
            _ if place.is_cpu() => 0,
            _ => place.device.id().id as i32,
        },
    };
    let strides: Option<Vec<i64>> = match input.choice(4) {
        0 => Some((0..shape.len()).map(|_| input.count()).collect()),
        1 => None,
        _ => Some(
            (0..shape.len())
                .map(|i| {
                    shape[i + 1..]
                        .iter()
                        .fold(1, |n: i64, m| n.wrapping_mul(*m))
                })
                .collect(),
        ),
    };
    let ndim = match input.u8() {
        255 => [-1, i32::MIN, i32::MAX, 65, 1 << 16][input.choice(5)],
        254 if !shape.is_empty() => shape.len() as i32 - 1,
        _ => shape.len() as i32,
    };
    let null_shape = input.u8() == 255;
    let version = [1, 1, 1, 0, 2, u32::from(input.u16())][input.choice(6)];
    let on_device = input.u8() < 224;
    let mut steps = Input::new(input.text());
    let bytes = input.rest();
    let mut bytes = bytes[..bytes.len().min(4096)].to_vec();
    bytes.resize(bytes.len().max(1), 0);

    // Bytes that the shape says.
    let n = usize::try_from(ndim).unwrap_or(0).min(shape.len());
    let product = |product: Option<usize>, n: &i64| product?.checked_mul(usize::try_from(*n).ok()?);
    let elements = shape[..n].iter().fold(Some(1), product);
    let claimed = elements.and_then(|n| n.checked_mul(usize::from(dtype.bits) / 8));
    let claimed = claimed.and_then(|n| n.checked_add(usize::try_from(byte_offset).ok()?));
    let (data, keep): (_, Box<dyn Send>) = match place.sim.is_some() && on_device {
        true => {
            let up = place
                .device
                .upload_array(&UInt8Array::from(bytes))
                .expect("there is room");
            let buffer = up.buffer(1).expect("values are there");
            (buffer.address().as_ptr(), Box::new(buffer))
        }
        false => {
            // Just what is claimed; more than there is is not.
            match claimed {
                Some(claimed) if claimed <= 1 << 16 => bytes.resize(claimed, 0),
                // Refused as too large, or another's memory.
                None => {}
                Some(_) if !place.is_cpu() => {}
                Some(_) => return,
            }
            let bytes = bytes.into_boxed_slice();
            (bytes.as_ptr().cast_mut().cast(), Box::new(bytes))
        }
    };
    let calls = Calls::default();
    let queue = place.device.default_queue();
    let tensor: *mut F = produce(data, device, dtype, &[], keep, &calls);
    let kept = (shape.clone(), strides.clone());
    // SAFETY: just made, and nobody else has it.
    unsafe {
        let tensor: &mut DLTensor = (*tensor).tensor_mut();
        tensor.shape = kept.0.as_ptr().cast_mut();
        if null_shape {
            tensor.shape = std::ptr::null_mut();
        }
        tensor.strides = kept
            .1
            .as_ref()
            .map_or(std::ptr::null_mut(), |s| s.as_ptr().cast_mut());
        tensor.ndim = ndim;
        tensor.byte_offset = byte_offset;
    }
    set_version(tensor, version);
    debug_assert!(n <= MOST);
    // SAFETY: as the contract says: shape and strides live to the end of this function, the import does not
    // keep them.
    let imported = unsafe { F::import(tensor, &queue) };
    if let Ok(array) = &imported {
        // Of no bytes nothing is kept.
        let kept = elements.is_none_or(|n| n > 0);
        assert!(!kept || calls.get() == 0, "deleted under an array");
        operations::imported(world, array, &mut steps);
    }
    drop(imported);
    // A device's thread may hold it for a copy.
    world.eventually("the deleter is called", || calls.get() > 0);
    world.assert_clean();
    assert_eq!(calls.get(), 1, "calls of the deleter");
}

/// Sets the major version, where there is one.
fn set_version<F: Form>(tensor: *mut F, major: u32) {
    if std::any::TypeId::of::<F>() == std::any::TypeId::of::<DLManagedTensorVersioned>() {
        // SAFETY: of this type, and nobody else has it.
        unsafe { (*tensor.cast::<DLManagedTensorVersioned>()).version.major = major };
    }
}

fn array_out<F: Form>(world: &World, place: &Place, input: &mut Input<'_>) {
    let data_type = kinds::data_type(input);
    let Some(rows) = generated(input, &data_type) else {
        return;
    };
    let device = place.device.upload_array(&rows).expect("valid");
    let (flags, number) = (input.u8(), input.choice(6) as i64 - 1);
    let queue = place.device.default_queue();
    let stream = match flags & 3 {
        0 => DlpackStream::NO_SYNC,
        1 => DlpackStream::from(&queue),
        // SAFETY: the devices here know no streams by number.
        2 if number < 3 => unsafe { DlpackStream::from_number(Some(number)) },
        _ => DlpackStream::NONE,
    };
    let mut options = DlpackOptions::new(stream);
    if flags & 4 != 0 {
        options = DlpackOptions {
            nulls_ignored: true,
            ..options
        };
    }
    if flags & 8 != 0 {
        options = DlpackOptions {
            release: ReleasePolicy::Ordered,
            ..options
        };
    }
    let column = device.export_dlpack(&options);
    let raw = DLDataType {
        code: input.u8() % 8,
        bits: input.u8(),
        lanes: input.u16(),
    };
    let buffers = (0..device.num_buffers()).filter_map(|i| device.buffer(i));
    let buffers = buffers.map(|buffer| buffer.export_dlpack(raw, &options));
    let tensors: Vec<_> = std::iter::once(column).chain(buffers).collect();
    if let Ok(tensor) = &tensors[0] {
        assert!(
            flags & 4 != 0 || rows.null_count() == 0,
            "nulls went out as values"
        );
        assert_eq!(tensor.shape()[0] as usize, rows.len());
    }
    drop(device);
    for tensor in tensors {
        match tensor {
            Ok(tensor) => consume::<F>(world, place, tensor, input),
            Err(e) => assert!(
                matches!(e, Error::InvalidArgument(_) | Error::NotSupported { .. }),
                "{e:?}"
            ),
        }
    }
}

fn consume<F: Form>(world: &World, place: &Place, tensor: DlpackTensor, input: &mut Input<'_>) {
    let held = Held::<F>::new(tensor);
    if place.is_cpu() {
        std::hint::black_box(held.bytes());
    }
    match input.choice(3) {
        0 => drop(held),
        _ => {
            let queue = place.device.default_queue();
            // SAFETY: a tensor of ours, which nobody writes to.
            let again = unsafe { F::import(held.into_raw(), &queue) };
            if let Ok(again) = again {
                operations::imported(world, &again, input);
            }
        }
    }
}
