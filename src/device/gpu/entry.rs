//! Entry into a context, and scopes in which the calls of a thread share one entry.

use std::cell::Cell;
use std::ffi::c_int;
use std::marker::PhantomData;
use std::ops::Deref;

use super::api::{Answer, Api, RELAXED, RawStream};
use super::runtime::{Before, Runtime};

/// The state of a thread's innermost scope.
#[derive(Clone, Copy)]
struct Frame {
    /// The address of the context whose entries share this one, or [`NOBODY`].
    context: usize,
    /// What the thread had before the entry; `None` as long as no call has been made.
    found: Option<Found>,
    /// A stream of this crate's that was found not to be captured.
    uncaptured: Option<RawStream>,
}

/// The address of no context.
const NOBODY: usize = 0;

#[derive(Clone, Copy)]
struct Found {
    before: Before,
    /// The thread's own capture mode; `None` if it was not exchanged.
    capture_mode: Option<c_int>,
}

impl Frame {
    const fn of(context: usize) -> Self {
        Self {
            context,
            found: None,
            uncaptured: None,
        }
    }
}

thread_local! {
    static FRAME: Cell<Frame> = const { Cell::new(Frame::of(NOBODY)) };
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
    /// Begins a scope of the context with this address: until it is dropped, entries of this thread
    /// share one. Foreign code must not run inside it: it would find the context current.
    pub(super) fn shared(runtime: &'a (dyn Runtime + 'static), context: usize) -> Self {
        let outer = FRAME.get();
        let is_inner = outer.context == context;
        if !is_inner {
            FRAME.set(Frame::of(context));
        }
        Self {
            runtime,
            outer: (!is_inner).then_some(outer),
            not_send: PhantomData,
        }
    }

    /// Begins a scope whose entry is shared with no other one.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub(super) fn apart(runtime: &'a (dyn Runtime + 'static)) -> Self {
        let outer = Some(FRAME.replace(Frame::of(NOBODY)));
        Self {
            runtime,
            outer,
            not_send: PhantomData,
        }
    }

    /// Makes the context current, unless an entry of this scope has done so.
    pub(super) fn enter(self) -> Answer<Current<'a>> {
        let frame = FRAME.get();
        if frame.found.is_some() {
            return Ok(Current(self));
        }
        let before = self.runtime.enter()?;
        // Calls that would spoil other libraries' stream captures are allowed: this crate refuses
        // streams that are captured, and touches no others'.
        let mut mode = RELAXED;
        // SAFETY: the mode is valid for the exchange of an int.
        let code = unsafe { (self.api().exchange_capture_mode)(&raw mut mode) };
        let found = Found {
            before,
            capture_mode: (code == 0).then_some(mode),
        };
        FRAME.set(Frame {
            found: Some(found),
            ..frame
        });
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
        let Some(found) = FRAME.replace(outer).found else {
            return;
        };
        if let Some(mut mode) = found.capture_mode {
            let exchange = self.api().exchange_capture_mode.function;
            // SAFETY: the mode is valid for the exchange of an int.
            unsafe { exchange(&raw mut mode) };
        }
        self.runtime.leave(found.before);
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

    /// Whether [`keep_uncaptured`](Self::keep_uncaptured) was called for this stream in this scope.
    pub(super) fn is_uncaptured(&self, stream: RawStream) -> bool {
        FRAME.get().uncaptured == Some(stream)
    }

    /// Remembers until the end of the scope that a stream is not being captured.
    pub(super) fn keep_uncaptured(&self, stream: RawStream) {
        FRAME.set(Frame {
            uncaptured: Some(stream),
            ..FRAME.get()
        });
    }
}
