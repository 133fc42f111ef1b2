//! Simulated devices.

use std::sync::Arc;

use arrow_device::Device;
use arrow_device::Queue;
use arrow_device::device::sim::{SimConfig, SimDevice, SimMemory, SimMode, SimQueue};
use arrow_device_conformance::{Hold, Subject, run};

use super::{Gate, skips_what_it_cannot_see, wrap};

pub(crate) fn deferred() -> SimConfig {
    SimConfig {
        mode: SimMode::Deferred,
        ..SimConfig::default()
    }
}

/// Keeps a simulated queue busy with a kernel.
pub(crate) fn hold(queue: &SimQueue) -> Hold {
    let gate = Arc::new(Gate::default());
    let kernel = gate.clone();
    let pass = move |_: &mut SimMemory<'_>| {
        kernel.pass();
        Ok(())
    };
    // SAFETY: the kernel writes nothing.
    let launched = unsafe { queue.launch(pass) };
    launched.unwrap();
    gate.hold()
}

fn make(config: &SimConfig) -> (Device, Arc<SimDevice>) {
    let sim = SimDevice::new(config.clone()).unwrap();
    (wrap(sim.clone()), sim)
}

pub(crate) fn balance(sim: &SimDevice) -> Result<(), String> {
    let report = sim.report();
    if report.is_clean() && report.pending_operations == 0 {
        return Ok(());
    }
    Err(format!("not clean: {report:#?}"))
}

fn suite(config: SimConfig) {
    run(&subject(config));
}

/// Of a device that runs nothing until it is waited for.
fn lazy_suite(config: SimConfig) {
    run(&subject(config).runs_only_when_waited_for());
}

fn subject(config: SimConfig) -> Subject {
    let (device, sim) = make(&config);
    Subject::new(device)
        .with_another(move || make(&config).0)
        .with_hold(|queue: &Queue| hold(queue.raw().downcast_ref().unwrap()))
        .with_balance(move || balance(&sim))
        .strict()
}

#[test]
fn asynchronous() {
    suite(SimConfig::default());
}

#[test]
fn that_runs_nothing_until_waited_for() {
    lazy_suite(deferred());
}

#[test]
fn with_peer_access() {
    suite(SimConfig {
        peer_access: true,
        ..SimConfig::default()
    });
    lazy_suite(SimConfig {
        peer_access: true,
        ..deferred()
    });
}

#[test]
fn with_slow_copies() {
    suite(SimConfig {
        bytes_per_second: Some(400 << 20),
        ..SimConfig::default()
    });
}

#[test]
fn with_little_memory() {
    lazy_suite(SimConfig {
        capacity_bytes: 64 << 20,
        ..deferred()
    });
}

#[test]
fn of_which_nothing_is_known() {
    let known = Subject::new(make(&SimConfig::default()).0);
    skips_what_it_cannot_see(&run(&known));
    let known = Subject::new(make(&deferred()).0).runs_only_when_waited_for();
    skips_what_it_cannot_see(&run(&known));
}
