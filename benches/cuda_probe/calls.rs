//! What single calls cost: pools, lists of small copies, events.

use std::ffi::c_void;
use std::hint::black_box;
use std::time::Instant;

use arrow_device::cuda::cudarc::driver::sys::{self, CUpointer_attribute};

use crate::Probe;
use crate::data::fill;
use crate::raw::{Copies, Event, Locked, OnDevice, Pool, check};
use crate::stats::{Res, Sample, Table, measure, since, size, time};

/// How a block of device memory is had.
enum Way {
    Pool(Pool),
    Plain,
}

pub(crate) fn pools(probe: &Probe) -> Res<()> {
    println!(
        "A block of device memory: allocated, 1 byte of it filled and waited for, freed, waited for."
    );
    println!(
        "The pool with threshold 0 gives memory back when the host waits; the other keeps it.\n"
    );
    let mut table = Table::new(&[
        "bytes",
        "from",
        "allocate",
        "p10",
        "p90",
        "until usable",
        "p10",
        "p90",
        "free",
        "p10",
        "p90",
        "with last wait",
        "p10",
        "p90",
        "rounds",
    ]);
    for bytes in [4 << 10, 1 << 20, 64 << 20, 1 << 30] {
        if bytes > probe.bytes(1 << 30, 1 << 20) {
            continue;
        }
        for (name, way) in [
            ("pool, threshold 0", Way::Pool(Pool::new(probe.ordinal, 0)?)),
            (
                "pool, threshold max",
                Way::Pool(Pool::new(probe.ordinal, u64::MAX)?),
            ),
            ("cuMemAlloc", Way::Plain),
        ] {
            let mut row = vec![size(bytes), name.to_owned()];
            let samples = match measure(probe.rounds(30, 0.1), || one_block(probe, &way, bytes)) {
                Ok(samples) => samples,
                Err(e) => {
                    table.row([size(bytes), name.to_owned(), "failed".into()]);
                    return Err(e);
                }
            };
            for sample in &samples {
                row.extend([sample.median(), sample.low(), sample.high()].map(time));
            }
            row.push(samples[0].len().to_string());
            table.row(row);
        }
    }
    table.print();
    Ok(())
}

fn one_block(probe: &Probe, way: &Way, bytes: usize) -> Res<[f64; 4]> {
    let stream = &probe.stream;
    let start = Instant::now();
    let plain = match way {
        Way::Pool(_) => None,
        Way::Plain => Some(OnDevice::new(bytes)?),
    };
    let address = match (way, &plain) {
        (_, Some(plain)) => plain.address(),
        (Way::Pool(pool), None) => pool.allocate(bytes, stream)?,
        (Way::Plain, None) => return Err("no block".into()),
    };
    let allocated = since(start);
    // SAFETY: the byte lies in the block that was just allocated in this stream's order, and is
    // freed after the wait.
    unsafe { stream.fill(address, 1, 1) }?;
    stream.wait()?;
    let usable = since(start);
    let start = Instant::now();
    match (way, plain) {
        // SAFETY: the block was allocated from this pool above, and is freed once, after its uses
        // in the stream's order.
        (Way::Pool(pool), _) => unsafe { pool.free(address, stream) }?,
        (Way::Plain, Some(plain)) => plain.free()?,
        (Way::Plain, None) => {}
    }
    let freed = since(start);
    stream.wait()?;
    Ok([allocated, usable, freed, since(start)])
}

pub(crate) fn small_copies(probe: &Probe) -> Res<()> {
    let count = probe.bytes(2000, 20);
    println!("{count} copies between page-locked memory and one block of the device.");
    println!(
        "The pieces lie twice their size apart on the host, at multiples of 64 bytes, and close together"
    );
    println!(
        "on the device. packed: memcpy to or from one block, and one copy. Until the event was waited for.\n"
    );
    let mut table = Table::new(&[
        "direction",
        "piece",
        "way",
        "submit",
        "p10",
        "p90",
        "total",
        "p10",
        "p90",
        "per piece",
        "rounds",
    ]);
    for bytes in [8usize, 64, 4 << 10, 32 << 10] {
        let device_step = bytes.next_multiple_of(64);
        let host_step = 2 * device_step;
        let mut pieces = Locked::new(count * host_step)?;
        let mut packed = Locked::new(count * device_step)?;
        fill(pieces.bytes_mut(), 4);
        fill(packed.bytes_mut(), 5);
        let device = OnDevice::new(count * device_step)?;
        let event = Event::new()?;
        for up in [true, false] {
            let mut copies = Copies::default();
            for i in 0..count {
                let there = device.address() + (i * device_step) as u64;
                let here = pieces.address() + (i * host_step) as u64;
                match up {
                    true => copies.add(there, here, bytes),
                    false => copies.add(here, there, bytes),
                }
            }
            let mut add = |way: &str, run: &mut dyn FnMut() -> Res<[f64; 2]>| -> Res<()> {
                let direction = if up { "up" } else { "down" };
                let first = [direction.to_owned(), size(bytes), way.to_owned()];
                match measure(probe.rounds(30, 0.1), run) {
                    Ok([submit, total]) => {
                        let rest = cells(&submit, &total, count);
                        table.row(first.into_iter().chain(rest));
                    }
                    Err(e) => table.row(first.into_iter().chain([e.to_string()])),
                }
                Ok(())
            };
            add("loop", &mut || {
                let start = Instant::now();
                for (dst, src, bytes) in copies.iter() {
                    // SAFETY: pieces of blocks that live until the wait, used by one copy each.
                    unsafe { probe.stream.copy(dst, src, bytes) }?;
                }
                finish(probe, &event, start)
            })?;
            match &probe.batch {
                Some(batch) => add(batch.name(), &mut || {
                    let start = Instant::now();
                    // SAFETY: pieces of blocks that live until the wait, used by one copy each.
                    unsafe { batch.copy(&copies, &probe.stream) }?;
                    finish(probe, &event, start)
                })?,
                None => println!("The driver has no call for lists of copies."),
            }
            let all = count * device_step;
            add("packed", &mut || {
                let start = Instant::now();
                if up {
                    let (to, from) = (packed.bytes_mut(), pieces.bytes_mut());
                    let parts = to.chunks_mut(device_step).zip(from.chunks(host_step));
                    for (to, from) in parts {
                        to[..bytes].copy_from_slice(&from[..bytes]);
                    }
                    // SAFETY: pieces of blocks that live until the wait, used by one copy each.
                    unsafe { probe.stream.copy(device.address(), packed.address(), all) }?;
                    return finish(probe, &event, start);
                }
                // SAFETY: pieces of blocks that live until the wait, used by one copy each.
                unsafe { probe.stream.copy(packed.address(), device.address(), all) }?;
                let [submitted, _] = finish(probe, &event, start)?;
                let (to, from) = (pieces.bytes_mut(), packed.bytes_mut());
                let parts = to.chunks_mut(host_step).zip(from.chunks(device_step));
                for (to, from) in parts {
                    to[..bytes].copy_from_slice(&from[..bytes]);
                }
                black_box(to);
                Ok([submitted, since(start)])
            })?;
        }
    }
    table.print();
    Ok(())
}

/// The seconds since `start` until now, and until the stream has done all.
fn finish(probe: &Probe, event: &Event, start: Instant) -> Res<[f64; 2]> {
    let submitted = since(start);
    event.record(&probe.stream)?;
    event.wait()?;
    Ok([submitted, since(start)])
}

fn cells(submit: &Sample, total: &Sample, count: usize) -> [String; 8] {
    [
        time(submit.median()),
        time(submit.low()),
        time(submit.high()),
        time(total.median()),
        time(total.low()),
        time(total.high()),
        time(total.median() / count as f64),
        total.len().to_string(),
    ]
}

pub(crate) fn events(probe: &Probe) -> Res<()> {
    let calls = probe.bytes(1000, 10);
    println!(
        "Per call: the mean of {calls} in a row is one value; streams are idle before each row of calls.\n"
    );
    let mut table = Table::new(&["call", "median", "p10", "p90", "best", "rounds"]);
    let mut add = |name: &str, run: &mut dyn FnMut() -> Res<f64>| -> Res<()> {
        let [sample] = measure(probe.rounds(30, 0.1), || {
            let seconds = run()?;
            probe.stream.wait()?;
            probe.second.wait()?;
            Ok([seconds / calls as f64])
        })?;
        table.row([
            name.to_owned(),
            time(sample.median()),
            time(sample.low()),
            time(sample.high()),
            time(sample.best()),
            sample.len().to_string(),
        ]);
        Ok(())
    };
    // The seconds of `calls` calls.
    let repeat = |call: &mut dyn FnMut() -> Res<()>| -> Res<f64> {
        let start = Instant::now();
        for _ in 0..calls {
            call()?;
        }
        Ok(since(start))
    };
    let event = Event::new()?;
    event.record(&probe.stream)?;
    event.wait()?;
    add("event create (no timing)", &mut || {
        let mut events = Vec::with_capacity(calls);
        repeat(&mut || {
            events.push(Event::new()?);
            Ok(())
        })
    })?;
    add("event destroy", &mut || {
        let mut events = Vec::new();
        for _ in 0..calls {
            events.push(Event::new()?);
        }
        repeat(&mut || {
            events.pop();
            Ok(())
        })
    })?;
    add("event record", &mut || {
        repeat(&mut || event.record(&probe.stream))
    })?;
    add("event query, completed", &mut || {
        repeat(&mut || event.query())
    })?;
    add("event wait, completed", &mut || {
        repeat(&mut || event.wait())
    })?;
    add("event record and wait", &mut || {
        repeat(&mut || {
            event.record(&probe.stream)?;
            event.wait()
        })
    })?;
    add("stream waits for a completed event", &mut || {
        repeat(&mut || probe.second.wait_for(&event))
    })?;
    add("stream wait, idle", &mut || {
        repeat(&mut || probe.stream.wait())
    })?;
    let context = probe.device.as_cuda()?.cu_context();
    add("context push and pop", &mut || {
        repeat(&mut || {
            let mut popped = std::ptr::null_mut();
            // SAFETY: the context is live, and `popped` is valid for the write of a handle.
            let code = unsafe {
                check("cuCtxPushCurrent", sys::cuCtxPushCurrent_v2(context))?;
                sys::cuCtxPopCurrent_v2(&raw mut popped)
            };
            check("cuCtxPopCurrent", code)
        })
    })?;
    let locked = Locked::new(4096)?;
    let ordinary = [0u8; 64];
    for (name, address) in [
        ("kind of an address, page-locked", locked.address()),
        (
            "kind of an address, ordinary",
            ordinary.as_ptr().expose_provenance() as u64,
        ),
    ] {
        add(name, &mut || repeat(&mut || kind_of(address)))?;
    }
    add("page-locked, 4 KiB: allocate and free", &mut || {
        repeat(&mut || Locked::new(4096)?.free())
    })?;
    table.print();
    Ok(())
}

fn kind_of(address: u64) -> Res<()> {
    let mut which = [CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE];
    let mut kind = 0u32;
    let mut data: [*mut c_void; 1] = [(&raw mut kind).cast()];
    // SAFETY: both lists have one member, and `kind` has the attribute's 4 bytes.
    let code =
        unsafe { sys::cuPointerGetAttributes(1, which.as_mut_ptr(), data.as_mut_ptr(), address) };
    black_box(kind);
    check("cuPointerGetAttributes", code)
}
