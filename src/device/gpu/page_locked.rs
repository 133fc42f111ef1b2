//! Page-locked memory for staging and downloads, within a limit, and whether other memory is
//! page-locked.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::{Arc, Mutex};

use super::blocks::{self, After, Waste, scrap};
use super::context::Context;
use super::runtime::Memory;
use crate::device::backend::DevicePtr;
use crate::device::lock;
use crate::error::{Error, Result};

/// Pieces of up to `SMALL` bytes may take `RESERVE` bytes beyond the limit: the view lengths of an
/// export should lie where the device reaches them.
const SMALL: usize = 64 << 10;
const RESERVE: usize = 1 << 20;

/// The number of the library's answers that are kept.
const ASKED: usize = 32;

/// Addresses that the library was asked about, and whether they are page-locked. A stale answer
/// costs only time: a copy is staged needlessly, or the library stages it by itself.
type Asked = (Range<usize>, bool);

/// A device's page-locked memory.
pub(super) struct PageLocked {
    /// Bytes.
    limit: usize,
    held: Arc<Mutex<Held>>,
    asked: Mutex<VecDeque<Asked>>,
}

#[derive(Default)]
struct Held {
    /// Address to length in bytes.
    ranges: BTreeMap<usize, usize>,
    bytes: usize,
}

impl PageLocked {
    /// Allows at most `limit` bytes.
    pub(super) fn new(limit: usize) -> Self {
        Self {
            limit,
            held: Arc::default(),
            asked: Mutex::default(),
        }
    }

    /// Allocates memory. Returns `None` beyond the limit, or if the library has no more: the caller
    /// then uses ordinary memory, which is slower.
    pub(super) fn allocate(&self, context: &Context, bytes: usize) -> Result<Option<DevicePtr>> {
        let reserve = if bytes <= SMALL { RESERVE } else { 0 };
        let limit = self.limit.saturating_add(reserve);
        {
            let mut held = lock(&self.held);
            match held.bytes.checked_add(bytes) {
                Some(all) if all <= limit => held.bytes = all,
                _ => return Ok(None),
            }
        }
        let allocated = context
            .enter(context.api().allocate_host.name)
            .and_then(|current| blocks::allocate(context, Memory::Host, bytes, &current));
        let mut held = lock(&self.held);
        match allocated {
            Ok(ptr) => {
                held.ranges.insert(ptr.address(), bytes);
                Ok(Some(ptr))
            }
            Err(e) => {
                held.bytes -= bytes;
                match e {
                    Error::OutOfMemory { .. } => Ok(None),
                    e => Err(e),
                }
            }
        }
    }

    /// Frees memory from `allocate` that nothing uses any more.
    pub(super) fn free(&self, context: &Arc<Context>, address: DevicePtr, bytes: usize) {
        lock(&self.held).ranges.remove(&address.address());
        // Counted until it is really freed.
        let held = self.held.clone();
        let freed = Box::new(move || {
            let mut held = lock(&held);
            held.bytes = held.bytes.saturating_sub(bytes);
        });
        let waste = Waste::Memory(Memory::Host, address);
        scrap(context, waste, After::Nothing, Some(freed));
    }

    /// Whether memory is page-locked: it was allocated here, or `ask` says so, which also returns
    /// the addresses around it that are alike.
    pub(super) fn has(
        &self,
        wanted: Range<usize>,
        ask: impl FnOnce() -> (bool, Range<usize>),
    ) -> bool {
        let before = |held: &Held| {
            let found = held.ranges.range(..=wanted.start).next_back();
            found.is_some_and(|(at, len)| wanted.end <= at + len)
        };
        if before(&lock(&self.held)) {
            return true;
        }
        // A part of what is not all page-locked may be.
        let known = |(range, answer): &&Asked| match answer {
            true => range.start <= wanted.start && wanted.end <= range.end,
            false => *range == wanted,
        };
        if let Some((_, answer)) = lock(&self.asked).iter().find(known) {
            return *answer;
        }
        let (answer, range) = ask();
        let mut asked = lock(&self.asked);
        if asked.len() == ASKED {
            asked.pop_front();
        }
        asked.push_back((range, answer));
        answer
    }
}
