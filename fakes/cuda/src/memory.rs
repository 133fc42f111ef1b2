//! All memory that calls have handed out or registered.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use arrow_device::device::{Backend, DevicePtr};

use crate::engine::{Engine, host_used};
use crate::ffi::*;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum What {
    Device,
    Pinned,
    Managed,
    Registered,
    /// Virtual memory of a device.
    Mapped,
}

impl What {
    pub(crate) const ALL: [Self; 5] = [
        Self::Device,
        Self::Pinned,
        Self::Managed,
        Self::Registered,
        Self::Mapped,
    ];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Pinned => "pinned",
            Self::Managed => "managed",
            Self::Registered => "registered",
            Self::Mapped => "mapped",
        }
    }
}

#[derive(Clone)]
pub(crate) struct Block {
    pub(crate) what: What,
    pub(crate) start: usize,
    pub(crate) bytes: usize,
    pub(crate) engine: Arc<Engine>,
    pub(crate) ordinal: i32,
    pub(crate) context: usize,
    /// The pool that it came from.
    pub(crate) pool: Option<usize>,
    /// The length that is reported for it instead of its own, as for memory that a program has
    /// mapped by itself.
    pub(crate) reported: Option<usize>,
}

impl Block {
    pub(crate) fn range(&self) -> Range<usize> {
        self.start..self.start + self.bytes
    }

    fn ptr(&self) -> DevicePtr {
        pointer(self.start)
    }

    /// What it is called in a report.
    pub(crate) fn describe(&self) -> String {
        let Self {
            start,
            bytes,
            ordinal,
            ..
        } = self;
        let what = self.what.name();
        let pool = self.pool.map_or("", |_| ", from a pool");
        format!("{what} memory {start:#x}, {bytes} bytes, ordinal {ordinal}{pool}")
    }

    /// Gives the memory back, out of any queue's order.
    pub(crate) fn release(&self) {
        match self.what {
            What::Device => {
                // SAFETY: this engine allocated the memory, which was in the table until now, so it
                // is freed once. The caller of the driver function guarantees that nothing uses it;
                // an access that comes all the same is refused.
                let freed = unsafe { self.engine.sim.free_now(self.ptr(), self.bytes) };
                if let Err(error) = freed {
                    self.engine.blame(error.to_string());
                }
            }
            What::Pinned | What::Managed if host_used(&self.range()) => {
                // It stays allocated, so that the work does no further harm.
                let text = format!("{}: freed while queued work uses it", self.describe());
                self.engine.blame(text);
            }
            What::Pinned | What::Managed => {
                // SAFETY: the memory is from `allocate_host` of this engine and was in the table
                // until now, so it is freed once; no queued work uses it.
                unsafe { self.engine.sim.free_host(self.ptr(), self.bytes) };
            }
            What::Registered if host_used(&self.range()) => {
                let text = format!(
                    "{}: unregistered while queued work uses it",
                    self.describe()
                );
                self.engine.blame(text);
            }
            What::Registered | What::Mapped => {}
        }
    }
}

pub(crate) fn pointer(address: usize) -> DevicePtr {
    DevicePtr::new(std::ptr::with_exposed_provenance_mut(address))
}

/// Where one end of a copy lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Place {
    /// At an address of a simulated device, whether or not there is memory.
    Device,
    Managed,
    /// Page-locked.
    Locked,
    Pageable,
}

/// All blocks by their first address.
pub(crate) struct Memory(BTreeMap<usize, Block>);

impl Memory {
    pub(crate) const fn new() -> Self {
        Self(BTreeMap::new())
    }

    pub(crate) fn insert(&mut self, block: Block) {
        self.0.insert(block.start, block);
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Block> {
        self.0.values()
    }

    /// The block that an address lies in.
    pub(crate) fn at(&self, address: Address) -> Option<&Block> {
        let address = usize::try_from(address).ok()?;
        let (_, block) = self.0.range(..=address).next_back()?;
        block.range().contains(&address).then_some(block)
    }

    /// As [`at`](Self::at), to change it.
    pub(crate) fn at_mut(&mut self, address: Address) -> Option<&mut Block> {
        let start = self.at(address)?.start;
        self.0.get_mut(&start)
    }

    pub(crate) fn engine_at(&self, address: Address) -> Option<Arc<Engine>> {
        self.at(address).map(|block| block.engine.clone())
    }

    /// Whether some of these addresses belong to a block.
    pub(crate) fn overlaps(&self, range: &Range<usize>) -> bool {
        let before = self.0.range(..range.end).next_back();
        before.is_some_and(|(_, block)| block.range().end > range.start)
    }

    /// Where memory lies. An error if the end of a host block is in between.
    pub(crate) fn place(
        &self,
        engine: &Engine,
        address: usize,
        bytes: usize,
    ) -> Result<Place, String> {
        if !engine.sim.copies_directly_from(pointer(address), bytes) {
            return Ok(Place::Device);
        }
        let Some(block) = self.at(address as Address) else {
            return Ok(Place::Pageable);
        };
        if bytes > block.range().end - address {
            return Err(format!(
                "{bytes} bytes at {address:#x} go past the end of {}",
                block.describe()
            ));
        }
        Ok(match block.what {
            What::Managed => Place::Managed,
            _ => Place::Locked,
        })
    }

    /// Takes out the block that starts at `address` if it is of one of these kinds; anything else
    /// is a violation.
    pub(crate) fn take(
        &mut self,
        call: &str,
        address: Address,
        which: impl Fn(&Block) -> bool,
    ) -> Result<Block, String> {
        let start = usize::try_from(address).unwrap_or(usize::MAX);
        match self.0.get(&start) {
            Some(block) if which(block) => self.0.remove(&start).ok_or_else(String::new),
            Some(block) => Err(format!("{call} of {}", block.describe())),
            None => Err(format!(
                "{call} of {address:#x}: not a live allocation (double free?)"
            )),
        }
    }

    /// Frees what was allocated in a context; what that was.
    pub(crate) fn end_context(&mut self, context: usize) -> Vec<String> {
        let all = std::mem::take(&mut self.0).into_iter();
        let (out, rest): (BTreeMap<_, _>, _) = all.partition(|(_, block)| block.context == context);
        self.0 = rest;
        let out = out.into_values().inspect(Block::release);
        out.map(|block| block.describe()).collect()
    }
}
