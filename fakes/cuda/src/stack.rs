//! The calling thread's context stack.

use std::cell::RefCell;

thread_local! {
    /// The context stack, the current one last.
    static STACK: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// Works with the context stack; `None` on a thread that is ending.
pub(crate) fn with_stack<T>(with: impl FnOnce(&mut Vec<usize>) -> T) -> Option<T> {
    STACK.try_with(|stack| with(&mut stack.borrow_mut())).ok()
}

/// The current context.
pub(crate) fn current() -> Option<usize> {
    with_stack(|stack| stack.last().copied()).flatten()
}
