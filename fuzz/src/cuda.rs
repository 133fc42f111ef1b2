//! The memories of one GPU as a world that threads share: streams are late at random, so that a missing wait shows in the rows, and
//! loans are read by copies on the device. The stand-in for the driver runs one operation after the other, so that no wait is missed
//! there: it shows that this runs.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use arrow_device::Devices;

use crate::gpu;
use crate::input::Input;
use crate::operations;
use crate::panics::watched;
use crate::world::World;

pub use crate::gpu::Counts;

static WORLD: OnceLock<World> = OnceLock::new();

/// Opens `cuda:0`, its page-locked and its managed memory.
///
/// # Errors
/// Returns why they cannot be opened.
pub fn open() -> Result<&'static Counts, arrow_device::Error> {
    crate::init();
    let names = ["cuda:0", "cuda-host:0", "cuda-managed:0"];
    let devices = names.map(Devices::open).into_iter();
    let devices = devices.collect::<Result<Vec<_>, _>>()?;
    let context = devices[0].cuda_context()?;
    let all = std::iter::once(Devices::cpu()).chain(devices);
    let world = World::of(all.map(|device| (device, None)).collect());
    WORLD.get_or_init(|| world);
    Ok(gpu::set(context))
}

/// The bytes of the operations that follow from a number: those of the target `operations`, of an array that is generated.
pub fn input(seed: u64) -> Vec<u8> {
    gpu::seed(seed);
    let mut bytes = vec![gpu::random() as u8 & !4];
    let mut some = |least: u64, most: u64, counted: bool| {
        let n = least + gpu::random() % (most - least);
        bytes.extend(counted.then_some(n as u8));
        bytes.extend((0..n).map(|_| gpu::random() as u8));
    };
    some(8, 80, true);
    some(10, 70, false);
    bytes
}

/// Runs an input, with streams that are late by other times each time.
///
/// # Panics
/// If rows are not those of arrow-rs, if a release failed, and before `open`.
pub fn run(data: &[u8]) {
    let world = WORLD.get().expect("open it first");
    watched(|| operations::on(world, &mut Input::new(data)));
    for place in &world.places {
        let failed = place.device.take_drop_error();
        assert!(failed.is_none(), "a release failed: {failed:?}");
    }
}

/// Waits for everything, and says what is not freed: nothing should be.
///
/// # Panics
/// If the device failed.
pub fn left() -> Vec<String> {
    let world = WORLD.get().expect("open it first");
    let end = Instant::now() + Duration::from_secs(20);
    loop {
        let left = world.places.iter().filter_map(|place| {
            place.device.synchronize().expect("the device is alive");
            place.device.trim();
            let stats = place.device.stats();
            let left = stats.allocations - stats.frees;
            (left > 0).then(|| format!("{left} allocations of {}", place.device))
        });
        let left: Vec<_> = left.collect();
        if left.is_empty() || Instant::now() > end {
            return left;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}
