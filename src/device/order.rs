//! The order of events, so that few of many pending ones are queried.
//!
//! The events of one queue complete in the order in which they were recorded: while the first has
//! not completed, no later one has. If two threads record at the same time, their order is unknown,
//! and both count as first.

use std::collections::BTreeMap;
use std::ops::Bound;
use std::sync::atomic::{AtomicU64, Ordering};

/// Returns a number for a queue, which no other queue of the process has or had, unlike its handle or the address of its value:
/// a new queue may get those of one that was dropped.
pub fn queue_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// The position of an event among those of its queue.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) struct Place {
    queue: u64,
    /// How many events of all queues had been recorded when recording this one began, and when it
    /// ended. No other event of the queue has the same `ended`.
    began: u64,
    ended: u64,
}

impl Place {
    /// Returns the place of an event whose queue is unknown.
    #[cfg(any(test, feature = "cuda", feature = "rocm"))]
    pub(crate) fn alone() -> Self {
        Self {
            queue: queue_number(),
            began: 0,
            ended: 0,
        }
    }

    /// Calls `record`, which records an event on a queue, and returns its result and the event's
    /// place.
    pub(crate) fn of<T>(queue: u64, record: impl FnOnce() -> T) -> (T, Self) {
        static RECORDED: AtomicU64 = AtomicU64::new(0);
        // If recording one event ends before recording another begins, the latter sees the former's
        // count.
        let began = RECORDED.load(Ordering::Acquire);
        let recorded = record();
        let ended = RECORDED.fetch_add(1, Ordering::AcqRel);
        let place = Self {
            queue,
            began,
            ended,
        };
        (recorded, place)
    }

    /// Returns whether the other event was recorded later on the same queue.
    fn is_before(&self, later: &Self) -> bool {
        self.queue == later.queue && self.ended < later.began
    }
}

/// Items that wait for events which have to be queried.
pub(crate) struct Asked<T>(BTreeMap<Place, Vec<T>>);

/// The progress of one round of queries.
#[derive(Default)]
pub(crate) struct Round {
    last: Option<Place>,
    /// The first event of the queue that has not completed.
    pending: Option<Place>,
}

impl<T> Default for Asked<T> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<T> Asked<T> {
    pub(crate) fn add(&mut self, place: Place, item: T) {
        self.0.entry(place).or_default().push(item);
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the item of the first event.
    pub(crate) fn first(&self) -> Option<&T> {
        self.0.values().next()?.first()
    }

    /// Removes and returns the items that wait for the next completed event; `None` ends the round.
    /// `is_done` is called once for each event, and not at all for events after a pending one of
    /// the same queue.
    pub(crate) fn next_done(
        &mut self,
        round: &mut Round,
        mut is_done: impl FnMut(&mut T) -> bool,
    ) -> Option<Vec<T>> {
        loop {
            let from = round.last.map_or(Bound::Unbounded, Bound::Excluded);
            let (&place, items) = self.0.range_mut((from, Bound::Unbounded)).next()?;
            if round.pending.is_some_and(|first| first.is_before(&place)) {
                // All others of this queue began even later.
                round.last = Some(Place {
                    began: u64::MAX,
                    ended: u64::MAX,
                    ..place
                });
                continue;
            }
            round.last = Some(place);
            if items.first_mut().is_none_or(&mut is_done) {
                return self.0.remove(&place);
            }
            let other = round.pending.filter(|first| first.queue == place.queue);
            let earlier = other.filter(|first| first.ended < place.ended);
            round.pending = Some(earlier.unwrap_or(place));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(queue: u64, began: u64, ended: u64) -> Place {
        Place {
            queue,
            began,
            ended,
        }
    }

    /// Runs one round, and returns what was queried and what had completed.
    fn round(asked: &mut Asked<Place>, done: impl Fn(&Place) -> bool) -> (Vec<Place>, Vec<Place>) {
        let (mut questions, mut all) = (Vec::new(), Vec::new());
        let mut round = Round::default();
        while let Some(items) = asked.next_done(&mut round, |place| {
            questions.push(*place);
            done(place)
        }) {
            all.extend(items);
        }
        (questions, all)
    }

    fn waiting(places: &[Place]) -> Asked<Place> {
        let mut asked = Asked::default();
        // The order of adding does not matter.
        for place in places.iter().rev() {
            asked.add(*place, *place);
        }
        asked
    }

    #[test]
    fn the_first_of_each_queue_is_asked() {
        let a: Vec<Place> = (0..1000).map(|i| place(1, i, i)).collect();
        let b: Vec<Place> = (0..1000).map(|i| place(2, i, i)).collect();
        let mut asked = waiting(&[&a[..], &b[..]].concat());
        assert_eq!(round(&mut asked, |_| false), (vec![a[0], b[0]], vec![]));
        // The first queue never completes; events of the other do.
        let (questions, done) = round(&mut asked, |at| at.queue == 2 && at.began < 999);
        assert_eq!(questions.len(), 1 + 1000);
        assert_eq!(done, b[..999]);
        assert_eq!(round(&mut asked, |_| true).1, [&a[..], &b[999..]].concat());
        assert!(asked.is_empty());
    }

    #[test]
    fn an_event_is_asked_once_for_all_who_wait() {
        let mut asked = waiting(&[place(1, 0, 0); 100]);
        assert_eq!(round(&mut asked, |_| false).0.len(), 1);
        assert_eq!(round(&mut asked, |_| true).1.len(), 100);
    }

    /// Two threads recorded at the same time: the event that counts as first may be the later one,
    /// and may never complete.
    #[test]
    fn events_without_an_order_do_not_hold_up_each_other() {
        let (long, short, after) = (place(1, 0, 5), place(1, 1, 2), place(1, 3, 4));
        let later = place(1, 6, 6);
        let mut asked = waiting(&[long, short, after, later]);
        assert_eq!(round(&mut asked, |_| false).0, [long, short]);
        let (questions, done) = round(&mut asked, |at| *at != long);
        assert_eq!(
            (questions, done),
            (vec![long, short, after], vec![short, after])
        );
        assert_eq!(round(&mut asked, |at| *at == long).1, [long]);
        assert_eq!(round(&mut asked, |_| true).1, [later]);
    }

    #[test]
    fn records_one_after_the_other_have_an_order() {
        let queue = queue_number();
        let ((inner, _), outer) = Place::of(queue, || {
            let ((), first) = Place::of(queue, || ());
            let ((), second) = Place::of(queue, || ());
            assert!(first.is_before(&second) && !second.is_before(&first));
            (first, second)
        });
        assert!(!outer.is_before(&inner) && !inner.is_before(&outer));
        assert!(!Place::alone().is_before(&Place::alone()));
    }
}
