//! Codes, texts, the last error.

use std::ffi::{CStr, c_char};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicI32, Ordering};
use std::thread::spawn;

use crate::fake::LAZY;
use crate::hip::*;

#[test]
fn the_last_error_is_the_threads_and_stays_until_taken() {
    let rig = Rig::new(1, LAZY);
    hipGetLastError(); // an earlier test's, on one thread
    assert_eq!((hipPeekAtLastError(), hipGetLastError()), (0, 0));
    assert_eq!(hipMalloc(null_mut(), 8), 1);
    assert_eq!(hipDeviceSynchronize(), 0);
    assert_eq!(hipPeekAtLastError(), 1, "success does not clear it");
    spawn(|| assert_eq!(hipPeekAtLastError(), 0))
        .join()
        .unwrap();
    assert_eq!(hipSetDevice(-1), 101);
    assert_eq!(hipPeekAtLastError(), 101, "the newer one counts");
    assert_eq!((hipGetLastError(), hipGetLastError()), (101, 0));

    assert_eq!(hipMemset(made_on(rig), 0, 8), 0);
    assert_eq!(hipStreamQuery(null_mut()), 600);
    assert_eq!(hipPeekAtLastError(), 0, "not ready is no error");
    {
        // HIP 6: a success is the last one too.
        let _version = Version::new(60342134);
        assert_eq!((hipMalloc(null_mut(), 8), hipPeekAtLastError()), (1, 1));
        assert_eq!((hipDeviceSynchronize(), hipPeekAtLastError()), (0, 0));
    }
    rig.release();
    rig.group.assert_report(&["outlived its context"]);
}

/// Memory that the context takes with it.
fn made_on(rig: Rig) -> Ptr {
    assert_eq!(current_device(), rig.first);
    device(8)
}

#[test]
fn the_drivers_codes_are_hips_or_unknown() {
    let rig = Rig::new(1, 0);
    let cases = [
        // Both have these.
        (1, 1),
        (2, 2),
        (100, 100),
        (201, 201),
        (214, 214),
        (400, 400),
        (700, 700),
        (719, 719),
        (801, 801),
        (900, 900),
        (908, 908),
        (910, 910),
        (999, 999),
        // A call inside a host function.
        (800, 900),
        // The driver's only.
        (34, 999),
        (46, 999),
        (102, 999),
        (220, 999),
        (227, 999),
        (402, 999),
        (703, 999),
        (711, 999),
        (716, 999),
        (721, 999),
        (802, 999),
        (812, 999),
        (909, 999),
        (911, 999),
        (919, 999),
        // Nobody's.
        (12345, 12345),
        (920, 920),
        (-3, -3),
    ];
    for (cuda, hip) in cases {
        rig.group.fail("cuCtxSynchronize", 1, cuda);
        assert_eq!(hipDeviceSynchronize(), hip, "{cuda}");
        assert_eq!(hipGetLastError(), hip);
    }
    assert_eq!(rig.group.clear(), cases.len() as u32);
    rig.end();
}

#[test]
fn codes_have_names_and_texts() {
    let text = |text: *const c_char| {
        // SAFETY: the library's texts are static and end with a NUL.
        unsafe { CStr::from_ptr(text) }.to_str().unwrap()
    };
    for (code, name, says) in [
        (0, "hipSuccess", "no error"),
        (2, "hipErrorOutOfMemory", "out of memory"),
        (
            100,
            "hipErrorNoDevice",
            "no ROCm-capable device is detected",
        ),
        (101, "hipErrorInvalidDevice", "invalid device ordinal"),
        (600, "hipErrorNotReady", "not ready"),
        (719, "hipErrorLaunchFailure", "the kernel failed"),
        (801, "hipErrorNotSupported", "not supported"),
        (999, "hipErrorUnknown", "unknown error"),
        (1054, "hipErrorTbd", "a code that is yet to be named"),
        (12345, "hipErrorUnknown", "unknown error"),
        (-1, "hipErrorUnknown", "unknown error"),
    ] {
        assert_eq!(text(hipGetErrorName(code)), name);
        assert_eq!(text(hipGetErrorString(code)), says);
    }
    let named = (1..2000).filter(|code| text(hipGetErrorName(*code)) != "hipErrorUnknown");
    // The numbers of `hipError_t` in HIP 5.2's header, without success and unknown.
    assert_eq!(named.count(), 72);
}

#[test]
fn calls_inside_host_functions_are_refused() {
    static ANSWERS: [AtomicI32; 2] = [const { AtomicI32::new(-1) }; 2];
    extern "C" fn call(device: Ptr) {
        ANSWERS[0].store(hipSetDevice(device.addr() as i32), Ordering::SeqCst);
        ANSWERS[1].store(hipDeviceSynchronize(), Ordering::SeqCst);
    }
    let rig = Rig::new(1, LAZY);
    let device = rig.first as usize as Ptr;
    // For the device of the thread that runs it, no context is to be retained there.
    assert_eq!(hipLaunchHostFunc(null_mut(), call, device), 0);
    assert_eq!(hipDeviceSynchronize(), 0);
    assert_eq!(
        ANSWERS.each_ref().map(|a| a.load(Ordering::SeqCst)),
        [900; 2]
    );
    rig.release();
    rig.group.assert_report(&[
        "cuDeviceGetCount inside a host function",
        "inside a host function",
    ]);
}

#[test]
fn a_failed_device_answers_its_code() {
    let rig = Rig::new(1, 0);
    let (memory, locked) = (device(8), pinned(8));
    rig.group.break_with(700);
    assert_eq!(hipDeviceSynchronize(), 700);
    assert_eq!(hipMalloc(&mut null_mut(), 8), 700);
    assert_eq!((hipFree(memory), hipHostFree(locked)), (700, 0));
    assert_eq!(hip_on_cuda_release(rig.first), 0);
    rig.group.assert_clean();
}

#[test]
fn a_driver_that_shuts_down_is_said_so() {
    let rig = Rig::new(1, 0);
    let memory = device(8);
    rig.group.shut_down(4);
    assert_eq!(hipFree(memory), 4);
    assert_eq!(hipStreamQuery(null_mut()), 4);
    rig.group.shut_down(0);
    assert_eq!(hipFree(memory), 0);
    rig.end();
}
