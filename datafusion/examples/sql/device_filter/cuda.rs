//! The kernels for CUDA devices, in PTX, which the driver compiles for its device.
//!
//! A compiler made the PTX of `filter.cu`; `python3 gpu/ptx` compares and assembles it. It ran on an NVIDIA H200:
//! `benches/results/2026-11-26-nvidia-h200-backends.md`.

use arrow_device::cuda::cudarc::driver::{
    CudaFunction, DriverError, LaunchArgs, LaunchConfig, PushKernelArg,
};
use arrow_device::cuda::cudarc::nvrtc::Ptx;
use arrow_device::device::{DevicePtr, device_error};
use arrow_device::{Device, DeviceBufferMut, Error, Queue, Result};

use super::column::{Bits, Column, Format};
use super::kernels::{Kernels, Picked, To};
use super::key::{Key, Kind};

/// How many rows a block selects from, about.
const TILE_ROWS: usize = 2048;

#[derive(Debug)]
pub(crate) struct Cuda {
    keep: CudaFunction,
    compare: CudaFunction,
    compare_bytes: CudaFunction,
    count_passing: CudaFunction,
    scan: CudaFunction,
    select: CudaFunction,
    count_nulls: CudaFunction,
    measure: CudaFunction,
    gather: CudaFunction,
    gather_bits: CudaFunction,
    gather_bytes: CudaFunction,
}

impl Cuda {
    pub(crate) fn load(device: &Device) -> Result<Self> {
        let failed = |e: DriverError| failed(device, e);
        let context = device.cuda_context()?;
        let module = context.load_module(Ptx::from_src(include_str!("filter.ptx")));
        let module = module.map_err(failed)?;
        let function = |name| module.load_function(name).map_err(failed);
        Ok(Self {
            keep: function("keep")?,
            compare: function("compare")?,
            compare_bytes: function("compare_bytes")?,
            count_passing: function("count_passing")?,
            scan: function("scan_u64")?,
            select: function("select")?,
            count_nulls: function("count_nulls")?,
            measure: function("measure")?,
            gather: function("gather")?,
            gather_bits: function("gather_bits")?,
            gather_bytes: function("gather_bytes")?,
        })
    }
}

impl Kernels for Cuda {
    fn keep(
        &self,
        queue: &Queue,
        bits: Bits,
        wanted: bool,
        passing: &mut DeviceBufferMut,
    ) -> Result<()> {
        let rows = passing.len();
        let arguments = [
            number(bits.at),
            bits.bit as u64,
            rows as u64,
            u64::from(wanted),
            number(passing.address()),
        ];
        // SAFETY: the arguments are the kernel's parameters. It reads `rows` bits, which are lent to the queue, and writes as many
        // bytes of `passing`, which is lent for writing.
        unsafe { launch(queue, &self.keep, threads(rows), &arguments) }
    }

    fn compare(
        &self,
        queue: &Queue,
        column: Column,
        kind: Kind,
        orderings: u8,
        literal: Key,
        passing: &mut DeviceBufferMut,
    ) -> Result<()> {
        let rows = passing.len();
        let [first, second, third, fourth] = literal.0;
        let arguments = [
            kind.family as u64,
            kind.width as u64,
            number(column.values.at),
            rows as u64,
            u64::from(orderings),
            first,
            second,
            third,
            fourth,
            number(passing.address()),
        ];
        // SAFETY: the arguments are the kernel's parameters. It reads `rows` values of the kind's width, which are lent to the queue
        // and aligned, and writes as many bytes of `passing`, which is lent for writing.
        unsafe { launch(queue, &self.compare, threads(rows), &arguments) }
    }

    fn compare_bytes(
        &self,
        queue: &Queue,
        column: Column,
        orderings: u8,
        literal: (DevicePtr, usize),
        passing: &mut DeviceBufferMut,
    ) -> Result<()> {
        let rows = passing.len();
        let (layout, width) = layout(column.format);
        let arguments = [
            layout,
            width,
            number(column.values.at),
            number(column.data),
            rows as u64,
            number(literal.0),
            literal.1 as u64,
            u64::from(orderings),
            number(passing.address()),
        ];
        // SAFETY: the arguments are the kernel's parameters. It reads rows of a valid column and the literal, which are lent to the
        // queue, and reads and writes `rows` bytes of `passing`, which is lent for writing.
        unsafe { launch(queue, &self.compare_bytes, threads(rows), &arguments) }
    }

    /// In three steps: the first counts the rows of each tile that pass, the second turns the counts into places, and the third
    /// writes the numbers of the rows there.
    fn select(
        &self,
        queue: &Queue,
        passing: &DeviceBufferMut,
        picked: &mut DeviceBufferMut,
        counts: &mut DeviceBufferMut,
        count: usize,
    ) -> Result<()> {
        let rows = passing.len();
        let tiles = rows.div_ceil(TILE_ROWS).max(1);
        // Freed in the order of the queue, and so after the kernels.
        let starts = DeviceBufferMut::for_values::<u64>(queue, tiles)?;
        let (passing, starts) = (number(passing.address()), number(starts.address()));
        let (rows, picked) = (rows as u64, number(picked.address()));
        // The kernels loop over tiles beyond the grid.
        let each_tile = blocks(u32::try_from(tiles).unwrap_or(u32::MAX).min(1 << 30), 256);
        let tiles = tiles as u64;
        // SAFETY: the arguments are the kernel's parameters. It reads a byte for each row, and writes a number for each tile to
        // `starts`, which has room for them.
        unsafe {
            launch(
                queue,
                &self.count_passing,
                each_tile,
                &[passing, rows, tiles, starts],
            )
        }?;
        let total = number(at(counts, count));
        // SAFETY: the arguments are the kernel's parameters, and it runs as one block. It reads and writes a number for each tile in
        // `starts`, and writes one in `counts`, which is lent for writing and has this one.
        unsafe { launch(queue, &self.scan, blocks(1, 1024), &[starts, tiles, total]) }?;
        // SAFETY: the arguments are the kernel's parameters, with the rows and tiles that were counted. It writes at most as many
        // numbers as there are rows to `picked`, which is lent for writing and has room for them.
        unsafe {
            launch(
                queue,
                &self.select,
                each_tile,
                &[passing, rows, tiles, starts, picked],
            )
        }
    }

    fn count_nulls(
        &self,
        queue: &Queue,
        column: Column,
        passing: &DeviceBufferMut,
        counts: &mut DeviceBufferMut,
        count: usize,
    ) -> Result<()> {
        let rows = passing.len();
        let arguments = [
            number(passing.address()),
            number(column.validity.at),
            column.validity.bit as u64,
            rows as u64,
            number(at(counts, count)),
        ];
        // SAFETY: the arguments are the kernel's parameters. It reads `rows` bytes and bits, which are lent to the queue, and writes a
        // number in `counts`, which is lent for writing and has this one.
        unsafe { launch(queue, &self.count_nulls, threads(rows), &arguments) }
    }

    /// In two steps: lengths, and their sums, which one block computes.
    fn measure(
        &self,
        queue: &Queue,
        column: Column,
        passing: &DeviceBufferMut,
        starts: &mut DeviceBufferMut,
        counts: &mut DeviceBufferMut,
        count: usize,
    ) -> Result<()> {
        let rows = passing.len();
        let starts = number(starts.address());
        let arguments = [
            layout(column.format).0,
            number(column.values.at),
            number(column.data),
            number(column.validity.at),
            column.validity.bit as u64,
            rows as u64,
            number(passing.address()),
            starts,
        ];
        // SAFETY: the arguments are the kernel's parameters. It reads `rows` rows of a valid column and as many bytes, which are lent
        // to the queue, and writes a number for each row to `starts`, which is lent for writing and has room for them.
        unsafe { launch(queue, &self.measure, threads(rows), &arguments) }?;
        let arguments = [starts, rows as u64, number(at(counts, count))];
        // SAFETY: the arguments are the kernel's parameters, and it runs as one block. It reads and writes a number for each row in
        // `starts`, and writes one in `counts`, which is lent for writing and has this one.
        unsafe { launch(queue, &self.scan, blocks(1, 1024), &arguments) }
    }

    fn gather(
        &self,
        queue: &Queue,
        column: Column,
        picked: &Picked<'_>,
        out: &mut DeviceBufferMut,
        to: To,
    ) -> Result<()> {
        let Format::Fixed { width, unit } = column.format else {
            return Ok(());
        };
        let arguments = [
            unit as u64,
            width as u64,
            number(column.values.at),
            number(picked.rows.address()),
            picked.count as u64,
            number(out.address().offset(to.row * width)),
        ];
        // SAFETY: the arguments are the kernel's parameters. It reads rows of the column, which is lent to the queue and aligned, at the
        // numbers that `select` has written, and writes as many rows to `out`, which is lent for writing and has room for them.
        unsafe { launch(queue, &self.gather, threads(picked.count), &arguments) }
    }

    fn gather_bits(
        &self,
        queue: &Queue,
        bits: Bits,
        picked: &Picked<'_>,
        out: &mut DeviceBufferMut,
        to: To,
    ) -> Result<()> {
        let arguments = [
            number(bits.at),
            bits.bit as u64,
            number(picked.rows.address()),
            picked.count as u64,
            number(out.address()),
            to.row as u64,
        ];
        let words = threads(picked.count.div_ceil(32) + 1);
        // SAFETY: the arguments are the kernel's parameters. It reads bits that are lent to the queue, at the numbers that `select` has
        // written, and writes the words of as many bits of `out`, which is lent for writing, has room for them, and is padded.
        unsafe { launch(queue, &self.gather_bits, words, &arguments) }
    }

    fn gather_bytes(
        &self,
        queue: &Queue,
        column: Column,
        picked: &Picked<'_>,
        starts: &DeviceBufferMut,
        out: &mut DeviceBufferMut,
        data: &mut DeviceBufferMut,
        to: To,
    ) -> Result<()> {
        let (kind, _) = layout(column.format);
        let width = match column.format {
            Format::Offsets { width } => width,
            _ => 16,
        };
        let arguments = [
            kind,
            number(column.values.at),
            number(column.data),
            number(column.validity.at),
            column.validity.bit as u64,
            number(picked.rows.address()),
            number(starts.address()),
            picked.count as u64,
            to.byte as u64,
            number(out.address().offset(to.row * width)),
            number(data.address()),
        ];
        // SAFETY: the arguments are the kernel's parameters. It reads rows of a valid column, which is lent to the queue, at the
        // numbers that `select` has written. It writes as many offsets and one more, or views, to `out`, and as many bytes as
        // `measure` has counted to `data`; both are lent for writing and have room for them.
        unsafe { launch(queue, &self.gather_bytes, threads(picked.count), &arguments) }
    }
}

/// Queues a kernel whose parameters all have 8 bytes.
///
/// # Safety
/// The arguments must be the kernel's parameters, and what it reads and writes with them must be lent to the queue.
unsafe fn launch(
    queue: &Queue,
    kernel: &CudaFunction,
    grid: LaunchConfig,
    arguments: &[u64],
) -> Result<()> {
    let stream = queue.cuda_stream()?;
    let mut launch: LaunchArgs<'_> = stream.launch_builder(kernel);
    for argument in arguments {
        launch.arg(argument);
    }
    // SAFETY: the caller guarantees arguments and memory (see `# Safety`).
    let launched = unsafe { launch.launch(grid) };
    launched.map(drop).map_err(|e| failed(queue.device(), e))
}

/// The number of a layout, and the bytes of a row that has a fixed number of them.
fn layout(format: Format) -> (u64, u64) {
    match format {
        Format::Bits => (0, 0),
        Format::Fixed { width, .. } => (0, width as u64),
        Format::Offsets { width: 4 } => (1, 0),
        Format::Offsets { .. } => (2, 0),
        Format::Views => (3, 0),
    }
}

/// The address of a number.
fn at(counts: &DeviceBufferMut, count: usize) -> DevicePtr {
    counts.address().offset(count * size_of::<u64>())
}

fn number(address: DevicePtr) -> u64 {
    address.address() as u64
}

/// So many blocks of so many threads.
fn blocks(blocks: u32, threads: u32) -> LaunchConfig {
    LaunchConfig {
        grid_dim: (blocks, 1, 1),
        block_dim: (threads, 1, 1),
        shared_mem_bytes: 0,
    }
}

/// The kernels loop over rows beyond the grid.
fn threads(n: usize) -> LaunchConfig {
    LaunchConfig::for_num_elems(u32::try_from(n).unwrap_or(u32::MAX))
}

fn failed(device: &Device, e: DriverError) -> Error {
    device_error(device.id(), "filter", e.0 as i32, e.to_string())
}
