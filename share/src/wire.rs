//! Packets of the protocol, on a socket that keeps their bounds.
//!
//! Each packet has a header of 16 bytes: kind (1), flags (1), 0 (2), bytes of the body (4), a number (8); all little-endian. A body
//! beyond [`INLINE`] bytes travels in a memory file, as the last descriptor.

use std::collections::VecDeque;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags,
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType, sockopt,
};

use crate::error::{Error, Result};
use crate::region::{Mapping, Region};

/// The bytes of each [`HELLO`](Kind::HELLO) and [`WELCOME`](Kind::WELCOME): what this is, and which version.
pub(crate) const VERSION: [u8; 8] = *b"ADSHARE\x01";
const HEADER: usize = 16;
/// The most bytes of a body that travel in the packet.
const INLINE: usize = 8 << 10;
/// The most bytes of any body.
const MOST: usize = 64 << 20;
/// Flag: the body is in a memory file.
const APART: u8 = 1;

/// What a packet says: one of these, or what the peer made up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Kind(u8);

impl Kind {
    /// Subscriber: its version.
    pub(crate) const HELLO: Self = Self(1);
    /// Publisher: its version, in answer.
    pub(crate) const WELCOME: Self = Self(2);
    /// Publisher: why the subscriber is not accepted. Nothing follows.
    pub(crate) const REFUSED: Self = Self(3);
    /// Publisher: the schema, before the first batch.
    pub(crate) const SCHEMA: Self = Self(4);
    /// Publisher: the values of a dictionary, which replace those of the same slot, in the memory that comes along. The number is the
    /// lease; the first 4 bytes of the body are the slot.
    pub(crate) const DICTIONARY: Self = Self(5);
    /// Publisher: a batch in the memory that comes along. The number is the lease.
    pub(crate) const OFFER: Self = Self(6);
    /// Publisher: the memory of a lease may be read; with a body, why it never can.
    pub(crate) const READY: Self = Self(7);
    /// Publisher: the stream is complete.
    pub(crate) const END: Self = Self(8);
    /// Publisher: the stream ends with an error.
    pub(crate) const FAIL: Self = Self(9);
    /// Subscriber: nothing uses the memory of this lease any more.
    pub(crate) const DONE: Self = Self(10);
    /// Subscriber: it takes nothing more. The number is the last lease that it has seen.
    pub(crate) const GONE: Self = Self(11);
}

/// A packet to send, any number of times.
#[derive(Clone, Debug)]
pub(crate) struct Outgoing {
    kind: Kind,
    pub(crate) number: u64,
    body: Arc<[u8]>,
    apart: Option<Arc<Region>>,
    memory: Option<Arc<Region>>,
}

impl Outgoing {
    /// With a body of any length, and memory of a lease.
    pub(crate) fn new(kind: Kind, body: &[u8], memory: Option<Arc<Region>>) -> Result<Self> {
        let apart = (body.len() > INLINE).then(|| Region::of(body));
        let apart = apart.transpose()?.map(Arc::new);
        let body = apart.as_ref().map_or(body, |_| &[]);
        Ok(Self {
            apart,
            memory,
            ..Self::short(kind, 0, body)
        })
    }

    /// With a short body, if any. A very long one loses its end.
    pub(crate) fn short(kind: Kind, number: u64, body: &[u8]) -> Self {
        Self {
            kind,
            number,
            body: body[..body.len().min(INLINE)].into(),
            apart: None,
            memory: None,
        }
    }

    /// Sends the packet, whole or not at all, without waiting. Returns whether there was room for it.
    ///
    /// # Errors
    /// Returns the system's error, such as [`Errno::PIPE`] once the peer has closed its end.
    pub(crate) fn send(&self, socket: BorrowedFd<'_>) -> rustix::io::Result<bool> {
        let apart = self.apart.as_ref();
        let length = apart.map_or(self.body.len(), |region| region.bytes) as u32;
        let mut header = [0; HEADER];
        header[0] = self.kind.0;
        header[1] = if apart.is_some() { APART } else { 0 };
        header[4..8].copy_from_slice(&length.to_le_bytes());
        header[8..].copy_from_slice(&self.number.to_le_bytes());
        let regions = self.memory.iter().chain(apart);
        let files: Vec<_> = regions.map(|region| region.file.as_fd()).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !files.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(&files));
        }
        let parts = [IoSlice::new(&header), IoSlice::new(&self.body)];
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        loop {
            match rustix::net::sendmsg(socket, &parts, &mut control, flags) {
                Ok(_) => return Ok(true),
                Err(Errno::INTR) => {}
                // In the socket, or in the system, where too much is on its way.
                Err(Errno::AGAIN | Errno::NOBUFS | Errno::TOOMANYREFS) => return Ok(false),
                Err(e) => return Err(e),
            }
        }
    }
}

/// Sends the packets that there is room for, without waiting. After an error there are none left.
///
/// # Errors
/// As [`Outgoing::send`].
pub(crate) fn flush(
    packets: &mut VecDeque<Outgoing>,
    socket: BorrowedFd<'_>,
) -> rustix::io::Result<()> {
    while let Some(packet) = packets.front() {
        if !packet.send(socket).inspect_err(|_| packets.clear())? {
            break;
        }
        packets.pop_front();
    }
    Ok(())
}

/// A packet that has come.
#[derive(Debug)]
pub(crate) struct Packet {
    pub(crate) kind: Kind,
    pub(crate) number: u64,
    pub(crate) body: Vec<u8>,
    pub(crate) memory: Option<OwnedFd>,
}

#[derive(Debug)]
pub(crate) enum Received {
    Packet(Packet),
    /// Nothing has come yet.
    Nothing,
    /// The peer has closed its end, and everything was read.
    Closed,
}

/// Receives a packet, without waiting. Descriptors are taken only if the peer is one that may send some.
///
/// # Errors
/// Returns [`Error::Protocol`] for what is no packet, and [`Error::Io`] if the system fails, for example because this process may not open
/// as many descriptors.
pub(crate) fn receive(socket: BorrowedFd<'_>, takes_files: bool) -> Result<Received> {
    let mut bytes = vec![0; HEADER + INLINE];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = match takes_files {
        true => RecvAncillaryBuffer::new(&mut space),
        false => RecvAncillaryBuffer::new(&mut []),
    };
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let mut resets = 0;
    let message = loop {
        let mut parts = [IoSliceMut::new(&mut bytes)];
        match rustix::net::recvmsg(socket, &mut parts, &mut control, flags) {
            Ok(message) => break message,
            Err(Errno::INTR) => {}
            // The peer closed its end before it had read everything. What it sent before is still here.
            Err(Errno::CONNRESET) if resets == 0 => resets = 1,
            Err(Errno::CONNRESET) => return Ok(Received::Closed),
            Err(Errno::AGAIN) => return Ok(Received::Nothing),
            Err(e) => return Err(Error::of("receive")(e)),
        }
    };
    // Closed again if this returns early.
    let mut files: Vec<OwnedFd> = Vec::new();
    for part in control.drain() {
        if let RecvAncillaryMessage::ScmRights(some) = part {
            files.extend(some);
        }
    }
    if message.bytes == 0 {
        return Ok(Received::Closed);
    }
    if message.flags.contains(ReturnFlags::CTRUNC) && takes_files {
        let why = std::io::Error::other("this process may not open as many descriptors");
        return Err(Error::of("receive a descriptor")(why));
    }
    let packet = bytes[..message.bytes].split_first_chunk::<HEADER>();
    let Some((&[kind, flags @ (0 | APART), 0, 0, a, b, c, d, number @ ..], body)) = packet else {
        return Error::broken("a packet of a wrong length, or with an unknown flag");
    };
    let mut body = body.to_vec();
    let length = u32::from_le_bytes([a, b, c, d]) as usize;
    if length > MOST || message.flags.contains(ReturnFlags::TRUNC) {
        return Error::broken("a packet that is too long");
    }
    if flags == APART {
        let file = files.pop();
        let file = file.ok_or_else(|| Error::protocol("a body apart does not come along"))?;
        body = Mapping::of_peer(file.as_fd(), length, true)?.to_vec();
    }
    let memory = files.pop();
    if body.len() != length || !files.is_empty() {
        return Error::broken("a packet of another length than it says");
    }
    Ok(Received::Packet(Packet {
        kind: Kind(kind),
        number: u64::from_le_bytes(number),
        body,
        memory,
    }))
}

/// Asks who is at the other end: this process's own user, or one of these.
///
/// # Errors
/// Returns [`Error::Refused`] for a peer of another user.
pub(crate) fn check_user(socket: BorrowedFd<'_>, others: &[u32]) -> Result<()> {
    let peer = sockopt::socket_peercred(socket);
    let peer = peer.map_err(Error::of("ask for the peer's user"))?;
    let user = peer.uid.as_raw();
    match user == rustix::process::geteuid().as_raw() || others.contains(&user) {
        true => Ok(()),
        false => Error::refused(format!(
            "the peer runs as user {user}, which is not allowed"
        )),
    }
}

/// Returns two ends of a connection, for [`Publisher::over`](crate::Publisher::over) and [`Subscriber::over`](crate::Subscriber::over). The
/// one of a child process can be its standard input, for example.
///
/// # Errors
/// Returns [`Error::Io`].
pub fn socket_pair() -> Result<(OwnedFd, OwnedFd)> {
    let (family, flags) = (AddressFamily::UNIX, SocketFlags::CLOEXEC);
    let pair = rustix::net::socketpair(family, SocketType::SEQPACKET, flags, None);
    pair.map_err(Error::of("make a pair of sockets"))
}

/// Returns a socket that keeps packets apart.
pub(crate) fn seqpacket(flags: SocketFlags) -> Result<OwnedFd> {
    let (family, flags) = (AddressFamily::UNIX, SocketFlags::CLOEXEC | flags);
    let socket = rustix::net::socket_with(family, SocketType::SEQPACKET, flags, None);
    socket.map_err(Error::of("make a socket"))
}

/// # Errors
/// Returns [`Error::Refused`] for a socket of another kind.
pub(crate) fn check_kind(socket: BorrowedFd<'_>) -> Result<()> {
    match sockopt::socket_type(socket) {
        Ok(SocketType::SEQPACKET) => Ok(()),
        Ok(_) => Error::refused("the socket is not of type SOCK_SEQPACKET"),
        Err(e) => Err(Error::of("look at a socket")(e)),
    }
}
