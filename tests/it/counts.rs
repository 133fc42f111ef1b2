//! What transfers cost: allocations, copies, bytes, events and waits, by the device's own counts.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crate::simkit::*;
use crate::support::*;
use arrow_array::builder::{ListBuilder, StringBuilder};
use arrow_array::{
    Array, ArrayRef, BooleanArray, Int64Array, RecordBatch, StringArray, StructArray,
};
use arrow_buffer::{BooleanBuffer, Buffer};
use arrow_data::ArrayData;
use arrow_device::device::sim::{FaultOp, SimConfig, SimMode};
use arrow_device::{DeviceArray, DeviceRecordBatch, TransferStats};
use arrow_schema::{DataType, Schema};

fn strings(columns: usize, rows: usize) -> RecordBatch {
    batch(&vec![DataType::Utf8; columns], rows, Nulls::Some, 3)
}

/// What `work` adds to the counts.
fn counted<T>(sim: &Sim, work: impl FnOnce() -> T) -> (T, TransferStats) {
    let before = sim.stats();
    let result = work();
    (result, sim.stats().since(&before))
}

/// The batch, and one more column that tells when its memory is let go.
fn watched_batch(batch: &RecordBatch) -> (RecordBatch, Weak<Vec<i64>>) {
    let (column, watch) = watched(batch.num_rows());
    let mut fields = batch.schema().fields().to_vec();
    fields.push(crate::support::types::field("watch", DataType::Int64));
    let schema = Schema::new(fields).with_metadata(batch.schema().metadata().clone());
    let mut columns = batch.columns().to_vec();
    columns.push(Arc::new(column));
    (
        RecordBatch::try_new(Arc::new(schema), columns).unwrap(),
        watch,
    )
}

/// Waits until all work has completed and the reaper has let go of its sources.
fn settle(sim: &Sim, source: &Weak<Vec<i64>>) {
    let end = Instant::now() + Duration::from_secs(5);
    sim.synchronize().unwrap();
    while source.strong_count() > 0 {
        assert!(Instant::now() < end, "the source was not let go");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn an_upload_is_one_allocation_and_one_list() {
    if cfg!(miri) {
        return;
    }
    for mode in MODES {
        let sim = Sim::new(mode);
        for warm in [false, true, true] {
            let (batch, watch) = watched_batch(&wide_batch(300, 50));
            let (up, stats) = counted(&sim, || sim.upload(&batch).unwrap());
            assert_eq!((stats.allocations, stats.copies, stats.fills), (1, 1, 0));
            assert!(stats.events <= 2);
            assert_eq!((stats.host_waits, stats.queue_waits), (0, 0));
            assert_eq!(stats.bytes_to_device, stats.allocated_bytes);
            assert_eq!(stats.host_copied_bytes, stats.allocated_bytes);
            assert_eq!(stats.host_allocations, u64::from(!warm));
            drop(batch);
            settle(&sim, &watch);
            let (down, stats) = counted(&sim, || up.to_host().unwrap());
            assert_eq!((stats.host_waits, stats.events), (1, 1));
            assert_eq!(stats.host_allocations, 0);
            assert_same_batch(&watched_batch(&wide_batch(300, 50)).0, &down, "300 columns");
        }
        sim.assert_done();
    }
}

#[test]
fn an_uploaded_batch_comes_down_with_one_wait() {
    if cfg!(miri) {
        return;
    }
    let sim = Sim::new(SimMode::Deferred);
    let batch = strings(300, 40);
    let up = sim.upload(&batch).unwrap();
    let lists = sim.faults().seen(FaultOp::Copy);
    let (down, stats) = counted(&sim, || up.to_host().unwrap());
    assert_eq!(sim.faults().seen(FaultOp::Copy), lists + 1);
    // 900 buffers lie side by side, and stay so.
    assert_eq!((stats.host_waits, stats.copies), (1, 1));
    assert_same_batch(&batch, &down, "300 columns of strings");
    // Once more for cut ones: their ends are read together.
    let cut = up.slice(7, 20).unwrap();
    let (_, stats) = counted(&sim, || cut.to_host().unwrap());
    assert_eq!(stats.host_waits, 2);
    drop((up, cut, down));
    sim.assert_done();
}

/// Neighbours go together: columns of one upload that still stand side by side, whole.
#[test]
fn neighbours_are_one_copy() {
    if cfg!(miri) {
        return;
    }
    let sim = Sim::new(SimMode::Async);
    let types = [
        DataType::Int64,
        DataType::Boolean,
        DataType::Float64,
        DataType::Int8,
    ];
    let batch = batch(&types, 33, Nulls::Some, 5);
    let up = sim.upload(&batch).unwrap();
    let other = sim.upload(&batch).unwrap();
    let column = |of: &DeviceRecordBatch, i| of.column(i).unwrap();
    // The same column twice; two allocations in turn; in another order.
    let table = [
        (vec![column(&up, 0), column(&up, 0)], 2),
        (vec![column(&up, 0), column(&other, 1), column(&up, 2)], 3),
        (vec![column(&up, 2), column(&up, 3), column(&up, 1)], 2),
    ];
    let apart = |array: &DeviceArray| {
        let buffers = 0..array.num_buffers();
        buffers.filter(|i| array.buffer(*i).is_some()).count() as u64
    };
    for (columns, runs) in table {
        let fields = columns.iter().map(|c| c.field().unwrap().clone());
        let fields: Vec<_> = fields
            .enumerate()
            .map(|(i, f)| f.as_ref().clone().with_name(i.to_string()))
            .collect();
        let mixed = DeviceRecordBatch::try_new(Arc::new(Schema::new(fields)), &columns).unwrap();
        let (down, stats) = counted(&sim, || mixed.to_host().unwrap());
        assert_eq!(stats.copies, runs);
        for (column, down) in columns.iter().zip(down.columns()) {
            assert_same(&column.to_host().unwrap(), down, "apart and together");
        }
        let rows = mixed.slice(0, 32).unwrap();
        let (down, stats) = counted(&sim, || rows.to_host().unwrap());
        assert_eq!(stats.copies, columns.iter().map(apart).sum::<u64>());
        assert_eq!(down.num_rows(), 32);
    }
    drop((up, other));
    sim.assert_done();
}

/// One read for each level of offsets, all columns together.
#[test]
fn cut_nested_columns_take_one_wait_for_each_level() {
    if cfg!(miri) {
        return;
    }
    let sim = Sim::new(SimMode::Async);
    let nested = crate::support::types::list(crate::support::types::list(DataType::Utf8));
    let batch = batch(&vec![nested; 20], 60, Nulls::Some, 8);
    let up = sim.upload(&batch).unwrap();
    let (_, stats) = counted(&sim, || up.to_host().unwrap());
    assert_eq!(stats.host_waits, 1);
    let (_, stats) = counted(&sim, || up.slice(11, 30).unwrap().to_host().unwrap());
    assert_eq!(stats.host_waits, 4);
    drop(up);
    sim.assert_done();
}

const ROWS: usize = 200_000;

/// Columns of `ROWS` rows with what a compact form of `rows` rows takes, in bytes.
type Compact = fn(&dyn Array) -> usize;

fn mask(array: &dyn Array) -> usize {
    if array.null_count() == 0 {
        0
    } else {
        array.len().div_ceil(8)
    }
}

fn columns() -> Vec<(&'static str, ArrayRef, Compact, usize)> {
    let ints = Int64Array::from_iter((0..ROWS as i64).map(|i| (i % 7 != 0).then_some(i)));
    let bools = BooleanArray::from_iter((0..ROWS).map(|i| (i % 5 != 0).then_some(i % 3 == 0)));
    let texts =
        StringArray::from_iter((0..ROWS).map(|i| (i % 9 != 0).then(|| format!("text {i}"))));
    let mut lists = ListBuilder::new(StringBuilder::new());
    for i in 0..ROWS {
        for k in 0..i % 3 {
            lists.values().append_value(format!("{i}.{k}"));
        }
        lists.append(i % 11 != 0);
    }
    let rows = StructArray::try_from(vec![
        ("i", Arc::new(ints.clone()) as ArrayRef),
        ("t", Arc::new(texts.clone()) as ArrayRef),
    ]);
    let int_bytes: Compact = |a| a.len() * 8 + mask(a);
    let text_bytes: Compact = |a| {
        let a = a.as_any().downcast_ref::<StringArray>().unwrap();
        let (first, last) = (a.value_offsets()[0], a.value_offsets()[a.len()]);
        (a.len() + 1) * 4 + (last - first) as usize + mask(a)
    };
    vec![
        ("i64", Arc::new(ints), int_bytes, 2),
        (
            "bool",
            Arc::new(bools),
            |a| a.len().div_ceil(8) + mask(a),
            2,
        ),
        ("utf8", Arc::new(texts), text_bytes, 3),
        (
            "list<utf8>",
            Arc::new(lists.finish()),
            |a| {
                let a = a.as_any().downcast_ref::<arrow_array::ListArray>().unwrap();
                let (first, last) = (
                    a.value_offsets()[0] as usize,
                    a.value_offsets()[a.len()] as usize,
                );
                let items = a.values().slice(first, last - first);
                let items = items.as_any().downcast_ref::<StringArray>().unwrap();
                let bytes = items.value_offsets()[items.len()] - items.value_offsets()[0];
                (a.len() + 1) * 4 + (items.len() + 1) * 4 + bytes as usize + mask(a)
            },
            5,
        ),
        (
            "struct<i64, utf8>",
            Arc::new(rows.unwrap()),
            |a| {
                let a = a.as_any().downcast_ref::<StructArray>().unwrap();
                let texts = a.column(1).as_any().downcast_ref::<StringArray>().unwrap();
                let (first, last) = (texts.value_offsets()[0], texts.value_offsets()[texts.len()]);
                a.len() * 8
                    + mask(a.column(0))
                    + (a.len() + 1) * 4
                    + (last - first) as usize
                    + mask(texts)
            },
            5,
        ),
    ]
}

/// One per cent moves as one per cent, up and down, wherever it begins.
#[test]
fn a_slice_moves_its_rows_only() {
    if cfg!(miri) {
        return;
    }
    let sim = Sim::new(SimMode::Async);
    for (name, array, compact, buffers) in columns() {
        let up = sim.upload_array(&array).unwrap();
        for offset in [0, 12_345, ROWS - ROWS / 100] {
            let part = array.slice(offset, ROWS / 100);
            let payload = compact(&part);
            let limit = (payload as f64 * 1.05) as u64 + 64 * buffers as u64;
            let (cut, stats) = counted(&sim, || sim.upload_array(&part).unwrap());
            assert!(
                stats.bytes_to_device <= limit,
                "{name} up: {stats:?} of {payload}"
            );
            assert!(
                stats.allocated_bytes <= (payload + 64 * buffers) as u64,
                "{name}"
            );
            assert_eq!(stats.host_waits, 0, "{name}");
            assert_same(&part, &cut.to_host().unwrap(), name);
            let slice = up.slice(offset, ROWS / 100).unwrap();
            let (down, stats) = counted(&sim, || slice.to_host().unwrap());
            assert!(
                stats.bytes_to_host <= limit,
                "{name} down: {stats:?} of {payload}"
            );
            assert_same(&part, &down, name);
        }
    }
    sim.assert_done();
}

/// Large columns are not packed by the host, except for their last bytes.
#[test]
fn large_columns_are_copied_directly() {
    if cfg!(miri) {
        return;
    }
    let sim = Sim::new(SimMode::Deferred);
    let large = |rows: usize| Int64Array::from_iter_values((0..rows as i64).map(|i| i * 3));
    for rows in [160_000, 160_001] {
        let columns: Vec<(String, ArrayRef)> = vec![
            (
                "a".into(),
                Arc::new(Int64Array::from_iter_values(0..rows as i64)),
            ),
            ("b".into(), Arc::new(large(rows))),
        ];
        let batch = RecordBatch::try_from_iter(columns).unwrap();
        let (up, stats) = counted(&sim, || sim.upload(&batch).unwrap());
        // Where the length is no multiple of 64 bytes the rest is packed.
        let tails = if rows % 8 == 0 { 0 } else { 2 };
        assert_eq!(stats.copies, 2 + tails);
        assert_eq!((stats.host_waits, stats.host_copied_bytes), (0, tails * 64));
        assert!(stats.events <= stats.copies + 1);
        drop(batch);
        let down = up.to_host().unwrap();
        assert_same(&large(rows), down.column(1), "direct");
    }
    // Packed and direct ones in turn, over more than one chunk of staging memory.
    let texts: Vec<_> = (0..3)
        .map(|_| crate::support::array(&DataType::Utf8, 40_000, Nulls::Some, 9))
        .collect();
    let bytes = Buffer::from_vec(vec![0b0110_1101u8; 1_100_000]);
    let bits: ArrayRef = Arc::new(BooleanArray::new(
        BooleanBuffer::new(bytes, 0, 8_400_013),
        None,
    ));
    let mut columns: Vec<(String, ArrayRef)> = vec![];
    for (i, text) in texts.into_iter().enumerate() {
        let rows = text.len();
        columns.push((format!("t{i}"), text));
        columns.push((format!("i{i}"), Arc::new(large(rows * 4).slice(3, rows))));
    }
    let batch = RecordBatch::try_from_iter(columns).unwrap();
    let mixed = sim.upload(&batch).unwrap();
    assert_same_batch(&batch, &mixed.to_host().unwrap(), "mixed");
    drop(mixed);
    let (up, stats) = counted(&sim, || sim.upload_array(&bits).unwrap());
    assert!(stats.host_copied_bytes <= 128, "{stats:?}");
    let tail = tail(&up, 1, &sim);
    assert_eq!(
        (tail[0], &tail[1..]),
        (0b0000_1101, &vec![0; tail.len() - 1][..])
    );
    assert_same(&bits, &up.to_host().unwrap(), "bits");
    drop(up);
    sim.assert_done();
}

/// Bytes of a device buffer from its last one up to its padding's end, from a kernel's view.
fn tail(array: &DeviceArray, i: usize, sim: &Sim) -> Vec<u8> {
    let queue = sim.default_queue();
    let buffer = array.buffer(i).unwrap();
    let loan = buffer.on(&queue).unwrap();
    let (address, len) = (loan.address(), buffer.len());
    let last = len.saturating_sub(1);
    let (sender, receiver) = std::sync::mpsc::channel();
    launch(&queue, move |memory| {
        let bytes = memory.read(address.offset(last), len.next_multiple_of(64) - last)?;
        sender.send(bytes.to_vec()).map_err(|e| e.to_string())
    })
    .unwrap();
    drop(loan);
    queue.synchronize().unwrap();
    receiver.recv().unwrap()
}

fn every_part(array: &DeviceArray, visit: &mut impl FnMut(&DeviceArray)) {
    visit(array);
    for i in 0..array.num_children() {
        every_part(&array.child(i).unwrap(), visit);
    }
}

/// Buffers start at multiples of 64, are padded with zeros, and masks end with zeros.
#[test]
fn padding_and_masks_end_with_zeros() {
    if cfg!(miri) {
        return;
    }
    let sim = Sim::new(SimMode::Async);
    let peer = Sim::with(SimConfig::default().with_peer_access(true));
    for (name, data_type) in all_types() {
        let whole = array(&data_type, 141, Nulls::Some, 6);
        let mut parts = vec![whole.slice(9, 77)];
        let made = SAME_ROWS.iter().filter_map(|variant| variant.of(&whole, 7));
        parts.extend(made.map(|made| made.array()));
        for part in parts {
            let up = sim.upload_array(&part).unwrap();
            // Recycled memory, so that what is not written shows.
            sim.host_slab(1 << 16).unwrap().fill(0xff);
            check_host_slab(&up.to_host().unwrap(), &name);
            check_host_slab(&up.slice(3, 50).unwrap().to_host().unwrap(), &name);
            check_device_slab(&up, &sim, &name);
            check_device_slab(&up.to_device(&peer).unwrap(), &peer, &name);
        }
    }
    sim.assert_done();
    peer.assert_done();
}

fn check_device_slab(array: &DeviceArray, sim: &Sim, name: &str) {
    every_part(array, &mut |part| {
        for i in 0..part.num_buffers() {
            let Some(buffer) = part.buffer(i).filter(|b| !b.is_empty()) else {
                continue;
            };
            assert_eq!(buffer.address().address() % 64, 0, "{name}");
            let tail = tail(part, i, sim);
            assert!(
                tail[1..].iter().all(|byte| *byte == 0),
                "{name} buffer {i}: {tail:?}"
            );
        }
        let masked = matches!(part.null_count(), Some(1..)) && part.buffer(0).is_some();
        let null = part.data_type() == &DataType::Null;
        if masked && !null && part.len() % 8 != 0 {
            let bits = tail(part, 0, sim)[0];
            assert_eq!(bits >> (part.len() % 8), 0, "{name}");
        }
    });
}

/// The mask's last byte beyond the rows, and every buffer's padding, are zero.
fn check_tails(data: &ArrayData, name: &str) {
    for buffer in data
        .buffers()
        .iter()
        .chain(data.nulls().map(|n| n.buffer()))
    {
        let padding = buffer.len().next_multiple_of(64) - buffer.len();
        if buffer.is_empty() {
            continue;
        }
        // SAFETY: a download's slab is padded to 64 bytes behind every buffer.
        let tail =
            unsafe { std::slice::from_raw_parts(buffer.as_ptr().add(buffer.len()), padding) };
        assert!(tail.iter().all(|byte| *byte == 0), "{name}: {tail:?}");
    }
    if let Some(nulls) = data.nulls().filter(|_| data.len() % 8 != 0) {
        let last = nulls.buffer().last().unwrap();
        assert_eq!(last >> (data.len() % 8), 0, "{name}");
    }
    data.child_data()
        .iter()
        .for_each(|child| check_tails(child, name));
}

fn host_buffers(data: &ArrayData, out: &mut Vec<Buffer>) {
    out.extend(data.buffers().iter().cloned());
    out.extend(data.nulls().map(|n| n.buffer().clone()));
    data.child_data()
        .iter()
        .for_each(|child| host_buffers(child, out));
}

/// All buffers of a download lie in one slab, 64-byte aligned, apart from each other.
fn check_host_slab(array: &ArrayRef, name: &str) {
    let mut buffers = vec![];
    host_buffers(&array.to_data(), &mut buffers);
    check_tails(&array.to_data(), name);
    buffers.retain(|b| !b.is_empty());
    let mut ranges: Vec<_> = buffers
        .iter()
        .map(|b| (b.as_ptr().addr(), b.len()))
        .collect();
    ranges.sort_unstable();
    let total: usize = ranges.iter().map(|(_, len)| len + 128).sum();
    for (address, _) in &ranges {
        assert_eq!(address % 64, 0, "{name}");
    }
    for pair in ranges.windows(2) {
        assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{name}: {ranges:?}");
    }
    if let (Some(first), Some(last)) = (ranges.first(), ranges.last()) {
        assert!(last.0 + last.1 - first.0 <= total, "{name}: {ranges:?}");
    }
}

#[test]
fn a_download_is_one_slab() {
    if cfg!(miri) {
        return;
    }
    let sim = Sim::new(SimMode::Async);
    let types: Vec<_> = all_types().into_iter().map(|(_, t)| t).collect();
    let batch = batch(&types, 100, Nulls::Some, 2);
    let (source, watch) = watched_batch(&batch);
    let up = sim.upload(&source).unwrap();
    drop(source);
    settle(&sim, &watch);
    sim.trim();
    let (down, stats) = counted(&sim, || up.to_host().unwrap());
    assert_eq!(stats.host_allocations, 1);
    check_host_slab(
        &(Arc::new(StructArray::from(down.clone())) as ArrayRef),
        "batch",
    );
    // Bytes are at most what went up and 64 for each buffer.
    assert!(stats.bytes_to_host <= sim.stats().bytes_to_device);
    assert_eq!(stats.host_copied_bytes, 0);
    // The slab lives with its last buffer, then serves again.
    let column = down.column(7).clone();
    drop(down);
    let (again, stats) = counted(&sim, || up.to_host().unwrap());
    assert_eq!(stats.host_allocations, 1);
    assert_same(batch.column(7), &column, "last holder");
    drop((again, column));
    let (_, stats) = counted(&sim, || up.to_host().unwrap());
    assert_eq!(stats.host_allocations, 0);
    drop(up);
    sim.assert_done();
}

/// Nothing is copied for the CPU.
#[test]
fn the_cpu_takes_arrays_as_they_are() {
    let cpu = arrow_device::Devices::cpu();
    let ints: ArrayRef = Arc::new(Int64Array::from(vec![1, 2, 3, 4, 5]));
    let up = cpu.upload_array(&ints).unwrap();
    let values = ints.to_data().buffers()[0].as_ptr();
    assert_eq!(
        up.buffer(1).unwrap().address().as_ptr().cast_const().cast(),
        values
    );
    let down = up.slice(1, 3).unwrap().to_host().unwrap();
    assert_eq!(
        down.to_data().buffers()[0].as_ptr().addr(),
        values.addr() + 8
    );
}
