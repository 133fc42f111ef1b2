//! Error codes: which are HIP's, and what they are called.

use std::ffi::CStr;

use crate::ffi::*;

/// HIP's code for one of the driver's; the crate's documentation has the rules.
pub(crate) fn of_cuda(code: Code) -> Code {
    const NOT_PERMITTED: Code = 800;
    match code {
        NOT_PERMITTED => STREAM_CAPTURE_UNSUPPORTED,
        code if find(code).is_none() && is_cudas(code) => UNKNOWN,
        code => code,
    }
}

/// Whether `CUresult` has a number that `hipError_t` does not have.
fn is_cudas(code: Code) -> bool {
    matches!(code,
        34 | 36 | 46 | 47 | 102 | 220..=227 | 402 | 703 | 711 | 714..=718 | 721 | 802..=812 | 909
        | 911..=919)
}

/// The name and the text of a code.
pub(crate) fn texts(code: Code) -> (&'static CStr, &'static CStr) {
    find(code).unwrap_or((c"hipErrorUnknown", c"unknown error"))
}

fn find(code: Code) -> Option<(&'static CStr, &'static CStr)> {
    let found = TABLE.iter().find(|(other, ..)| *other == code)?;
    Some((found.1, found.2))
}

/// `hipError_t` of HIP 5.2.
#[rustfmt::skip] // a table
static TABLE: &[(Code, &CStr, &CStr)] = &[
    (0, c"hipSuccess", c"no error"),
    (1, c"hipErrorInvalidValue", c"invalid argument"),
    (2, c"hipErrorOutOfMemory", c"out of memory"),
    (3, c"hipErrorNotInitialized", c"not initialized"),
    (4, c"hipErrorDeinitialized", c"shutting down"),
    (5, c"hipErrorProfilerDisabled", c"the profiler is disabled"),
    (6, c"hipErrorProfilerNotInitialized", c"the profiler is not initialized"),
    (7, c"hipErrorProfilerAlreadyStarted", c"the profiler runs already"),
    (8, c"hipErrorProfilerAlreadyStopped", c"the profiler does not run"),
    (9, c"hipErrorInvalidConfiguration", c"invalid launch configuration"),
    (12, c"hipErrorInvalidPitchValue", c"invalid pitch"),
    (13, c"hipErrorInvalidSymbol", c"invalid device symbol"),
    (17, c"hipErrorInvalidDevicePointer", c"invalid device pointer"),
    (21, c"hipErrorInvalidMemcpyDirection", c"invalid direction of a copy"),
    (35, c"hipErrorInsufficientDriver", c"the driver is too old for the runtime"),
    (52, c"hipErrorMissingConfiguration", c"no launch configuration"),
    (53, c"hipErrorPriorLaunchFailure", c"an earlier launch failed"),
    (98, c"hipErrorInvalidDeviceFunction", c"invalid device function"),
    (100, c"hipErrorNoDevice", c"no ROCm-capable device is detected"),
    (101, c"hipErrorInvalidDevice", c"invalid device ordinal"),
    (200, c"hipErrorInvalidImage", c"invalid device code"),
    (201, c"hipErrorInvalidContext", c"invalid device context"),
    (202, c"hipErrorContextAlreadyCurrent", c"the context is current already"),
    (205, c"hipErrorMapFailed", c"mapping failed"),
    (206, c"hipErrorUnmapFailed", c"unmapping failed"),
    (207, c"hipErrorArrayIsMapped", c"the array is mapped"),
    (208, c"hipErrorAlreadyMapped", c"mapped already"),
    (209, c"hipErrorNoBinaryForGpu", c"no code for this device"),
    (210, c"hipErrorAlreadyAcquired", c"acquired already"),
    (211, c"hipErrorNotMapped", c"not mapped"),
    (212, c"hipErrorNotMappedAsArray", c"not mapped as an array"),
    (213, c"hipErrorNotMappedAsPointer", c"not mapped as a pointer"),
    (214, c"hipErrorECCNotCorrectable", c"uncorrectable memory error"),
    (215, c"hipErrorUnsupportedLimit", c"the device does not support this limit"),
    (216, c"hipErrorContextAlreadyInUse", c"another thread uses the context"),
    (217, c"hipErrorPeerAccessUnsupported", c"no peer access between these devices"),
    (218, c"hipErrorInvalidKernelFile", c"invalid kernel file"),
    (219, c"hipErrorInvalidGraphicsContext", c"invalid graphics context"),
    (300, c"hipErrorInvalidSource", c"invalid source of device code"),
    (301, c"hipErrorFileNotFound", c"file not found"),
    (302, c"hipErrorSharedObjectSymbolNotFound", c"symbol of a shared object not found"),
    (303, c"hipErrorSharedObjectInitFailed", c"a shared object was not initialized"),
    (304, c"hipErrorOperatingSystem", c"a call of the operating system failed"),
    (400, c"hipErrorInvalidHandle", c"invalid resource handle"),
    (401, c"hipErrorIllegalState", c"the resource is in the wrong state"),
    (500, c"hipErrorNotFound", c"named symbol not found"),
    (600, c"hipErrorNotReady", c"not ready"),
    (700, c"hipErrorIllegalAddress", c"illegal memory access"),
    (701, c"hipErrorLaunchOutOfResources", c"too few resources for the launch"),
    (702, c"hipErrorLaunchTimeOut", c"the kernel ran too long and was ended"),
    (704, c"hipErrorPeerAccessAlreadyEnabled", c"peer access is enabled already"),
    (705, c"hipErrorPeerAccessNotEnabled", c"peer access is not enabled"),
    (708, c"hipErrorSetOnActiveProcess", c"the process uses the device already"),
    (709, c"hipErrorContextIsDestroyed", c"the context is destroyed"),
    (710, c"hipErrorAssert", c"an assertion of the kernel failed"),
    (712, c"hipErrorHostMemoryAlreadyRegistered", c"the memory is page-locked already"),
    (713, c"hipErrorHostMemoryNotRegistered", c"the memory is not page-locked"),
    (719, c"hipErrorLaunchFailure", c"the kernel failed"),
    (720, c"hipErrorCooperativeLaunchTooLarge", c"too many blocks for a cooperative launch"),
    (801, c"hipErrorNotSupported", c"not supported"),
    (900, c"hipErrorStreamCaptureUnsupported", c"not permitted while a stream is captured"),
    (901, c"hipErrorStreamCaptureInvalidated", c"the capture was spoilt by an earlier error"),
    (902, c"hipErrorStreamCaptureMerge", c"would merge two captures"),
    (903, c"hipErrorStreamCaptureUnmatched", c"the capture did not begin in this stream"),
    (904, c"hipErrorStreamCaptureUnjoined", c"a fork of the capture was not joined"),
    (905, c"hipErrorStreamCaptureIsolation", c"a dependency would leave the capture"),
    (906, c"hipErrorStreamCaptureImplicit", c"would depend on a capture by the default stream"),
    (907, c"hipErrorCapturedEvent", c"the event was last recorded in a captured stream"),
    (908, c"hipErrorStreamCaptureWrongThread", c"the capture began on another thread"),
    (910, c"hipErrorGraphExecUpdateFailure", c"the graph cannot be updated so"),
    (999, c"hipErrorUnknown", c"unknown error"),
    (1052, c"hipErrorRuntimeMemory", c"a memory call of the layer below failed"),
    (1053, c"hipErrorRuntimeOther", c"a call of the layer below failed"),
    (1054, c"hipErrorTbd", c"a code that is yet to be named"),
];
