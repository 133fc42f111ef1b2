//! Every call of the driver fails once.

use std::cell::RefCell;

use arrow_device::{Error, Queue, Result};

use super::rig::{Rig, soon};
use crate::support::in_part;
use crate::vendor::{CALLS, error_text};

/// Codes of the driver: an unknown one is none of ours to interpret.
const CODES: [i32; 3] = [1, 2, 12345];

thread_local! {
    /// Queues that are dropped when no call is to fail: a stream that the driver refuses to destroy
    /// would be lost.
    static QUEUES: RefCell<Vec<Queue>> = const { RefCell::new(Vec::new()) };
}

/// Drops a queue only after a call has failed.
pub(crate) fn keep(queue: Queue) {
    QUEUES.with_borrow_mut(|queues| queues.push(queue));
}

/// Runs `work` with each call of the driver failing in turn. At least one failure comes back.
pub(crate) fn fail_everywhere(rig: &Rig, name: &str, work: impl Fn() -> Result<()>) {
    // In part each call fails with one of the codes.
    let rounds = if in_part() { 1 } else { CODES.len() };
    let streams = rig.group.live("streams");
    for round in 0..rounds {
        let mut failed = 0;
        for n in 1.. {
            assert!(n < 500, "{name} never ends");
            let code = CODES[(round + n as usize) % CODES.len()];
            rig.group.fail("*", n, code);
            let result = work();
            let fired = rig.group.clear();
            QUEUES.take();
            match result {
                Err(Error::OutOfMemory { operation, .. }) => {
                    // An allocation whose arguments are refused is too large.
                    assert!(
                        code <= 2 && operation.starts_with(CALLS),
                        "{name}: {operation}"
                    );
                }
                Err(Error::Device {
                    code: got,
                    operation,
                    message,
                    device,
                }) => {
                    assert_eq!((got, device), (code, rig.id()), "{name}");
                    assert!(operation.starts_with(CALLS), "{name}: {operation}");
                    assert!(message.contains(error_text(code)), "{name}: {message}");
                    failed += 1;
                }
                Err(Error::InvalidInput { message, .. }) => {
                    // The driver could not say whose memory it is.
                    assert!(fired > 0, "{name}: {message}");
                }
                Err(e) => panic!("{name}, call {n}: {e:?}"),
                Ok(()) => {}
            }
            // And once more, without.
            work().unwrap_or_else(|e| panic!("{name} after call {n}: {e}"));
            QUEUES.take();
            let _ = rig.take_drop_error();
            rig.assert_clean(format_args!("{name}, call {n}, code {code}"));
            let _ = rig.take_drop_error();
            // The release thread may drop a queue last.
            let destroyed = soon(|| {
                let _ = rig.synchronize();
                rig.group.live("streams") <= streams
            });
            assert!(destroyed, "{name}, call {n}, code {code}: streams are left");
            if fired == 0 {
                break;
            }
        }
        assert!(failed > 0, "{name}: no failure came back");
    }
}
