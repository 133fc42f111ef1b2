//! The kernels for CUDA devices, in PTX, which the driver compiles for its device.
//!
//! **Unproven:** the PTX assembles, but no GPU has run it yet. The tests run the kernels of the
//! simulated device.

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
        let (orderings, passing) = (u32::from(condition.passing), number(passing.address()));
        launch.arg(&kind).arg(&values).arg(&mask).arg(&column.bit);
        launch.arg(&column.rows).arg(&orderings);
        launch.arg(&condition.literal).arg(&passing);
        // SAFETY: the arguments are the kernel's parameters. It reads `rows` rows and their bits,
        // which are lent to the queue, and writes as many bytes of `passing`, which is lent for
        // writing.
        let launched = unsafe { launch.launch(threads(column.rows)) };
        launched.map(drop).map_err(|e| failed(queue.device(), e))
    }

    /// Does the same as the simulated device's kernel.
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
        // SAFETY: the arguments are the kernel's parameters, and it runs as one thread. It reads a
        // byte for each row, and writes at most as many numbers to `picked` and one to `counts`,
        // which are lent for writing and are large enough.
        let launched = unsafe { launch.launch(one) };
        launched.map(drop).map_err(|e| failed(queue.device(), e))
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

/// The kernels loop over rows beyond the grid.
fn threads(n: usize) -> LaunchConfig {
    LaunchConfig::for_num_elems(u32::try_from(n).unwrap_or(u32::MAX))
}

fn failed(device: &Device, e: DriverError) -> Error {
    device_error(device.id(), "filter", e.0 as i32, e.to_string())
}
