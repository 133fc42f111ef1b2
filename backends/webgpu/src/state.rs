//! [`State`]: the events of a device and the downloads before them.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;

use wgpu::SubmissionIndex;

use crate::landing::Landing;

/// An event that was recorded.
#[derive(Clone)]
pub(crate) struct Recorded {
    pub(crate) number: u64,
    /// What this crate had submitted last. The program may have submitted more before the event.
    pub(crate) submission: Option<SubmissionIndex>,
}

#[derive(Default)]
pub(crate) struct State {
    /// The number of the last event.
    pub(crate) last: u64,
    pub(crate) submission: Option<SubmissionIndex>,
    /// The live events, by address.
    pub(crate) events: HashMap<usize, (Recorded, Box<u64>)>,
    pub(crate) landings: VecDeque<Landing>,
    /// The landing that is taking place: its number, and the host memory to which it writes.
    pub(crate) current: Option<(u64, Vec<Range<usize>>)>,
    /// How many threads wait for events. They land the downloads before those.
    pub(crate) waiting: usize,
    /// The device's thread has a job.
    pub(crate) is_driven: bool,
}

impl State {
    /// Returns the submission of the first download, if that comes before an event.
    pub(crate) fn first_landing(&self, event: u64) -> Option<SubmissionIndex> {
        let first = self.landings.front().filter(|first| first.number <= event);
        first.map(|first| first.submission.clone())
    }

    /// Returns whether all downloads before an event have landed.
    pub(crate) fn has_landed(&self, event: u64) -> bool {
        let first = self.landings.front().map(|first| first.number);
        let current = self.current.as_ref().map(|(number, _)| *number);
        let mut left = [first, current].into_iter().flatten();
        left.all(|landing| landing > event)
    }

    /// Returns what tells the first download from others.
    pub(crate) fn front(&self) -> Option<usize> {
        self.landings.front().map(Landing::identity)
    }
}
