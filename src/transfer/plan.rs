//! The plan of a transfer: where each buffer's bytes come from, and where in one slab they go. Every buffer starts at a
//! multiple of 64 bytes and is padded to a multiple of 64 with zeros.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use crate::data::tree::{Node, Slot};
use crate::device::{ALIGNMENT, DevicePtr};
use crate::error::{Error, Result};
use crate::transfer::fix::{Fix, Piece};

/// The nodes and buffers of a transfer's result, and what is copied for them.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    /// The nodes of the result; their offset is 0.
    pub(crate) nodes: Vec<Node>,
    /// The buffers of the result. Until [`place`](Self::place) has been called, the base of a slot is the address of its
    /// source (until [`lay_out`](Self::lay_out): base plus offset), and its owner is one of the constants below, or
    /// `NOTES` plus the index of its note.
    pub(super) slots: Vec<Slot>,
    notes: Vec<Note>,
    /// The bytes that [`Fix::Ready`] refers to.
    pub(crate) ready: Vec<u8>,
    /// The length of the slab in bytes, a multiple of 64.
    pub(crate) bytes: usize,
}

/// The base of buffers that are present but have no source.
pub(super) const SLAB: DevicePtr = DevicePtr::new(std::ptr::dangling_mut());

/// The bytes are copied unchanged.
pub(super) const PLAIN: u32 = 0;
/// The same, and they are all bytes of a buffer that an earlier transfer wrote and padded with zeros.
pub(super) const WHOLE: u32 = 1;
/// The bytes are copied with those of another slot: of the one before ([`Note::Run`]), or of one with the same source.
const FOLLOWS: u32 = 2;
/// The owner of the slot whose note is the first.
const NOTES: u32 = 3;

/// What a plan states about a slot besides its bytes.
#[derive(Clone, Copy, Debug)]
enum Note {
    Fix(Fix),
    /// The slot and those that follow it are copied together; this is the number of bytes, of all of them.
    Run(usize),
}

impl Plan {
    /// Returns the bytes to allocate on a device, where buffers without bytes need an address too.
    pub(crate) fn device_bytes(&self) -> usize {
        match self.slots.iter().all(Slot::is_null) {
            true => self.bytes,
            false => self.bytes.max(ALIGNMENT),
        }
    }

    /// Returns what is copied, in ascending order of destination.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = Piece> {
        let there = self.slots.iter().filter(|slot| there(slot));
        there.filter_map(|slot| noted(slot, &self.notes))
    }

    /// As [`pieces`](Self::pieces), each with whether its source is followed by zeros up to the next multiple of 64 bytes.
    pub(super) fn padded_pieces(&self) -> impl Iterator<Item = (Piece, bool)> {
        let there = self.slots.iter().filter(|slot| there(slot));
        there.filter_map(|slot| {
            let run = |note| matches!(self.notes[note as usize], Note::Run(_));
            let padded = slot.owner == WHOLE || (slot.owner >= NOTES && run(slot.owner - NOTES));
            noted(slot, &self.notes).map(|piece| (piece, padded))
        })
    }

    /// Returns what is copied for buffer `i` of a node, or `None` if the buffer has no bytes.
    pub(super) fn piece(&self, node: &Node, i: usize) -> Option<Piece> {
        let slot = &self.slots[node.first_slot as usize + i];
        there(slot).then(|| noted(slot, &self.notes)).flatten()
    }

    /// Calls `work` with each of the [`pieces`](Self::pieces). This is faster than the iterator: the call for unchanged
    /// bytes, by far the most frequent, is compiled separately, so that the piece stays in registers.
    #[inline(always)]
    pub(crate) fn each(&self, mut work: impl FnMut(Piece) -> Result<()>) -> Result<()> {
        for slot in self.slots.iter().filter(|slot| there(slot)) {
            if slot.owner == PLAIN {
                work(plain(slot))?;
            } else if let Some(piece) = noted(slot, &self.notes) {
                work(piece)?;
            }
        }
        Ok(())
    }

    /// Returns the nodes and slots of the result in a slab at `base`.
    pub(crate) fn place(self, base: DevicePtr) -> (Vec<Node>, Vec<Slot>) {
        let mut slots = self.slots;
        for slot in slots.iter_mut().filter(|slot| !slot.is_null()) {
            slot.base = base;
            slot.owner = 0;
        }
        (self.nodes, slots)
    }

    /// Adds a note of what the host changes in a slot's bytes; returns the owner that refers to it.
    pub(super) fn fix(&mut self, fix: Fix) -> u32 {
        self.notes.push(Note::Fix(fix));
        NOTES + (self.notes.len() - 1) as u32
    }

    /// Combines buffers that an earlier transfer wrote next to each other into one piece; they stay next to each other.
    pub(super) fn join(&mut self) {
        let mut run: Option<Run> = None;
        for slot in self.slots.iter_mut().filter(|slot| there(slot)) {
            if slot.owner != WHOLE {
                run = None;
                continue;
            }
            let bytes = slot.bytes().unwrap_or(0);
            let mut next = Run {
                base: slot.base,
                start: slot.offset,
                end: slot.offset + bytes.next_multiple_of(ALIGNMENT),
                note: self.notes.len(),
            };
            match run {
                Some(run) if run.base == slot.base && run.end == slot.offset => {
                    (next.start, next.note) = (run.start, run.note);
                    self.notes[run.note] = Note::Run(slot.offset + bytes - run.start);
                    slot.owner = FOLLOWS;
                }
                _ => {
                    self.notes.push(Note::Run(bytes));
                    slot.owner = NOTES + next.note as u32;
                }
            }
            run = Some(next);
        }
    }

    /// Assigns each slot its offset in the slab. With `share`, slots that have the same source and the same changes get
    /// the same offset.
    pub(super) fn lay_out(&mut self, share: bool) -> Result<()> {
        let mut places = HashMap::new();
        let mut at = 0usize;
        for slot in self.slots.iter_mut().filter(|slot| there(slot)) {
            slot.bytes().ok_or_else(too_large)?;
            let mut piece = plain(slot);
            let mut alone = slot.owner != FOLLOWS;
            if slot.owner >= NOTES {
                match self.notes[(slot.owner - NOTES) as usize] {
                    Note::Fix(fix) => piece.fix = fix,
                    Note::Run(_) => alone = false,
                }
            }
            slot.base = slot.address();
            if share && alone {
                match places.entry((slot.base, piece.dst_bytes, piece.fix)) {
                    Entry::Occupied(place) => {
                        slot.offset = *place.get();
                        slot.owner = FOLLOWS;
                        continue;
                    }
                    Entry::Vacant(place) => _ = place.insert(at),
                }
            }
            // Both are at most `isize::MAX` plus 64, so the sum does not overflow.
            let end = at + piece.region();
            if isize::try_from(end).is_err() {
                return Err(too_large());
            }
            slot.offset = at;
            at = end;
        }
        self.bytes = at;
        Ok(())
    }
}

/// Slots that are next to each other in one allocation of the source.
struct Run {
    /// The allocation, and the first byte and the end of the slots in it.
    base: DevicePtr,
    start: usize,
    end: usize,
    /// The index of the first slot's note.
    note: usize,
}

/// Whether a slot has bytes.
#[inline]
fn there(slot: &Slot) -> bool {
    slot.bytes() != Some(0)
}

#[inline]
fn plain(slot: &Slot) -> Piece {
    Piece {
        src: slot.base,
        dst: slot.offset,
        dst_bytes: slot.bytes().unwrap_or(0),
        fix: Fix::None,
    }
}

/// Returns what is copied for a slot whose owner is not `PLAIN`, or `None` if another slot's piece includes it.
#[inline(never)]
fn noted(slot: &Slot, notes: &[Note]) -> Option<Piece> {
    let mut piece = plain(slot);
    if slot.owner >= NOTES {
        match notes[(slot.owner - NOTES) as usize] {
            Note::Fix(fix) => piece.fix = fix,
            Note::Run(bytes) => piece.dst_bytes = bytes,
        }
    }
    (slot.owner != FOLLOWS).then_some(piece)
}

pub(super) fn too_large() -> Error {
    Error::argument("the rows do not fit in memory")
}
