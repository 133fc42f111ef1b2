//! A child of the process that has initialised the library.

use std::ptr::null_mut;

use crate::fork_kit::{alone, forked};
use crate::raw::*;

#[test]
fn every_call_of_a_child_is_refused() {
    alone("fork::every_call_of_a_child_is_refused", || {
        let bound = Bound::new(0);
        let (stream, event) = (stream(), event());
        forked(|| {
            let answers = [
                cuInit(0),
                cuCtxSynchronize(),
                cuCtxPushCurrent_v2(bound.ctx),
                cuStreamQuery(stream),
                cuEventSynchronize(event),
                cuEventDestroy_v2(event),
                cuStreamDestroy_v2(stream),
                cuMemAlloc_v2(&mut 0, 8),
                cuDevicePrimaryCtxRelease_v2(bound.group.first),
            ];
            assert_eq!(answers, [3; 9]);
            // Texts need no initialisation.
            assert_eq!(cuGetErrorName(3, &mut std::ptr::null()), 0);
        });
        assert_eq!(cuEventDestroy_v2(event), 0);
        assert_eq!(cuStreamDestroy_v2(stream), 0);
        bound.end();
    });
    // Here nothing was initialised by another process.
    assert_eq!(cuInit(0), 0);
    assert_eq!(cuCtxPopCurrent_v2(null_mut()), 201);
}
