//! From a batch to the packets that describe it.

use std::sync::{Arc, OnceLock, Weak};
use std::task::Wake;

use arrow_device::{ArrowDeviceType, Device, DeviceRecordBatch, Queue, SyncEvent};
use arrow_schema::{DataType, SchemaRef};

use crate::describe::{Described, Description, describe};
use crate::device::{copied, origin, own_memory};
use crate::error::Result;
use crate::manifest::{Manifest, Slot, slots};
use crate::peers::{Kept, Peer, Peers};
use crate::schema;
use crate::wire::{Kind, Outgoing};

/// What a publisher knows from one batch to the next.
#[derive(Debug)]
pub(crate) struct Sending {
    schema: SchemaRef,
    packet: Outgoing,
    /// Its dictionaries, and what was sent for each last.
    slots: Vec<Slot>,
    values: Vec<Option<(Manifest, u64)>>,
    /// Values of dictionaries so far.
    count: u64,
    /// A queue that waits for work whose events cross.
    waiting: OnceLock<Queue>,
}

/// A batch that can be sent.
#[derive(Debug)]
pub(crate) struct Prepared {
    /// The batch, and its event if other processes wait for it.
    kept: Kept,
    schema: Outgoing,
    values: Vec<Values>,
    offer: Outgoing,
    /// The bytes that had to be copied first, if any had to be.
    pub(crate) copied: Option<u64>,
    /// When the memory may be read; `None` if it may be read now.
    event: Option<SyncEvent>,
}

/// The values of a dictionary.
#[derive(Debug)]
struct Values {
    kept: Kept,
    /// Of all that were sent, which these are.
    number: u64,
    packet: Outgoing,
}

impl Sending {
    /// Prepares a batch, the first one if nothing is known yet.
    pub(crate) fn prepare_with(
        known: &mut Option<Self>,
        batch: &DeviceRecordBatch,
    ) -> Result<Prepared> {
        if let Some(known) = known {
            return known.prepare(batch);
        }
        let mut new = Self::new(batch.schema())?;
        let prepared = new.prepare(batch)?;
        // A batch that could not be sent leaves its schema open.
        *known = Some(new);
        Ok(prepared)
    }

    fn prepare(&mut self, batch: &DeviceRecordBatch) -> Result<Prepared> {
        if self.schema != *batch.schema_ref() {
            let what = "the batch has another schema than the first one that was sent";
            return Err(arrow_device::Error::InvalidArgument(what.into()).into());
        }
        let (batch, described, copied) = place(batch)?;
        let device_type = batch.device().id().device_type;
        let all = described.dictionaries.iter().map(|(of, _)| of);
        for region in all.chain([&described.batch]).flat_map(|of| &of.region) {
            match device_type {
                ArrowDeviceType::CPU => region.freeze()?,
                // No driver can.
                ArrowDeviceType::CUDA => {}
                _ => region.keep_others_from_writing()?,
            }
        }
        let event = batch.as_struct().ready_event(None)?;
        let (handle, crossing) = self.cross(batch.device(), event.as_ref()).unzip();
        let origin = origin(batch.device())?;
        let manifest = |described: &Described| {
            let region = described.region.as_ref();
            let (memory, size) = region.map_or((0, 0), |of| (of.number, of.bytes as u64));
            Manifest {
                device_type: batch.device().id().device_type,
                origin,
                memory,
                size,
                ready: event.is_none(),
                event: handle,
                parts: described.parts.clone(),
            }
        };
        let bytes = manifest(&described.batch).to_bytes();
        let offer = Outgoing::new(Kind::OFFER, &bytes, described.batch.region)?;
        let dictionaries = described.dictionaries.into_iter().enumerate();
        let values = dictionaries.map(|(slot, (described, array))| {
            let manifest = manifest(&described);
            let mut bytes = (slot as u32).to_le_bytes().to_vec();
            bytes.extend(manifest.to_bytes());
            let packet = Outgoing::new(Kind::DICTIONARY, &bytes, described.region)?;
            let number = self.number(slot, manifest);
            Ok(Values {
                kept: Arc::new(array),
                number,
                packet,
            })
        });
        let values = values.collect::<Result<_>>()?;
        let schema = self.packet.clone();
        Ok(Prepared {
            kept: Arc::new((batch, crossing)),
            schema,
            values,
            offer,
            copied,
            event,
        })
    }

    /// Returns a handle by which devices of other processes wait for an event, and what keeps it, if there are such events.
    fn cross(&self, device: &Device, event: Option<&SyncEvent>) -> Option<([u8; 64], Kept)> {
        #[cfg(feature = "cuda")]
        if let Ok(crossing) = crate::cuda::Crossing::new(device, event?, &self.waiting) {
            return Some((crossing.handle, Arc::new(crossing)));
        }
        let _ = (device, event, &self.waiting);
        None
    }

    fn new(schema: SchemaRef) -> Result<Self> {
        let mut found = Vec::new();
        slots(&DataType::Struct(schema.fields().clone()), &mut found);
        let bytes = schema::to_bytes(&schema);
        // Arrow IPC has no keys of keys, for example, and would describe another type.
        if schema::from_bytes(&bytes).map_or(true, |read| read != *schema) {
            let what = "the schema has a type that Arrow IPC cannot describe";
            return Err(arrow_device::Error::InvalidArgument(what.into()).into());
        }
        Ok(Self {
            packet: Outgoing::new(Kind::SCHEMA, &bytes, None)?,
            schema,
            values: vec![None; found.len()],
            slots: found,
            count: 0,
            waiting: OnceLock::new(),
        })
    }

    /// Returns the number of a dictionary's values: the same as before, if they are the same memory, and so are the dictionaries inside
    /// them, which come first.
    fn number(&mut self, slot: usize, manifest: Manifest) -> u64 {
        let last = self.values[slot].take();
        let is_same = |(last, number): &(Manifest, u64)| {
            let inside = self.values[self.slots[slot].first..slot].iter().flatten();
            last.memory == manifest.memory
                && last.parts == manifest.parts
                && inside.map(|(_, of)| of).all(|of| of < number)
        };
        let number = last
            .filter(is_same)
            .map_or(self.count + 1, |(_, number)| number);
        self.count = self.count.max(number);
        self.values[slot] = Some((manifest, number));
        number
    }
}

impl Prepared {
    /// Sends the batch to a subscriber, after what it does not have yet of its schema and dictionaries. Returns the lease.
    pub(crate) fn post(&self, peer: &mut Peer, next_lease: &mut u64) -> u64 {
        let mut lend = |peer: &mut Peer, packet: &Outgoing, is_batch, kept: &Kept| {
            *next_lease += 1;
            peer.lend(*next_lease, is_batch, kept.clone(), self.event.is_some());
            let mut packet = packet.clone();
            packet.number = *next_lease;
            peer.post(packet);
            *next_lease
        };
        if !peer.has_schema {
            peer.has_schema = true;
            peer.post(self.schema.clone());
            peer.dictionaries.resize(self.values.len(), None);
        }
        for (slot, values) in self.values.iter().enumerate() {
            let last = peer.dictionaries[slot].replace(values.number);
            if last != Some(values.number) {
                lend(peer, &values.packet, false, &values.kept);
            }
        }
        lend(peer, &self.offer, true, &self.kept)
    }

    /// Tells a subscriber once the memory of a lease may be read, if that was not said with it.
    pub(crate) fn tell_when_ready(&self, peers: &Arc<Peers>, lease: (u64, u64)) {
        let Some(event) = self.event.clone() else {
            return;
        };
        let peers = Arc::downgrade(peers);
        let readiness = Arc::new(Readiness {
            peers,
            event,
            lease,
        });
        match readiness.event.notify(&readiness.clone().into()) {
            Ok(false) => {}
            Ok(true) | Err(_) => readiness.wake(),
        }
    }
}

/// Returns a batch in one shareable allocation, and where it lies there: the same one, or a copy of so many bytes.
fn place(batch: &DeviceRecordBatch) -> Result<(DeviceRecordBatch, Description, Option<u64>)> {
    if let Some(described) = describe(batch)? {
        return Ok((batch.clone(), described, None));
    }
    let copy = copied(batch)?;
    let described = describe(&copy)?.ok_or_else(|| own_memory(batch.device()))?;
    let bytes = copy.get_array_memory_size() as u64;
    Ok((copy, described, Some(bytes)))
}

struct Readiness {
    peers: Weak<Peers>,
    event: SyncEvent,
    /// The subscriber, and its lease.
    lease: (u64, u64),
}

impl Wake for Readiness {
    fn wake(self: Arc<Self>) {
        if let Some(peers) = self.peers.upgrade() {
            let why = self.event.is_complete().err().map(|e| e.to_string());
            let why = why.unwrap_or_default();
            let packet = Outgoing::short(Kind::READY, self.lease.1, why.as_bytes());
            peers.ready(self.lease, packet);
        }
    }
}
