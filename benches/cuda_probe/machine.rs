//! What the figures were measured on.

use std::ffi::c_int;
use std::fs::read_to_string;

use arrow_device::cuda::cudarc::driver::result::{self, device};
use arrow_device::cuda::cudarc::driver::sys::{CUdevice_attribute as A, cuDriverGetVersion};

use crate::Probe;
use crate::raw::Lists;
use crate::stats::{Res, size};

/// The device's name, as the driver has it.
pub(crate) fn name(ordinal: usize) -> Res<String> {
    Ok(device::get_name(device::get(c_int::try_from(ordinal)?)?)?)
}

pub(crate) fn run(probe: &Probe) -> Res<()> {
    let handle = device::get(c_int::try_from(probe.ordinal)?)?;
    // SAFETY: the driver has just given the handle.
    let attribute = |which: A| unsafe { device::get_attribute(handle, which) };
    let (free, total) = result::mem_get_info()?;
    let mut version = 0;
    // SAFETY: `version` is valid for the write of an int.
    unsafe { cuDriverGetVersion(&raw mut version) }.result()?;
    let pci = format!(
        "/sys/bus/pci/devices/{:04x}:{:02x}:{:02x}.0",
        attribute(A::CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID)?,
        attribute(A::CU_DEVICE_ATTRIBUTE_PCI_BUS_ID)?,
        attribute(A::CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID)?
    );
    let link = |file: &str| first(&format!("{pci}/{file}"));
    let capability = [
        attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
    ];
    let engines = attribute(A::CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT)?;
    let virtual_machine = of("/proc/cpuinfo", "flags")
        .split(' ')
        .any(|flag| flag == "hypervisor");
    let no_lists = "not in this driver";
    for (name, value) in [
        (
            "crate",
            concat!("arrow-device ", env!("CARGO_PKG_VERSION")).to_owned(),
        ),
        (
            "build",
            if cfg!(debug_assertions) {
                "debug: slower than a release"
            } else {
                "release"
            }
            .to_owned(),
        ),
        (
            "device",
            format!("{} ({})", name(probe.ordinal)?, probe.device.id()),
        ),
        (
            "compute capability",
            capability.map(|n| n.to_string()).join("."),
        ),
        (
            "device memory",
            format!("{}, of which {} free", size(total), size(free)),
        ),
        ("copy engines", engines.to_string()),
        (
            "CUDA of the driver",
            format!("{}.{}", version / 1000, version % 1000 / 10),
        ),
        ("driver", first("/proc/driver/nvidia/version")),
        (
            "call for lists of copies",
            probe
                .lists
                .as_ref()
                .map_or(no_lists, |_| Lists::NAME)
                .to_owned(),
        ),
        (
            "link now",
            format!(
                "{}, {} lanes",
                link("current_link_speed"),
                link("current_link_width")
            ),
        ),
        ("NUMA node of the device", link("numa_node")),
        (
            "huge pages",
            first("/sys/kernel/mm/transparent_hugepage/enabled"),
        ),
        ("processor", of("/proc/cpuinfo", "model name")),
        (
            "virtual machine",
            if virtual_machine {
                "yes"
            } else {
                "no, or it does not say"
            }
            .to_owned(),
        ),
        ("cores", std::thread::available_parallelism()?.to_string()),
        ("memory", of("/proc/meminfo", "MemTotal")),
        ("kernel", first("/proc/sys/kernel/osrelease")),
    ] {
        println!("{name:<28}{value}");
    }
    println!(
        "\nUnits: 1 GB/s = 10^9 bytes a second; KiB and MiB are powers of two. p10 and p90: a tenth of\n\
         the values are below or above. Waits are for an event without timing, by this thread.\n"
    );
    Ok(())
}

/// The first line of a file.
fn first(path: &str) -> String {
    let text = read_to_string(path).unwrap_or_default();
    match text.lines().next().map(str::trim) {
        Some(line) if !line.is_empty() => line.to_owned(),
        _ => "unknown".into(),
    }
}

/// What follows "name:" in a file.
pub(crate) fn of(path: &str, name: &str) -> String {
    let text = read_to_string(path).unwrap_or_default();
    let mut lines = text.lines().filter_map(|line| line.split_once(':'));
    let found = lines.find(|(key, _)| key.trim() == name);
    found.map_or("unknown".into(), |(_, value)| value.trim().to_owned())
}
