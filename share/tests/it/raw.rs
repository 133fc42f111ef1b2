//! The protocol by hand: packets of any kind and content, as the wire has them.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use arrow_device_share::socket_pair;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

pub(crate) const VERSION: &[u8] = b"ADSHARE\x01";

pub(crate) const HELLO: u8 = 1;
pub(crate) const WELCOME: u8 = 2;
pub(crate) const REFUSED: u8 = 3;
pub(crate) const SCHEMA: u8 = 4;
pub(crate) const DICTIONARY: u8 = 5;
pub(crate) const OFFER: u8 = 6;
pub(crate) const READY: u8 = 7;
pub(crate) const END: u8 = 8;
pub(crate) const DONE: u8 = 10;
pub(crate) const GONE: u8 = 11;

/// A packet as it was received.
#[derive(Debug)]
pub(crate) struct Packet {
    pub(crate) kind: u8,
    pub(crate) number: u64,
    pub(crate) body: Vec<u8>,
    pub(crate) memory: Option<OwnedFd>,
}

/// One end of a connection.
#[derive(Debug)]
pub(crate) struct Raw(pub(crate) OwnedFd);

impl Raw {
    /// Returns an end, and the other one.
    pub(crate) fn pair() -> (Self, OwnedFd) {
        let (here, there) = socket_pair().unwrap();
        (Self(here), there)
    }

    /// Connects to a publisher's socket.
    pub(crate) fn connect(path: &Path) -> Self {
        let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
        let socket = rustix::net::socket_with(family, kind, SocketFlags::CLOEXEC, None).unwrap();
        rustix::net::connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
        Self(socket)
    }

    pub(crate) fn send(&self, kind: u8, number: u64, body: &[u8], memory: Option<BorrowedFd<'_>>) {
        let mut header = [0; 16];
        header[0] = kind;
        header[4..8].copy_from_slice(&(body.len() as u32).to_le_bytes());
        header[8..].copy_from_slice(&number.to_le_bytes());
        self.send_bytes(&[&header, body].concat(), memory);
    }

    pub(crate) fn send_bytes(&self, bytes: &[u8], memory: Option<BorrowedFd<'_>>) {
        let files: Vec<_> = memory.into_iter().collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !files.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(&files));
        }
        let parts = [IoSlice::new(bytes)];
        // The other end may be closed by now.
        let _ = rustix::net::sendmsg(&self.0, &parts, &mut control, SendFlags::NOSIGNAL);
    }

    /// Waits for the next packet; `None` at the end.
    pub(crate) fn receive(&self) -> Option<Packet> {
        let mut bytes = vec![0; 1 << 16];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(&mut bytes)];
        let flags = RecvFlags::CMSG_CLOEXEC;
        let received = rustix::net::recvmsg(&self.0, &mut parts, &mut control, flags);
        let n = received.map_or(0, |message| message.bytes);
        let files = control.drain().flat_map(|part| match part {
            RecvAncillaryMessage::ScmRights(files) => files.collect::<Vec<_>>(),
            _ => Vec::new(),
        });
        let memory = files.last();
        if n == 0 {
            return None;
        }
        assert_eq!(bytes[1], 0, "a body apart");
        Some(Packet {
            kind: bytes[0],
            number: u64::from_le_bytes(bytes[8..16].try_into().unwrap()),
            body: bytes[16..n].to_vec(),
            memory,
        })
    }

    /// Waits for a packet of this kind.
    #[track_caller]
    pub(crate) fn expect(&self, kind: u8) -> Packet {
        let packet = self.receive().expect("a packet");
        assert_eq!(packet.kind, kind, "{packet:?}");
        packet
    }

    /// Says hello, as a subscriber.
    pub(crate) fn subscribe(&self) {
        self.send(HELLO, 0, VERSION, None);
        assert_eq!(self.expect(WELCOME).body, VERSION);
    }

    /// Answers a subscriber, as a publisher.
    pub(crate) fn welcome(&self) {
        assert_eq!(self.expect(HELLO).body, VERSION);
        self.send(WELCOME, 0, VERSION, None);
    }

    /// Sends a packet on.
    pub(crate) fn pass(&self, packet: &Packet) {
        let memory = packet.memory.as_ref().map(|file| file.as_fd());
        self.send(packet.kind, packet.number, &packet.body, memory);
    }
}
