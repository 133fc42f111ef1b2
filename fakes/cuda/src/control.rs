//! What tests steer the stand-in with; see the crate's documentation.

use std::ffi::{c_char, c_int};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use arrow_device::device::Backend;

use crate::call::calls_of_thread;
use crate::engine::Engine;
use crate::ffi::*;
use crate::memory::What;
use crate::registry::{Registry, registry};

/// Nothing panics across C.
fn caught<T>(otherwise: T, body: impl FnOnce() -> Option<T>) -> T {
    let result = catch_unwind(AssertUnwindSafe(body));
    result.ok().flatten().unwrap_or(otherwise)
}

fn engine(ordinal: c_int) -> Option<Arc<Engine>> {
    registry().open_engine(ordinal).ok()
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fake_cuda_open(
    count: c_int,
    flags: u32,
    capacity_bytes: u64,
) -> c_int {
    caught(-1, || registry().open_group(count, flags, capacity_bytes))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fake_cuda_close(ordinal: c_int) -> c_int {
    caught(-1, || {
        let engine = registry().engine(ordinal)?;
        let closed = registry().close_group(&engine);
        closed.map(|_| 0)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fake_cuda_fail(
    ordinal: c_int,
    name: In<c_char>,
    nth: u32,
    code: c_int,
) -> c_int {
    caught(-1, || {
        engine(ordinal)?.fail_nth(name.text().ok()?, nth.max(1), code);
        Some(0)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fake_cuda_clear(ordinal: c_int) -> u32 {
    caught(0, || Some(engine(ordinal)?.clear()))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fake_cuda_calls(ordinal: c_int, name: In<c_char>) -> u64 {
    caught(0, || Some(engine(ordinal)?.calls(&name.text().ok()?)))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fake_cuda_thread_calls(text: Out<u8>, bytes: usize) -> usize {
    caught(0, || {
        let calls = calls_of_thread();
        text.put_bytes(calls.as_bytes(), bytes);
        Some(calls.len())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fake_cuda_misreport(address: Address, bytes: usize) -> c_int {
    caught(-1, || {
        registry().memory.at_mut(address)?.reported = Some(bytes);
        Some(0)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fake_cuda_uuid(ordinal: c_int, number: u64) -> c_int {
    caught(-1, || {
        registry().uuids.insert(ordinal, number);
        Some(0)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fake_cuda_break(ordinal: c_int, code: c_int) -> c_int {
    caught(-1, || {
        let engine = engine(ordinal)?;
        // An error says that it has failed already.
        let _ = engine.fail(code);
        Some(0)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fake_cuda_shutdown(ordinal: c_int, code: c_int) -> c_int {
    caught(-1, || {
        engine(ordinal)?.shut_down(code);
        Some(0)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fake_cuda_drain(ordinal: c_int) -> c_int {
    caught(-1, || {
        let engine = engine(ordinal)?;
        let drained = engine.sim.synchronize();
        Some(drained.map_or_else(|error| engine.code_of(&error), |()| 0))
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fake_cuda_report(
    ordinal: c_int,
    text: Out<u8>,
    bytes: usize,
) -> usize {
    caught(0, || {
        let lines = report(&engine(ordinal)?);
        let report: String = lines.iter().map(|line| format!("{line}\n")).collect();
        text.put_bytes(report.as_bytes(), bytes);
        Some(report.len())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn fake_cuda_live(ordinal: c_int, what: In<c_char>) -> u64 {
    caught(u64::MAX, || {
        let engine = engine(ordinal)?;
        let what = what.text().ok()?;
        let registry = registry();
        if let Some(what) = What::ALL.iter().find(|other| other.name() == what) {
            return Some(blocks(&registry, &engine, *what).len() as u64);
        }
        let objects = |own| Some(objects(&registry, &engine, own).len() as u64);
        match what.as_str() {
            "contexts" => objects("context"),
            "streams" => objects("stream"),
            "events" => objects("event"),
            "pools" => objects("memory pool"),
            "handles" => objects("memory handle"),
            "reserved" => Some(reserved(&registry, &engine).map(|(_, n)| n as u64).sum()),
            "pending" => Some(engine.sim.report().pending_operations as u64),
            _ => None,
        }
    })
}

/// The live blocks of an engine.
fn blocks(registry: &Registry, engine: &Arc<Engine>, what: What) -> Vec<String> {
    let own = registry.memory.iter();
    let own = own.filter(|block| block.what == what && Arc::ptr_eq(&block.engine, engine));
    own.map(|block| block.describe()).collect()
}

/// The addresses that an engine has reserved, and how many bytes there are at each.
fn reserved(registry: &Registry, engine: &Arc<Engine>) -> impl Iterator<Item = (usize, usize)> {
    let all = registry.reserved.iter();
    let own = all.filter(|(_, of)| Arc::ptr_eq(&of.engine, engine));
    own.map(|(start, of)| (*start, of.bytes))
}

/// The live objects of an engine.
fn objects(registry: &Registry, engine: &Arc<Engine>, kind: &str) -> Vec<String> {
    let own = |handle: &usize| {
        let owner = registry.owner(*handle);
        owner.is_some_and(|owner| Arc::ptr_eq(&owner, engine))
    };
    let handles: Vec<usize> = match kind {
        "context" => registry.contexts.iter().map(|(h, _)| h).collect(),
        "stream" => registry.streams.iter().map(|(h, _)| h).collect(),
        "event" => registry.events.iter().map(|(h, _)| h).collect(),
        "memory pool" => {
            let pools = registry.pools.iter().filter(|(_, pool)| !pool.default);
            pools.map(|(h, _)| h).collect()
        }
        "memory handle" => registry.physical.iter().map(|(h, _)| h).collect(),
        _ => Vec::new(),
    };
    let handles = handles.into_iter().filter(own);
    handles
        .map(|handle| format!("{kind} {handle:#x}"))
        .collect()
}

/// What is not clean.
fn report(engine: &Arc<Engine>) -> Vec<String> {
    let mut lines = Vec::new();
    let registry = registry();
    for what in What::ALL {
        lines.extend(blocks(&registry, engine, what));
    }
    let addresses = reserved(&registry, engine);
    lines.extend(addresses.map(|(start, bytes)| format!("{bytes} reserved bytes at {start:#x}")));
    for kind in ["context", "stream", "event", "memory pool", "memory handle"] {
        lines.extend(objects(&registry, engine, kind));
    }
    drop(registry);
    for line in &mut lines {
        line.insert_str(0, "live: ");
    }
    let sim = engine.sim.report();
    if sim.pending_operations > 0 {
        lines.push(format!("pending: {} operations", sim.pending_operations));
    }
    let violations = engine.violations().into_iter().chain(sim.violations);
    lines.extend(violations.map(|text| format!("violation: {text}")));
    lines
}
