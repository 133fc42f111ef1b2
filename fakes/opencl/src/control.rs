//! Which call fails, and what is counted.

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What becomes of a call.
pub(crate) enum Fate {
    Pass,
    /// It is not made, and reports this code.
    Fail(c_int),
}

struct Rule {
    name: String,
    nth: u64,
    /// How many calls fail from the nth on.
    times: u64,
    code: c_int,
}

/// Returns whether this is a thread of the backend, which asks about events as often as time permits, or ends another device.
fn is_backends_thread() -> bool {
    // The kernel keeps 15 bytes of the name.
    let name = std::fs::read_to_string("/proc/thread-self/comm");
    name.is_ok_and(|name| name.starts_with("arrow-device op"))
}

#[derive(Default)]
struct State {
    rule: Option<Rule>,
    failed: u64,
    /// By name.
    calls: HashMap<String, u64>,
    misuses: u64,
    /// References and memory that the program owns, by address.
    live: HashMap<usize, usize>,
}

static STATE: Mutex<Option<State>> = Mutex::new(None);
/// How many references and pieces of memory `live` counts. A forked child reads it without the lock, which a thread of its parent may
/// have held.
static LIVE: AtomicU64 = AtomicU64::new(0);

fn with<T>(work: impl FnOnce(&mut State) -> T) -> T {
    let mut state: MutexGuard<'_, _> = STATE.lock().unwrap_or_else(PoisonError::into_inner);
    work(state.get_or_insert_with(State::default))
}

/// Returns what becomes of a call of this function. One that returns nothing but a code is never reported as a success without
/// being made, since nobody could see that.
pub(crate) fn fate(name: &str, has_result: bool) -> Fate {
    with(|state| {
        *state.calls.entry(name.to_owned()).or_default() += 1;
        let Some(rule) = &mut state.rule else {
            return Fate::Pass;
        };
        let is_other = match &*rule.name {
            "*" => is_backends_thread(),
            wanted => wanted != name,
        };
        if is_other || (rule.code == 0 && !has_result) {
            return Fate::Pass;
        }
        if rule.nth > 1 {
            rule.nth -= 1;
            return Fate::Pass;
        }
        let code = rule.code;
        rule.times -= 1;
        if rule.times == 0 {
            state.rule = None;
        }
        state.failed += 1;
        Fate::Fail(code)
    })
}

/// The program owns one more reference, or memory.
pub(crate) fn gained<T>(object: *mut T) {
    if !object.is_null() {
        with(|state| {
            *state.live.entry(object.addr()).or_default() += 1;
            LIVE.fetch_add(1, Ordering::Relaxed);
        });
    }
}

/// The program gives one back.
pub(crate) fn lost<T>(object: *mut T) {
    if object.is_null() {
        return;
    }
    with(|state| {
        match state.live.get_mut(&object.addr()) {
            Some(1) => drop(state.live.remove(&object.addr())),
            Some(count) => *count -= 1,
            None => {
                state.misuses += 1;
                return;
            }
        }
        LIVE.fetch_sub(1, Ordering::Relaxed);
    });
}

/// # Safety
/// `name` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_opencl_fail(name: *const c_char, nth: u64, times: u64, code: c_int) {
    // SAFETY: the caller guarantees a C string.
    let name = unsafe { CStr::from_ptr(name) }
        .to_string_lossy()
        .into_owned();
    with(|state| {
        state.rule = Some(Rule {
            name,
            nth,
            times,
            code,
        });
        state.failed = 0;
    });
}

#[unsafe(no_mangle)]
pub extern "C" fn fake_opencl_clear() -> u64 {
    with(|state| {
        state.rule = None;
        std::mem::take(&mut state.failed)
    })
}

/// # Safety
/// `name` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fake_opencl_calls(name: *const c_char) -> u64 {
    // SAFETY: the caller guarantees a C string.
    let name = unsafe { CStr::from_ptr(name) }
        .to_string_lossy()
        .into_owned();
    with(|state| state.calls.get(&name).copied().unwrap_or(0))
}

#[unsafe(no_mangle)]
pub extern "C" fn fake_opencl_live() -> u64 {
    LIVE.load(Ordering::Relaxed)
}

#[unsafe(no_mangle)]
pub extern "C" fn fake_opencl_misuses() -> u64 {
    with(|state| state.misuses)
}
