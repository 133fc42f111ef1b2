//! The publisher's side of its connections: what each subscriber has been sent, what it holds, and the thread that listens to all.

use std::any::Any;
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{Shutdown, SocketFlags};

use crate::error::{Error, Result, lock};
use crate::options::PublisherStats;
use crate::wire::{Kind, Outgoing, Packet, Received, VERSION, check_user, flush, receive};

/// How many connections there may be at a time.
const MOST: usize = 256;
/// How long the thread lets pass what it cannot wait for.
const PAUSE: Duration = Duration::from_millis(10);

/// What a lease keeps: a batch, or the values of a dictionary.
pub(crate) type Kept = Arc<dyn Any + Send + Sync>;

/// The connections, which the thread and the publisher share.
#[derive(Debug)]
pub(crate) struct Peers {
    users: Vec<u32>,
    state: Mutex<State>,
    /// Signalled when a subscriber has come or gone, or has returned a lease.
    changed: Condvar,
    /// Wakes the thread.
    wake: OwnedFd,
}

#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) peers: Vec<Peer>,
    pub(crate) next_lease: u64,
    next_peer: u64,
    /// What was done; of subscribers, those whose connections are over.
    pub(crate) done: PublisherStats,
    /// Deaths of subscribers that the program was told of.
    pub(crate) reported: u64,
    /// The publisher is gone.
    over: bool,
}

/// A connection.
#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) id: u64,
    /// The thread has it, too, while it waits.
    socket: Arc<OwnedFd>,
    /// No other will come: it is waited for, and its end is noticed, before it has said what it is.
    is_only: bool,
    /// It has said what it is.
    is_subscriber: bool,
    pub(crate) has_schema: bool,
    /// What was sent last for each dictionary of the schema.
    pub(crate) dictionaries: Vec<Option<u64>>,
    leases: BTreeMap<u64, Lease>,
    /// It takes nothing more.
    gone: bool,
    /// What could not be sent yet.
    outbox: VecDeque<Outgoing>,
    /// Nothing more is sent, but its process may still read what it has.
    is_broken: bool,
    /// It broke the protocol, or cannot be sent what comes next: it counts as dead.
    is_lost: bool,
}

#[derive(Debug)]
struct Lease {
    is_batch: bool,
    /// The memory may not be read yet.
    is_unready: bool,
    kept: Kept,
}

impl Peers {
    pub(crate) fn new(users: Vec<u32>) -> Result<Self> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        Ok(Self {
            users,
            state: Mutex::default(),
            changed: Condvar::new(),
            wake: rustix::event::eventfd(0, flags).map_err(Error::of("make an event"))?,
        })
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    /// Waits for what `look` returns.
    ///
    /// # Errors
    /// Returns [`Error::TimedOut`] if there is none after `at_most`.
    pub(crate) fn wait<T>(
        &self,
        at_most: Duration,
        what: &'static str,
        mut look: impl FnMut(&mut State) -> Option<T>,
    ) -> Result<T> {
        let mut found = None;
        let is_waited_for = |state: &mut State| {
            found = look(state);
            found.is_none()
        };
        // A lock that was poisoned by a panic ends the wait early.
        let waited = self
            .changed
            .wait_timeout_while(self.lock(), at_most, is_waited_for);
        drop(waited);
        found.ok_or(Error::TimedOut(what))
    }

    /// Adds a connection, whose other end has not said anything yet; is it the only one there will ever be?
    pub(crate) fn add(&self, socket: OwnedFd, is_only: bool) -> Result<()> {
        let mut allowed = check_user(socket.as_fd(), &self.users);
        let mut state = self.lock();
        if state.over {
            return Ok(());
        }
        if state.peers.len() >= MOST {
            allowed = Error::refused("the publisher has as many subscribers as it can");
        }
        if let Err(e) = &allowed {
            // If there is no room even for this, closing says enough.
            let why = match e {
                Error::Refused(why) => why.to_string(),
                e => e.to_string(),
            };
            let _ = Outgoing::short(Kind::REFUSED, 0, why.as_bytes()).send(socket.as_fd());
            return allowed;
        }
        let id = state.next_peer;
        state.next_peer += 1;
        state.peers.push(Peer {
            id,
            socket: Arc::new(socket),
            is_only,
            is_subscriber: false,
            has_schema: false,
            dictionaries: Vec::new(),
            leases: BTreeMap::new(),
            gone: false,
            outbox: VecDeque::new(),
            is_broken: false,
            is_lost: false,
        });
        drop(state);
        self.wake();
        Ok(())
    }

    /// Tells a subscriber that holds a lease that the memory may be read, or never can.
    pub(crate) fn ready(&self, (id, number): (u64, u64), packet: Outgoing) {
        let mut state = self.lock();
        let mut peers = state.peers.iter_mut();
        if let Some(peer) = peers.find(|peer| peer.id == id) {
            if let Some(lease) = peer.leases.get_mut(&number) {
                lease.is_unready = false;
                peer.post(packet);
            }
        }
        drop(state);
        self.changed.notify_all();
        self.wake();
    }

    /// Lets the thread look again at what there is to do.
    pub(crate) fn wake(&self) {
        // It fails if the counter is full: then the thread is awake already.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Ends [`run`](Self::run), once nobody has anything any more. Nothing more is sent.
    pub(crate) fn end(&self) {
        let mut state = self.lock();
        state.over = true;
        state.peers.iter_mut().for_each(Peer::break_off);
        drop(state);
        self.wake();
    }

    /// Listens to all connections, and to `listener` for new ones, until the [end](Self::end), and then to those that still have something: a
    /// device's memory would be used again while they read it.
    pub(crate) fn run(&self, mut listener: Option<OwnedFd>) {
        loop {
            let state = self.lock();
            if state.over {
                listener = None;
                if state.peers.is_empty() {
                    return;
                }
            }
            let waits_for = |peer: &Peer| (peer.socket.clone(), peer.waits_for());
            let sockets: Vec<_> = state.peers.iter().map(waits_for).collect();
            drop(state);
            let mut polled = vec![PollFd::new(&self.wake, PollFlags::IN)];
            polled.extend(sockets.iter().map(|(of, flags)| PollFd::new(of, *flags)));
            polled.extend(listener.iter().map(|of| PollFd::new(of, PollFlags::IN)));
            // Without memory to wait with, for example, there is no use in trying again at once.
            let mut is_crowded = match rustix::event::poll(&mut polled, None) {
                Ok(_) => false,
                Err(e) => e != Errno::INTR,
            };
            let happened: Vec<_> = polled.iter().map(PollFd::revents).collect();
            let is_woken = !happened[0].is_empty();
            if is_woken {
                let _ = rustix::io::read(&self.wake, &mut [0; 8]);
            }
            let mut freed = Vec::new();
            // Nobody else removes any: those before one that is removed stay where they are.
            for at in (0..sockets.len()).rev() {
                if is_woken || !happened[1 + at].is_empty() {
                    let is_full = self.lock().hear(at, &mut freed);
                    // The socket has room, and yet nothing was sent: the system has none. That passes, but nobody says when.
                    is_crowded |= is_full && happened[1 + at].contains(PollFlags::OUT);
                }
            }
            let called = happened.get(1 + sockets.len());
            let has_come = called.is_some_and(|events| !events.is_empty());
            if let Some(listener) = listener.as_ref().filter(|_| has_come) {
                let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
                match rustix::net::accept_with(listener, flags) {
                    // One that is refused has been told, as far as possible.
                    Ok(socket) => _ = self.add(socket, false),
                    Err(Errno::MFILE | Errno::NFILE | Errno::NOMEM) => is_crowded = true,
                    Err(_) => {}
                }
            }
            self.changed.notify_all();
            // Without the lock: this frees memory.
            drop(freed);
            if is_crowded {
                std::thread::sleep(PAUSE);
            }
        }
    }
}

impl State {
    pub(crate) fn subscribers(&self) -> usize {
        let takes_batches = |peer: &&Peer| peer.takes_batches();
        self.peers.iter().filter(takes_batches).count()
    }

    pub(crate) fn leases(&self) -> usize {
        self.peers.iter().map(|peer| peer.leases.len()).sum()
    }

    pub(crate) fn died(&self) -> u64 {
        let lost = self.peers.iter().filter(|peer| peer.is_lost);
        self.done.died + lost.filter(|peer| peer.has_died()).count() as u64
    }

    /// Does what a connection asks for, or ends it. What need not be kept any more goes to `freed`. Returns whether
    /// there was something to send, and nothing was sent.
    fn hear(&mut self, at: usize, freed: &mut Vec<Kept>) -> bool {
        let peer = &mut self.peers[at];
        let before = peer.outbox.len();
        let is_over = peer.hear(freed);
        let is_full = before > 0 && peer.outbox.len() == before;
        if is_over {
            let peer = self.peers.remove(at);
            self.done.left += u64::from(peer.gone);
            self.done.died += u64::from(peer.has_died());
            freed.push(Arc::new(peer));
        }
        is_full && !is_over
    }
}

impl Peer {
    pub(crate) fn takes_batches(&self) -> bool {
        self.is_subscriber && !self.gone && !self.is_broken
    }

    /// Whether it is to become a subscriber.
    pub(crate) fn is_awaited(&self) -> bool {
        self.is_only && !self.is_subscriber && !self.is_broken
    }

    /// Whether it is a subscriber that has not left, once the connection is over.
    fn has_died(&self) -> bool {
        (self.is_subscriber || self.is_only) && !self.gone
    }

    /// What the thread waits for.
    fn waits_for(&self) -> PollFlags {
        match self.outbox.is_empty() {
            true => PollFlags::IN,
            false => PollFlags::IN | PollFlags::OUT,
        }
    }

    /// Whether it has so many batches, or more dictionaries than go with them.
    pub(crate) fn has_all(&self, batches: usize) -> bool {
        let of = self.leases.values().filter(|lease| lease.is_batch).count();
        of >= batches
            || self.leases.len()
                > batches.saturating_mul(1 + self.dictionaries.len()) + self.dictionaries.len()
    }

    /// Keeps `kept`, whose memory may not be ready yet, until the subscriber returns the lease, goes or dies.
    pub(crate) fn lend(&mut self, lease: u64, is_batch: bool, kept: Kept, is_unready: bool) {
        let lease_of = Lease {
            is_batch,
            is_unready: is_batch && is_unready,
            kept,
        };
        self.leases.insert(lease, lease_of);
    }

    /// Whether it has a batch that it may not read yet.
    pub(crate) fn waits_for_memory(&self) -> bool {
        self.leases.values().any(|lease| lease.is_unready)
    }

    /// Sends a packet, now or when there is room. If the peer has closed its end, the thread notices.
    pub(crate) fn post(&mut self, packet: Outgoing) {
        self.outbox.push_back(packet);
        self.flush();
    }

    fn flush(&mut self) {
        match flush(&mut self.outbox, self.socket.as_fd()) {
            Ok(()) => {}
            // It has closed its end, in order or not: what it has said before is still to be heard.
            Err(Errno::PIPE | Errno::CONNRESET) => self.break_off(),
            // The subscriber must not take what follows for all there is.
            Err(_) => self.lose(),
        }
    }

    fn lose(&mut self) {
        self.is_lost = true;
        self.break_off();
    }

    /// Sends nothing more, and says so. What it has stays until it returns it, or closes its own end, as its death does.
    fn break_off(&mut self) {
        self.is_broken = true;
        self.outbox.clear();
        let _ = rustix::net::shutdown(self.socket.as_fd(), Shutdown::Write);
    }

    /// Whether everything was sent, or it is known why not. What one that reads nothing more has said before is still to be heard.
    pub(crate) fn is_flushed(&self) -> bool {
        self.outbox.is_empty() && (!self.is_broken || self.is_lost || self.gone)
    }

    /// Reads what has come. Returns whether the connection is over.
    fn hear(&mut self, freed: &mut Vec<Kept>) -> bool {
        self.flush();
        // The rest waits for the next turn, so that nobody keeps the others waiting.
        for _ in 0..64 {
            match receive(self.socket.as_fd(), false) {
                Ok(Received::Packet(packet)) if self.take(&packet, freed).is_ok() => {}
                Ok(Received::Nothing) => return self.is_broken && self.leases.is_empty(),
                Ok(Received::Closed) => return true,
                // One out of order, or no packet at all.
                Ok(Received::Packet(_)) | Err(_) => self.lose(),
            }
        }
        self.is_lost && self.leases.is_empty()
    }

    fn take(&mut self, packet: &Packet, freed: &mut Vec<Kept>) -> Result<()> {
        match packet.kind {
            Kind::HELLO if !self.is_subscriber => {
                if packet.body != VERSION {
                    let why = b"the publisher has another version of the protocol: 1";
                    let _ = Outgoing::short(Kind::REFUSED, 0, why).send(self.socket.as_fd());
                    return Error::broken("another version");
                }
                self.is_subscriber = true;
                self.post(Outgoing::short(Kind::WELCOME, 0, &VERSION));
                Ok(())
            }
            Kind::DONE if self.is_subscriber => {
                let lease = self.leases.remove(&packet.number);
                let lease = lease.ok_or_else(|| Error::protocol("a lease that is not out"))?;
                freed.push(lease.kept);
                Ok(())
            }
            Kind::GONE if self.is_subscriber && !self.gone => {
                self.gone = !self.is_lost;
                // It will never see these.
                let unseen = self.leases.split_off(&packet.number.saturating_add(1));
                freed.extend(unseen.into_values().map(|lease| lease.kept));
                self.outbox.clear();
                Ok(())
            }
            _ => Error::broken("a packet out of order"),
        }
    }
}
