//! Nodes describe their device, and open it where they run.

use crate::kit::*;
use crate::nodes::*;

/// Numbers of the host, doubled.
fn doubled(partitions: usize, device: impl Into<DeviceSpec>) -> Plan {
    let host = format!("Numbers{}", " 1".repeat(partitions));
    double(planned(&host, &[], &[]), device)
}

#[test]
fn descriptions_compare_what_they_describe() {
    let (a, b) = (Sim::new(), Sim::new());
    let of = DeviceSpec::from(&a);
    assert_eq!(of, DeviceSpec::from(a.device.clone()));
    assert_ne!(of, DeviceSpec::from(&b));
    assert_ne!(of, any_sim());
    // Of a device of the same id, in another process perhaps.
    assert_ne!(of, DeviceSpec::from(a.device.id()));
    assert!(of.fits(&a) && !of.fits(&b));
    assert!(any_sim().fits(&a) && any_sim().fits(&b));
    assert!(!any_sim().fits(&Devices::cpu()));
    assert!(DeviceSpec::from(a.device.id()).fits(&a));
    let cpu = DeviceSpec::from(&Devices::cpu());
    assert_eq!((cpu.id(), cpu.to_string()), (None, "cpu".to_owned()));
    for text in ["cuda", "cuda:1", "cpu", "sim", "vulkan:3", "cuda-host:0"] {
        let spec: DeviceSpec = text.parse().unwrap();
        assert_eq!(spec.to_string(), text);
    }
    assert!("gpu".parse::<DeviceSpec>().is_err());
}

/// Four partitions on two devices: each has its half, and a whole chain of operators stays there. A result is where it is wanted,
/// wherever the plan ran.
#[tokio::test]
async fn partitions_go_to_different_devices() {
    let (a, b) = (Sim::new(), Sim::new());
    // Bytes that each device was sent, and sent back.
    let bytes = |sim: &Sim| (sim.stats().bytes_to_device, sim.stats().bytes_to_host);
    let moved = || [&a, &b].map(bytes);
    let plan = with_transitions(double(doubled(4, any_sim()), any_sim()));
    let found = collect_partitioned(plan, offering([&a, &b])).await.unwrap();
    assert_eq!(numbers_of(&found.concat()), multiples(64, 4));
    assert_eq!(moved(), [(256, 256); 2]);
    // One device takes all.
    let plan = with_transitions(doubled(4, any_sim()));
    collect(plan, offering([&b])).await.unwrap();
    assert_eq!(moved(), [(256, 256), (768, 768)]);
    let plan = doubled(4, any_sim());
    let stream = execute_on_device(plan, offering([&a, &b]), &a).unwrap();
    let batches: Vec<_> = stream.try_collect().await.unwrap();
    assert!(batches.iter().all(|batch| *batch.device() == a.device));
    assert_eq!(sorted(numbers_on(&batches)), multiples(64, 2));
    drop((found, batches));
    a.assert_done();
    b.assert_done();
}

/// Whoever plans needs no device: it is asked for when the plan runs, and the error says what is missing and what there is.
#[tokio::test]
async fn a_plan_for_a_device_that_is_not_there() {
    let a = Sim::new();
    let plain = || session().task_ctx();
    for (wanted, context, there) in [
        ("cuda:7", plain(), "cuda:7"),
        ("opencl", plain(), "opencl"),
        ("cuda", offering([&a]), "the session offers [sim:"),
        ("cuda", offering([]), "the session offers []"),
    ] {
        let spec: DeviceSpec = wanted.parse().unwrap();
        let plan = with_transitions(doubled(2, spec.clone()));
        let error = collect(plan, context.clone()).await.unwrap_err();
        let Error::DeviceNotAvailable { device, .. } = ours(&error) else {
            panic!("{error}");
        };
        assert_eq!(device.device_type.short_name(), wanted.split(':').next());
        says(&error, &[there, "MapExec, partition 0"]);
        // Neither do forms and scans.
        let open = |_| -> arrow_device::Result<Reader> { panic!("there is no device to read on") };
        let table = DeviceTable::from_readers(numbers(0, 1).schema(), spec.clone(), 2, open);
        let leaf = device_leaf(std::sync::Arc::new(table)).await;
        let line = "CoalescePartitions < Projection a:x < LocalLimit 3 < There";
        let plan = with_transitions(double(planned(line, &[], &[("There", &leaf)]), spec));
        let shown = text(&plan, &[]);
        let device = format!("device={wanted}");
        assert!(shown.lines().all(|line| line.contains(&device)), "{shown}");
        fails(collect(plan, context).await, &[wanted, there]);
    }
}

/// The session's devices first of all, by their ids.
#[test]
fn a_session_opens_its_own_devices() {
    let (a, b) = (Sim::new(), Sim::new());
    let resolver = DeviceResolver::of_task(&offering([&a, &b]));
    let open = |spec: DeviceSpec, partition| resolver.open(&spec, partition);
    for (sim, partition) in [(&a, 0), (&b, 1), (&a, 2), (&b, 5)] {
        assert_eq!(open(any_sim(), partition).unwrap(), sim.device);
        // An id is that device's, whatever the partition.
        let id = sim.device.id();
        assert_eq!(open(id.into(), partition + 1).unwrap(), sim.device);
    }
    let other = Sim::new();
    let e = open(other.device.id().into(), 0).unwrap_err();
    assert!(matches!(e, Error::DeviceNotAvailable { .. }), "{e}");
    // This very device is meant, and this program has it.
    assert_eq!(open(DeviceSpec::from(&other), 0).unwrap(), other.device);
    assert_eq!(open(DeviceId::CPU.into(), 3).unwrap(), Devices::cpu());
    // Without a resolver, those of the process.
    let resolver = DeviceResolver::of_task(&session().task_ctx());
    let sim = Devices::simulated().unwrap();
    for (spec, device) in [("sim", &sim), ("sim:0", &sim), ("cpu", &Devices::cpu())] {
        assert_eq!(resolver.open(&spec.parse().unwrap(), 1).unwrap(), *device);
    }
    // One that returns another type.
    let resolver = DeviceResolver::new(|_, _| Ok(Devices::cpu()));
    let e = fails(resolver.open(&any_sim(), 0), &["returned cpu"]);
    let of = |e: &Error| matches!(e, Error::DeviceNotAvailable { device, .. } if device.device_type == ArrowDeviceType::EXT_DEV);
    assert!(of(&e), "{e:?}");
}

/// A plan does not keep its device, and says so when it runs too late.
#[tokio::test]
async fn a_plan_holds_no_device() {
    let sim = Sim::new();
    let id = sim.device.id();
    let plan = with_transitions(doubled(1, &sim));
    let weak = sim.device.downgrade();
    drop(sim);
    assert!(weak.upgrade().is_none());
    let error = ours(&fails(run(&plan).await, &[&id.to_string()]));
    assert!(matches!(error, Error::DeviceNotAvailable { .. }));
}
