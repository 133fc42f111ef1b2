//! Entry into a context, and scopes in which the calls of a thread share one entry.

use std::cell::Cell;
use std::ffi::c_int;
use std::marker::PhantomData;
use std::ops::Deref;

use super::api::{Answer, Api, RELAXED};
use super::runtime::{Before, Runtime};

/// The state of a thread's innermost scope.
#[derive(Clone, Copy)]
struct Frame {
    /// The address of the context whose entries share this one; 0 for none.
    context: usize,
    /// What the thread had before the entry: that of the library, and the thread's own capture mode,
    /// if it was exchanged. `None` as long as no call has been made.
    before: Option<(Before, Option<c_int>)>,
}

thread_local! {
    static FRAME: Cell<Frame> = const { Cell::new(Frame { context: 0, before: None }) };
}

/// While it lives, all entries of this thread into its context are one, which the first of them
/// makes, and which ends with the scope. An entry into another context meanwhile is nested: it ends
/// before the next call in this one. Not `Send`.
pub(super) struct Scope<'a> {
    runtime: &'a (dyn Runtime + 'static),
    /// The scope around it; `None` if it belongs to a scope of the same context.
    outer: Option<Frame>,
    not_send: PhantomData<*const ()>,
}

impl<'a> Scope<'a> {
    /// Begins a scope of the context with this address. Foreign code must not run inside it: it
    /// would find the context current.
    pub(super) fn new(runtime: &'a (dyn Runtime + 'static), context: usize) -> Self {
        let outer = FRAME.get();
        let is_inner = outer.context == context;
        if !is_inner {
            FRAME.set(Frame {
                context,
                before: None,
            });
        }
        Self {
            runtime,
            outer: (!is_inner).then_some(outer),
            not_send: PhantomData,
        }
    }

    /// Makes the context current, unless an entry of this scope has done so.
    pub(super) fn enter(self) -> Answer<Current<'a>> {
        let frame = FRAME.get();
        if frame.before.is_none() {
            let before = self.runtime.enter()?;
            // Other libraries' stream captures stay as they are: the streams of this crate are not
            // captured, and it touches no others'.
            let mut mode = RELAXED;
            // SAFETY: the mode is valid for the exchange of an int.
            let exchanged = unsafe { self.api().exchange_capture_mode(&raw mut mode) };
            let before = Some((before, exchanged.is_ok().then_some(mode)));
            FRAME.set(Frame { before, ..frame });
        }
        Ok(Current(self))
    }

    fn api(&self) -> &'a Api {
        self.runtime.library().api()
    }
}

impl Drop for Scope<'_> {
    fn drop(&mut self) {
        let Some(outer) = self.outer else {
            return;
        };
        let Some((before, capture_mode)) = FRAME.replace(outer).before else {
            return;
        };
        if let Some(mut mode) = capture_mode {
            // SAFETY: the mode is valid for the exchange of an int.
            let _ = unsafe { self.api().exchange_capture_mode(&raw mut mode) };
        }
        self.runtime.leave(before);
    }
}

/// While it lives, the context is current on this thread, and the library's calls may be made. Not
/// `Send`.
pub(crate) struct Current<'a>(Scope<'a>);

impl Deref for Current<'_> {
    type Target = dyn Runtime;

    fn deref(&self) -> &Self::Target {
        self.0.runtime
    }
}

impl Current<'_> {
    pub(super) fn api(&self) -> &Api {
        self.0.api()
    }
}
