//! Events.

use std::ffi::c_uint;
use std::sync::Arc;

use crate::call::{FREE, Of, WORK, call};
use crate::engine::Recorded;
use crate::ffi::*;
use crate::registry::{Event, Registry, registry};

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuEventCreate(phEvent: Out<Handle>, flags: c_uint) -> Code {
    call("cuEventCreate", WORK, Of::Current, || {
        if phEvent.is_null() || flags > 7 {
            return Err(INVALID_VALUE);
        }
        let mut registry = registry();
        let (context, found) = registry.current()?;
        let engine = found.engine.clone();
        // cudarc's own events for page-locked slices have another flag.
        if flags == 0 {
            engine.blame("an event with timing, which costs time".into());
        }
        let event = Event {
            context,
            recorded: None,
        };
        phEvent.put(registry.insert(|r| &mut r.events, &engine, event))
    })
}

/// Waits that were given to streams stay.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuEventDestroy_v2(hEvent: Handle) -> Code {
    call("cuEventDestroy_v2", FREE, Of::Handle(hEvent), || {
        registry().remove(|r| &mut r.events, hEvent).map(drop)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuEventRecord(hEvent: Handle, hStream: Handle) -> Code {
    call("cuEventRecord", WORK, Of::Handle(hEvent), || {
        let mut registry = registry();
        let (found, event) = registry.find(&registry.events, hEvent)?;
        let context = event.context;
        let lane = registry.work_lane(hStream)?;
        if context != lane.context {
            let text = format!("event {found:#x} recorded on a stream of another context");
            lane.engine.blame(text);
            return Err(INVALID_HANDLE);
        }
        let recorded = lane.engine.record(&lane.queue)?;
        Registry::change(&mut registry.events, found, |event| {
            event.recorded = Some(recorded);
        });
        Ok(())
    })
}

/// The last record of an event.
fn recorded(hEvent: Handle) -> Outcome<Option<Arc<Recorded>>> {
    let registry = registry();
    let (_, event) = registry.find(&registry.events, hEvent)?;
    Ok(event.recorded.clone())
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuEventQuery(hEvent: Handle) -> Code {
    call(
        "cuEventQuery",
        WORK,
        Of::Handle(hEvent),
        || match recorded(hEvent)? {
            Some(recorded) if !recorded.query()? => Err(NOT_READY),
            _ => Ok(()),
        },
    )
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuEventSynchronize(hEvent: Handle) -> Code {
    call("cuEventSynchronize", WORK, Of::Handle(hEvent), || {
        let recorded = recorded(hEvent)?;
        recorded.map_or(Ok(()), |recorded| recorded.wait())
    })
}
