//! The kernels for CUDA devices, in PTX, which the driver compiles for its device.
//!
//! A compiler made the PTX of `filter.cu`, whose C++ is tested on the host; `python3 .ci/ptx` does
//! both and assembles the PTX. **Unproven:** no GPU has run it yet.

use arrow_device::cuda::cudarc::driver::{CudaFunction, DriverError, LaunchConfig, PushKernelArg};
use arrow_device::cuda::cudarc::nvrtc::Ptx;
use arrow_device::device::{DevicePtr, device_error};
use arrow_device::{Device, DeviceBufferMut, Error, Queue, Result};

use super::column::Column;
use super::predicate::{Condition, Kind};

/// How many rows a block selects from, about.
const TILE_ROWS: usize = 2048;

#[derive(Clone, Debug)]
pub(crate) struct Kernels {
    compare: CudaFunction,
    count_passing: CudaFunction,
    scan: CudaFunction,
    select: CudaFunction,
    gather: CudaFunction,
}

impl Kernels {
    pub(crate) fn load(device: &Device) -> Result<Self> {
        let failed = |e: DriverError| failed(device, e);
        let context = device.as_cuda()?.cuda_context()?;
        let module = context.load_module(Ptx::from_src(include_str!("filter.ptx")));
        let module = module.map_err(failed)?;
        Ok(Self {
            compare: module.load_function("compare").map_err(failed)?,
            count_passing: module.load_function("count_passing").map_err(failed)?,
            scan: module.load_function("scan_u64").map_err(failed)?,
            select: module.load_function("select").map_err(failed)?,
            gather: module.load_function("gather").map_err(failed)?,
        })
    }

    /// Does the same as the simulated device's kernel.
    pub(crate) fn compare(
        &self,
        queue: &Queue,
        column: Column,
        condition: Condition,
        passing: &mut DeviceBufferMut,
    ) -> Result<()> {
        let stream = queue.cuda_stream()?;
        let mut launch = stream.launch_builder(&self.compare);
        let (kind, values, mask) = arguments(column);
        let (orderings, passing) = (u64::from(condition.passing), number(passing.address()));
        launch.arg(&kind).arg(&values).arg(&mask).arg(&column.bit);
        launch.arg(&column.rows).arg(&orderings);
        launch.arg(&condition.literal).arg(&passing);
        // SAFETY: the arguments are the kernel's parameters. It reads `rows` rows and their bits,
        // which are lent to the queue, and writes as many bytes of `passing`, which is lent for
        // writing.
        let launched = unsafe { launch.launch(threads(column.rows)) };
        launched.map(drop).map_err(|e| failed(queue.device(), e))
    }

    /// Does the same as the simulated device's kernel, in three steps: the first counts the rows
    /// of each tile that pass, the second turns the counts into places, and the third writes the
    /// numbers of the rows there.
    pub(crate) fn select(
        &self,
        queue: &Queue,
        passing: &DeviceBufferMut,
        picked: &mut DeviceBufferMut,
        counts: &mut DeviceBufferMut,
    ) -> Result<()> {
        let failed = |e: DriverError| failed(queue.device(), e);
        let rows = passing.len();
        let tiles = rows.div_ceil(TILE_ROWS).max(1);
        // Freed in the order of the queue, and so after the kernels.
        let starts = DeviceBufferMut::for_values::<u64>(queue, tiles)?;
        let (passing, starts) = (number(passing.address()), number(starts.address()));
        let (picked, count) = (number(picked.address()), number(counts.address()));
        let stream = queue.cuda_stream()?;
        // The kernels loop over tiles beyond the grid.
        let each_tile = blocks(u32::try_from(tiles).unwrap_or(u32::MAX).min(1 << 30), 256);
        let mut launch = stream.launch_builder(&self.count_passing);
        launch.arg(&passing).arg(&rows).arg(&tiles).arg(&starts);
        // SAFETY: the arguments are the kernel's parameters. It reads a byte for each row, and
        // writes a number for each tile to `starts`, which has room for them.
        unsafe { launch.launch(each_tile) }.map_err(failed)?;
        let mut launch = stream.launch_builder(&self.scan);
        launch.arg(&starts).arg(&tiles).arg(&count);
        // SAFETY: the arguments are the kernel's parameters, and it runs as one block. It reads and
        // writes a number for each tile in `starts`, and one in `counts`, which is lent for writing
        // and is not empty.
        unsafe { launch.launch(blocks(1, 1024)) }.map_err(failed)?;
        let mut launch = stream.launch_builder(&self.select);
        launch.arg(&passing).arg(&rows).arg(&tiles);
        launch.arg(&starts).arg(&picked);
        // SAFETY: the arguments are the kernel's parameters, with the rows and tiles that were
        // counted. It writes at most as many numbers as there are rows to `picked`, which is lent
        // for writing and has room for them.
        unsafe { launch.launch(each_tile) }.map_err(failed)?;
        Ok(())
    }

    /// Does the same as the simulated device's kernel.
    #[expect(clippy::too_many_arguments)]
    pub(crate) fn gather(
        &self,
        queue: &Queue,
        column: Column,
        picked: &DeviceBufferMut,
        i: usize,
        counts: &mut DeviceBufferMut,
        out: &mut DeviceBufferMut,
        out_mask: &mut DeviceBufferMut,
    ) -> Result<()> {
        let stream = queue.cuda_stream()?;
        let mut launch = stream.launch_builder(&self.gather);
        let (kind, values, mask) = arguments(column);
        let (picked, count) = (number(picked.address()), number(counts.address()));
        let nulls = number(counts.address().offset((1 + i) * size_of::<i64>()));
        let (out, out_mask) = (number(out.address()), number(out_mask.address()));
        launch.arg(&kind).arg(&values).arg(&mask).arg(&column.bit);
        launch.arg(&picked).arg(&count).arg(&nulls);
        launch.arg(&out).arg(&out_mask);
        // SAFETY: the arguments are the kernel's parameters. It reads rows of the column, which is
        // lent to the queue, at the numbers that `select` has written. It writes at most as many
        // rows and bits as the column has, and a count, to buffers that are lent for writing and
        // are large enough.
        let launched = unsafe { launch.launch(threads(column.rows.div_ceil(8))) };
        launched.map(drop).map_err(|e| failed(queue.device(), e))
    }
}

/// Kind, values and validity bitmap.
fn arguments(column: Column) -> (u64, u64, u64) {
    let kind = match column.kind {
        Kind::Int32 => 0,
        Kind::Int64 => 1,
        Kind::Float64 => 2,
    };
    (kind, number(column.values), number(column.mask))
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
