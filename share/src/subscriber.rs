//! [`Subscriber`].

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arrow_device::{Device, DeviceArray, DeviceBuffer, DeviceRecordBatch};
use arrow_schema::{DataType, SchemaRef};
use rustix::net::{SocketAddrUnix, SocketFlags};

use crate::build::Building;
use crate::error::{Error, Result, check_process};
use crate::lease::{Lease, Link, Places};
use crate::manifest::{Manifest, Parts, Slot, slots};
use crate::schema;
use crate::wire::{
    self, Kind, Outgoing, Packet, Received, VERSION, check_kind, check_user, seqpacket,
};

/// How a [`Subscriber`] behaves.
#[derive(Clone, Debug, Default)]
pub struct SubscriberOptions {
    places: Places,
    users: Vec<u32>,
}

impl SubscriberOptions {
    /// Makes options for a publisher that is trusted: what it says of its memory is believed without reading it, so that receiving a batch
    /// takes the same time whatever its size, and memory of devices is accepted. [`DeviceArray::validated`] checks a batch all the same.
    ///
    /// # Safety
    /// The publisher is one of this crate, or does as one: values are valid for their types, null counts are right, and memory does not
    /// change from when it is ready until its lease is returned.
    #[must_use]
    pub unsafe fn trusting() -> Self {
        let mut options = Self::default();
        options.places.trusting = true;
        options
    }

    /// Sets the device whose type the publisher's batches may have, beside the CPU: a simulated device of this process, or with the feature
    /// `cuda` the GPU on which the publisher's memory is. Needs [`trusting`](Self::trusting).
    #[must_use]
    pub fn with_device(mut self, device: Device) -> Self {
        self.places.device = Some(device);
        self
    }

    /// Allows a publisher of another user.
    #[must_use]
    pub fn with_user(mut self, user: u32) -> Self {
        self.users.push(user);
        self
    }
}

/// Receives the batches of a [`Publisher`](crate::Publisher), which lie in its memory: an iterator, which waits for the next batch, or a
/// stream ([`into_stream`](Self::into_stream)).
///
/// Each batch is a lease, which goes back when the last array that uses its memory is dropped; batches may outlive the subscriber. A
/// publisher that is told how many batches a subscriber may have waits for the rest. Returns and the subscriber's farewell do not wait for a
/// publisher that reads nothing: what the socket has no room for goes with the next return, and what is left after the last one is lost
/// when the connection closes, which the publisher may count as a death.
///
/// The publisher is not trusted, unless [options](SubscriberOptions::trusting) say so: it can make a batch an error, but not change it once
/// it is there. Memory must be frozen by the system, and all values are [validated](DeviceArray::validated), for which text, lists and
/// columns with nulls are read; the others are not.
///
/// A child that was forked reads nothing: its first item is [`Error::Refused`]. It keeps the connection open until it ends or runs another
/// program, so that the publisher notices the subscriber's death only then.
///
/// After the end of the stream, or an error, there are no more batches. The end of a publisher that did not end its stream is an error:
/// [`Error::PublisherDied`].
#[derive(Debug)]
pub struct Subscriber {
    pub(crate) link: Arc<Link>,
    places: Places,
    welcome: bool,
    schema: Option<SchemaRef>,
    /// The schema's dictionaries, with the values that came last.
    dictionaries: Vec<(Slot, Option<DeviceArray>)>,
    /// Batches that were not returned yet. Those that are not ready wait for the publisher's word.
    batches: VecDeque<Next>,
    /// Whether the next batch needs the publisher's word, whatever its own memory does: a dictionary does.
    is_late: bool,
    last_lease: u64,
    over: bool,
}

#[derive(Debug)]
struct Next {
    lease: u64,
    ready: bool,
    batch: DeviceRecordBatch,
    /// Keeps the lease until the batch is ready, also of a batch that has no bytes.
    _memory: DeviceBuffer,
}

impl Subscriber {
    /// Connects to the publisher that listens at a path.
    ///
    /// # Errors
    /// Returns [`Error::Io`] if there is none, and [`Error::Refused`] if it runs as another user. What else the publisher refuses is the
    /// first item.
    pub fn connect(path: impl AsRef<Path>) -> Result<Self> {
        Self::connect_with(path, SubscriberOptions::default())
    }

    /// As [`connect`](Self::connect), with options.
    ///
    /// # Errors
    /// As [`connect`](Self::connect).
    pub fn connect_with(path: impl AsRef<Path>, options: SubscriberOptions) -> Result<Self> {
        let io = Error::of("connect to the publisher");
        let address = SocketAddrUnix::new(path.as_ref()).map_err(&io)?;
        let socket = seqpacket(SocketFlags::empty())?;
        rustix::net::connect(&socket, &address).map_err(&io)?;
        Self::over_with(socket, options)
    }

    /// Subscribes to the publisher at the other end of a socket ([`socket_pair`](crate::socket_pair)).
    ///
    /// # Errors
    /// Returns [`Error::Refused`] for a socket of another kind or a peer of another user.
    pub fn over(socket: OwnedFd) -> Result<Self> {
        Self::over_with(socket, SubscriberOptions::default())
    }

    /// As [`over`](Self::over), with options.
    ///
    /// # Errors
    /// As [`over`](Self::over).
    pub fn over_with(socket: OwnedFd, options: SubscriberOptions) -> Result<Self> {
        check_kind(socket.as_fd())?;
        check_user(socket.as_fd(), &options.users)?;
        let link = Arc::new(Link::new(socket));
        link.post(Outgoing::short(Kind::HELLO, 0, &VERSION));
        Ok(Self {
            link,
            places: options.places,
            welcome: false,
            schema: None,
            dictionaries: Vec::new(),
            batches: VecDeque::new(),
            is_late: false,
            last_lease: 0,
            over: false,
        })
    }

    /// Returns the schema of all batches. Waits for it; a stream that ends without a batch has none.
    ///
    /// # Errors
    /// As the next item.
    pub fn schema(&mut self) -> Result<Option<SchemaRef>> {
        while self.schema.is_none() && !self.over {
            if !self.hear()? {
                self.link.wait(None)?;
            }
        }
        Ok(self.schema.clone())
    }

    /// Returns the next item as `next` does, if it comes in time.
    ///
    /// # Errors
    /// Returns [`Error::TimedOut`] if nothing has come after `at_most`, which ends nothing.
    pub fn next_timeout(&mut self, at_most: Duration) -> Option<Result<DeviceRecordBatch>> {
        self.next_until(Instant::now().checked_add(at_most))
    }

    fn next_until(&mut self, end: Option<Instant>) -> Option<Result<DeviceRecordBatch>> {
        loop {
            if let Some(next) = self.try_next() {
                return next;
            }
            let left = end.map(|end| end.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                return Some(Err(Error::TimedOut("no batch has come")));
            }
            if let Err(e) = self.link.wait(left) {
                self.leave();
                return Some(Err(e));
            }
        }
    }

    /// Returns the next item if it has come: `Some(None)` at the end.
    pub(crate) fn try_next(&mut self) -> Option<Option<Result<DeviceRecordBatch>>> {
        loop {
            if self.batches.front().is_some_and(|next| next.ready) {
                let next = self.batches.pop_front();
                return Some(next.map(|next| self.checked(next.batch)));
            }
            if self.over {
                return Some(None);
            }
            match self.hear() {
                Ok(true) => {}
                Ok(false) => return None,
                Err(e) => return Some(Some(Err(e))),
            }
        }
    }

    /// Checks a batch that is ready, before the program gets it.
    fn checked(&mut self, batch: DeviceRecordBatch) -> Result<DeviceRecordBatch> {
        if self.places.trusting {
            return Ok(batch);
        }
        // Texts under nulls that are no UTF-8 have become zeros.
        let of = |all| DeviceRecordBatch::try_from(all)?.with_schema(batch.schema());
        let checked = batch.as_struct().validated().and_then(of);
        if checked.is_err() {
            self.leave();
        }
        Ok(checked?)
    }

    /// Takes in a packet, if one has come. After an error nothing more is taken.
    fn hear(&mut self) -> Result<bool> {
        let received = check_process(self.link.process);
        let heard = match received.and_then(|()| wire::receive(self.link.socket(), true)) {
            Ok(Received::Nothing) => return Ok(false),
            Ok(Received::Closed) => Err(Error::PublisherDied),
            Ok(Received::Packet(packet)) => self.take(packet),
            Err(e) => Err(e),
        };
        if heard.is_err() {
            self.leave();
        }
        heard.map(|()| true)
    }

    fn take(&mut self, packet: Packet) -> Result<()> {
        let text = |body: &[u8]| String::from_utf8_lossy(body).into_owned();
        match packet.kind {
            Kind::REFUSED if !self.welcome => Error::refused(text(&packet.body)),
            Kind::WELCOME if !self.welcome => {
                if packet.body != VERSION {
                    return Error::refused("the publisher has another version");
                }
                self.welcome = true;
                Ok(())
            }
            _ if !self.welcome => Error::broken("a packet before the welcome"),
            Kind::SCHEMA if self.schema.is_none() => {
                let schema = Arc::new(schema::from_bytes(&packet.body)?);
                let root = DataType::Struct(schema.fields().clone());
                let mut found = Vec::new();
                slots(&root, &mut found);
                self.dictionaries = found.into_iter().map(|slot| (slot, None)).collect();
                self.schema = Some(schema);
                Ok(())
            }
            Kind::DICTIONARY => self.take_dictionary(packet),
            Kind::OFFER => self.take_batch(packet),
            Kind::READY if packet.number > self.last_lease => {
                Error::broken("a batch that does not wait")
            }
            Kind::READY if !packet.body.is_empty() => Err(Error::Failed(text(&packet.body))),
            Kind::READY => {
                // The program may have a batch for which its device waits.
                let mut waiting = self.batches.iter_mut();
                let found = waiting.find(|next| next.lease == packet.number);
                found.into_iter().for_each(|next| next.ready = true);
                Ok(())
            }
            Kind::END | Kind::FAIL if self.batches.iter().any(|next| !next.ready) => Err(
                Error::protocol("an end before the memory of a batch was ready"),
            ),
            Kind::END => {
                self.leave();
                Ok(())
            }
            Kind::FAIL => Err(Error::Failed(text(&packet.body))),
            _ => Error::broken("an unknown packet, or a packet out of order"),
        }
    }

    fn take_dictionary(&mut self, packet: Packet) -> Result<()> {
        let cut = || Error::protocol("a dictionary is cut short");
        let (slot, body) = packet.body.split_first_chunk().ok_or_else(cut)?;
        let slot = u32::from_le_bytes(*slot) as usize;
        let (manifest, memory) = self.map(body, packet.number, packet.memory)?;
        let of = self.dictionaries.get(slot).map(|(of, _)| of);
        let of = of.ok_or_else(|| Error::protocol("a dictionary that the schema does not have"))?;
        let building = self.building(&memory, manifest.parts, of.first);
        // SAFETY: the values are validated with each batch that has them, or the program vouches for the publisher.
        let values = unsafe { building.values(&of.values) }?;
        self.dictionaries[slot].1 = Some(values);
        self.is_late |= !manifest.ready;
        Ok(())
    }

    fn take_batch(&mut self, packet: Packet) -> Result<()> {
        let (manifest, memory) = self.map(&packet.body, packet.number, packet.memory)?;
        let schema = self.known()?;
        let building = self.building(&memory, manifest.parts, 0);
        // SAFETY: `checked` validates the batch before anybody gets it, or the program vouches for the publisher.
        let batch = unsafe { building.batch(&schema) }?;
        let is_late = std::mem::take(&mut self.is_late);
        let ready = manifest.ready && !is_late;
        self.batches.push_back(Next {
            lease: packet.number,
            ready,
            batch,
            _memory: memory,
        });
        Ok(())
    }

    /// Maps the memory of a lease, which the drop of what is mapped returns.
    fn map(
        &mut self,
        manifest: &[u8],
        number: u64,
        memory: Option<OwnedFd>,
    ) -> Result<(Manifest, DeviceBuffer)> {
        self.last_lease = number;
        let link = self.link.clone();
        let lease = Lease { link, number };
        self.known()?;
        let mut manifest = Manifest::from_bytes(manifest)?;
        let memory = self.places.map(&mut manifest, memory, lease)?;
        Ok((manifest, memory))
    }

    fn known(&self) -> Result<SchemaRef> {
        let schema = self.schema.clone();
        schema.ok_or_else(|| Error::protocol("memory before the schema"))
    }

    fn building<'a>(
        &'a self,
        memory: &'a DeviceBuffer,
        parts: Parts,
        dictionary: usize,
    ) -> Building<'a> {
        Building {
            memory,
            parts,
            dictionaries: &self.dictionaries,
            dictionary,
            trusted: self.places.trusting,
        }
    }

    /// Takes nothing more, and tells the publisher so.
    fn leave(&mut self) {
        if !std::mem::replace(&mut self.over, true) {
            self.batches.clear();
            self.dictionaries.clear();
            self.link.leave(self.last_lease);
        }
    }
}

impl Iterator for Subscriber {
    type Item = Result<DeviceRecordBatch>;

    /// Waits for the next batch, and for its memory.
    fn next(&mut self) -> Option<Self::Item> {
        self.next_until(None)
    }
}

impl Drop for Subscriber {
    fn drop(&mut self) {
        self.leave();
    }
}
