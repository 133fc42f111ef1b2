//! Device memory: addresses that the host cannot touch, the memory itself, and an allocator with red zones and a quarantine.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;

use super::SimConfig;

/// The byte that fills fresh memory.
pub(super) const FRESH: u8 = 0xA5;
/// The byte that fills freed memory.
pub(super) const FREED: u8 = 0x5A;
/// The byte that fills the red zones around an allocation.
const RED_ZONE: u8 = 0xFB;
/// Alignment of an allocation and least length of a red zone, in bytes.
const UNIT: usize = 64;
/// Two ranges of addresses of one length: those that users see, behind which there is never any memory, and the memory itself,
/// which the engine finds at the same offset of the other range.
#[cfg_attr(not(target_os = "linux"), allow(dead_code))] // never made there
#[derive(Debug)]
pub(super) struct Mapping {
    /// Mapped `PROT_NONE`: what users see.
    device: *mut u8,
    /// Mapped for reading and writing: never leaves this module's parent.
    engine: *mut u8,
    bytes: usize,
}

// SAFETY: the mappings live until `Drop`; `Mapping` itself never reads or writes them.
unsafe impl Send for Mapping {}
// SAFETY: the mappings live until `Drop`, and the fields do not change; only the engine, and the allocator for what nothing else
// uses, touch the memory.
unsafe impl Sync for Mapping {}

impl Mapping {
    #[cfg(target_os = "linux")]
    pub(super) fn new(bytes: usize) -> Result<Self, String> {
        if cfg!(miri) {
            return Err("Miri has no addresses without memory".into());
        }
        let map = |protection| {
            // SAFETY: the kernel chooses the address, so the new mapping replaces no other.
            let start = unsafe {
                libc::mmap(
                    std::ptr::null_mut(),
                    bytes,
                    protection,
                    libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                    -1,
                    0,
                )
            };
            (start != libc::MAP_FAILED)
                .then_some(start.cast::<u8>())
                .ok_or_else(|| {
                    let e = std::io::Error::last_os_error();
                    format!(
                        "mmap of {bytes} bytes: {e}; SimConfig::with_capacity_bytes asks for fewer"
                    )
                })
        };
        let device = map(libc::PROT_NONE)?;
        match map(libc::PROT_READ | libc::PROT_WRITE) {
            Ok(engine) => Ok(Self {
                device,
                engine,
                bytes,
            }),
            Err(error) => {
                // SAFETY: mapped above with this length, and nothing has the address yet.
                unsafe { libc::munmap(device.cast(), bytes) };
                Err(error)
            }
        }
    }

    #[cfg(not(target_os = "linux"))]
    pub(super) fn new(_bytes: usize) -> Result<Self, String> {
        Err("simulated devices need Linux".into())
    }

    /// Returns the addresses that users see.
    pub(super) fn range(&self) -> Range<usize> {
        self.device.addr()..self.device.addr() + self.bytes
    }

    /// Returns the address that users see for a byte offset within the device.
    pub(super) fn device(&self, offset: usize) -> *mut u8 {
        self.device.wrapping_add(offset)
    }

    /// Returns the address through which the engine reads and writes that byte.
    pub(super) fn engine(&self, offset: usize) -> *mut u8 {
        self.engine.wrapping_add(offset)
    }

    /// Returns the byte offset of an address that users see, or `None` for another address.
    pub(super) fn offset(&self, address: usize) -> Option<usize> {
        self.range()
            .contains(&address)
            .then(|| address - self.device.addr())
    }

    /// Sets a range of byte offsets.
    fn set(&self, range: Range<usize>, byte: u8) {
        debug_assert!(range.start <= range.end && range.end <= self.bytes);
        // SAFETY: the range is inside the mapping, and nothing else uses it: a [`Poison`] of memory that is not handed out yet
        // or was freed, or red zones.
        unsafe {
            self.engine(range.start)
                .write_bytes(byte, range.end - range.start)
        };
    }

    /// Whether all bytes of a red zone are intact.
    fn intact(&self, zone: Range<usize>) -> bool {
        // SAFETY: the range is inside the mapping, like those of `set`; only `set` writes to a red
        // zone, with the allocator locked.
        let bytes =
            unsafe { std::slice::from_raw_parts(self.engine(zone.start), zone.end - zone.start) };
        bytes.iter().all(|byte| *byte == RED_ZONE)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        #[cfg(target_os = "linux")]
        for start in [self.device, self.engine] {
            // SAFETY: mapped in `new` with this length; every user of the addresses holds this
            // value's owner.
            unsafe { libc::munmap(start.cast(), self.bytes) };
        }
    }
}

/// Memory that is neither unused nor allocated, so that nobody but the holder of this touches it, and the byte that fills it, if
/// one does. Filling takes about as long as a copy: it is done without a lock held.
#[derive(Debug)]
#[must_use = "the memory is not filled yet"]
pub(super) struct Poison {
    range: Range<usize>,
    byte: Option<u8>,
}

impl Poison {
    pub(super) fn apply(&self, mapping: &Mapping) {
        if let Some(byte) = self.byte {
            mapping.set(self.range.clone(), byte);
        }
    }
}

#[derive(Debug)]
struct Allocation {
    bytes: usize,
    /// Freed by its owner; the free waits in a queue.
    freeing: bool,
}

/// Unused blocks. Neither finding one that fits nor adding one looks at the others.
#[derive(Debug)]
struct Unused {
    /// Offset to length in bytes. Neighbours are merged.
    by_offset: BTreeMap<usize, usize>,
    /// Length, offset.
    by_length: BTreeSet<(usize, usize)>,
}

impl Unused {
    fn new(length: usize) -> Self {
        Self {
            by_offset: BTreeMap::from([(0, length)]),
            by_length: BTreeSet::from([(length, 0)]),
        }
    }

    /// Takes out the smallest block of at least `length` bytes: its offset and its length.
    fn take(&mut self, length: usize) -> Option<(usize, usize)> {
        let &(length, start) = self.by_length.range((length, 0)..).next()?;
        self.remove(start);
        Some((start, length))
    }

    fn insert(&mut self, start: usize, length: usize) {
        self.by_offset.insert(start, length);
        self.by_length.insert((length, start));
    }

    /// Removes the block that starts at `start`, if there is one. Returns its length.
    fn remove(&mut self, start: usize) -> Option<usize> {
        let length = self.by_offset.remove(&start)?;
        self.by_length.remove(&(length, start));
        Some(length)
    }

    /// Adds a block, merged with its neighbours.
    fn merge(&mut self, mut start: usize, mut length: usize) {
        length += self.remove(start + length).unwrap_or(0);
        let before = self.by_offset.range(..start).next_back();
        if let Some((&before, _)) = before.filter(|(before, bytes)| **before + **bytes == start) {
            length += self.remove(before).unwrap_or(0);
            start = before;
        }
        self.insert(start, length);
    }
}

/// Hands out byte offsets of a [`Mapping`].
#[derive(Debug)]
pub(super) struct Allocator {
    unused: Unused,
    /// Allocations by offset of their first byte. Their block begins `UNIT` bytes earlier.
    live: BTreeMap<usize, Allocation>,
    /// Freed blocks, oldest first: offset, length in bytes.
    quarantine: VecDeque<(usize, usize)>,
    quarantined_bytes: usize,
    quarantine_max_bytes: usize,
    /// Whether fresh and freed memory is filled.
    fill: bool,
}

/// Length in bytes of the block for an allocation.
fn block_bytes(bytes: usize) -> Option<usize> {
    bytes.checked_next_multiple_of(UNIT)?.checked_add(2 * UNIT)
}

/// The two red zones of an allocation: up to its first byte, and from its last to the block's end.
fn red_zones(offset: usize, bytes: usize) -> [Range<usize>; 2] {
    let end = offset + bytes;
    [
        offset - UNIT..offset,
        end..end.next_multiple_of(UNIT) + UNIT,
    ]
}

impl Allocator {
    pub(super) fn new(capacity_bytes: usize, config: &SimConfig) -> Self {
        Self {
            unused: Unused::new(capacity_bytes),
            live: BTreeMap::new(),
            quarantine: VecDeque::new(),
            quarantined_bytes: 0,
            quarantine_max_bytes: config.quarantine_bytes,
            fill: config.fill,
        }
    }

    /// Takes out memory for an allocation of so many bytes, which [`hand_out`](Self::hand_out) makes of it once its poison was
    /// applied. Returns `None` if there is not enough.
    pub(super) fn reserve(&mut self, mapping: &Mapping, bytes: usize) -> Option<Poison> {
        let block = block_bytes(bytes)?;
        let (start, length) = loop {
            match self.unused.take(block) {
                Some(fit) => break fit,
                None if self.quarantine.is_empty() => return None,
                None => self.evict(),
            }
        };
        if length > block {
            self.unused.insert(start + block, length - block);
        }
        let offset = start + UNIT;
        for zone in red_zones(offset, bytes) {
            mapping.set(zone, RED_ZONE);
        }
        Some(self.poison(offset..offset + bytes, FRESH))
    }

    /// Makes an allocation of what was reserved. Returns its byte offset.
    pub(super) fn hand_out(&mut self, fresh: Poison) -> usize {
        let Range { start, end } = fresh.range;
        let bytes = end - start;
        let allocation = Allocation {
            bytes,
            freeing: false,
        };
        self.live.insert(start, allocation);
        start
    }

    fn poison(&self, range: Range<usize>, byte: u8) -> Poison {
        Poison {
            range,
            byte: self.fill.then_some(byte),
        }
    }

    /// Marks an allocation as freed by its owner. The error says what is wrong with that.
    pub(super) fn begin_free(&mut self, offset: usize, bytes: usize) -> Result<(), String> {
        match self.live.get_mut(&offset) {
            None => Err("not the start of a live allocation (double free?)".into()),
            Some(allocation) if allocation.freeing => Err("double free".into()),
            Some(allocation) if allocation.bytes != bytes => Err(format!(
                "freed as {bytes} bytes, allocated as {}",
                allocation.bytes
            )),
            Some(allocation) => {
                allocation.freeing = true;
                Ok(())
            }
        }
    }

    /// Ends an allocation, whose memory nobody has from now on. Returns whether its red zones were intact, and its block, for
    /// [`quarantine`](Self::quarantine).
    pub(super) fn finish_free(
        &mut self,
        mapping: &Mapping,
        offset: usize,
    ) -> (bool, Option<Poison>) {
        let Some(Allocation { bytes, .. }) = self.live.remove(&offset) else {
            return (true, None);
        };
        let [head, tail] = red_zones(offset, bytes);
        let block = head.start..tail.end;
        let intact = mapping.intact(head) && mapping.intact(tail);
        (intact, Some(self.poison(block, FREED)))
    }

    /// Quarantines a block whose poison was applied.
    pub(super) fn quarantine(&mut self, freed: Poison) {
        let block = freed.range;
        self.quarantine.push_back((block.start, block.len()));
        self.quarantined_bytes += block.len();
        while self.quarantined_bytes > self.quarantine_max_bytes {
            self.evict();
        }
    }

    /// Makes the oldest block of the quarantine usable again.
    fn evict(&mut self) {
        let Some((start, length)) = self.quarantine.pop_front() else {
            return;
        };
        self.quarantined_bytes -= length;
        self.unused.merge(start, length);
    }

    /// Checks that `bytes` bytes from `offset` lie in one allocation whose free has not run. The
    /// error says why not.
    pub(super) fn check(&self, offset: usize, bytes: usize) -> Result<(), String> {
        let before = self.live.range(..=offset).next_back();
        let (start, allocation) = before.ok_or("not allocated, or freed")?;
        let within = offset - start;
        if within > allocation.bytes {
            Err("not allocated, or freed".into())
        } else if bytes > allocation.bytes - within {
            Err(format!(
                "{} bytes past the end of an allocation of {}",
                bytes - (allocation.bytes - within),
                allocation.bytes
            ))
        } else {
            Ok(())
        }
    }

    /// Returns whether [`check`](Self::check) succeeds and the allocation's owner has not freed any of
    /// it either.
    pub(super) fn owned(&self, offset: usize, bytes: usize) -> bool {
        let before = self.live.range(..=offset).next_back();
        self.check(offset, bytes).is_ok() && before.is_some_and(|(_, a)| !a.freeing)
    }

    /// Repairs damaged red zones. Returns the byte offsets of their allocations.
    pub(super) fn damaged(&mut self, mapping: &Mapping) -> Vec<usize> {
        let mut damaged = Vec::new();
        for (offset, allocation) in &self.live {
            for zone in red_zones(*offset, allocation.bytes) {
                if !mapping.intact(zone.clone()) {
                    mapping.set(zone, RED_ZONE);
                    damaged.push(*offset);
                }
            }
        }
        damaged
    }

    /// Returns the number and the bytes of allocations that their owners have not freed.
    pub(super) fn owned_total(&self) -> (usize, usize) {
        let owned = self.live.values().filter(|a| !a.freeing);
        owned.fold((0, 0), |(count, bytes), a| (count + 1, bytes + a.bytes))
    }

    /// Returns the number of allocations whose free waits in a queue.
    pub(super) fn freeing(&self) -> usize {
        self.live.values().filter(|a| a.freeing).count()
    }

    pub(super) fn quarantined_bytes(&self) -> usize {
        self.quarantined_bytes
    }
}
