//! The kernels for CUDA devices, in PTX, which the driver compiles for its device.
//!
//! A compiler made the PTX of `filter.cu`; `python3 gpu/ptx` compares and assembles it. The filter's kernels ran on an NVIDIA H200:
//! `benches/results/2026-11-26-nvidia-h200-backends.md`.

use std::collections::HashMap;

use arrow_device::cuda::cudarc::driver::{CudaFunction, DriverError, LaunchConfig, PushKernelArg};
use arrow_device::cuda::cudarc::nvrtc::Ptx;
use arrow_device::device::device_error;
use arrow_device::{Device, Error, Queue, Result};

use super::sim::KERNELS;

/// The kernels by their names.
#[derive(Debug)]
pub(crate) struct Cuda(HashMap<&'static str, CudaFunction>);

impl Cuda {
    pub(crate) fn load(device: &Device) -> Result<Self> {
        let failed = |e: DriverError| failed(device, e);
        let module = Ptx::from_src(include_str!("filter.ptx"));
        let module = device.cuda_context()?.load_module(module).map_err(failed)?;
        let function = |name: &&'static str| Ok((*name, module.load_function(name)?));
        let functions = KERNELS.iter().map(function);
        Ok(Self(functions.collect::<Result<_, _>>().map_err(failed)?))
    }

    /// # Safety
    /// As [`Launcher::launch`](super::kernels::Launcher::launch).
    pub(crate) unsafe fn launch(
        &self,
        queue: &Queue,
        kernel: &str,
        rows: u64,
        words: &[u64],
    ) -> Result<()> {
        let blocks = |blocks: u32, threads: u32| LaunchConfig {
            grid_dim: (blocks, 1, 1),
            block_dim: (threads, 1, 1),
            shared_mem_bytes: 0,
        };
        let most = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
        let grid = match kernel {
            "count_passing" | "select" => blocks(most(words[2]).min(1 << 30), 256),
            "scan_u64" => blocks(1, 1024),
            _ => LaunchConfig::for_num_elems(most(rows.max(1))),
        };
        let stream = queue.cuda_stream()?;
        let mut launch = stream.launch_builder(&self.0[kernel]);
        for word in words {
            launch.arg(word);
        }
        // SAFETY: the caller guarantees parameters and memory (see `# Safety`).
        let launched = unsafe { launch.launch(grid) };
        launched.map(drop).map_err(|e| failed(queue.device(), e))
    }
}

fn failed(device: &Device, e: DriverError) -> Error {
    device_error(device.id(), "filter", e.0 as i32, e.to_string())
}
