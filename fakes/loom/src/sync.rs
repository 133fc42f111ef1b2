//! The locks of the model checker, which replace `src/stream/async_stream/sync.rs`.

pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard};
use loom::thread;

pub(crate) type ThreadKey = thread::ThreadId;

pub(crate) fn this_thread() -> ThreadKey {
    thread::current().id()
}
