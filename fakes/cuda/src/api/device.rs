//! Initialisation, devices, error texts.

use std::ffi::{CStr, c_char, c_int, c_uint};

use crate::call::{Of, QUERY, QUIET, call, is_forked, plain, set_initialized};
use crate::engine::{
    Engine, NO_CONCURRENT_MANAGED, NO_DESCRIPTORS, NO_POOLS, NO_VIRTUAL_MEMORY, environment,
};
use crate::errors;
use crate::ffi::*;
use crate::registry::{device_count, registry};

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuInit(flags: c_uint) -> Code {
    static ANSWER: std::sync::OnceLock<Code> = std::sync::OnceLock::new();
    plain("cuInit", || {
        match *ANSWER.get_or_init(|| environment("FAKE_CUDA_INIT").unwrap_or(0)) {
            _ if is_forked() => Err(NOT_INITIALIZED),
            0 if flags == 0 => {
                set_initialized();
                Ok(())
            }
            0 => Err(INVALID_VALUE),
            code => Err(code),
        }
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDriverGetVersion(version: Out<c_int>) -> Code {
    plain("cuDriverGetVersion", || version.put(13000))
}

/// A text of a code, or null.
fn text_of(code: Code, text: Out<*const c_char>, which: fn((Text, Text)) -> Text) -> Outcome {
    match errors::texts(code) {
        Some(texts) => text.put(which(texts).as_ptr()),
        None => {
            text.put(std::ptr::null())?;
            Err(INVALID_VALUE)
        }
    }
}

type Text = &'static CStr;

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuGetErrorName(error: Code, text: Out<*const c_char>) -> Code {
    plain("cuGetErrorName", || text_of(error, text, |(name, _)| name))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuGetErrorString(error: Code, text: Out<*const c_char>) -> Code {
    plain("cuGetErrorString", || {
        text_of(error, text, |(_, text)| text)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceGetCount(count: Out<c_int>) -> Code {
    call("cuDeviceGetCount", QUERY, Of::Nobody, || {
        count.put(device_count())
    })
}

/// Refuses an ordinal that there is not.
pub(crate) fn check(ordinal: c_int) -> Outcome {
    if (0..device_count()).contains(&ordinal) {
        Ok(())
    } else {
        Err(INVALID_DEVICE)
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceGet(device: Out<c_int>, ordinal: c_int) -> Code {
    call("cuDeviceGet", QUERY, Of::Device(ordinal), || {
        check(ordinal)?;
        device.put(ordinal)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceGetName(name: Out<c_char>, len: c_int, dev: c_int) -> Code {
    call("cuDeviceGetName", QUIET, Of::Device(dev), || {
        check(dev)?;
        let room = usize::try_from(len).map_err(|_| INVALID_VALUE)?;
        if name.is_null() || room == 0 {
            return Err(INVALID_VALUE);
        }
        let mut text = format!("Simulated CUDA device {dev}").into_bytes();
        text.truncate(room - 1);
        text.push(0);
        name.put_bytes(&text, room);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceGetAttribute(
    pi: Out<c_int>,
    attrib: c_int,
    dev: c_int,
) -> Code {
    call("cuDeviceGetAttribute", QUIET, Of::Device(dev), || {
        check(dev)?;
        let engine = registry().engine(dev);
        let lacks = |flag| engine.as_ref().is_some_and(|e| Engine::has(e, flag));
        pi.put(match attrib {
            1..=3 => 1024,          // MAX_THREADS_PER_BLOCK, MAX_BLOCK_DIM_X, _Y
            4 => 64,                // MAX_BLOCK_DIM_Z
            5 => i32::MAX,          // MAX_GRID_DIM_X
            6 | 7 => 65535,         // MAX_GRID_DIM_Y, _Z
            8 => 48 << 10,          // MAX_SHARED_MEMORY_PER_BLOCK
            10 => 32,               // WARP_SIZE
            16 => 4,                // MULTIPROCESSOR_COUNT
            19 => 1,                // CAN_MAP_HOST_MEMORY
            40 => 2,                // ASYNC_ENGINE_COUNT
            41 | 78 | 83 | 91 => 1, // UNIFIED_ADDRESSING, STREAM_PRIORITIES_SUPPORTED,
            // MANAGED_MEMORY, CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
            75 => 9,                                        // COMPUTE_CAPABILITY_MAJOR
            89 => i32::from(!lacks(NO_CONCURRENT_MANAGED)), // CONCURRENT_MANAGED_ACCESS
            102 => i32::from(!lacks(NO_VIRTUAL_MEMORY)),    // VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
            103 => i32::from(!lacks(NO_DESCRIPTORS)), // HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED
            125 => 1,                                 // IPC_EVENT_SUPPORTED
            115 => i32::from(!lacks(NO_POOLS)),       // MEMORY_POOLS_SUPPORTED
            _ => 0,
        })
    })
}

/// The name of a device in all processes: by default its ordinal says which it is.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceGetUuid_v2(uuid: Out<[u8; 16]>, dev: c_int) -> Code {
    call("cuDeviceGetUuid_v2", QUIET, Of::Device(dev), || {
        check(dev)?;
        let number = registry().uuids.get(&dev).copied();
        let mut bytes = *b"cudafake........";
        bytes[8..].copy_from_slice(&number.unwrap_or(dev as u64).to_be_bytes());
        uuid.put(bytes)
    })
}
