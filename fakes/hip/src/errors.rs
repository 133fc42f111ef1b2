//! Error codes: which are HIP's, and what they are called.

use std::ffi::CStr;

use crate::ffi::*;

/// HIP's code for one of the driver's; the crate's documentation has the rules.
pub(crate) fn of_cuda(code: Code) -> Code {
    const NOT_PERMITTED: Code = 800;
    match code {
        NOT_PERMITTED => STREAM_CAPTURE_UNSUPPORTED,
        code => code,
    }
}

/// The name and the text of a code.
pub(crate) fn texts(code: Code) -> (&'static CStr, &'static CStr) {
    let found = TABLE.iter().find(|(other, ..)| *other == code);
    found.map_or((c"hipErrorUnknown", c"unknown error"), |found| {
        (found.1, found.2)
    })
}

/// Of `hipError_t`, those that the driver's stand-in answers, and a few.
#[rustfmt::skip] // a table
static TABLE: &[(Code, &CStr, &CStr)] = &[
    (0, c"hipSuccess", c"no error"),
    (1, c"hipErrorInvalidValue", c"invalid argument"),
    (2, c"hipErrorOutOfMemory", c"out of memory"),
    (3, c"hipErrorNotInitialized", c"not initialized"),
    (4, c"hipErrorDeinitialized", c"shutting down"),
    (21, c"hipErrorInvalidMemcpyDirection", c"invalid direction of a copy"),
    (100, c"hipErrorNoDevice", c"no ROCm-capable device is detected"),
    (101, c"hipErrorInvalidDevice", c"invalid device ordinal"),
    (200, c"hipErrorInvalidImage", c"invalid device code"),
    (201, c"hipErrorInvalidContext", c"invalid device context"),
    (208, c"hipErrorAlreadyMapped", c"mapped already"),
    (400, c"hipErrorInvalidHandle", c"invalid resource handle"),
    (500, c"hipErrorNotFound", c"named symbol not found"),
    (600, c"hipErrorNotReady", c"not ready"),
    (700, c"hipErrorIllegalAddress", c"illegal memory access"),
    (704, c"hipErrorPeerAccessAlreadyEnabled", c"peer access is enabled already"),
    (709, c"hipErrorContextIsDestroyed", c"the context is destroyed"),
    (719, c"hipErrorLaunchFailure", c"the kernel failed"),
    (801, c"hipErrorNotSupported", c"not supported"),
    (900, c"hipErrorStreamCaptureUnsupported", c"not permitted while a stream is captured"),
    (999, c"hipErrorUnknown", c"unknown error"),
];
