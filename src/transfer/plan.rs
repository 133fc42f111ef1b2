//! Where a transfer's bytes come from and where they go, in one slab. A [`Draft`] says the former; laid out it
//! is a [`Plan`], which says both. Every buffer starts at a multiple of 64 bytes and is padded to 64 with zeros.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use crate::data::tree::{Node, Slot};
use crate::device::{ALIGNMENT, DevicePtr};
use crate::error::{Error, Result};
use crate::transfer::fix::{Fix, Piece};

/// The nodes of the result, and what its buffers hold.
#[derive(Debug, Default)]
pub(super) struct Draft {
    /// At offset 0.
    pub(super) nodes: Vec<Node>,
    pub(super) buffers: Vec<Source>,
    notes: Notes,
    /// The bytes of buffers that have no source.
    pub(super) ready: Vec<u8>,
}

/// A buffer of the result, and which bytes of the array it holds.
#[derive(Clone, Copy, Debug)]
pub(super) struct Source {
    /// The allocation.
    base: DevicePtr,
    /// In the allocation, in bytes.
    offset: usize,
    /// The length in bytes that the buffer of the result has.
    bytes: usize,
    content: Content,
}

/// A buffer of the result, its source, and its place in the slab.
#[derive(Clone, Copy, Debug)]
struct Placed {
    src: DevicePtr,
    /// In the slab, in bytes.
    dst: usize,
    bytes: usize,
    content: Content,
}

/// What a buffer of the result holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Content {
    /// The result has no such buffer.
    Absent,
    /// No bytes, but the buffer has an address.
    Empty,
    /// The bytes of the source.
    Plain,
    /// The bytes of the source, which are all of a buffer that a transfer wrote: its padding goes with them.
    Padded,
    /// What the fix of this number makes of the source.
    Fixed(u32),
    /// The bytes of the source, moved in one piece with the buffers after it: the run of this number.
    Run(u32),
    /// The bytes of the source, which the piece of an earlier buffer brings.
    Brought,
}

/// What there is to know of some buffers beyond their bytes.
#[derive(Debug, Default)]
struct Notes {
    fixes: Vec<Fix>,
    /// The bytes of each run.
    runs: Vec<usize>,
}

/// Where everything goes.
#[derive(Debug)]
pub(crate) struct Plan {
    /// Nodes of the result, at offset 0.
    pub(crate) nodes: Vec<Node>,
    buffers: Vec<Placed>,
    notes: Notes,
    /// The bytes of pieces that have no source.
    pub(crate) ready: Vec<u8>,
    /// The length of the slab in bytes, a multiple of 64.
    pub(crate) bytes: usize,
}

impl Source {
    pub(super) const ABSENT: Self = Self::none(Content::Absent);
    pub(super) const EMPTY: Self = Self::none(Content::Empty);

    const fn none(content: Content) -> Self {
        Self {
            base: DevicePtr::NULL,
            offset: 0,
            bytes: 0,
            content,
        }
    }

    /// A buffer of `bytes` bytes, made of those of `slot` from byte `offset` on.
    #[inline(always)]
    pub(super) fn of(slot: &Slot, offset: usize, bytes: usize, content: Content) -> Self {
        Self {
            base: slot.base,
            offset: slot.offset + offset,
            bytes,
            content,
        }
    }
}

impl Draft {
    /// Notes what the host has to do to the bytes of a buffer.
    pub(super) fn fix(&mut self, fix: Fix) -> Content {
        self.notes.fixes.push(fix);
        Content::Fixed((self.notes.fixes.len() - 1) as u32)
    }

    /// A buffer of these bytes, which have no source.
    pub(super) fn ready(&mut self, bytes: &[u8]) -> Source {
        let content = self.fix(Fix::Ready(self.ready.len()));
        self.ready.extend_from_slice(bytes);
        Source {
            bytes: bytes.len(),
            ..Source::none(content)
        }
    }

    /// Makes one piece of buffers that a transfer put next to each other: they stay so.
    pub(super) fn join(&mut self) {
        let mut run: Option<Run> = None;
        for buffer in self.buffers.iter_mut().filter(|buffer| buffer.bytes > 0) {
            if buffer.content != Content::Padded {
                run = None;
                continue;
            }
            let mut next = Run {
                base: buffer.base,
                start: buffer.offset,
                end: buffer.offset + buffer.bytes.next_multiple_of(ALIGNMENT),
                number: self.notes.runs.len(),
            };
            match run {
                Some(run) if run.base == buffer.base && run.end == buffer.offset => {
                    (next.start, next.number) = (run.start, run.number);
                    self.notes.runs[run.number] = buffer.offset + buffer.bytes - run.start;
                    buffer.content = Content::Brought;
                }
                _ => {
                    self.notes.runs.push(buffer.bytes);
                    buffer.content = Content::Run(next.number as u32);
                }
            }
            run = Some(next);
        }
    }

    /// Gives all buffers their place in the slab. With `share` buffers that are to hold the same, made of the same
    /// bytes, get one place.
    pub(super) fn lay_out(self, share: bool) -> Result<Plan> {
        let notes = self.notes;
        let mut places = HashMap::new();
        let mut at = 0usize;
        // One element takes the room of the other: the list stays where it is.
        const { assert!(size_of::<Source>() == size_of::<Placed>()) };
        let mut fits = true;
        let place = |source: Source| {
            let mut placed = Placed {
                src: source.base.offset(source.offset),
                dst: 0,
                bytes: source.bytes,
                content: source.content,
            };
            if source.bytes == 0 {
                return placed;
            }
            if isize::try_from(source.bytes).is_err() {
                fits = false;
                return placed;
            }
            let mut piece = placed.piece();
            if let Content::Fixed(fix) = source.content {
                piece.fix = notes.fixes[fix as usize];
            }
            if share && !matches!(source.content, Content::Run(_) | Content::Brought) {
                match places.entry((placed.src, placed.bytes, piece.fix)) {
                    Entry::Occupied(place) => {
                        (placed.dst, placed.content) = (*place.get(), Content::Brought);
                        return placed;
                    }
                    Entry::Vacant(place) => _ = place.insert(at),
                }
            }
            placed.dst = at;
            // Neither exceeds `isize::MAX` and a block, so this does not overflow.
            let end = at + piece.region();
            match isize::try_from(end) {
                Ok(_) => at = end,
                Err(_) => fits = false,
            }
            placed
        };
        let buffers = self.buffers.into_iter().map(place).collect();
        if !fits {
            return Err(Error::argument("the rows do not fit in memory"));
        }
        Ok(Plan {
            nodes: self.nodes,
            buffers,
            notes,
            ready: self.ready,
            bytes: at,
        })
    }
}

/// Buffers that follow each other in one allocation of the source.
struct Run {
    /// The allocation, and where they start and end in it.
    base: DevicePtr,
    start: usize,
    end: usize,
    number: usize,
}

impl Placed {
    #[inline]
    fn piece(&self) -> Piece {
        Piece {
            src: self.src,
            dst: self.dst,
            dst_bytes: self.bytes,
            fix: Fix::None,
        }
    }

    /// What is to be moved for a buffer; `None` if the piece of another buffer brings it.
    #[inline(never)]
    fn noted(&self, notes: &Notes) -> Option<Piece> {
        let mut piece = self.piece();
        match self.content {
            Content::Fixed(fix) => piece.fix = notes.fixes[fix as usize],
            Content::Run(run) => piece.dst_bytes = notes.runs[run as usize],
            Content::Brought => return None,
            _ => {}
        }
        Some(piece)
    }
}

impl Plan {
    /// The bytes of a device slab: buffers without bytes need an address too.
    pub(crate) fn device_bytes(&self) -> usize {
        let absent = |buffer: &Placed| buffer.content == Content::Absent;
        match self.buffers.iter().all(absent) {
            true => self.bytes,
            false => self.bytes.max(ALIGNMENT),
        }
    }

    /// What is to be moved, in ascending order of destination.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = Piece> {
        let with_bytes = self.buffers.iter().filter(|buffer| buffer.bytes > 0);
        with_bytes.filter_map(|buffer| buffer.noted(&self.notes))
    }

    /// Calls `work` for each of the [`pieces`](Self::pieces), faster: for plain ones, which are the most frequent, it
    /// is compiled separately, and the piece is never assembled in memory.
    #[inline(always)]
    pub(crate) fn each(&self, mut work: impl FnMut(Piece) -> Result<()>) -> Result<()> {
        for buffer in self.buffers.iter().filter(|buffer| buffer.bytes > 0) {
            if matches!(buffer.content, Content::Plain) {
                work(buffer.piece())?;
            } else if let Some(piece) = buffer.noted(&self.notes) {
                work(piece)?;
            }
        }
        Ok(())
    }

    /// Nodes and slots over a slab at `base`.
    pub(crate) fn place(self, base: DevicePtr) -> (Vec<Node>, Vec<Slot>) {
        // As in `lay_out`, the list stays where it is.
        const { assert!(size_of::<Placed>() == size_of::<Slot>()) };
        let slot = |buffer: Placed| {
            let base = match buffer.content {
                Content::Absent => DevicePtr::NULL,
                _ => base,
            };
            Slot::new(base, buffer.dst, Some(buffer.bytes), 0)
        };
        (self.nodes, self.buffers.into_iter().map(slot).collect())
    }
}
