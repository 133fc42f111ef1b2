//! Exported arrays are released in every order, on any thread, and each time once.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use crate::support::types::{dictionary, structure};
use crate::support::wide_batch;
use crate::support_c::export::{ints, join};
use crate::support_c::sim::{Place, places, simulated};
use crate::support_c::{CArray, Moved, c, take};
use arrow_buffer::Buffer;
use arrow_device::device::DevicePtr;
use arrow_device::device::sim::SimMode;
use arrow_device::{
    DeviceArray, DeviceBuffer, DeviceRecordBatch, Devices, ExportOptions, Queue, ReleasePolicy,
    SyncPolicy, Validity,
};
use arrow_schema::DataType;

const EVENT: ExportOptions = ExportOptions::new(SyncPolicy::Event);

struct Counted(Arc<AtomicUsize>, #[allow(dead_code)] Buffer);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::AcqRel);
    }
}

/// Memory whose drops are counted.
fn counted(buffer: Buffer) -> (DeviceBuffer, Arc<AtomicUsize>) {
    let drops = Arc::new(AtomicUsize::new(0));
    let (address, len) = (
        DevicePtr::new(buffer.as_ptr().cast_mut().cast()),
        buffer.len(),
    );
    let owner = Box::new(Counted(drops.clone(), buffer));
    // SAFETY: the owner holds the memory, which has `len` bytes that nobody writes.
    (
        unsafe { DeviceBuffer::from_raw(&Devices::cpu(), address, len, owner, None) },
        drops,
    )
}

/// A batch of an integer column, a struct of one, and a dictionary; each buffer has an owner of its own.
fn owned() -> (DeviceRecordBatch, Vec<Arc<AtomicUsize>>) {
    let numbers = || counted(Buffer::from_vec(vec![0i32, 1, 1]));
    let plain = |buffer| DeviceArray::from_values(DataType::Int32, 3, buffer, None).unwrap();
    let (buffers, drops): (Vec<_>, Vec<_>) = (0..4).map(|_| numbers()).unzip();
    let cpu = Devices::cpu();
    let inner = plain(buffers[1].clone());
    let data_type = structure(vec![("i", DataType::Int32)]);
    // SAFETY: a struct has no values but those of its child, `inner`, which has as many rows.
    let outer =
        unsafe { DeviceArray::from_parts(&cpu, data_type, 3, None, &[], &[inner]) }.unwrap();
    let keys = [Some(buffers[2].clone())];
    let data_type = dictionary(DataType::Int32, DataType::Int32);
    let values = plain(buffers[3].clone());
    // SAFETY: the keys are 0 and 1, and there are three values.
    let words =
        unsafe { DeviceArray::from_parts(&cpu, data_type, 3, None, &keys, &[values]) }.unwrap();
    (join(&[plain(buffers[0].clone()), outer, words]), drops)
}

fn dropped(drops: &[Arc<AtomicUsize>]) -> Vec<usize> {
    drops.iter().map(|d| d.load(Ordering::Acquire)).collect()
}

/// Every order of `n` things.
fn orders(n: usize) -> Vec<Vec<usize>> {
    if n == 0 {
        return vec![vec![]];
    }
    let shorter = orders(n - 1);
    let insert = |o: &Vec<usize>, at| [&o[..at], &[n - 1], &o[at..]].concat();
    shorter
        .iter()
        .flat_map(|o| (0..n).map(move |at| insert(o, at)))
        .collect()
}

/// Root, three columns, a grandchild and a dictionary, all moved out, released in every order and on other threads:
/// each lets go of its own memory, at its own release.
#[test]
fn every_order() {
    // Which owner each of the six has: 4 is "none".
    const OWNER: [usize; 6] = [4, 0, 4, 2, 1, 3];
    for (k, order) in orders(6).into_iter().enumerate() {
        let (batch, drops) = owned();
        let mut exported = batch.export_array(&EVENT).unwrap();
        drop(batch);
        assert_eq!(dropped(&drops), [0; 4]);
        // SAFETY: the export is live and has these children; each struct is moved once.
        let mut nodes: Vec<Option<Moved>> = unsafe {
            let root = &raw mut c(&mut exported).array;
            let child = |i| *(*root).children.add(i);
            let grandchild: *mut CArray = *(*child(1)).children;
            let words = (*child(2)).dictionary;
            let all = [child(0), child(1), child(2), grandchild, words];
            let all: Vec<_> = all.into_iter().map(|p| Some(Moved(take(p)))).collect();
            [Some(Moved(take(root)))].into_iter().chain(all).collect()
        };
        drop(exported);
        let mut expected = [0; 5];
        for i in order {
            let node = nodes[i].take();
            if k % 10 == 0 {
                thread::spawn(move || drop(node)).join().unwrap();
            } else {
                drop(node);
            }
            expected[OWNER[i]] = 1;
            assert_eq!(dropped(&drops), expected[..4], "after {i} in order {k}");
        }
        assert_eq!(dropped(&drops), [1; 4]);
    }
}

/// A release that leaves its children in place takes them along; a second one does nothing.
#[test]
fn whole_trees_and_twice() {
    let (batch, drops) = owned();
    let mut exported = batch.export_array(&EVENT).unwrap();
    drop(batch);
    let root = &raw mut c(&mut exported).array;
    // SAFETY: the export is live and has this child; its root's release is called once.
    unsafe {
        let release = (*root).release.unwrap();
        let child = *(*root).children.add(1);
        release(child);
        assert!((*child).release.is_none());
        assert_eq!(dropped(&drops), [0, 1, 0, 0]);
        release(child);
        assert_eq!(dropped(&drops), [0, 1, 0, 0]);
        // Moved out with everything below.
        drop(Moved(take(*(*root).children.add(2))));
        assert_eq!(dropped(&drops), [0, 1, 1, 1]);
        release(root);
        assert_eq!(dropped(&drops), [1; 4]);
    }
    drop(exported);
    assert_eq!(dropped(&drops), [1; 4]);
}

/// All columns lie in one allocation, which stays for the last of them.
#[test]
fn siblings_on_many_threads() {
    for place in places() {
        let assert_live = |n| {
            let live = place.sim.as_ref().map(|sim| sim.report().live_allocations);
            assert!(live.is_none_or(|live| live == n), "{live:?}, not {n}");
        };
        let columns = || {
            let up = place.device.upload(&wide_batch(64, 10)).unwrap();
            let mut exported = up.export_array(&EVENT).unwrap();
            let root = c(&mut exported).array;
            // SAFETY: the export is live and has these children; each struct is moved once.
            let child = |i| unsafe { Moved(take(*root.children.add(i))) };
            ((0..64).map(child).collect::<Vec<_>>(), exported)
        };
        for _ in 0..20 {
            let (mut children, exported) = columns();
            assert_live(1);
            drop(children.split_off(1));
            assert_live(1);
            drop((children, exported));
            assert_live(0);
            let (children, exported) = columns();
            let mut chunks: Vec<Vec<Moved>> = (0..4).map(|_| vec![]).collect();
            let numbered = children.into_iter().enumerate();
            numbered.for_each(|(i, child)| chunks[i % 4].push(child));
            thread::scope(|scope| {
                for chunk in chunks {
                    scope.spawn(move || drop(chunk));
                }
                scope.spawn(move || drop(exported));
            });
            assert_live(0);
        }
        place.assert_clean();
    }
}

/// A queue that goes on once it is told to.
fn busy(place: &Place) -> (Queue, mpsc::Sender<()>) {
    let queue = place.device.new_queue().unwrap();
    let (go, gate) = mpsc::channel::<()>();
    let sim = queue.as_sim().unwrap();
    // SAFETY: the kernel writes nothing.
    unsafe { sim.launch(move |_| gate.recv().map_err(|e| e.to_string())) }.unwrap();
    (queue, go)
}

/// A consumer whose work is not ordered: memory goes after the device's work, and the release does not wait for it.
#[test]
fn release_synchronizes_elsewhere() {
    let Some(place) = simulated(SimMode::Async) else {
        return;
    };
    for policy in [ReleasePolicy::Ordered, ReleasePolicy::Synchronize] {
        let up = place.device.upload_array(&ints(100)).unwrap();
        up.wait().unwrap();
        let exported = up
            .export_array(&ExportOptions {
                release: policy,
                ..EVENT
            })
            .unwrap();
        drop(up);
        let (queue, go) = busy(&place);
        drop(exported);
        // Long enough for a release thread that does not wait.
        thread::sleep(Duration::from_millis(50));
        let live = place.sim().report().live_allocations;
        assert_eq!(
            live,
            usize::from(policy == ReleasePolicy::Synchronize),
            "{policy:?}"
        );
        go.send(()).unwrap();
        drop(queue);
        place.assert_clean();
    }
}

/// However much is released while the device is busy, it is settled for all of it together.
#[test]
fn releases_wait_together() {
    let Some(place) = simulated(SimMode::Async) else {
        return;
    };
    let up = place.device.upload_array(&ints(100)).unwrap();
    up.wait().unwrap();
    let options = ExportOptions {
        release: ReleasePolicy::Synchronize,
        ..EVENT
    };
    let exported: Vec<_> = (0..1000)
        .map(|_| up.compact().unwrap().export_array(&options).unwrap())
        .collect();
    place.device.synchronize().unwrap();
    let before = place.device.stats();
    let (queue, go) = busy(&place);
    drop(exported);
    assert_eq!(place.sim().report().live_allocations, 1001);
    go.send(()).unwrap();
    let start = Instant::now();
    while place.sim().report().live_allocations > 1 {
        assert!(start.elapsed() < Duration::from_secs(20));
        thread::yield_now();
    }
    // One that was under way, and one for what came meanwhile.
    let waits = place.device.stats().since(&before).host_waits;
    assert!((1..=2).contains(&waits), "{waits} waits");
    drop((queue, up));
    place.assert_clean();
}

/// Memory of several columns goes with the last of them, beside memory of others.
#[test]
fn an_owner_of_two_columns() {
    let (two, two_drops) = counted(Buffer::from_vec(vec![1i32, 2, 3, 4, 5, 6]));
    let (one, one_drops) = counted(Buffer::from_vec(vec![7i32, 8, 9]));
    let column = |buffer| DeviceArray::from_values(DataType::Int32, 3, buffer, None).unwrap();
    let halves = [0, 12].map(|at| column(two.slice(at, 12).unwrap()));
    let [first, second] = halves;
    let batch = join(&[first, column(one), second]);
    drop(two);
    let drops = [two_drops, one_drops];
    let mut exported = batch.export_array(&EVENT).unwrap();
    drop(batch);
    // SAFETY: the struct is one of the export's, which is not released yet, and is moved once.
    let last = unsafe {
        let root = &raw mut c(&mut exported).array;
        Moved(take(*(*root).children.add(2)))
    };
    drop(exported);
    assert_eq!(dropped(&drops), [0, 1]);
    drop(last);
    assert_eq!(dropped(&drops), [1, 1]);
}

/// The list of lengths behind a view array is not used again before a consumer's work is done.
#[test]
fn lists_of_lengths_wait_too() {
    let Some(place) = simulated(SimMode::Async) else {
        return;
    };
    let long = arrow_array::StringViewArray::from(vec!["longer than twelve bytes, out of line"]);
    for policy in [ReleasePolicy::Ordered, ReleasePolicy::Synchronize] {
        let up = place.device.upload_array(&long).unwrap();
        up.wait().unwrap();
        let mut exported = up
            .export_array(&ExportOptions {
                release: policy,
                ..EVENT
            })
            .unwrap();
        // SAFETY: the export is live, and the last of its four buffers is the list of sizes.
        let list = unsafe { *c(&mut exported).array.buffers.add(3) };
        let (queue, go) = busy(&place);
        drop(exported);
        // More than can be idle.
        let hosts: Vec<_> = (0..50)
            .map(|_| place.device.host_buffer(8).unwrap())
            .collect();
        let again = hosts
            .iter()
            .any(|host| host.as_device_ptr().as_ptr().cast_const() == list);
        assert_eq!(again, policy == ReleasePolicy::Ordered, "{policy:?}");
        drop(hosts);
        go.send(()).unwrap();
        drop((queue, up));
        place.assert_clean();
    }
}

/// A panic in the drop of one owner costs the others nothing.
#[test]
fn owners_that_panic() {
    struct Bomb;
    impl Drop for Bomb {
        fn drop(&mut self) {
            panic!("owner's drop");
        }
    }
    let values = Buffer::from_vec(vec![1i32, 2, 3]);
    let address = DevicePtr::new(values.as_ptr().cast_mut().cast());
    // SAFETY: `values` has 12 bytes that live as long as the test, and nobody writes to them.
    let bomb =
        unsafe { DeviceBuffer::from_raw(&Devices::cpu(), address, 12, Box::new(Bomb), None) };
    let (calm, drops) = counted(values.clone());
    // The mask's owner goes first.
    let both = {
        let validity = Some(Validity::new(bomb, 0, 3).unwrap());
        DeviceArray::from_values(DataType::Int32, 3, calm, validity).unwrap()
    };
    let allowed = ExportOptions {
        counts_nulls: false,
        ..EVENT
    };
    let exported = both.export_array(&allowed).unwrap();
    drop(both);
    assert_eq!(drops.load(Ordering::Acquire), 0);
    drop(exported);
    assert_eq!(drops.load(Ordering::Acquire), 1);
}
