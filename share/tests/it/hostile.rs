//! Peers that do not keep to the protocol: packets changed, out of order, with other memory, from another version. Each is an error
//! of the one that reads it, which holds nothing afterwards.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use arrow_array::types::Int8Type;
use arrow_array::{
    Array, ArrayRef, DictionaryArray, FixedSizeBinaryArray, ListArray, RecordBatch, StringArray,
};
use arrow_buffer::{NullBuffer, OffsetBuffer};
use arrow_device_share::{Error, Publisher, PublisherOptions, Subscriber, shared_cpu, socket_pair};
use arrow_schema::Field;
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};

use crate::deaths::{LONG, shared, until};
use crate::raw::{
    DICTIONARY, DONE, END, GONE, HELLO, OFFER, Packet, READY, REFUSED, Raw, SCHEMA, VERSION,
};
use crate::round_trips::batch_of;
use crate::support::cases::batch;
use crate::support::r#gen::Nulls;
use crate::support::types::all_types;
use crate::two::{Held, alone};

/// The packets that a publisher sends for a batch.
fn packets(batch: &RecordBatch) -> Vec<Packet> {
    let (raw, there) = Raw::pair();
    let publisher = Publisher::over(there).unwrap();
    raw.subscribe();
    publisher
        .send(&shared_cpu().upload(batch).unwrap())
        .unwrap();
    publisher.finish().unwrap();
    std::iter::from_fn(|| raw.receive()).collect()
}

/// Reads what a publisher has sent that sends these, and then nothing more.
fn read(packets: &[Packet]) -> Vec<Result<RecordBatch, Error>> {
    let (raw, there) = Raw::pair();
    let subscriber = Subscriber::over(there).unwrap();
    raw.welcome();
    packets.iter().for_each(|packet| raw.pass(packet));
    drop(raw);
    let to_host = |batch: Result<arrow_device::DeviceRecordBatch, _>| Ok(batch?.to_host()?);
    subscriber.map(to_host).collect()
}

#[test]
fn as_it_was() {
    let batch = batch_of(Arc::new(StringArray::from(vec!["a", "bc", "def"])));
    let read = read(&packets(&batch));
    assert_eq!(read.len(), 1);
    assert_eq!(*read[0].as_ref().unwrap(), batch);
}

/// Bytes of all packets changed, for batches of every type. What is accepted all the same must be readable. The fuzz target `manifests`
/// changes any of them.
#[test]
fn changed_bytes() {
    if !alone("hostile::changed_bytes") {
        return;
    }
    // Panics of arrow-ipc are caught, but there should be none.
    std::panic::set_hook(Box::new(|panic| {
        eprintln!("{panic}");
        std::process::abort();
    }));
    drop(shared(0));
    let before = Held::now();
    let types: Vec<_> = all_types()
        .into_iter()
        .map(|(_, data_type)| data_type)
        .collect();
    for some in types.chunks(9) {
        let mut original = packets(&batch(some, 5, Nulls::Some, 1));
        for i in 0..original.len() {
            let bytes = original[i].body.len();
            // Of schemas fewer than of the descriptions of where things are.
            let step = if original[i].kind == SCHEMA { 23 } else { 7 };
            for at in (0..bytes).step_by(step) {
                let old = original[i].body[at];
                original[i].body[at] = [old ^ 1, old ^ 0x80, 0xff][at / step % 3];
                for batch in read(&original).into_iter().flatten() {
                    // All of it can be read.
                    assert!(!format!("{batch:?}").is_empty());
                }
                original[i].body[at] = old;
            }
        }
        drop(original);
    }
    until("nothing is left", || Held::now() == before);
}

#[test]
fn orders_of_packets_to_a_subscriber() {
    let batch = batch_of(Arc::new(StringArray::from(vec!["a", "bc", "def"])));
    let all = packets(&batch);
    let kinds: Vec<_> = all.iter().map(|packet| packet.kind).collect();
    assert_eq!(kinds, [SCHEMA, OFFER, END]);
    let [schema, offer, end] = [0, 1, 2].map(|i| &all[i]);
    let copy = |packet: &Packet| Packet {
        kind: packet.kind,
        number: packet.number,
        body: packet.body.clone(),
        memory: packet.memory.as_ref().map(|file| file.try_clone().unwrap()),
    };
    let of = |kind| Packet {
        kind,
        number: 1,
        body: Vec::new(),
        memory: None,
    };
    let wrong: [(&str, Vec<Packet>); 9] = [
        ("memory before the schema", vec![copy(offer)]),
        ("packet out of order", vec![copy(schema), copy(schema)]),
        ("does not wait", vec![copy(schema), of(READY)]),
        ("cut short", vec![copy(schema), of(OFFER)]),
        ("dictionary", vec![copy(schema), of(DICTIONARY)]),
        ("packet out of order", vec![of(DONE)]),
        ("packet out of order", vec![of(HELLO)]),
        ("unknown packet", vec![of(99)]),
        ("gone without ending", vec![copy(schema)]),
    ];
    for (why, packets) in wrong {
        let read = read(&packets);
        let error = read.into_iter().next().unwrap().unwrap_err().to_string();
        assert!(error.contains(why), "{why}: {error}");
    }
    // An end without batches is an end.
    assert!(read(&[copy(end)]).is_empty());
    let without = Packet {
        memory: None,
        ..copy(offer)
    };
    let error = read(&[copy(schema), without]).remove(0).unwrap_err();
    assert!(
        error.to_string().contains("do not come together"),
        "{error}"
    );
}

/// A connection that the publisher ends keeps what was lent, which its process may still read, until it is returned or the process is gone.
#[test]
fn leases_outlive_a_broken_connection() {
    for returns in [true, false] {
        let (raw, there) = Raw::pair();
        let publisher = Publisher::over(there).unwrap();
        raw.subscribe();
        publisher.send(&shared(0)).unwrap();
        raw.expect(SCHEMA);
        let lease = raw.expect(OFFER).number;
        raw.send(99, 0, b"", None);
        assert!(raw.receive().is_none());
        until("it is thrown out", || publisher.stats().subscribers == 0);
        assert_eq!((publisher.stats().leases, publisher.stats().died), (1, 1));
        let sent = publisher.send(&shared(1));
        assert!(matches!(sent, Err(Error::SubscriberDied)), "{sent:?}");
        match returns {
            true => raw.send(DONE, lease, b"", None),
            false => drop(raw),
        }
        until("the lease is back", || publisher.stats().leases == 0);
        assert_eq!((publisher.stats().left, publisher.stats().died), (0, 1));
    }
}

/// One that sends nonsense for ever keeps nobody waiting longer than the publisher's patience.
#[test]
fn nonsense_does_not_prolong_a_wait() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let options = PublisherOptions {
        leases: 1,
        patience: Duration::from_millis(300),
        ..Default::default()
    };
    let publisher = Publisher::bind_with(&path, options).unwrap();
    let _full = Subscriber::connect(&path).unwrap();
    let raw = Raw::connect(&path);
    raw.subscribe();
    publisher.wait_for_subscribers(2, LONG).unwrap();
    assert_eq!(publisher.send(&shared(0)).unwrap(), 2);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Relaxed) {
                raw.send(DONE, 99, b"", None);
                std::thread::sleep(Duration::from_millis(20));
            }
        });
        let start = Instant::now();
        let sent = publisher.send(&shared(1));
        is_over.store(true, Relaxed);
        assert!(matches!(sent, Err(Error::TimedOut(_))), "{sent:?}");
        assert!(start.elapsed() < Duration::from_secs(10));
    });
}

/// One that returns batches, and never a dictionary, is full, too.
#[test]
fn dictionaries_are_not_kept_without_end() {
    let (raw, there) = Raw::pair();
    let options = PublisherOptions {
        leases: 2,
        patience: Duration::from_millis(200),
        ..Default::default()
    };
    let publisher = Publisher::over_with(there, options).unwrap();
    raw.subscribe();
    let new_words = |i: usize| {
        let words = DictionaryArray::<Int8Type>::from_iter([format!("{i}").as_str()]);
        let batch = shared_cpu().upload(&batch_of(Arc::new(words))).unwrap();
        publisher.send(&batch)
    };
    let sent = (0..20).find_map(|i| {
        let full = new_words(i).err();
        while let Some(packet) = full.is_none().then(|| raw.receive()).flatten() {
            if packet.kind == OFFER {
                raw.send(DONE, packet.number, b"", None);
                break;
            }
        }
        full.map(|e| (i, e))
    });
    let (i, full) = sent.expect("an error");
    assert!(matches!(full, Error::TimedOut(_)), "{full}");
    // As many as two batches and the last one may have.
    assert_eq!((i, publisher.stats().leases), (6, 6));
}

#[test]
fn orders_of_packets_to_a_publisher() {
    let hello = (HELLO, 0, VERSION);
    let wrong: [&[(u8, u64, &[u8])]; 8] = [
        &[(DONE, 1, b"")],
        &[(GONE, 1, b"")],
        &[hello, hello],
        &[hello, (DONE, 99, b"")],
        &[hello, (GONE, 0, b""), (GONE, 0, b"")],
        &[hello, (OFFER, 1, b"")],
        &[hello, (77, 1, b"")],
        &[hello, (DONE, 1, b""), (DONE, 1, b"")],
    ];
    for packets in wrong {
        let (raw, there) = Raw::pair();
        let publisher = Publisher::over(there).unwrap();
        let sends = std::thread::spawn(move || {
            let sent = publisher.send(&shared(0));
            until("the subscriber is thrown out", || {
                let stats = publisher.stats();
                stats.subscribers == 0 && stats.leases == 0
            });
            drop(publisher);
            sent
        });
        for (kind, number, body) in packets {
            raw.send(*kind, *number, body, None);
        }
        // It closes the connection.
        while raw.receive().is_some() {}
        let _ = sends.join().unwrap();
    }
    // Not even a packet.
    let (raw, there) = Raw::pair();
    let publisher = Publisher::over(there).unwrap();
    raw.send_bytes(b"x", None);
    assert!(raw.receive().is_none());
    drop(publisher);
}

#[test]
fn another_version() {
    let (raw, there) = Raw::pair();
    let _publisher = Publisher::over(there).unwrap();
    raw.send(HELLO, 0, b"ADSHARE\x02", None);
    let refused = raw.expect(REFUSED);
    assert!(String::from_utf8(refused.body).unwrap().contains("version"));
    assert!(raw.receive().is_none());

    let (raw, there) = Raw::pair();
    let mut subscriber = Subscriber::over(there).unwrap();
    raw.send(crate::raw::WELCOME, 0, b"ADSHARE\x02", None);
    let refused = subscriber.next().unwrap();
    assert!(matches!(refused, Err(Error::Refused(_))), "{refused:?}");
    assert!(subscriber.next().is_none());

    let stream = std::os::unix::net::UnixStream::pair().unwrap().0;
    assert!(matches!(
        Subscriber::over(stream.into()),
        Err(Error::Refused(_))
    ));
}

fn file(bytes: u64, seals: SealFlags) -> OwnedFd {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = rustix::fs::memfd_create("hostile", flags).unwrap();
    rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, bytes).unwrap();
    rustix::fs::fcntl_add_seals(&file, seals).unwrap();
    file
}

/// A file without pages, of a size that fits large ones.
fn hollow(flags: MemfdFlags, seals: SealFlags) -> rustix::io::Result<OwnedFd> {
    let file = rustix::fs::memfd_create("hostile", MemfdFlags::ALLOW_SEALING | flags)?;
    rustix::fs::ftruncate(&file, 2 << 20)?;
    rustix::fs::fcntl_add_seals(&file, seals)?;
    Ok(file)
}

/// Memory that could change or shrink, that is shorter than described, or no memory at all.
#[test]
fn other_memory() {
    let batch = batch_of(Arc::new(StringArray::from(vec!["a", "bc", "def"])));
    let mut all = packets(&batch);
    let frozen = SealFlags::SHRINK | SealFlags::WRITE;
    let (pipe, _other_end) = rustix::pipe::pipe().unwrap();
    let mut wrong: Vec<(&str, OwnedFd)> = vec![
        ("has holes", hollow(MemfdFlags::CLOEXEC, frozen).unwrap()),
        ("shrink", file(1 << 16, SealFlags::WRITE)),
        ("still be written", file(1 << 16, SealFlags::SHRINK)),
        ("bytes of memory are described", file(64, frozen)),
        ("no sealed memory file", pipe),
        (
            "no sealed memory file",
            std::fs::File::open("/proc/self/exe").unwrap().into(),
        ),
    ];
    match hollow(MemfdFlags::HUGETLB, frozen) {
        Ok(file) => wrong.push(("pages of another size", file)),
        Err(e) => println!("skipped: this system has no large pages: {e}"),
    }
    for (why, memory) in wrong {
        all[1].memory = Some(memory);
        let error = read(&all).remove(0).unwrap_err().to_string();
        assert!(error.contains(why), "{why}: {error}");
    }
    all[1].body[8] ^= 1;
    let error = read(&all).remove(0).unwrap_err().to_string();
    assert!(error.contains("another machine"), "{error}");
    all[1].body[8] ^= 1;
    // Zeros are offsets and texts, too: such a batch is valid.
    all[1].memory = Some(file(1 << 16, frozen));
    assert_eq!(read(&all).remove(0).unwrap().num_rows(), 3);
}

/// Values of less than no bytes, at the top and in lists: a type that can be written, and that no array has.
#[test]
fn negative_widths() {
    const WIDTH: i32 = 4951;
    let values = [[1; WIDTH as usize]].into_iter();
    let values: ArrayRef = Arc::new(FixedSizeBinaryArray::try_from_iter(values).unwrap());
    let item = Arc::new(Field::new("item", values.data_type().clone(), true));
    let list = ListArray::new(item, OffsetBuffer::from_lengths([1]), values.clone(), None);
    for column in [values, Arc::new(list)] {
        let mut all = packets(&batch_of(column));
        let mut places = all[0].body.windows(4);
        let at = places.position(|bytes| bytes == WIDTH.to_le_bytes());
        let at = at.expect("the width");
        all[0].body[at..at + 4].copy_from_slice(&(-1_i32).to_le_bytes());
        let error = read(&all).remove(0).unwrap_err();
        assert!(matches!(error, Error::Protocol(_)), "{error}");
    }
}

/// One more connection than there can be is told so, once.
#[test]
fn too_many_connections() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("socket");
    let _publisher = Publisher::bind(&path).unwrap();
    let subscribe = |_| {
        let raw = Raw::connect(&path);
        raw.subscribe();
        raw
    };
    let _all = Vec::from_iter((0..256).map(subscribe));
    let refused = Subscriber::connect(&path).unwrap().next().unwrap();
    let refused = refused.unwrap_err().to_string();
    let expected = "refused: the publisher has as many subscribers as it can";
    assert_eq!(refused, expected);
}

/// Values that are not valid for their type, in memory that is as it should be.
#[test]
fn invalid_values() {
    let batch = batch_of(Arc::new(StringArray::from(vec!["a", "bc", "def"])) as ArrayRef);
    let mut all = packets(&batch);
    let invalid = file(1 << 16, SealFlags::SHRINK);
    rustix::io::pwrite(&invalid, &[0xff; 1 << 16], 0).unwrap();
    rustix::fs::fcntl_add_seals(&invalid, SealFlags::WRITE).unwrap();
    all[1].memory = Some(invalid);
    let error = read(&all).remove(0).unwrap_err();
    assert!(matches!(&error, Error::Device(_)), "{error}");
}

/// Under a null, any bytes are valid: the subscriber gets zeros there.
#[test]
fn no_text_under_a_null() {
    let (offsets, nulls) = (vec![0, 1, 3, 6], vec![true, false, true]);
    let (offsets, nulls) = (OffsetBuffer::new(offsets.into()), NullBuffer::from(nulls));
    // SAFETY: nobody reads the text under the null.
    let texts = unsafe {
        StringArray::new_unchecked(offsets, b"a\xff\xffdef".as_slice().into(), Some(nulls))
    };
    let read = read(&packets(&batch_of(Arc::new(texts))))
        .remove(0)
        .unwrap();
    let mended = StringArray::from(vec![Some("a"), None, Some("def")]);
    assert_eq!(read, batch_of(Arc::new(mended)));
}

/// Neither side can write to memory of the CPU that was sent, nor change its size.
#[test]
fn what_was_sent_is_frozen() {
    let (raw, there) = Raw::pair();
    let publisher = Publisher::over(there).unwrap();
    raw.subscribe();
    let sent = shared(3);
    let address = sent
        .column(0)
        .unwrap()
        .buffer(1)
        .unwrap()
        .address()
        .address();
    publisher.send(&sent).unwrap();
    raw.expect(SCHEMA);
    let memory = raw.expect(OFFER).memory.unwrap();
    assert!(rustix::io::pwrite(&memory, b"x", 0).is_err());
    assert!(rustix::fs::ftruncate(&memory, 0).is_err());
    assert!(rustix::fs::fcntl_add_seals(&memory, SealFlags::GROW).is_err());
    let writable = rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE;
    // SAFETY: a new mapping, which is not used.
    let mapped = unsafe {
        let flags = rustix::mm::MapFlags::SHARED;
        rustix::mm::mmap(std::ptr::null_mut(), 64, writable, flags, &memory, 0)
    };
    assert!(mapped.is_err());
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let start = format!("{:x}-", address - address % 4096);
    let mapping = maps.lines().find(|line| line.starts_with(&start)).unwrap();
    assert!(mapping.contains(" r--p "), "{mapping}");
    assert_eq!(sent.to_host().unwrap(), crate::deaths::numbers(3));
}

/// A process that may not open as many files gets an error, not a batch without its memory, and the lease goes back.
#[test]
fn a_full_table_of_descriptors() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    if !alone("hostile::a_full_table_of_descriptors") {
        return;
    }
    let (here, there) = socket_pair().unwrap();
    let publisher = Publisher::over(here).unwrap();
    let mut subscriber = Subscriber::over(there).unwrap();
    let batch = shared(0);
    publisher.send(&batch).unwrap();
    drop(subscriber.next().unwrap().unwrap());
    publisher.send(&batch).unwrap();
    let limit = getrlimit(Resource::Nofile);
    let mut full = Vec::new();
    let few = Rlimit {
        current: Some(64),
        ..limit
    };
    setrlimit(Resource::Nofile, few).unwrap();
    while let Ok(file) = std::fs::File::open("/dev/null") {
        full.push(file);
    }
    let error = subscriber.next().unwrap().unwrap_err().to_string();
    assert!(error.contains("may not open as many"), "{error}");
    assert!(subscriber.next().is_none());
    // Nor can the publisher make memory, and says so.
    assert!(shared_cpu().upload(&crate::deaths::numbers(1)).is_err());
    drop(full);
    setrlimit(Resource::Nofile, limit).unwrap();
    until("the lease is back", || publisher.stats().leases == 0);
    assert_eq!(publisher.stats().died, 0);
}
