//! Both ways from 1 KiB to 1 GiB and from 1 to 1,000 columns, beside what a program can write by hand, cudarc, and the raw copy.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Instant;

use arrow_array::cast::AsArray;
use arrow_array::{RecordBatch, types::Int64Type};
use arrow_buffer::Buffer;
use arrow_device::cuda::cudarc::driver::result;

use crate::Probe;
use crate::data::{buffers, built, ordinary, over, pack, parts};
use crate::machine::of;
use crate::peer::Peer;
use crate::raw::{Locked, OnDevice, Pool, address};
use crate::stats::{Res, Table, Way, measure, since, size, time, way};
use crate::transfers::{download, upload};

const LEGEND: &str = "\
Columns of Int64 without nulls in ordinary memory; this crate packs with 8 threads at most. Medians, until all was done; frees are not
timed, on any side. All ways but the raw copy, which is of as many page-locked bytes, begin or end with a RecordBatch.
by hand: the buffers of a batch of any type, listed, packed into page-locked memory that is there, 1 copy into a block from a warm pool.
typed by hand: the same by a program that knows the columns' type; down: 1 copy into such memory, and a batch over it.
copy each: a block from a warm pool, and a copy from ordinary memory, for each column. cudarc each: clone_htod or clone_dtoh of each
column. cudarc packed: through a PinnedHostSlice that is there, packed and unpacked.\n";

/// In the order of the table's columns.
const WAYS: [&str; 7] = [
    "this crate",
    "raw copy",
    "typed by hand",
    "by hand",
    "copy each",
    "cudarc each",
    "cudarc packed",
];

/// Each row of the record is the worst of some sizes: its id, this crate's time divided by what, and the target.
const ROWS: [(&str, &str, f64); 5] = [
    ("G1", "upload / the best hand-written way", 1.15),
    (
        "G1",
        "upload / the way by hand for columns of any type",
        1.15,
    ),
    ("G2", "download / the best hand-written way", 1.15),
    (
        "G3",
        "upload from 16 MiB on, ordinary memory, 8 threads / the raw copy",
        1.3,
    ),
    (
        "U7",
        "64 KiB to 64 MiB in 10 columns / a block and a copy for each column",
        1.0,
    ),
];

pub(crate) fn run(probe: &Probe) -> Res<()> {
    println!("{LEGEND}");
    probe.device.set_packing_threads(8);
    let done = sizes(probe);
    probe.device.set_packing_threads(0);
    done
}

fn sizes(probe: &Probe) -> Res<()> {
    // What all ways together hold at once, and something to spare.
    let host = of("/proc/meminfo", "MemAvailable").replace(" kB", "");
    let most = (host.parse::<usize>()? << 10).min(result::mem_get_info()?.0) / 8;
    let most = most.min(probe.bytes(1 << 30, 256 << 10));
    let all = ordinary(most, 3);
    let mut grid = Grid {
        probe,
        pool: Pool::new(probe.ordinal)?,
        peer: Peer::new(probe.ordinal)?,
        there: OnDevice::new(most)?,
        locked: Arc::new(Locked::new(most)?),
    };
    let head = format!(
        "columns {} crate/raw crate/best best",
        WAYS.map(|way| way.replace(' ', "-")).join(" ")
    );
    let mut results = Results {
        probe,
        up: Table::new(&format!("up {head}")),
        down: Table::new(&format!("down {head}")),
        worst: Default::default(),
    };
    let start = Instant::now();
    for bytes in (10..31).step_by(2).map(|n| 1usize << n) {
        if bytes > most || since(start) > 50.0 {
            println!(
                "{} and more: left out (memory, time, or --quick)",
                size(bytes)
            );
            break;
        }
        for columns in [1, 10, 100, 1000] {
            let each = bytes / columns / 64 * 64;
            if each > 0 {
                let batch = over(&all.slice_with_length(0, columns * each), columns)?;
                let shape = Shape {
                    bytes,
                    columns,
                    each,
                };
                grid.up(&batch, shape, &mut results)?;
                grid.down(&batch, shape, &mut results)?;
            }
        }
    }
    let Results {
        up, down, worst, ..
    } = results;
    drop((up, down));
    for ((id, what, target), (ratio, shape)) in ROWS.into_iter().zip(worst) {
        if !shape.is_empty() {
            println!("{id}: the worst is {shape}");
            probe.row(id, &format!("{what}, the worst size"), ratio, "<=", target);
        }
    }
    Ok(())
}

/// Of a batch: the size that it stands for, its columns, and their bytes, a multiple of 64.
#[derive(Clone, Copy)]
struct Shape {
    bytes: usize,
    columns: usize,
    each: usize,
}

impl Shape {
    fn all(self) -> usize {
        self.columns * self.each
    }
}

struct Results<'a> {
    probe: &'a Probe,
    up: Table,
    down: Table,
    /// The highest ratio of each row, and where it was.
    worst: [(f64, String); ROWS.len()],
}

impl Results<'_> {
    /// Measures this crate, the raw copy and what is written by hand, in this order, after a run of each.
    fn measure(&mut self, is_up: bool, shape: Shape, ways: Vec<Way<'_>>) -> Res<()> {
        let (direction, table) = if is_up {
            ("up", &mut self.up)
        } else {
            ("down", &mut self.down)
        };
        let plural = if shape.columns == 1 { "" } else { "s" };
        let name = format!("{} in {} column{plural}", size(shape.bytes), shape.columns);
        let first = ways.into_iter().map(|mut way| Ok((way.1()?[1], way)));
        let mut first = first.collect::<Res<Vec<_>>>()?;
        first[2..].sort_by(|a, b| a.0.total_cmp(&b.0));
        // Of what is written by hand, the fastest always stays.
        while first.len() > 3 && first.iter().map(|(took, _)| 2.0 * took).sum::<f64>() > 0.5 {
            if let Some((took, (way, _))) = first.pop() {
                println!(
                    "{direction}, {name}: {way} left out, since a round takes over half a second ({})",
                    time(took)
                );
            }
        }
        let mut ways: Vec<_> = first.into_iter().map(|(_, way)| way).collect();
        let least = if shape.bytes < 256 << 20 { 5 } else { 3 };
        let took = measure(self.probe, least, 0.2, &mut ways)?;
        for (i, (way, _)) in ways.iter().enumerate() {
            println!(
                "grid\t{direction}\t{}\t{}\t{way}\t{:e}",
                shape.all(),
                shape.columns,
                took.median(i)
            );
        }
        let best = (2..ways.len()).min_by(|a, b| took.median(*a).total_cmp(&took.median(*b)));
        let best = best.ok_or("no way is written by hand")?;
        let at = |name: &str| ways.iter().position(|way| way.0 == name);
        let over = |way: Option<usize>| way.map_or(0.0, |way| took.over(&[way]));
        let (over_raw, over_best) = (over(Some(1)), over(Some(best)));
        let mut cells = vec![size(shape.bytes), shape.columns.to_string()];
        cells.extend(WAYS.map(|name| at(name).map_or("-".into(), |way| time(took.median(way)))));
        cells.extend([over_raw, over_best].map(|ratio| format!("{ratio:.3}")));
        cells.push(ways[best].0.clone());
        table.row(cells);
        let is_large = shape.bytes >= self.probe.bytes(16 << 20, 64 << 10);
        let is_ten = shape.columns == 10 && (1 << 16..=1 << 26).contains(&shape.bytes);
        let ratios = [
            (is_up, over_best),
            (is_up, over(at("by hand"))),
            (!is_up, over_best),
            (is_up && is_large, over_raw),
            (is_up && is_ten, over(at("copy each"))),
        ];
        for (worst, (applies, ratio)) in self.worst.iter_mut().zip(ratios) {
            if applies && ratio > worst.0 {
                *worst = (ratio, name.clone());
            }
        }
        Ok(())
    }
}

/// What the ways use in turn, as large as the largest size.
struct Grid<'a> {
    probe: &'a Probe,
    pool: Pool,
    peer: Peer,
    there: OnDevice,
    locked: Arc<Locked>,
}

impl Grid<'_> {
    fn up(&mut self, batch: &RecordBatch, shape: Shape, to: &mut Results<'_>) -> Res<()> {
        let (probe, pool, peer, there) = (self.probe, &self.pool, &self.peer, &self.there);
        let (stream, all) = (&probe.stream, shape.all());
        let locked = RefCell::new(Arc::get_mut(&mut self.locked).ok_or("a batch is left")?);
        let mut pinned = peer.locked(all)?;
        let by_hand = |pack: &mut dyn FnMut()| {
            pool.with_blocks(stream, [all].into_iter(), |_, block| {
                pack();
                // SAFETY: the block has as many bytes, and the memory lives until the wait.
                unsafe { stream.copy(block, locked.borrow().span().address(), all) }
            })
        };
        let ways = vec![
            way("this crate", || upload(probe, batch)),
            way("raw copy", || {
                probe.copy(there.span(), locked.borrow().span().first(all))
            }),
            way("typed by hand", || {
                by_hand(&mut || pack(locked.borrow_mut().bytes_mut(), values(batch)))
            }),
            way("by hand", || {
                by_hand(&mut || pack(locked.borrow_mut().bytes_mut(), buffers(batch)))
            }),
            way("cudarc each", || peer.up_each(values(batch))),
            way("cudarc packed", || {
                peer.up_packed(values(batch), &mut pinned)
            }),
            way("copy each", || {
                let mut columns = values(batch);
                let sizes = [shape.each].into_iter().cycle().take(shape.columns);
                pool.with_blocks(stream, sizes, |_, block| {
                    let column = columns.next().ok_or("too few columns")?;
                    // SAFETY: the block has as many bytes, and the batch lives until the wait.
                    unsafe { stream.copy(block, address(column), column.len()) }
                })
            }),
        ];
        to.measure(true, shape, ways)
    }

    fn down(&mut self, batch: &RecordBatch, shape: Shape, to: &mut Results<'_>) -> Res<()> {
        let (probe, peer, there) = (self.probe, &self.peer, self.there.span().first(shape.all()));
        let locked = Arc::get_mut(&mut self.locked).ok_or("a batch is left")?;
        pack(locked.bytes_mut(), values(batch));
        probe.copy(there, locked.span().first(shape.all()))?;
        locked.bytes_mut()[..shape.all()].fill(0);
        let (up, locked, schema) = (probe.device.upload(batch)?, &self.locked, batch.schema());
        let by_hand = || {
            probe.copy(locked.span(), there)?;
            built(&schema, parts(&locked.buffer(shape.all()), shape.columns))
        };
        if up.to_host()? != *batch || by_hand()? != *batch {
            return Err("what came down is not what went up".into());
        }
        let make = |values: Vec<Vec<u8>>| built(&schema, values.into_iter().map(Buffer::from_vec));
        let (block, mut pinned) = (peer.block(shape.all())?, peer.locked(shape.all())?);
        let blocks = (0..shape.columns).map(|_| peer.block(shape.each));
        let blocks = blocks.collect::<Res<Vec<_>>>()?;
        let ways = vec![
            way("this crate", || download(&up)),
            way("raw copy", || probe.copy(locked.span(), there)),
            way("typed by hand", || {
                let start = Instant::now();
                let here = by_hand()?;
                let took = since(start);
                drop(here);
                Ok([f64::NAN, took])
            }),
            way("cudarc each", || peer.down_each(&blocks, make)),
            way("cudarc packed", || {
                peer.down_packed(&block, &mut pinned, shape.each, make)
            }),
        ];
        to.measure(false, shape, ways)
    }
}

/// The bytes of each column, as a program takes them that knows their type.
fn values(batch: &RecordBatch) -> impl Iterator<Item = &[u8]> {
    let columns = batch.columns().iter();
    columns.map(|column| {
        column
            .as_primitive::<Int64Type>()
            .values()
            .inner()
            .as_slice()
    })
}
