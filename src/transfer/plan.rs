//! Where a transfer's bytes come from and go: nodes, slots and pieces of one slab. Every buffer starts
//! at a multiple of 64 bytes and is padded to 64 with zeros.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use crate::data::tree::{Node, Slot};
use crate::device::{ALIGNMENT, DevicePtr};
use crate::error::{Error, Result};
use crate::transfer::fix::{Fix, Piece};

/// Where everything goes.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    /// Nodes of the result, at offset 0.
    pub(crate) nodes: Vec<Node>,
    /// Slots of the result. Until [`place`](Self::place) puts them there, their base is where their
    /// bytes come from (while the plan is made: base and offset), and their owner one of the numbers
    /// below, or it counts the notes up to theirs.
    pub(super) slots: Vec<Slot>,
    notes: Vec<Note>,
    /// The bytes of pieces that have no source.
    pub(crate) ready: Vec<u8>,
    /// Length of the slab in bytes, a multiple of 64.
    pub(crate) bytes: usize,
}

/// The base of slots that are there but have no source.
pub(super) const SLAB: DevicePtr = DevicePtr::new(std::ptr::dangling_mut());

/// Bytes as they are.
pub(super) const PLAIN: u32 = 0;
/// All bytes of a buffer that a transfer wrote, padding and all.
pub(super) const WHOLE: u32 = 1;
/// Moved together with another slot: as `WHOLE`, with the one before, or the same bytes as another's.
const FOLLOWS: u32 = 2;
/// The first note.
const NOTES: u32 = 3;

/// What is to be known of a slot beyond its bytes.
#[derive(Clone, Copy, Debug)]
enum Note {
    Fix(Fix),
    /// It is moved with those that follow it: so many bytes in all.
    Run(usize),
}

impl Plan {
    /// Bytes of a device slab: buffers without bytes need an address too.
    pub(crate) fn device_bytes(&self) -> usize {
        match self.slots.iter().all(Slot::is_null) {
            true => self.bytes,
            false => self.bytes.max(ALIGNMENT),
        }
    }

    /// What is to be moved, in ascending order of destination.
    pub(crate) fn pieces(&self) -> impl Iterator<Item = Piece> {
        let there = self.slots.iter().filter(|slot| there(slot));
        there.filter_map(|slot| noted(slot, &self.notes))
    }

    /// As [`pieces`](Self::pieces), each with whether zeros follow its source up to the next multiple of 64 bytes.
    pub(super) fn padded_pieces(&self) -> impl Iterator<Item = (Piece, bool)> {
        let there = self.slots.iter().filter(|slot| there(slot));
        there.filter_map(|slot| {
            let run = |note| matches!(self.notes[note as usize], Note::Run(_));
            let padded = slot.owner == WHOLE || (slot.owner >= NOTES && run(slot.owner - NOTES));
            noted(slot, &self.notes).map(|piece| (piece, padded))
        })
    }

    /// Returns what buffer `i` of a node is made of, or `None` if it has no bytes.
    pub(super) fn piece(&self, node: &Node, i: usize) -> Option<Piece> {
        let slot = &self.slots[node.first_slot as usize + i];
        there(slot).then(|| noted(slot, &self.notes)).flatten()
    }

    /// Does `work` for each of the [`pieces`](Self::pieces), faster: for plain ones, which are the
    /// most, it is compiled apart, and the piece is never put together in memory.
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

    /// Nodes and slots over a slab at `base`.
    pub(crate) fn place(self, base: DevicePtr) -> (Vec<Node>, Vec<Slot>) {
        let mut slots = self.slots;
        for slot in slots.iter_mut().filter(|slot| !slot.is_null()) {
            slot.base = base;
            slot.owner = 0;
        }
        (self.nodes, slots)
    }

    /// Notes what the host has to do to a slot's bytes; answers its owner.
    pub(super) fn fix(&mut self, fix: Fix) -> u32 {
        self.notes.push(Note::Fix(fix));
        NOTES + (self.notes.len() - 1) as u32
    }

    /// Makes one piece of what a transfer put side by side: it stays so.
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

    /// Gives all slots their place in the slab. `share`: one place for slots that are to hold the same, made
    /// from the same bytes.
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
            // Neither is more than `isize::MAX` and a block, so this does not wrap.
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

/// Slots that follow each other in one allocation of the source.
struct Run {
    /// The allocation, and where they start and end in it.
    base: DevicePtr,
    start: usize,
    end: usize,
    /// The first one's note.
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

/// What a slot of a plan stands for that is not plain; `None` if it goes with another.
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
