//! What the figures were measured on.

use std::ffi::{CStr, c_int};
use std::fs::read_to_string;
use std::path::Path;

use arrow_device::cuda::cudarc::driver::sys::{self, CUdevice_attribute as A};

use crate::Probe;
use crate::raw::check;
use crate::stats::{Res, size};

/// The driver's handle of the device.
fn handle(probe: &Probe) -> Res<sys::CUdevice> {
    let mut device = 0;
    let ordinal = c_int::try_from(probe.ordinal)?;
    // SAFETY: `device` is valid for the write of a handle.
    let code = unsafe { sys::cuDeviceGet(&raw mut device, ordinal) };
    check("cuDeviceGet", code)?;
    Ok(device)
}

/// The device's name, as the driver has it.
pub(crate) fn name(probe: &Probe) -> Res<String> {
    let mut name = [0; 256];
    // SAFETY: `name` has the 256 bytes that the driver may write.
    check("cuDeviceGetName", unsafe {
        sys::cuDeviceGetName(name.as_mut_ptr(), 256, handle(probe)?)
    })?;
    // SAFETY: the driver has written a text that ends with NUL to `name`.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) };
    Ok(name.to_string_lossy().into_owned())
}

pub(crate) fn run(probe: &Probe) -> Res<()> {
    let (device, name) = (handle(probe)?, name(probe)?);
    let (mut free, mut total) = (0, 0);
    // SAFETY: `free` and `total` are valid for the write of a size.
    check("cuMemGetInfo", unsafe {
        sys::cuMemGetInfo_v2(&raw mut free, &raw mut total)
    })?;
    let attribute = |which: A| -> Res<c_int> {
        let mut value = 0;
        // SAFETY: `value` is valid for the write of an int.
        let code = unsafe { sys::cuDeviceGetAttribute(&raw mut value, which, device) };
        check("cuDeviceGetAttribute", code)?;
        Ok(value)
    };
    let version = probe.device.as_cuda()?.driver_version();
    let version = version.map_or("unknown".into(), |v| {
        format!("{}.{}", v / 1000, v % 1000 / 10)
    });
    line("crate", concat!("arrow-device ", env!("CARGO_PKG_VERSION")));
    line(
        "build",
        if cfg!(debug_assertions) {
            "debug: slower than a release"
        } else {
            "release"
        },
    );
    line("device", format!("{} ({})", name, probe.device.id()));
    line(
        "compute capability",
        format!(
            "{}.{}",
            attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?
        ),
    );
    line(
        "device memory",
        format!("{}, of which {} free", size(total), size(free)),
    );
    line(
        "copy engines",
        attribute(A::CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT)?.to_string(),
    );
    line("CUDA of the driver", version);
    line("driver", first("/proc/driver/nvidia/version"));
    line(
        "call for lists of copies",
        probe
            .batch
            .as_ref()
            .map_or("not in this driver", |batch| batch.name()),
    );
    let pci = format!(
        "/sys/bus/pci/devices/{:04x}:{:02x}:{:02x}.0",
        attribute(A::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID)?,
        attribute(A::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID)?,
        attribute(A::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID)?
    );
    let of_link = |file: &str| first(Path::new(&pci).join(file));
    line(
        "link now",
        format!(
            "{}, {} lanes",
            of_link("current_link_speed"),
            of_link("current_link_width")
        ),
    );
    line("NUMA node of the device", of_link("numa_node"));
    line("NUMA nodes", nodes());
    line("huge pages", first(format!("{HUGE}/enabled")));
    line(
        "huge pages, defragmentation",
        first(format!("{HUGE}/defrag")),
    );
    line("processor", cpu("model name"));
    line(
        "virtual machine",
        if cpu("flags").split(' ').any(|flag| flag == "hypervisor") {
            "yes"
        } else {
            "no, or it does not say"
        },
    );
    line("cores", probe.cores.to_string());
    line("memory", of("/proc/meminfo", "MemTotal"));
    line("kernel", first("/proc/sys/kernel/osrelease"));
    println!(
        "\nUnits: 1 GB/s = 10^9 bytes a second; KiB, MiB and GiB are powers of two. p10 and p90: a tenth of\n\
         the values are below or above. Waits are for an event without timing, by this thread.\n"
    );
    Ok(())
}

const HUGE: &str = "/sys/kernel/mm/transparent_hugepage";

fn line(name: &str, value: impl AsRef<str>) {
    println!("{name:<28}{}", value.as_ref());
}

/// The first line of a file.
fn first(path: impl AsRef<Path>) -> String {
    let text = read_to_string(path).unwrap_or_default();
    match text.lines().next() {
        Some(line) if !line.trim().is_empty() => line.trim().to_owned(),
        _ => "unknown".into(),
    }
}

/// What follows "name:" in a file.
fn of(path: &str, name: &str) -> String {
    let text = read_to_string(path).unwrap_or_default();
    let found = text.lines().find_map(|line| {
        let (key, value) = line.split_once(':')?;
        (key.trim() == name).then(|| value.trim().to_owned())
    });
    found.unwrap_or_else(|| "unknown".into())
}

fn cpu(name: &str) -> String {
    of("/proc/cpuinfo", name)
}

/// Each node with its cores.
fn nodes() -> String {
    let mut nodes: Vec<String> = (0..256)
        .map(|node| (node, format!("/sys/devices/system/node/node{node}/cpulist")))
        .filter(|(_, path)| Path::new(path).exists())
        .map(|(node, path)| format!("{node} (cores {})", first(path)))
        .collect();
    if nodes.is_empty() {
        nodes.push("unknown".into());
    }
    nodes.join(", ")
}

/// Most memory that this process had resident.
pub(crate) fn peak() -> String {
    of("/proc/self/status", "VmHWM")
}
