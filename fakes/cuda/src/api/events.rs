//! Events.

use std::ffi::c_uint;
use std::sync::Arc;

use crate::call::{FREE, Of, WORK, call};
use crate::crossing::Crossing;
use crate::engine::Recorded;
use crate::ffi::*;
use crate::registry::{Event, Registry, registry};

const DISABLE_TIMING: c_uint = 2;
const INTERPROCESS: c_uint = 4;
/// How many events for other processes a context can have. A driver has more, and runs out of them, too.
const MOST_INTERPROCESS: usize = 64;

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
        let crosses = flags & INTERPROCESS != 0;
        if crosses && flags & DISABLE_TIMING == 0 {
            return Err(INVALID_VALUE);
        }
        let crossing = |registry: &Registry| {
            let known = registry
                .events
                .iter()
                .filter(|(_, event)| event.crosses() && event.context == context);
            let has_room = known.count() < MOST_INTERPROCESS;
            has_room.then(Crossing::new).flatten().map(Arc::new)
        };
        let crossing = crosses.then(|| crossing(&registry).ok_or(OUT_OF_MEMORY));
        let event = Event {
            context,
            recorded: None,
            crossing: crossing.transpose()?,
        };
        phEvent.put(registry.insert(|r| &mut r.events, &engine, event))
    })
}

impl Event {
    fn crosses(&self) -> bool {
        self.crossing.as_ref().is_some_and(|of| of.is_own())
    }

    /// The record of another process whose work has not run, if it is an event of one.
    pub(crate) fn pending_elsewhere(&self) -> Option<(Arc<Crossing>, u64)> {
        let crossing = self.crossing.as_ref().filter(|of| !of.is_own())?;
        Some((crossing.clone(), crossing.pending()?))
    }
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
        let (context, crossing) = (event.context, event.crossing.clone());
        let lane = registry.work_lane(hStream)?;
        if context != lane.context {
            let text = format!("event {found:#x} recorded on a stream of another context");
            lane.engine.blame(text);
            return Err(INVALID_HANDLE);
        }
        if let Some(crossing) = crossing {
            let record = crossing.record();
            lane.engine.launch(&lane.queue, None, move |_| {
                crossing.complete(record);
                Ok(())
            })?;
        }
        let recorded = lane.engine.record(&lane.queue)?;
        Registry::change(&mut registry.events, found, |event| {
            event.recorded = Some(recorded);
        });
        Ok(())
    })
}

/// The last record of an event in this process, and the state of one of another process's that has work.
type Last = (Option<Arc<Recorded>>, Option<(Arc<Crossing>, u64)>);

fn last(hEvent: Handle) -> Outcome<Last> {
    let registry = registry();
    let (_, event) = registry.find(&registry.events, hEvent)?;
    Ok((event.recorded.clone(), event.pending_elsewhere()))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuEventQuery(hEvent: Handle) -> Code {
    call("cuEventQuery", WORK, Of::Handle(hEvent), || {
        match last(hEvent)? {
            (Some(recorded), _) if !recorded.query()? => Err(NOT_READY),
            (_, Some(_)) => Err(NOT_READY),
            _ => Ok(()),
        }
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuEventSynchronize(hEvent: Handle) -> Code {
    call("cuEventSynchronize", WORK, Of::Handle(hEvent), || {
        let (recorded, elsewhere) = last(hEvent)?;
        if let Some((crossing, record)) = elsewhere {
            crossing.wait(record).map_err(|_| UNKNOWN)?;
        }
        recorded.map_or(Ok(()), |recorded| recorded.wait())
    })
}
