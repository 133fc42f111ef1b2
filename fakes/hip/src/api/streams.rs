//! Streams, events, host functions.

use std::ffi::{c_int, c_uint, c_void};
use std::ptr::null_mut;

use crate::call::{call, forward, on_device};
use crate::contexts::{current_device, within};
use crate::driver::HostFn;
use crate::ffi::*;

forward! {
    hipStreamCreateWithFlags(stream: *mut Handle, flags: c_uint) => cuStreamCreate(stream, flags);
    hipStreamSynchronize(stream: Handle) => cuStreamSynchronize(stream);
    hipStreamQuery(stream: Handle) => cuStreamQuery(stream);
    hipStreamWaitEvent(stream: Handle, event: Handle, flags: c_uint) =>
        cuStreamWaitEvent(stream, event, flags);
    hipStreamIsCapturing(stream: Handle, pCaptureStatus: *mut c_int) =>
        cuStreamIsCapturing(stream, pCaptureStatus);
    hipStreamBeginCapture(stream: Handle, mode: c_int) => cuStreamBeginCapture_v2(stream, mode);
    hipStreamEndCapture(stream: Handle, pGraph: *mut Handle) => cuStreamEndCapture(stream, pGraph);
    hipLaunchHostFunc(stream: Handle, function: HostFn, userData: *mut c_void) =>
        cuLaunchHostFunc(stream, function, userData);
    hipEventCreateWithFlags(event: *mut Handle, flags: c_uint) =>
        cuEventCreate(event, event_flags(flags)?);
    hipEventDestroy(event: Handle) => cuEventDestroy_v2(event);
    hipEventRecord(event: Handle, stream: Handle) => cuEventRecord(event, stream);
    hipEventQuery(event: Handle) => cuEventQuery(event);
    hipEventSynchronize(event: Handle) => cuEventSynchronize(event);
}

/// Waits for the stream's work, as HIP may.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn hipStreamDestroy(stream: Handle) -> Code {
    on_device(|driver| {
        // SAFETY: the caller guarantees a live stream that nothing uses any more.
        unsafe {
            // Whatever it answers, the stream goes.
            let _ = driver.cuStreamSynchronize(stream);
            driver.cuStreamDestroy_v2(stream)
        }
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn hipThreadExchangeStreamCaptureMode(mode: *mut c_int) -> Code {
    call(|driver| {
        // SAFETY: the caller guarantees that `mode` points to a mode.
        unsafe { driver.cuThreadExchangeStreamCaptureMode(mode) }
    })
}

/// CUDA has no flags for how far an event's release reaches; HIP takes one of them at most.
fn event_flags(flags: c_uint) -> Outcome<c_uint> {
    const DISABLE_SYSTEM_FENCE: c_uint = 0x2000_0000;
    const RELEASE_TO_DEVICE: c_uint = 0x4000_0000;
    const RELEASE_TO_SYSTEM: c_uint = 0x8000_0000;
    let reach = flags & (DISABLE_SYSTEM_FENCE | RELEASE_TO_DEVICE | RELEASE_TO_SYSTEM);
    // Blocking, no timing, between processes.
    match flags ^ reach {
        others @ 0..=7 if reach.count_ones() <= 1 => Ok(others),
        _ => Err(INVALID_VALUE),
    }
}

/// The default streams are the current device's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn hipStreamGetDevice(stream: Handle, device: Out<c_int>) -> Code {
    const PER_THREAD: usize = 2;
    if stream.addr() <= PER_THREAD {
        return call(|_| device.put(current_device()));
    }
    on_device(|driver| {
        let mut context = null_mut();
        // SAFETY: the caller guarantees a live stream; `context` is valid for the write of a
        // handle.
        unsafe { driver.cuStreamGetCtx(stream, &mut context) }?;
        let mut ordinal = 0;
        // SAFETY: `ordinal` is valid for the write of an int.
        within(driver, context, || unsafe {
            driver.cuCtxGetDevice(&mut ordinal)
        })?;
        device.put(ordinal)
    })
}
