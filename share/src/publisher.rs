//! [`Publisher`].

use std::fs::{File, Permissions};
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use arrow_device::DeviceRecordBatch;
use rustix::fs::FlockOperation;
use rustix::io::Errno;
use rustix::net::{SocketAddrUnix, SocketFlags};

use crate::error::{Error, Result, check_process, lock};
use crate::options::{DeadPeers, PublisherOptions, PublisherStats};
use crate::peers::{Peer, Peers, State};
use crate::sending::{Prepared, Sending};
use crate::wire::{Kind, Outgoing, check_kind, seqpacket};

/// Hands batches to subscribers in other processes, each batch to all of them, without a copy.
///
/// A thread of its own accepts subscribers and frees what they return. Dropping a publisher without [`finish`](Self::finish) looks to its
/// subscribers like its death, as a panic does. However it ends, a batch is kept until subscribers return it: nobody waits for that, also
/// not the end of the process.
///
/// A child that was forked can only drop it. It keeps the sockets open all the same, so that subscribers notice the death of the publisher
/// only when the child has ended, too, or runs another program.
///
/// ```
/// use std::time::Duration;
/// use arrow_array::record_batch;
/// use arrow_device_share::{Publisher, Subscriber, shared_cpu};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let folder = tempfile::tempdir()?;
/// # let path = folder.path().join("batches");
/// let publisher = Publisher::bind(&path)?;
/// let subscriber = Subscriber::connect(&path)?; // in another process, as a rule
/// publisher.wait_for_subscribers(1, Duration::from_secs(10))?;
///
/// let batch = record_batch!(("id", Int64, [1, 2, 3]))?;
/// publisher.send(&shared_cpu().upload(&batch)?)?;
/// publisher.finish()?;
///
/// for received in subscriber {
///     assert_eq!(received?.to_host()?, batch);
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Publisher {
    peers: Arc<Peers>,
    options: PublisherOptions,
    /// Held by one `send` at a time, so that all subscribers get the batches in one order.
    sending: Mutex<Option<Sending>>,
    /// The socket's file, and which one it is.
    file: Option<(PathBuf, u64)>,
    /// A forked child has neither the thread nor a say in the file.
    process: u32,
}

impl Publisher {
    /// Listens for subscribers at a path. A socket that a dead publisher has left there is replaced. The file is this user's alone, and
    /// removed when the publisher is dropped. Publishers that start in one folder take turns, for which it must be readable.
    ///
    /// # Errors
    /// Returns [`Error::Io`], for example if another publisher listens there.
    pub fn bind(path: impl AsRef<Path>) -> Result<Self> {
        Self::bind_with(path, PublisherOptions::default())
    }

    /// As [`bind`](Self::bind), with options.
    ///
    /// # Errors
    /// As [`bind`](Self::bind).
    pub fn bind_with(path: impl AsRef<Path>, options: PublisherOptions) -> Result<Self> {
        let (path, io) = (path.as_ref(), Error::of("listen for subscribers"));
        let address = SocketAddrUnix::new(path).map_err(&io)?;
        let socket = seqpacket(SocketFlags::NONBLOCK)?;
        // One that is bound but does not listen yet looks as one that is dead: those that start in a folder take turns.
        let folder = path.parent().filter(|folder| *folder != Path::new(""));
        let folder = File::open(folder.unwrap_or(Path::new(".")));
        let folder = folder.map_err(Error::of("open the socket's folder"))?;
        let take_turns = || rustix::fs::flock(&folder, FlockOperation::LockExclusive);
        rustix::io::retry_on_intr(take_turns).map_err(&io)?;
        match rustix::net::bind(&socket, &address) {
            Err(Errno::ADDRINUSE) if is_socket(path) && is_stale(&address) => {
                std::fs::remove_file(path).map_err(Error::of("remove an old socket"))?;
                rustix::net::bind(&socket, &address).map_err(&io)?;
            }
            bound => bound.map_err(&io)?,
        }
        // Before anybody can connect.
        let mode = if options.users.is_empty() {
            0o600
        } else {
            0o666
        };
        std::fs::set_permissions(path, Permissions::from_mode(mode))
            .map_err(Error::of("protect the socket"))?;
        let file = std::fs::metadata(path).map_err(Error::of("look at the socket"))?;
        rustix::net::listen(&socket, 128).map_err(&io)?;
        let file = Some((path.to_owned(), file.ino()));
        Self::start(options, Some(socket), file)
    }

    /// Publishes to the one subscriber at the other end of a socket ([`socket_pair`](crate::socket_pair)), such as a child process.
    /// [`send`](Self::send) waits until it has begun, and returns [`Error::SubscriberDied`] once it has died.
    ///
    /// # Errors
    /// Returns [`Error::Refused`] for a socket of another kind or a peer of another user.
    pub fn over(socket: OwnedFd) -> Result<Self> {
        let options = PublisherOptions {
            dead_peers: DeadPeers::Report,
            ..Default::default()
        };
        Self::over_with(socket, options)
    }

    /// As [`over`](Self::over), with options.
    ///
    /// # Errors
    /// As [`over`](Self::over).
    pub fn over_with(socket: OwnedFd, options: PublisherOptions) -> Result<Self> {
        check_kind(socket.as_fd())?;
        let publisher = Self::start(options, None, None)?;
        publisher.peers.add(socket, true)?;
        Ok(publisher)
    }

    fn start(
        options: PublisherOptions,
        listener: Option<OwnedFd>,
        file: Option<(PathBuf, u64)>,
    ) -> Result<Self> {
        let peers = Arc::new(Peers::new(options.users.clone())?);
        let served = peers.clone();
        let run = move || {
            // After a panic of what it freed nobody is there to keep what subscribers have: it stays for ever.
            let served = ManuallyDrop::new(served);
            served.run(listener);
            drop(ManuallyDrop::into_inner(served));
        };
        let thread = std::thread::Builder::new().name("arrow-device publisher".into());
        thread.spawn(run).map_err(Error::of("start a thread"))?;
        Ok(Self {
            peers,
            options,
            sending: Mutex::default(),
            file,
            process: std::process::id(),
        })
    }

    /// Waits until there are so many subscribers.
    ///
    /// # Errors
    /// Returns [`Error::TimedOut`] if there are fewer after `at_most`, and [`Error::Refused`] in a forked child.
    pub fn wait_for_subscribers(&self, subscribers: usize, at_most: Duration) -> Result<()> {
        check_process(self.process)?;
        let what = "too few subscribers have come";
        let is_done = |state: &mut State| (state.subscribers() >= subscribers).then_some(());
        self.peers.wait(at_most, what, is_done)
    }

    /// Waits until each subscriber may have another batch, so that the next [`send`](Self::send) waits for none that is there now.
    ///
    /// # Errors
    /// Returns [`Error::TimedOut`] if one may not after `at_most`, and [`Error::Refused`] in a forked child.
    pub fn wait_for_room(&self, at_most: Duration) -> Result<()> {
        check_process(self.process)?;
        let is_full = |peer: &Peer| self.is_full(peer);
        let is_done = |state: &mut State| (!state.peers.iter().any(is_full)).then_some(());
        self.peers.wait(at_most, STUCK, is_done)
    }

    /// Sends a batch to all subscribers, and returns how many these are. The batch is kept until each has returned it, gone or died.
    ///
    /// A batch that lies in one shareable allocation, on [`shared_cpu`](crate::shared_cpu), a [`shared_sim`](crate::shared_sim) or a
    /// `shared_cuda`, is not copied: slices and projections of such a batch neither. Its dictionaries may lie in others. Any other batch is copied once, on
    /// its device, and [`stats`](Self::stats) says so. From now on nobody can write to memory of the CPU that was sent, also not after
    /// [`DeviceBuffer::into_raw`](arrow_device::DeviceBuffer::into_raw).
    ///
    /// This does not wait for the work that fills the memory, unless sizes in device memory are not known yet: subscribers wait for it, or on
    /// CUDA their devices. It waits for subscribers that have as many batches as they may.
    ///
    /// # Errors
    /// Returns [`Error::Device`] if the batch has another schema than the first one, or is on a device whose memory cannot be shared;
    /// [`Error::TimedOut`] if a subscriber has returned nothing for long ([`PublisherOptions::patience`]), where those before it have
    /// the batch; [`Error::SubscriberDied`] as the [`DeadPeers`] say; [`Error::Refused`] in a forked child; [`Error::Io`].
    pub fn send(&self, batch: &DeviceRecordBatch) -> Result<usize> {
        check_process(self.process)?;
        let mut sending = lock(&self.sending);
        let prepared = Sending::prepare_with(&mut sending, batch)?;
        let ids = Vec::from_iter(self.peers.lock().peers.iter().map(|peer| peer.id));
        let mut sent = 0;
        for id in ids {
            if let Some(lease) = self.one(&prepared, id)? {
                sent += 1;
                // Not under the lock, which this may take. It need not wait for the others.
                prepared.tell_when_ready(&self.peers, (id, lease));
            }
        }
        let mut state = self.peers.lock();
        state.done.batches += 1;
        state.done.copied_batches += u64::from(prepared.copied.is_some());
        state.done.copied_bytes += prepared.copied.unwrap_or(0);
        drop(state);
        self.report()?;
        Ok(sent)
    }

    /// Whether a batch has to wait for this connection.
    fn is_full(&self, peer: &Peer) -> bool {
        peer.is_awaited() || peer.takes_batches() && peer.has_all(self.options.leases.max(1))
    }

    /// Sends a batch to a subscriber that still is one. Returns the lease.
    fn one(&self, prepared: &Prepared, id: u64) -> Result<Option<u64>> {
        self.peers.wait(self.options.patience, STUCK, |state| {
            let mut peers = state.peers.iter_mut();
            match peers.find(|peer| peer.id == id) {
                Some(peer) if self.is_full(peer) => None,
                Some(peer) if peer.takes_batches() => {
                    let lease = prepared.post(peer, &mut state.next_lease);
                    if !peer.is_flushed() {
                        self.peers.wake();
                    }
                    Some(Some(lease))
                }
                _ => Some(None),
            }
        })
    }

    /// Reports a subscriber that has died.
    fn report(&self) -> Result<()> {
        let mut state = self.peers.lock();
        if self.options.dead_peers == DeadPeers::Report && state.reported < state.died() {
            state.reported += 1;
            return Err(Error::SubscriberDied);
        }
        Ok(())
    }

    /// Ends the stream: subscribers read what was sent, and then its end. Waits until all memory is ready and all that was
    /// sent has left this process. What subscribers still have is kept for them.
    ///
    /// # Errors
    /// Returns [`Error::TimedOut`] if a subscriber reads nothing for long, and [`Error::SubscriberDied`] as the [`DeadPeers`] say.
    pub fn finish(self) -> Result<()> {
        self.end(&Outgoing::short(Kind::END, 0, &[]))
    }

    /// Ends the stream with an error: subscribers read what was sent, and then [`Error::Failed`] with this text.
    ///
    /// # Errors
    /// As [`finish`](Self::finish).
    pub fn fail(self, why: &str) -> Result<()> {
        self.end(&Outgoing::short(Kind::FAIL, 0, why.as_bytes()))
    }

    fn end(&self, last: &Outgoing) -> Result<()> {
        check_process(self.process)?;
        let (patience, peers) = (self.options.patience, &self.peers);
        let is_late = |peer: &Peer| peer.is_awaited() || peer.waits_for_memory();
        peers.wait(patience, STUCK, |state| {
            (!state.peers.iter().any(is_late)).then_some(())
        })?;
        let mut state = peers.lock();
        for peer in state.peers.iter_mut().filter(|peer| peer.takes_batches()) {
            peer.post(last.clone());
        }
        drop(state);
        peers.wake();
        peers.wait(patience, STUCK, |state| {
            state.peers.iter().all(Peer::is_flushed).then_some(())
        })?;
        self.report()
    }

    /// Returns what was done so far: nothing in a forked child. Waits for nothing.
    pub fn stats(&self) -> PublisherStats {
        if check_process(self.process).is_err() {
            return PublisherStats::default();
        }
        let state = self.peers.lock();
        PublisherStats {
            subscribers: state.subscribers(),
            leases: state.leases(),
            died: state.died(),
            ..state.done
        }
    }
}

impl Drop for Publisher {
    fn drop(&mut self) {
        if check_process(self.process).is_err() {
            return;
        }
        if let Some((path, number)) = &self.file {
            // Unless another publisher has put its own there.
            if std::fs::metadata(path).is_ok_and(|file| file.ino() == *number) {
                let _ = std::fs::remove_file(path);
            }
        }
        self.peers.end();
    }
}

/// What a subscriber does that is waited for.
const STUCK: &str = "a subscriber returns nothing";

/// Whether a path names a socket, and not a file of the user's.
fn is_socket(path: &Path) -> bool {
    std::fs::symlink_metadata(path).is_ok_and(|file| file.file_type().is_socket())
}

/// Whether nobody listens at an address.
fn is_stale(address: &SocketAddrUnix) -> bool {
    let socket = seqpacket(SocketFlags::NONBLOCK);
    socket.is_ok_and(|it| rustix::net::connect(&it, address) == Err(Errno::CONNREFUSED))
}
