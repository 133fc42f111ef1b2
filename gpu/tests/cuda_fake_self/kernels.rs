//! The stand-ins for the examples' kernels notice a wrong launch.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaSlice, CudaStream, DevicePtr, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::Ptx;

use crate::fake::{Group, LAZY};

/// The stand-in reads the names.
const PTX: &str = "
.visible .entry double_f64() { ret; }
.visible .entry count_passing() { ret; }
.visible .entry scan_u64() { ret; }
.visible .entry select() { ret; }
";

struct Launcher {
    context: Arc<CudaContext>,
    stream: Arc<CudaStream>,
}

impl Launcher {
    fn open(flags: u32) -> (Group, Self) {
        let group = Group::open(1, flags);
        let context = CudaContext::new(group.ordinal()).unwrap();
        let stream = context.default_stream();
        (group, Self { context, stream })
    }

    fn launch(&self, name: &str, blocks: u32, threads: u32, parameters: &[u64]) {
        let module = self.context.load_module(Ptx::from_src(PTX)).unwrap();
        let kernel = module.load_function(name).unwrap();
        let mut launch = self.stream.launch_builder(&kernel);
        for parameter in parameters {
            launch.arg(parameter);
        }
        let shape = LaunchConfig {
            grid_dim: (blocks, 1, 1),
            block_dim: (threads, 1, 1),
            shared_mem_bytes: 0,
        };
        // SAFETY: callers pass as many parameters as the kernel has, each of 8 bytes. Where they
        // are wrong on purpose, the stand-in refuses them.
        unsafe { launch.launch(shape) }.unwrap();
    }

    /// The address of a copy of these values.
    fn up<T: cudarc::driver::DeviceRepr>(&self, values: &[T]) -> (CudaSlice<T>, u64) {
        let memory = self.stream.clone_htod(values).unwrap();
        self.stream.synchronize().unwrap(); // the stream reads `values`
        let (address, sync) = memory.device_ptr(&self.stream);
        drop(sync);
        (memory, address)
    }
}

/// 100 rows of which every third passes, in 2 tiles of 64 rows and of what is left.
fn passing() -> Vec<u8> {
    (0..100).map(|row| u8::from(row % 3 == 0)).collect()
}

#[test]
fn three_kernels_select_rows() {
    for flags in [0, LAZY] {
        let (group, on) = Launcher::open(flags);
        let ((passing, rows), (starts, at)) = (on.up(&passing()), on.up(&[7u64; 3]));
        let (picked, to) = on.up(&[0u64; 34]);
        on.launch("count_passing", 2, 256, &[rows, 100, 2, at]);
        on.launch("scan_u64", 1, 1024, &[at, 2, at + 16]);
        on.launch("select", 1, 32, &[rows, 100, 2, at, to]);
        let found = on.stream.clone_dtoh(&starts).unwrap();
        let rows = on.stream.clone_dtoh(&picked).unwrap();
        on.stream.synchronize().unwrap();
        assert_eq!(found, [0, 22, 34]);
        assert_eq!(rows, (0..100).step_by(3).collect::<Vec<u64>>());
        drop((passing, starts, picked));
        assert_eq!(group.drain(), 0);
        drop(on);
        group.assert_clean();
    }
}

/// Launches kernels of which the last must be refused.
fn refused(violation: &str, launches: impl FnOnce(&Launcher, u64, u64)) {
    let (group, on) = Launcher::open(0);
    let ((passing, rows), (starts, at)) = (on.up(&passing()), on.up(&[7u64; 8]));
    launches(&on, rows, at);
    assert_ne!(group.drain(), 0, "{violation}");
    drop((passing, starts, on));
    group.assert_report(&[violation]);
}

#[test]
fn grids_that_leave_rows_out_or_hang_are_noticed() {
    refused(
        "DoubleF64 needs a thread for each of 8 rows",
        |on, _, at| {
            on.launch("double_f64", 1, 8, &[at, at, 8]);
            on.stream.synchronize().unwrap();
            on.launch("double_f64", 1, 7, &[at, at, 8]);
        },
    );
    refused("ScanU64 has one block", |on, _, at| {
        on.launch("scan_u64", 2, 64, &[at, 3, at + 24]);
    });
    refused("CountPassing needs whole warps", |on, rows, at| {
        on.launch("count_passing", 2, 100, &[rows, 10, 2, at]);
    });
}

#[test]
fn steps_that_do_not_fit_are_noticed() {
    // Without the scan, the starts are counts.
    refused("tile 0 starts at 22, not 0", |on, rows, at| {
        on.launch("count_passing", 2, 256, &[rows, 100, 2, at]);
        on.launch("select", 2, 256, &[rows, 100, 2, at, at]);
    });
    // Other tiles than those that were counted.
    refused("tile 1 starts at 22, not 11", |on, rows, at| {
        on.launch("count_passing", 2, 256, &[rows, 100, 2, at]);
        on.launch("scan_u64", 1, 1024, &[at, 2, at + 16]);
        on.launch("select", 1, 256, &[rows, 60, 2, at, at + 24]);
    });
    refused("100 rows have no tile", |on, rows, at| {
        on.launch("count_passing", 1, 256, &[rows, 100, 0, at]);
    });
    // The counts and the total have too little memory.
    refused("past the end of an allocation of 64", |on, rows, at| {
        on.launch("count_passing", 9, 32, &[rows, 100, 9, at]);
    });
    refused("past the end of an allocation of 64", |on, _, at| {
        on.launch("scan_u64", 1, 32, &[at, 8, at + 64]);
    });
}
