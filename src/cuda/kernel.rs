//! Loans and buffers as kernel arguments: a pointer each.

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{LaunchArgs, PushKernelArg};

use crate::data::{DeviceBits, DeviceSlice};
use crate::device::DevicePtr;
use crate::memory::{DeviceBufferMut, Loan};

const _: () = assert!(
    size_of::<DevicePtr>() == size_of::<CUdeviceptr>(),
    "CUDA has 64-bit addresses"
);

fn argument(address: &DevicePtr) -> &CUdeviceptr {
    // SAFETY: both are 8 bytes with 8-byte alignment; the address is read as a number.
    unsafe { &*std::ptr::from_ref(address).cast::<CUdeviceptr>() }
}

// SAFETY: the driver reads the argument during the launch, while it is borrowed; it is the
// address of memory that the launch's stream has waited for, if it is the loan's queue's.
unsafe impl<'a, 'b: 'a> PushKernelArg<&'b Loan<'_>> for LaunchArgs<'a> {
    #[inline(always)]
    fn arg(&mut self, arg: &'b Loan<'_>) -> &mut Self {
        self.arg(argument(arg.address_ref()))
    }
}

// SAFETY: as above.
unsafe impl<'a, 'b: 'a, T> PushKernelArg<&'b DeviceSlice<'_, T>> for LaunchArgs<'a> {
    #[inline(always)]
    fn arg(&mut self, arg: &'b DeviceSlice<'_, T>) -> &mut Self {
        self.arg(argument(arg.address_ref()))
    }
}

// SAFETY: as above. The bit offset is an argument of its own.
unsafe impl<'a, 'b: 'a> PushKernelArg<&'b DeviceBits<'_>> for LaunchArgs<'a> {
    #[inline(always)]
    fn arg(&mut self, arg: &'b DeviceBits<'_>) -> &mut Self {
        self.arg(argument(arg.address_ref()))
    }
}

// SAFETY: as above; the memory is nobody else's yet.
unsafe impl<'a, 'b: 'a> PushKernelArg<&'b mut DeviceBufferMut> for LaunchArgs<'a> {
    #[inline(always)]
    fn arg(&mut self, arg: &'b mut DeviceBufferMut) -> &mut Self {
        self.arg(argument(arg.address_ref()))
    }
}
