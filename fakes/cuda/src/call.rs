//! What every call goes through.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::engine::{Engine, Kind, Lasting};
use crate::ffi::*;
use crate::registry::{blame, registry};

/// Ordinary work.
pub(crate) const WORK: Kind = Kind {
    any: true,
    lasting: Lasting::Before,
};
/// Frees and destroys: the books are kept although the engine has failed.
pub(crate) const FREE: Kind = Kind {
    any: true,
    lasting: Lasting::After,
};
/// Calls that a failed engine still answers.
pub(crate) const QUERY: Kind = Kind {
    any: true,
    lasting: Lasting::Ignored,
};
/// Pushes, pops, attributes: nor does a failure of "any function" happen there.
pub(crate) const QUIET: Kind = Kind {
    any: false,
    lasting: Lasting::Ignored,
};
/// Queries of pointers.
pub(crate) const POINTER: Kind = Kind {
    any: false,
    lasting: Lasting::Before,
};

/// Whose call it is. Where this says nothing, it is the current context's.
#[derive(Clone, Copy)]
pub(crate) enum Of {
    /// No engine's.
    Nobody,
    Current,
    /// That of an ordinal, if it is open.
    Device(i32),
    /// That of an ordinal, which is opened.
    Opening(i32),
    Handle(Handle),
    Address(Address),
}

thread_local! {
    /// Whose host function this thread is in.
    static HOST_FUNCTION_OF: RefCell<Option<Arc<Engine>>> = const { RefCell::new(None) };
}

thread_local! {
    /// The calls of this thread.
    static CALLS: RefCell<BTreeMap<&'static str, u64>> = const { RefCell::new(BTreeMap::new()) };
}

/// The calls that this thread has made: one function a line, with the number of its calls.
pub(crate) fn calls_of_thread() -> String {
    let text = |calls: &RefCell<BTreeMap<&str, u64>>| {
        let calls = calls.borrow();
        calls
            .iter()
            .map(|(name, n)| format!("{name} {n}\n"))
            .collect()
    };
    CALLS.try_with(text).unwrap_or_default()
}

/// The process that has initialised the library; 0: none.
static INITIALIZED: AtomicU32 = AtomicU32::new(0);

pub(crate) fn set_initialized() {
    INITIALIZED.store(std::process::id(), Ordering::SeqCst);
}

/// Whether a parent of this process has initialised the library, which then never works here.
pub(crate) fn is_forked() -> bool {
    let process = INITIALIZED.load(Ordering::SeqCst);
    process != 0 && process != std::process::id()
}

/// Runs a host function, in which no call is permitted.
pub(crate) fn host_function(engine: Arc<Engine>, function: impl FnOnce()) {
    struct Mark(Option<Arc<Engine>>);
    impl Drop for Mark {
        fn drop(&mut self) {
            HOST_FUNCTION_OF.replace(self.0.take());
        }
    }
    let _mark = Mark(HOST_FUNCTION_OF.replace(Some(engine)));
    function();
}

/// A call that needs no initialisation and belongs to no engine.
pub(crate) fn plain(name: &'static str, body: impl FnOnce() -> Outcome) -> Code {
    caught(name, || permitted(name).and_then(|()| body()))
}

/// Carries out a call.
pub(crate) fn call(name: &'static str, kind: Kind, of: Of, body: impl FnOnce() -> Outcome) -> Code {
    caught(name, || {
        permitted(name)?;
        if INITIALIZED.load(Ordering::SeqCst) != std::process::id() {
            return Err(NOT_INITIALIZED);
        }
        let engine = engine_of(of);
        if let Some(engine) = &engine {
            engine.admit(name, kind)?;
            engine.pass_frees();
        } else if let (Of::Nobody, Some(engine)) = (of, engine_of(Of::Current)) {
            engine.count(name);
        }
        let result = body();
        if let (Some(engine), true) = (&engine, kind.any) {
            engine.run_at_once();
        }
        match engine.and_then(|engine| engine.lasting()) {
            Some(code) if kind.lasting == Lasting::After => Err(code),
            _ => result,
        }
    })
}

/// Calls inside host functions are not permitted.
fn permitted(name: &str) -> Outcome {
    let engine = HOST_FUNCTION_OF.try_with(|engine| engine.borrow().clone());
    match engine.ok().flatten() {
        None => Ok(()),
        engine => {
            blame(engine.as_ref(), format!("{name} inside a host function"));
            Err(NOT_PERMITTED)
        }
    }
}

fn engine_of(of: Of) -> Option<Arc<Engine>> {
    let mut registry = registry();
    let own = match of {
        Of::Nobody => return None,
        Of::Current => None,
        Of::Device(ordinal) => return registry.engine(ordinal),
        Of::Opening(ordinal) => return registry.open_engine(ordinal).ok(),
        Of::Handle(handle) => registry.owner(number(handle)),
        Of::Address(address) => registry.memory.engine_at(address),
    };
    own.or_else(|| registry.current_engine())
}

fn caught(name: &'static str, body: impl FnOnce() -> Outcome) -> Code {
    // At the end of a thread nothing is counted any more.
    let _ = CALLS.try_with(|calls| *calls.borrow_mut().entry(name).or_default() += 1);
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => 0,
        Ok(Err(code)) => code,
        Err(_) => {
            // The panic hook has written what and where.
            eprintln!("{name} panicked");
            UNKNOWN
        }
    }
}
