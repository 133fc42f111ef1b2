//! Streams of arrays read on the host: in order, ahead of the consumer, and to their end.

use std::cell::Cell;
use std::rc::Rc;
use std::sync::Arc;

use arrow_array::{Array, ArrayRef, Int32Array, Int64Array};
use arrow_device::{
    Device, DeviceArray, DeviceArrayIterator, DeviceArrayReader, Devices, Error, Result,
};
use arrow_schema::{ArrowError, DataType, Field};

use crate::simkit::{MODES, Sim};

fn sent(n: i64) -> ArrayRef {
    Arc::new(
        (0..100)
            .map(|i| (i % 3 != 0).then_some(i * n))
            .collect::<Int64Array>(),
    )
}

/// A stream of these arrays, and how often it was asked.
fn stream(
    device: &Device,
    arrays: Vec<Result<DeviceArray>>,
) -> (impl DeviceArrayReader, Rc<Cell<usize>>) {
    let asked = Rc::new(Cell::new(0));
    let asking = asked.clone();
    let mut arrays = arrays.into_iter();
    let next = std::iter::from_fn(move || {
        asking.set(asking.get() + 1);
        arrays.next()
    });
    let field = Arc::new(Field::new("ids", DataType::Int64, true));
    let stream = DeviceArrayIterator::new(next, field, device.id().device_type);
    (stream, asked)
}

#[test]
fn arrays_are_downloaded_ahead_of_the_consumer() {
    for mode in MODES {
        for prefetch in [None, Some(0), Some(1), Some(3)] {
            let sim = Sim::new(mode);
            let up = |n| Ok(sim.upload_array(&sent(n))?.slice(n as usize, 50).unwrap());
            let (stream, asked) = stream(&sim, (0..6).map(up).collect());
            sim.synchronize().unwrap();
            let before = sim.stats();
            let mut host = stream.into_host_reader();
            assert_eq!(host.field().name(), "ids");
            if let Some(prefetch) = prefetch {
                host = host.with_prefetch(prefetch);
            }
            assert_eq!(asked.get(), 0);
            let ahead = prefetch.unwrap_or(1);
            for n in 0..6 {
                assert_eq!(*host.next().unwrap().unwrap(), *sent(n as i64).slice(n, 50));
                assert_eq!(asked.get(), (n + 1 + ahead).min(7), "{n}, {prefetch:?}");
            }
            assert!(host.next().is_none() && host.next().is_none());
            let cost = sim.stats().since(&before);
            assert_eq!((cost.host_waits, cost.allocations), (6, 0), "{cost:?}");
            drop(host);
            sim.assert_done();
        }
    }
}

#[test]
fn arrays_on_the_host_are_neither_copied_nor_asked_for_ahead() {
    let cpu = Devices::cpu();
    let arrays = [sent(1), sent(2)];
    let up = arrays.iter().map(|array| cpu.upload_array(array)).collect();
    let (stream, asked) = stream(&cpu, up);
    for (i, back) in stream.into_host_reader().enumerate() {
        let back = back.unwrap().to_data();
        assert_eq!(
            back.buffers()[0].as_ptr(),
            arrays[i].to_data().buffers()[0].as_ptr()
        );
        assert_eq!(asked.get(), i + 1);
    }
}

#[test]
fn an_error_comes_in_its_place_and_ends_the_reader() {
    let cpu = Devices::cpu();
    let up = |n| cpu.upload_array(&sent(n));
    let other = cpu.upload_array(&Int32Array::from(vec![1]));
    let gone = Err(Error::from(ArrowError::CDataInterface("gone".into())));
    for (bad, text) in [
        (gone, "gone"),
        (
            other,
            "array is Int32 in the array, but Int64 in its stream: cast it first",
        ),
    ] {
        let (stream, asked) = stream(&cpu, vec![up(1), bad, up(2)]);
        let mut host = stream.into_host_reader().with_prefetch(3);
        assert!(host.next().unwrap().is_ok());
        let e = host.next().unwrap().unwrap_err().to_string();
        assert!(e.contains(text), "{e}");
        assert!(host.next().is_none());
        assert_eq!(asked.get(), 2);
    }
}
