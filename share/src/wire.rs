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

/// The bytes of each [`HELLO`](Kind::Hello) and [`WELCOME`](Kind::Welcome): what this is, and which version.
pub(crate) const VERSION: [u8; 8] = *b"ADSHARE\x01";
const HEADER: usize = 16;
/// The most bytes of a body that travel in the packet.
const INLINE: usize = 8 << 10;
/// The most bytes of any body.
const MOST: usize = 64 << 20;
/// Flag: the body is in a memory file.
const APART: u8 = 1;

/// What a packet says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub(crate) enum Kind {
    /// Subscriber: its version.
    Hello = 1,
    /// Publisher: its version, in answer.
    Welcome = 2,
    /// Publisher: why the subscriber is not accepted. Nothing follows.
    Refused = 3,
    /// Publisher: the schema, before the first batch.
    Schema = 4,
    /// Publisher: the values of a dictionary, which replace those of the same slot, in the memory that comes along. The number is the
    /// lease; the first 4 bytes of the body are the slot.
    Dictionary = 5,
    /// Publisher: a batch in the memory that comes along. The number is the lease.
    Offer = 6,
    /// Publisher: the memory of a lease may be read; with a body, why it never can.
    Ready = 7,
    /// Publisher: the stream is complete.
    End = 8,
    /// Publisher: the stream ends with an error.
    Fail = 9,
    /// Subscriber: nothing uses the memory of this lease any more.
    Done = 10,
    /// Subscriber: it takes nothing more. The number is the last lease that it has seen.
    Gone = 11,
}

impl Kind {
    const ALL: [Self; 11] = {
        use Kind::*;
        [
            Hello, Welcome, Refused, Schema, Dictionary, Offer, Ready, End, Fail, Done, Gone,
        ]
    };

    fn from_byte(byte: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u8 == byte)
    }
}

/// A packet to send, any number of times.
#[derive(Clone, Debug)]
pub(crate) struct Outgoing {
    kind: Kind,
    number: u64,
    body: Arc<[u8]>,
    apart: Option<Arc<Region>>,
    memory: Option<Arc<Region>>,
}

impl Outgoing {
    pub(crate) fn new(kind: Kind, body: &[u8]) -> Result<Self> {
        let apart = (body.len() > INLINE).then(|| Region::of(body));
        let apart = apart.transpose()?.map(Arc::new);
        let body = apart.as_ref().map_or(body, |_| &[]).into();
        Ok(Self {
            body,
            apart,
            ..Self::empty(kind, 0)
        })
    }

    /// With a text, of which a very long one loses its end.
    pub(crate) fn text(kind: Kind, text: &str) -> Self {
        let body = &text.as_bytes()[..text.len().min(INLINE)];
        Self {
            body: body.into(),
            ..Self::empty(kind, 0)
        }
    }

    /// Without a body.
    pub(crate) fn empty(kind: Kind, number: u64) -> Self {
        Self {
            kind,
            number,
            body: Arc::default(),
            apart: None,
            memory: None,
        }
    }

    pub(crate) fn with_memory(self, memory: Option<Arc<Region>>) -> Self {
        Self { memory, ..self }
    }

    /// Returns the same packet with another number.
    pub(crate) fn numbered(&self, number: u64) -> Self {
        Self {
            number,
            ..self.clone()
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
        header[0] = self.kind as u8;
        header[1] = if apart.is_some() { APART } else { 0 };
        header[4..8].copy_from_slice(&length.to_le_bytes());
        header[8..].copy_from_slice(&self.number.to_le_bytes());
        let files = self
            .memory
            .iter()
            .chain(apart)
            .map(|region| region.file.as_fd());
        let files: Vec<BorrowedFd<'_>> = files.collect();
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
    if message.bytes < HEADER || message.flags.contains(ReturnFlags::TRUNC) {
        return Error::broken("a packet of a wrong length");
    }
    let mut number = [0; 8];
    number.copy_from_slice(&bytes[8..HEADER]);
    let length = u32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]) as usize;
    let kind = Kind::from_byte(bytes[0]).ok_or_else(|| Error::protocol("an unknown packet"))?;
    let is_apart = bytes[1] == APART;
    if bytes[1] & !APART != 0 || bytes[2..4] != [0, 0] || length > MOST {
        return Error::broken("a packet with an unknown flag");
    }
    bytes.truncate(message.bytes);
    let mut body = bytes.split_off(HEADER);
    if is_apart {
        let file = files.pop();
        let file = file.ok_or_else(|| Error::protocol("a body apart does not come along"))?;
        body = Mapping::of_peer(file.as_fd(), length, true)?.to_vec();
    }
    let memory = files.pop();
    if body.len() != length || !files.is_empty() {
        return Error::broken("a packet of another length than it says");
    }
    Ok(Received::Packet(Packet {
        kind,
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
