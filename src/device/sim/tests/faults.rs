use super::*;

/// One of each operation; cleans up whatever fails.
fn program(device: &SimDevice) -> Result<()> {
    let host = device.allocate_host(8)?.unwrap();
    let result = with_host(device, host);
    // SAFETY: allocated above; `with_host` has waited.
    unsafe { device.free_host(host, 8) };
    result
}

fn with_host(device: &SimDevice, host: DevicePtr) -> Result<()> {
    let queue = device.new_queue()?;
    let memory = queue.allocate(128)?;
    let result = (|| {
        fill(&queue, memory, 1, 8)?;
        let copy = CopyOp {
            src: memory,
            dst: host,
            bytes: 8,
            kind: CopyKind::DeviceToHost,
        };
        // SAFETY: both live until the work was waited for.
        unsafe { queue.copy(&[copy])? };
        sim(&queue).run(|_| Ok(()))?;
        let event = queue.record()?;
        let result = (|| {
            // SAFETY: live.
            unsafe { queue.wait(event)? };
            query(device, event)?;
            wait(device, event)
        })();
        release(device, event);
        result
    })();
    let freed = free(&queue, memory, 128);
    // So that no copy is left, whatever failed.
    device.faults().fail_nth(None, 0);
    device.synchronize()?;
    result.and(freed)
}

#[test]
fn every_operation_fails_once() {
    let Some(device) = deferred() else { return };
    for op in FaultOp::ALL {
        device.faults().clear();
        device.faults().fail_nth(op, 1);
        let error = program(&device).unwrap_err();
        match op {
            FaultOp::Allocate | FaultOp::HostAllocate => {
                assert!(
                    matches!(error, Error::OutOfMemory { bytes: 8 | 128, .. }),
                    "{op:?}: {error}"
                );
            }
            _ => assert_eq!(code(Err::<(), _>(error)), INJECTED, "{op:?}"),
        }
        assert_eq!(device.faults().fired(), 1);
        device.assert_clean();
        program(&device).unwrap();
        assert_eq!(device.faults().fired(), 1, "not lasting");
    }
}

#[test]
fn each_operation_fails_in_turn() {
    let Some(device) = deferred() else { return };
    let total = FaultOp::ALL.len() as u64; // one of each
    for n in 1..=total {
        device.faults().clear();
        device.faults().fail_nth(None, n);
        assert!(program(&device).is_err(), "{n}");
        assert_eq!(device.faults().fired(), 1);
        device.assert_clean();
    }
    device.faults().clear();
    device.faults().fail_nth(None, total + 1);
    program(&device).unwrap();
}

#[test]
fn the_nth_is_counted_from_now() {
    let Some(device) = deferred() else { return };
    let queue = device.default_queue().unwrap();
    let memory = queue.allocate(1).unwrap();
    fill(&queue, memory, 0, 1).unwrap();
    device.faults().fail_nth(FaultOp::Fill, 3);
    let results = [0; 5].map(|_| fill(&queue, memory, 0, 1).is_ok());
    assert_eq!(results, [true, true, false, true, true]);
    assert_eq!(
        device.report().pending_operations,
        5,
        "a failed one is not queued"
    );
    device.faults().fail_nth(FaultOp::Fill, 1);
    device.faults().fail_nth(FaultOp::Fill, 0);
    fill(&queue, memory, 0, 1).unwrap();
    free(&queue, memory, 1).unwrap();
}

#[test]
fn ids_are_unique_and_absence_is_clear() {
    let (Some(a), Some(b)) = (deferred(), deferred()) else {
        return;
    };
    assert_ne!(a.capabilities().id, b.capabilities().id);
    assert_eq!(a.capabilities().id.device_type, ArrowDeviceType::EXT_DEV);
    for huge in [usize::MAX, usize::MAX / 4] {
        let error = SimDevice::new(SimConfig {
            capacity_bytes: huge,
            ..SimConfig::default()
        })
        .unwrap_err();
        assert!(matches!(error, Error::DeviceNotAvailable { .. }), "{error}");
    }
}
