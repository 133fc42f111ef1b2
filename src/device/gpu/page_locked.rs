//! Page-locked memory for staging and downloads, within a limit, and whether other memory is
//! page-locked.

use std::collections::{BTreeSet, VecDeque};
use std::fmt;
use std::ops::Range;
use std::sync::Mutex;

use super::api::Failed;
use super::context::Context;
use super::runtime::{Meaning, Memory, to_ptr};
use crate::device::backend::{AddressClass, DevicePtr};
use crate::device::lock;
use crate::device::parts::Ranges;
use crate::error::Result;

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
pub(crate) struct PageLocked {
    /// Bytes.
    limit: usize,
    /// What is in use.
    live: Ranges<()>,
    held: Mutex<Held>,
    asked: Mutex<VecDeque<Asked>>,
}

#[derive(Default)]
struct Held {
    /// What is not in use and may be freed or used again: length in bytes, address.
    idle: BTreeSet<(usize, usize)>,
    /// All of it, and what is in use.
    bytes: usize,
    refused: Option<Refused>,
}

/// What the library refused to page-lock. The same or more is not asked for again until memory was
/// freed.
struct Refused {
    bytes: usize,
    why: String,
}

impl Held {
    /// Takes the smallest idle piece that fits, at most twice as large.
    fn reuse(&mut self, bytes: usize) -> Option<(usize, DevicePtr)> {
        let fits = (bytes, 0)..=(bytes.saturating_mul(2), usize::MAX);
        let piece = *self.idle.range(fits).next()?;
        self.idle.remove(&piece);
        let (bytes, address) = piece;
        Some((bytes, to_ptr(address)))
    }

    /// Counts `bytes` bytes if they are within the limit.
    fn reserve(&mut self, bytes: usize, limit: usize) -> bool {
        match self.bytes.checked_add(bytes) {
            Some(all) if all <= limit => {
                self.bytes = all;
                true
            }
            _ => false,
        }
    }
}

impl PageLocked {
    /// Allows at most `limit` bytes.
    pub(super) fn new(limit: usize) -> Self {
        Self {
            limit,
            live: Ranges::new(),
            held: Mutex::default(),
            asked: Mutex::default(),
        }
    }

    /// Allocates memory. Returns `None` beyond the limit, or if the library has no such memory: the
    /// caller then uses ordinary memory, which is slower.
    ///
    /// # Errors
    /// The device is lost.
    pub(super) fn allocate(&self, context: &Context, bytes: usize) -> Result<Option<DevicePtr>> {
        let idle = lock(&self.held).reuse(bytes);
        if let Some((bytes, idle)) = idle {
            self.live.insert(idle, bytes, ());
            return Ok(Some(idle));
        }
        let reserve = if bytes <= SMALL { RESERVE } else { 0 };
        let limit = self.limit.saturating_add(reserve);
        let reserved = || lock(&self.held).reserve(bytes, limit);
        let within = reserved() || (self.free_if_quiet(context) && reserved());
        if !within {
            return Ok(None);
        }
        let mut allocated = self.lock_pages(context, bytes);
        if let Ok(Err(Meaning::OutOfMemory)) = allocated {
            if self.free_if_quiet(context) {
                allocated = self.lock_pages(context, bytes);
            }
        }
        if let Ok(Ok(ptr)) = allocated {
            self.live.insert(ptr, bytes, ());
            return Ok(Some(ptr));
        }
        lock(&self.held).bytes -= bytes;
        allocated.map(|_| None)
    }

    /// Asks the library for page-locked memory, unless it has refused as much before. Drivers
    /// refuse for many reasons that are none of the device's, with as many codes: ordinary memory
    /// serves then.
    fn lock_pages(
        &self,
        context: &Context,
        bytes: usize,
    ) -> Result<std::result::Result<DevicePtr, Meaning>> {
        let refused = |refused: &Refused| refused.bytes <= bytes;
        if lock(&self.held).refused.as_ref().is_some_and(refused) {
            return Ok(Err(Meaning::Other));
        }
        let current = context.enter(context.api().allocate_host.name)?;
        let Failed { call, code, .. } = match current.allocate(Memory::Host, bytes) {
            Ok(ptr) => return Ok(Ok(ptr)),
            Err(failed) => {
                let e = context.check::<()>(Err(failed)).err();
                if let (true, Some(e)) = (context.has_failed(), e) {
                    return Err(e);
                }
                failed
            }
        };
        let meaning = context.meaning(code);
        // What a capture forbids is allowed later.
        if meaning != Meaning::Passing {
            lock(&self.held).refused = Some(Refused {
                bytes,
                why: format!("{call} of {bytes} bytes failed with code {code}"),
            });
        }
        Ok(Err(meaning))
    }

    /// Takes memory back that nothing uses any more. It stays page-locked, for reuse, until it may
    /// be freed: the library might wait for the device, or for host functions.
    pub(super) fn give_back(&self, address: DevicePtr, bytes: usize) {
        let bytes = self.live.remove(address).map_or(bytes, |(bytes, ())| bytes);
        lock(&self.held).idle.insert((bytes, address.address()));
    }

    /// Whether there is memory that may be freed.
    pub(super) fn has_idle(&self) -> bool {
        !lock(&self.held).idle.is_empty()
    }

    /// Frees what is not in use, if the device has no work. Returns whether something was freed.
    fn free_if_quiet(&self, context: &Context) -> bool {
        self.has_idle() && context.is_quiet() && self.free_idle(context)
    }

    /// Frees what is not in use. Returns whether something was freed.
    pub(super) fn free_idle(&self, context: &Context) -> bool {
        let idle = std::mem::take(&mut lock(&self.held).idle);
        let Ok(current) = context.enter_even_if_failed() else {
            lock(&self.held).idle.extend(idle);
            return false;
        };
        let mut freed = false;
        for (bytes, address) in idle {
            // SAFETY: the memory is from `allocate`, was taken out of the list, and nothing uses it
            // any more.
            let gone = unsafe { current.try_free(Memory::Host, to_ptr(address)) };
            let mut held = lock(&self.held);
            if gone {
                freed = true;
                held.bytes = held.bytes.saturating_sub(bytes);
                held.refused = None;
            } else {
                held.idle.insert((bytes, address));
            }
        }
        freed
    }

    /// Lets the library be asked again for what it has refused.
    pub(super) fn ask_again(&self) {
        lock(&self.held).refused = None;
    }

    /// Whether memory is page-locked: it was allocated here, or `ask` says so, which also returns
    /// the addresses around it that are alike.
    pub(super) fn has(
        &self,
        address: DevicePtr,
        bytes: usize,
        ask: impl FnOnce() -> (bool, Range<usize>),
    ) -> bool {
        let locked = AddressClass::HostAccessible;
        if self.live.classify(address, bytes, locked) == Some(locked) {
            return true;
        }
        let wanted = address.range(bytes);
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

/// Says how much there is, and why there is no more.
impl fmt::Debug for PageLocked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let held = lock(&self.held);
        let refused = held.refused.as_ref().map(|refused| &refused.why);
        f.debug_struct("PageLocked")
            .field("bytes", &held.bytes)
            .field("limit", &self.limit)
            .field("refused", &refused)
            .finish()
    }
}
