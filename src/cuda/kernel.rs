//! Loans and buffers as kernel arguments: each passes its address.

use cudarc::driver::sys::CUdeviceptr;
use cudarc::driver::{LaunchArgs, PushKernelArg};

use crate::device::DevicePtr;
use crate::memory::{DeviceBufferMut, Loan};

const _: () = assert!(
    size_of::<DevicePtr>() == size_of::<CUdeviceptr>(),
    "CUDA has 64-bit addresses"
);

/// Views an address as a kernel argument.
fn argument(address: &DevicePtr) -> &CUdeviceptr {
    // SAFETY: `DevicePtr` is a pointer, which has the size of a `CUdeviceptr` (asserted above) and
    // its alignment on systems with 64-bit addresses; any address is a value of the integer.
    unsafe { &*std::ptr::from_ref(address).cast::<CUdeviceptr>() }
}

// SAFETY: the driver reads the argument during the launch, while it is borrowed. Whoever launches
// guarantees (`launch` is unsafe) that the stream is that of the loan's queue, which has waited for
// the memory. The bit offset of a bitmap is an argument of its own.
unsafe impl<'a, 'b: 'a, T> PushKernelArg<&'b Loan<'_, T>> for LaunchArgs<'a> {
    #[inline(always)]
    fn arg(&mut self, arg: &'b Loan<'_, T>) -> &mut Self {
        self.arg(argument(arg.address_ref()))
    }
}

// SAFETY: the driver reads the argument while it is borrowed. Nothing else has the memory yet, and
// whoever launches guarantees that the stream is that of the buffer's queue.
unsafe impl<'a, 'b: 'a> PushKernelArg<&'b mut DeviceBufferMut> for LaunchArgs<'a> {
    #[inline(always)]
    fn arg(&mut self, arg: &'b mut DeviceBufferMut) -> &mut Self {
        self.arg(argument(arg.address_ref()))
    }
}
