//! The names of the runtime's error codes.

use opencl_sys::*;

macro_rules! names {
    ($($code:ident)*) => {
        /// Returns the name of an error code, such as `CL_OUT_OF_RESOURCES`.
        pub(crate) fn name(code: cl_int) -> &'static str {
            match code {
                CL_SUCCESS => "CL_SUCCESS, without a result",
                CL_PLATFORM_NOT_FOUND_KHR => "CL_PLATFORM_NOT_FOUND_KHR",
                $($code => stringify!($code),)*
                _ => "a code that this crate does not know",
            }
        }
    };
}

/// Returned by the loader if it finds no driver (extension cl_khr_icd).
pub(crate) const CL_PLATFORM_NOT_FOUND_KHR: cl_int = -1001;

/// Returns whether an allocation that failed with this code may succeed once memory has been freed.
pub(crate) fn is_out_of_memory(code: cl_int) -> bool {
    matches!(
        code,
        CL_MEM_OBJECT_ALLOCATION_FAILURE | CL_OUT_OF_RESOURCES | CL_OUT_OF_HOST_MEMORY
    )
}

/// Returns whether a queue for which a wait fails with this code runs nothing any more.
pub(crate) fn is_gone(code: cl_int) -> bool {
    matches!(
        code,
        CL_INVALID_COMMAND_QUEUE | CL_INVALID_CONTEXT | CL_INVALID_DEVICE | CL_DEVICE_NOT_AVAILABLE
    )
}

names! {
    CL_DEVICE_NOT_FOUND
    CL_DEVICE_NOT_AVAILABLE
    CL_COMPILER_NOT_AVAILABLE
    CL_MEM_OBJECT_ALLOCATION_FAILURE
    CL_OUT_OF_RESOURCES
    CL_OUT_OF_HOST_MEMORY
    CL_PROFILING_INFO_NOT_AVAILABLE
    CL_MEM_COPY_OVERLAP
    CL_IMAGE_FORMAT_MISMATCH
    CL_IMAGE_FORMAT_NOT_SUPPORTED
    CL_BUILD_PROGRAM_FAILURE
    CL_MAP_FAILURE
    CL_MISALIGNED_SUB_BUFFER_OFFSET
    CL_EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST
    CL_COMPILE_PROGRAM_FAILURE
    CL_LINKER_NOT_AVAILABLE
    CL_LINK_PROGRAM_FAILURE
    CL_DEVICE_PARTITION_FAILED
    CL_KERNEL_ARG_INFO_NOT_AVAILABLE
    CL_INVALID_VALUE
    CL_INVALID_DEVICE_TYPE
    CL_INVALID_PLATFORM
    CL_INVALID_DEVICE
    CL_INVALID_CONTEXT
    CL_INVALID_QUEUE_PROPERTIES
    CL_INVALID_COMMAND_QUEUE
    CL_INVALID_HOST_PTR
    CL_INVALID_MEM_OBJECT
    CL_INVALID_IMAGE_FORMAT_DESCRIPTOR
    CL_INVALID_IMAGE_SIZE
    CL_INVALID_SAMPLER
    CL_INVALID_BINARY
    CL_INVALID_BUILD_OPTIONS
    CL_INVALID_PROGRAM
    CL_INVALID_PROGRAM_EXECUTABLE
    CL_INVALID_KERNEL_NAME
    CL_INVALID_KERNEL_DEFINITION
    CL_INVALID_KERNEL
    CL_INVALID_ARG_INDEX
    CL_INVALID_ARG_VALUE
    CL_INVALID_ARG_SIZE
    CL_INVALID_KERNEL_ARGS
    CL_INVALID_WORK_DIMENSION
    CL_INVALID_WORK_GROUP_SIZE
    CL_INVALID_WORK_ITEM_SIZE
    CL_INVALID_GLOBAL_OFFSET
    CL_INVALID_EVENT_WAIT_LIST
    CL_INVALID_EVENT
    CL_INVALID_OPERATION
    CL_INVALID_GL_OBJECT
    CL_INVALID_BUFFER_SIZE
    CL_INVALID_MIP_LEVEL
    CL_INVALID_GLOBAL_WORK_SIZE
    CL_INVALID_PROPERTY
    CL_INVALID_IMAGE_DESCRIPTOR
    CL_INVALID_COMPILER_OPTIONS
    CL_INVALID_LINKER_OPTIONS
    CL_INVALID_DEVICE_PARTITION_COUNT
    CL_INVALID_PIPE_SIZE
    CL_INVALID_DEVICE_QUEUE
    CL_INVALID_SPEC_ID
    CL_MAX_SIZE_RESTRICTION_EXCEEDED
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        assert_eq!(name(CL_OUT_OF_RESOURCES), "CL_OUT_OF_RESOURCES");
        assert_eq!(name(CL_INVALID_EVENT), "CL_INVALID_EVENT");
        assert_eq!(name(-4711), "a code that this crate does not know");
    }
}
