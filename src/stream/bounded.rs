//! [`Bounded`]: a queue between two threads.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::device::lock;

/// A queue from one thread to another, bounded in items and in bytes. An item of any size fits into an empty queue.
#[derive(Debug)]
pub(super) struct Bounded<T> {
    state: Mutex<State<T>>,
    changed: Condvar,
    most_items: usize,
    most_bytes: usize,
}

#[derive(Debug)]
struct State<T> {
    /// With the bytes of each.
    items: VecDeque<(T, usize)>,
    bytes: usize,
    /// Nothing will be pushed any more.
    ended: bool,
    /// Nothing will be taken any more.
    closed: bool,
}

impl<T> Bounded<T> {
    pub(super) fn new(most_items: usize, most_bytes: usize) -> Self {
        Self {
            state: Mutex::new(State {
                items: VecDeque::new(),
                bytes: 0,
                ended: false,
                closed: false,
            }),
            changed: Condvar::new(),
            most_items: most_items.max(1),
            most_bytes,
        }
    }

    /// Waits until there is room, and adds an item of `bytes` bytes. Returns whether the queue is still open; the item is
    /// dropped if not.
    pub(super) fn push(&self, item: T, bytes: usize) -> bool {
        let mut state = self.wait_while(|state| {
            let is_full = state.items.len() >= self.most_items
                || state.bytes.saturating_add(bytes) > self.most_bytes;
            !state.closed && is_full && !state.items.is_empty()
        });
        if state.closed {
            // Drops run foreign code: not under the lock.
            drop(state);
            return false;
        }
        state.items.push_back((item, bytes));
        state.bytes += bytes;
        self.changed.notify_all();
        true
    }

    /// Waits for the next item. Returns `None` once the queue is closed, or ended and empty.
    pub(super) fn pop(&self) -> Option<T> {
        let mut state =
            self.wait_while(|state| !state.closed && !state.ended && state.items.is_empty());
        let (item, bytes) = state.items.pop_front()?;
        state.bytes -= bytes;
        self.changed.notify_all();
        Some(item)
    }

    /// Says that nothing will be pushed any more. What is in the queue can still be taken.
    pub(super) fn end(&self) {
        lock(&self.state).ended = true;
        self.changed.notify_all();
    }

    /// Says that nothing will be taken any more, and returns what is in the queue: its drop runs foreign code.
    pub(super) fn close(&self) -> impl Iterator<Item = T> + use<T> {
        let mut state = lock(&self.state);
        state.closed = true;
        state.bytes = 0;
        let items = std::mem::take(&mut state.items);
        drop(state);
        self.changed.notify_all();
        items.into_iter().map(|(item, _)| item)
    }

    fn wait_while(&self, condition: impl Fn(&State<T>) -> bool) -> MutexGuard<'_, State<T>> {
        let state = lock(&self.state);
        self.changed
            .wait_while(state, |state| condition(state))
            .unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::thread;

    use super::*;

    #[test]
    fn items_come_in_order_within_the_bounds() {
        let queue = Bounded::new(2, 100);
        let (sender, pushed) = mpsc::channel();
        thread::scope(|scope| {
            scope.spawn(|| {
                // The third does not fit before the first is taken, the fourth before the queue is empty.
                for (i, bytes) in [(1, 10), (2, 20), (3, 30), (4, 1000)] {
                    assert!(queue.push(i, bytes));
                    sender.send(i).unwrap();
                }
                queue.end();
            });
            assert_eq!([pushed.recv(), pushed.recv()], [Ok(1), Ok(2)]);
            assert!(pushed.try_recv().is_err());
            assert_eq!(queue.pop(), Some(1));
            assert_eq!(pushed.recv(), Ok(3));
            assert_eq!(queue.pop(), Some(2));
            assert!(pushed.try_recv().is_err());
            assert_eq!(queue.pop(), Some(3));
            assert_eq!((queue.pop(), queue.pop()), (Some(4), None));
        });
    }

    #[test]
    fn closing_wakes_both_sides() {
        let queue = Bounded::new(1, 100);
        assert!(queue.push(1, 0));
        thread::scope(|scope| {
            let pushing = scope.spawn(|| queue.push(2, 0));
            assert!(queue.close().eq([1]));
            assert!(!pushing.join().unwrap());
        });
        assert_eq!(queue.pop(), None);
        let queue = Bounded::<u8>::new(1, 100);
        thread::scope(|scope| {
            let popping = scope.spawn(|| queue.pop());
            assert_eq!(queue.close().count(), 0);
            assert_eq!(popping.join().unwrap(), None);
        });
    }
}
