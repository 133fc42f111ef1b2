//! Dictionaries: sent once, replaced by number, those inside others first.

use std::sync::Arc;

use arrow_array::types::Int32Type;
use arrow_array::{Array, ArrayRef, DictionaryArray, Int32Array, ListArray, RecordBatch};
use arrow_buffer::OffsetBuffer;
use arrow_device::{DeviceArray, DeviceRecordBatch};
use arrow_device_share::{Publisher, Subscriber, shared_cpu, socket_pair};
use arrow_schema::{DataType, Field};

use crate::raw::{DICTIONARY, OFFER, Packet, Raw, SCHEMA};
use crate::round_trips::batch_of;

fn words(words: &[&str]) -> ArrayRef {
    Arc::new(
        words
            .iter()
            .copied()
            .collect::<DictionaryArray<Int32Type>>(),
    )
}

/// Keys of lists of words, which are keys themselves.
fn nested(seed: usize) -> ArrayRef {
    let words = words(&["a", "b", "a", ["c", "d"][seed % 2], "b"]);
    let item = Arc::new(Field::new_list_field(words.data_type().clone(), true));
    let lists = ListArray::new(item, OffsetBuffer::from_lengths([2, 0, 3]), words, None);
    let keys = Int32Array::from_iter_values((0..20).map(|i| i % 3));
    Arc::new(DictionaryArray::new(keys, Arc::new(lists)))
}

/// The packets of a publisher that sends these, after the schema.
fn packets(batches: &[DeviceRecordBatch]) -> Vec<Packet> {
    let (raw, there) = Raw::pair();
    let publisher = Publisher::over(there).unwrap();
    raw.subscribe();
    for batch in batches {
        publisher.send(batch).unwrap();
    }
    publisher.finish().unwrap();
    raw.expect(SCHEMA);
    std::iter::from_fn(|| raw.receive()).collect()
}

fn kinds(packets: &[Packet]) -> Vec<u8> {
    let of_memory = packets.iter().map(|packet| packet.kind);
    of_memory
        .filter(|kind| [DICTIONARY, OFFER].contains(kind))
        .collect()
}

#[test]
fn sent_once_and_replaced() {
    let first = shared_cpu()
        .upload(&batch_of(words(&["x", "y", "x", "z"])))
        .unwrap();
    let second = shared_cpu().upload(&batch_of(words(&["v", "w"]))).unwrap();
    let slice = first.slice(1, 2).unwrap();
    let all = [first.clone(), slice, second.clone(), second, first];
    let packets = packets(&all);
    let expected = [
        DICTIONARY, OFFER, OFFER, DICTIONARY, OFFER, OFFER, DICTIONARY, OFFER,
    ];
    assert_eq!(kinds(&packets), expected);
    // The memory that a dictionary and its batch share is the same file.
    let number = |packet: &Packet, at: usize| packet.body[at..at + 8].to_vec();
    assert_eq!(number(&packets[0], 4 + 24), number(&packets[1], 24));
}

#[test]
fn inside_others() {
    let batches: [RecordBatch; 2] = [0, 1].map(|seed| batch_of(nested(seed)));
    let [first, second] = [0, 1].map(|i| shared_cpu().upload(&batches[i]).unwrap());
    let all = [first.clone(), first.slice(5, 9).unwrap(), second, first];
    let found = kinds(&packets(&all));
    let (d, o) = (DICTIONARY, OFFER);
    assert_eq!(found, [d, d, o, o, d, d, o, d, d, o]);

    let (here, there) = socket_pair().unwrap();
    let publisher = Publisher::over(here).unwrap();
    let subscriber = Subscriber::over(there).unwrap();
    all.iter()
        .for_each(|batch| _ = publisher.send(batch).unwrap());
    publisher.finish().unwrap();
    let received = subscriber.map(|batch| batch.unwrap().to_host().unwrap());
    let expected = [
        &batches[0],
        &batches[0].slice(5, 9),
        &batches[1],
        &batches[0],
    ]
    .map(Clone::clone);
    assert_eq!(received.collect::<Vec<_>>(), expected);
}

/// An array with other children, of the same type.
fn with_child(array: &DeviceArray, child: DeviceArray) -> DeviceArray {
    let buffers = [array.buffer(1)];
    // SAFETY: the values refer to no more rows than the child has, and there are no nulls.
    let made = unsafe {
        let data_type = array.data_type().clone();
        DeviceArray::from_parts(
            child.device(),
            data_type,
            array.len(),
            None,
            &buffers,
            std::slice::from_ref(&child),
        )
    };
    made.unwrap()
}

/// The outer values are the same memory, but what is inside them is not.
#[test]
fn another_one_inside_the_same_values() {
    let [first, second] = [0, 1].map(|seed| shared_cpu().upload(&batch_of(nested(seed))).unwrap());
    let lists = |batch: &DeviceRecordBatch| batch.column(0).unwrap().child(0).unwrap();
    let words = lists(&second).child(0).unwrap().child(0).unwrap();
    let keys = with_child(&lists(&first).child(0).unwrap(), words);
    let column = with_child(&first.column(0).unwrap(), with_child(&lists(&first), keys));
    let mixed = DeviceRecordBatch::try_new(first.schema(), &[column]).unwrap();
    let (d, o) = (DICTIONARY, OFFER);
    assert_eq!(kinds(&packets(&[first, mixed])), [d, d, o, d, d, o]);
}

#[test]
fn keys_of_keys_are_refused() {
    let inner = DataType::Dictionary(Box::new(DataType::Int32), Box::new(DataType::Utf8));
    let keys = DataType::Dictionary(Box::new(DataType::Int32), Box::new(inner));
    let column = arrow_array::new_empty_array(&keys);
    let (publisher, _subscriber) = {
        let (here, there) = socket_pair().unwrap();
        (
            Publisher::over(here).unwrap(),
            Subscriber::over(there).unwrap(),
        )
    };
    let refused = publisher.send(&shared_cpu().upload(&batch_of(column)).unwrap());
    assert!(refused.unwrap_err().to_string().contains("cannot describe"));
}
