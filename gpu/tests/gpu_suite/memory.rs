//! When there is no memory left.

use arrow_device::{DeviceBufferMut, Error};

use super::everywhere;
use crate::support::{assert_same_batch, wide_batch};
use crate::vendor::{DEVICE, memory_info, open_device};

#[test]
fn out_of_device_memory_is_an_error_and_not_the_end() {
    everywhere(|place| {
        let device = place.open(DEVICE);
        let (_, total) = memory_info(&device);
        let queue = device.default_queue();
        let sent = wide_batch(8, 1000);
        let before = device.upload(&sent).unwrap();
        for bytes in [total + 1, 1 << 52, usize::MAX / 2, usize::MAX] {
            match DeviceBufferMut::allocate(&queue, bytes) {
                Err(Error::OutOfMemory { bytes: asked, .. }) => assert!(asked >= bytes),
                other => panic!("{bytes} bytes: {other:?}"),
            }
        }
        // Until nothing is left.
        let (mut all, chunk) = (Vec::new(), total / 8);
        let full = loop {
            match DeviceBufferMut::allocate(&queue, chunk) {
                Ok(memory) => all.push(memory),
                Err(e) => break e,
            }
            assert!(all.len() <= 8, "more than there is");
        };
        assert!(matches!(full, Error::OutOfMemory { .. }), "{full}");
        assert!(
            full.to_string()
                .contains(&format!("{}", chunk.next_multiple_of(64))),
            "{full}"
        );
        assert_same_batch(&sent, &before.to_host().unwrap(), "from before");
        all.clear();
        let after = device.upload(&sent).unwrap();
        assert_same_batch(&sent, &after.to_host().unwrap(), "afterwards");
        drop((before, after, queue));
        device.assert_done();
        // For whoever uses the device next.
        device.trim();
    });
}

/// Memory that a device keeps for later is given up before another allocation fails.
#[test]
fn kept_memory_is_not_in_the_way() {
    everywhere(|place| {
        let (one, two) = (
            place.open(DEVICE),
            open_device(DEVICE, place.ordinal).unwrap(),
        );
        let (free, _) = memory_info(&two);
        let bytes = free / 8 * 5;
        drop(DeviceBufferMut::allocate(&one.default_queue(), bytes).unwrap());
        one.synchronize().unwrap();
        // Another size of the same device's, then of another's after `trim`.
        drop(DeviceBufferMut::allocate(&one.default_queue(), bytes / 5 * 6).unwrap());
        one.synchronize().unwrap();
        one.trim();
        drop(DeviceBufferMut::allocate(&two.default_queue(), bytes).unwrap());
        two.synchronize().unwrap();
        two.trim();
        one.assert_done();
    });
}
