//! The kernels of CUDA devices: PTX, which the driver compiles for its device.
//!
//! **Unproven:** the text assembles, but no GPU has run it yet, and no test does. What the tests go through are the
//! simulated device's.

use arrow_device::cuda::cudarc::driver::{CudaFunction, DriverError, LaunchConfig, PushKernelArg};
use arrow_device::cuda::cudarc::nvrtc::Ptx;
use arrow_device::device::{DevicePtr, device_error};
use arrow_device::{Device, DeviceBufferMut, Error, Queue, Result};

use super::column::Column;
use super::predicate::{Condition, Kind};

#[derive(Clone, Debug)]
pub(crate) struct Kernels {
    compare: CudaFunction,
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
            select: module.load_function("select").map_err(failed)?,
            gather: module.load_function("gather").map_err(failed)?,
        })
    }

    /// As the simulated device's.
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
        let (orderings, passing) = (u32::from(condition.passing), number(passing.address()));
        launch.arg(&kind).arg(&values).arg(&mask).arg(&column.bit);
        launch.arg(&column.rows).arg(&orderings);
        launch.arg(&condition.literal).arg(&passing);
        // SAFETY: these are the kernel's parameters. It reads `rows` rows and their bits, which are lent to the queue, and
        // writes as many bytes of `passing`, which is lent to be written.
        let launched = unsafe { launch.launch(threads(column.rows)) };
        launched.map(drop).map_err(|e| failed(queue.device(), e))
    }

    /// As the simulated device's.
    pub(crate) fn select(
        &self,
        queue: &Queue,
        passing: &DeviceBufferMut,
        picked: &mut DeviceBufferMut,
        counts: &mut DeviceBufferMut,
    ) -> Result<()> {
        let stream = queue.cuda_stream()?;
        let mut launch = stream.launch_builder(&self.select);
        let (rows, passing) = (passing.len(), number(passing.address()));
        let (picked, counts) = (number(picked.address()), number(counts.address()));
        launch.arg(&passing).arg(&rows).arg(&picked).arg(&counts);
        let one = LaunchConfig {
            grid_dim: (1, 1, 1),
            block_dim: (1, 1, 1),
            shared_mem_bytes: 0,
        };
        // SAFETY: these are the kernel's parameters, and it is one thread. It reads a byte for each row, and writes at most as
        // many numbers to `picked` and one to `counts`, which are lent to be written and have room.
        let launched = unsafe { launch.launch(one) };
        launched.map(drop).map_err(|e| failed(queue.device(), e))
    }

    /// As the simulated device's.
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
        // SAFETY: these are the kernel's parameters. It reads rows of the column, which is lent to the queue, at the numbers
        // that `select` wrote, and writes as many rows and their bits at most as the column has, and a count: to buffers
        // that are lent to be written and have room.
        let launched = unsafe { launch.launch(threads(column.rows.div_ceil(8))) };
        launched.map(drop).map_err(|e| failed(queue.device(), e))
    }
}

/// Kind, values and mask.
fn arguments(column: Column) -> (u32, u64, u64) {
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

/// The kernels go on where the grid ends.
fn threads(n: usize) -> LaunchConfig {
    LaunchConfig::for_num_elems(u32::try_from(n).unwrap_or(u32::MAX))
}

fn failed(device: &Device, e: DriverError) -> Error {
    device_error(device.id(), "filter", e.0 as i32, e.to_string())
}
