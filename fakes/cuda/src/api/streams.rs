//! Streams and host functions.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::ffi::{c_int, c_uint, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::call::{FREE, Of, QUIET, WORK, call, host_function};
use crate::engine::pending;
use crate::ffi::*;
use crate::registry::{Stream, is_legacy, registry};

fn create(phStream: Out<Handle>, is_green: bool) -> Outcome {
    if phStream.is_null() {
        return Err(INVALID_VALUE);
    }
    let mut registry = registry();
    let (context, found) = registry.current()?;
    let engine = found.engine.clone();
    let queue = engine.new_queue()?;
    let green = if is_green {
        registry.new_handle(&engine)
    } else {
        0
    };
    let stream = Stream {
        context,
        queue,
        green,
    };
    let stream = registry.insert(|r| &mut r.streams, &engine, stream);
    phStream.put(stream)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuStreamCreate(phStream: Out<Handle>, flags: c_uint) -> Code {
    call("cuStreamCreate", WORK, Of::Current, || match flags {
        0 | 1 => create(phStream, false),
        _ => Err(INVALID_VALUE),
    })
}

/// What was given to the stream still runs.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuStreamDestroy_v2(hStream: Handle) -> Code {
    call("cuStreamDestroy_v2", FREE, Of::Handle(hStream), || {
        let mut registry = registry();
        let stream = registry.remove(|r| &mut r.streams, hStream)?;
        registry.retire(stream);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuStreamGetCtx(hStream: Handle, pctx: Out<Handle>) -> Code {
    call("cuStreamGetCtx", WORK, Of::Handle(hStream), || {
        let lane = registry().lane(hStream)?;
        let green = green(hStream);
        pctx.put(handle(if green == 0 { lane.context } else { green }))
    })
}

/// The context that stands for a stream's green context; 0 if it is of none.
fn green(hStream: Handle) -> usize {
    let registry = registry();
    let stream = registry.streams.peek(number(hStream));
    stream.map_or(0, |stream| stream.green)
}

/// Makes a stream of a green context of the current context's device. It is otherwise as others:
/// what a driver does with it is not known well enough to be played.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fake_cuda_green_stream(phStream: Out<Handle>) -> Code {
    call("fake_cuda_green_stream", QUIET, Of::Current, || {
        create(phStream, true)
    })
}

/// Streams that are being captured. Nothing is: they only say so.
static CAPTURING: Mutex<BTreeSet<usize>> = Mutex::new(BTreeSet::new());

fn capturing() -> MutexGuard<'static, BTreeSet<usize>> {
    CAPTURING.lock().unwrap_or_else(PoisonError::into_inner)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuStreamBeginCapture_v2(hStream: Handle, _mode: c_int) -> Code {
    call("cuStreamBeginCapture_v2", WORK, Of::Handle(hStream), || {
        registry().lane(hStream)?;
        capturing().insert(hStream.addr());
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuStreamEndCapture(hStream: Handle, graph: Out<Handle>) -> Code {
    call("cuStreamEndCapture", WORK, Of::Handle(hStream), || {
        capturing().remove(&hStream.addr());
        graph.put(std::ptr::null_mut())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuStreamIsCapturing(hStream: Handle, status: Out<c_int>) -> Code {
    call("cuStreamIsCapturing", WORK, Of::Handle(hStream), || {
        registry().lane(hStream)?;
        status.put(c_int::from(capturing().contains(&hStream.addr())))
    })
}

thread_local! {
    /// The thread's capture mode; 0 is global.
    static CAPTURE_MODE: Cell<c_int> = const { Cell::new(0) };
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuThreadExchangeStreamCaptureMode(mode: *mut c_int) -> Code {
    call(
        "cuThreadExchangeStreamCaptureMode",
        QUIET,
        Of::Nobody,
        || {
            if mode.is_null() {
                return Err(INVALID_VALUE);
            }
            // SAFETY: the pointer is not null, and the caller guarantees that it points to a mode.
            unsafe { *mode = CAPTURE_MODE.replace(*mode) };
            Ok(())
        },
    )
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuStreamQuery(hStream: Handle) -> Code {
    call("cuStreamQuery", WORK, Of::Handle(hStream), || {
        let lane = registry().lane(hStream)?;
        if pending(&lane.queue) > 0 {
            return Err(NOT_READY);
        }
        // Nothing is pending on an engine that failed in between, either.
        lane.engine.lasting().map_or(Ok(()), Err)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuStreamSynchronize(hStream: Handle) -> Code {
    call("cuStreamSynchronize", WORK, Of::Handle(hStream), || {
        let lane = registry().lane(hStream)?;
        // Work that keeps the engine busy is no reason to wait for an idle stream.
        match pending(&lane.queue) {
            0 => lane.engine.lasting().map_or(Ok(()), Err),
            _ => lane.engine.record(&lane.queue)?.wait(),
        }
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuStreamWaitEvent(
    hStream: Handle,
    hEvent: Handle,
    flags: c_uint,
) -> Code {
    call("cuStreamWaitEvent", WORK, Of::Handle(hStream), || {
        let mut registry = registry();
        let lane = registry.lane(hStream)?;
        let (found, event) = registry.find(&registry.events, hEvent)?;
        if flags > 1 {
            return Err(INVALID_VALUE);
        }
        if let Some((crossing, record)) = event.pending_elsewhere() {
            let engine = lane.engine.clone();
            // It blocks, as a host function may.
            let queued = engine.host_functions.queue();
            return lane.engine.launch(&lane.queue, None, move |_| {
                let _running = queued.run();
                let waited = crossing.wait(record);
                waited.map_err(|why| engine.failure(LAUNCH_FAILED, &why))
            });
        }
        // An event that was never recorded is no work.
        let Some(recorded) = &event.recorded else {
            return Ok(());
        };
        if !std::sync::Arc::ptr_eq(recorded.engine(), &lane.engine) {
            let text = format!("stream waits for event {found:#x} of another engine");
            lane.engine.blame(text);
            return Err(INVALID_HANDLE);
        }
        recorded.order(&lane.queue)
    })
}

type HostFn = Option<unsafe extern "C" fn(*mut c_void)>;

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuLaunchHostFunc(
    hStream: Handle,
    function: HostFn,
    userData: *mut c_void,
) -> Code {
    call("cuLaunchHostFunc", WORK, Of::Handle(hStream), || {
        let function = function.ok_or(INVALID_VALUE)?;
        let lane = registry().work_lane(hStream)?;
        let data = userData.expose_provenance();
        let engine = lane.engine.clone();
        let queued = engine.host_functions.queue();
        lane.engine.launch(&lane.queue, None, move |_| {
            let _running = queued.run();
            host_function(engine, || {
                // SAFETY: the caller of the driver function guarantees that the function may be
                // called with this argument, once, on any thread.
                unsafe { function(std::ptr::with_exposed_provenance_mut(data)) }
            });
            Ok(())
        })
    })
}

/// What the legacy default stream is asked and may not be.
pub(crate) fn refuse_legacy(stream: Handle) -> Outcome {
    if is_legacy(stream) {
        Err(INVALID_VALUE)
    } else {
        Ok(())
    }
}
