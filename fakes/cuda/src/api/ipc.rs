//! Events of other processes.

use std::sync::Arc;

use crate::call::{Of, WORK, call};
use crate::crossing::{Crossing, IpcHandle};
use crate::ffi::*;
use crate::registry::{Event, registry};

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuIpcGetEventHandle(
    pHandle: Out<IpcHandle>,
    event: Handle,
) -> Code {
    call("cuIpcGetEventHandle", WORK, Of::Handle(event), || {
        let registry = registry();
        let (_, found) = registry.find(&registry.events, event)?;
        let crossing = found.crossing.as_ref().filter(|crossing| crossing.is_own());
        pHandle.put(crossing.ok_or(INVALID_VALUE)?.handle())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuIpcOpenEventHandle(
    phEvent: Out<Handle>,
    handle: IpcHandle,
) -> Code {
    call("cuIpcOpenEventHandle", WORK, Of::Current, || {
        if phEvent.is_null() {
            return Err(INVALID_VALUE);
        }
        let mut registry = registry();
        let (context, found) = registry.current()?;
        let engine = found.engine.clone();
        if handle.is_of_this_process() {
            return Err(INVALID_CONTEXT);
        }
        // Its owner has died, or has destroyed it.
        let crossing = Crossing::open(handle).ok_or(INVALID_HANDLE)?;
        let event = Event {
            context,
            recorded: None,
            crossing: Some(Arc::new(crossing)),
        };
        phEvent.put(registry.insert(|r| &mut r.events, &engine, event))
    })
}
