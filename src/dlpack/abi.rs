//! The structs of `dlpack.h`, version 1.3.
//!
//! Why our own and no crate's: every crate that has the current structs (dlpark, dlpack-rs, dlpack-ffi)
//! types the deleter as `extern "C"`, through which a producer's C++ exception or Python binding's panic
//! must not pass: that would be undefined behaviour, where `extern "C-unwind"` ends in a defined abort or a
//! caught panic. Their structs are also `Copy`, dlpark comes with procedural macros for its errors, and the
//! crate `dlpack` knows no versions. What remains of use is six structs, whose layout is checked below.

use std::ffi::c_void;

use crate::abi::ArrowDeviceType;
use crate::device::DeviceId;
use crate::error::{Error, Result};

/// The version of the structs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct DLPackVersion {
    /// Another one means another layout.
    pub major: u32,
    /// A newer one means more codes.
    pub minor: u32,
}

impl DLPackVersion {
    /// The version that this crate speaks: 1.3.
    pub const CURRENT: Self = Self { major: 1, minor: 3 };
}

/// Whose memory a tensor is. DLPack's device types are Arrow's: the codes are the same.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct DLDevice {
    /// `DLDeviceType`.
    pub device_type: ArrowDeviceType,
    /// Which one of its kind. 0 for the CPU, page-locked and managed memory.
    pub device_id: i32,
}

impl DLDevice {
    /// As Arrow has it: the id to look up in [`Devices`](crate::Devices). Page-locked and managed memory
    /// says 0, whichever device it was made for.
    ///
    /// ```
    /// use arrow_device::dlpack::DLDevice;
    /// use arrow_device::{ArrowDeviceType, DeviceId};
    /// let cpu = DLDevice { device_type: ArrowDeviceType::CPU, device_id: 0 };
    /// assert_eq!(cpu.id(), DeviceId::CPU);
    /// assert_eq!(DLDevice::of(DeviceId::CPU)?, cpu);
    /// # Ok::<(), arrow_device::Error>(())
    /// ```
    pub const fn id(self) -> DeviceId {
        match self.device_type {
            ArrowDeviceType::CPU => DeviceId::CPU,
            device_type => DeviceId::new(device_type, self.device_id as i64),
        }
    }

    /// As DLPack has it.
    ///
    /// # Errors
    /// [`Error::NotSupported`] for an id that does not fit into 32 bits.
    pub fn of(id: DeviceId) -> Result<Self> {
        let device_id = match id.device_type {
            t if shares_ids(t) => 0,
            _ => i32::try_from(id.id).map_err(|_| Error::NotSupported {
                device: id,
                operation: "DLPack",
                reason: "DLPack's device ids have 32 bits".into(),
            })?,
        };
        Ok(Self {
            device_type: id.device_type,
            device_id,
        })
    }
}

/// Refuses devices of which DLPack's `data` is an object of the runtime's (an `MTLBuffer`, a `cl_mem`), with an offset into
/// it, where Arrow's `buffers[i]` is an address: neither side may take one for the other.
///
/// # Errors
/// [`Error::NotSupported`].
pub(super) fn check_addresses(device: DeviceId) -> Result<()> {
    use ArrowDeviceType as T;
    if !matches!(
        device.device_type,
        T::METAL | T::OPENCL | T::VULKAN | T::WEBGPU
    ) {
        return Ok(());
    }
    Err(Error::NotSupported {
        device,
        operation: "DLPack",
        reason: "a DLPack tensor of this device type holds a buffer object of its runtime, and an Arrow array an address, \
                 which this crate does not turn into each other; copy the data to the CPU and exchange it there"
            .into(),
    })
}

/// Whether the header of DLPack wants 0 as the id of this kind of memory.
pub(super) fn shares_ids(device_type: ArrowDeviceType) -> bool {
    matches!(
        device_type,
        ArrowDeviceType::CPU
            | ArrowDeviceType::CUDA_HOST
            | ArrowDeviceType::ROCM_HOST
            | ArrowDeviceType::CUDA_MANAGED
    )
}

/// The type of an element: `lanes` numbers of `bits` bits each.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct DLDataType {
    /// `DLDataTypeCode`: one of this type's constants, or a newer one.
    pub code: u8,
    /// Bits of one number.
    pub bits: u8,
    /// Numbers per element: 1 but for vectors.
    pub lanes: u16,
}

impl DLDataType {
    /// Signed integers.
    pub const INT: u8 = 0;
    /// Unsigned integers.
    pub const UINT: u8 = 1;
    /// IEEE floating point.
    pub const FLOAT: u8 = 2;
    /// Opaque handles.
    pub const OPAQUE_HANDLE: u8 = 3;
    /// bfloat16.
    pub const BFLOAT: u8 = 4;
    /// Complex numbers: pairs of floats.
    pub const COMPLEX: u8 = 5;
    /// Booleans, a byte each.
    pub const BOOL: u8 = 6;

    /// One number of `bits` bits.
    pub const fn new(code: u8, bits: u8) -> Self {
        Self {
            code,
            bits,
            lanes: 1,
        }
    }

    /// Bytes of an element; `None` if it is not a whole number of them.
    pub(super) fn bytes(self) -> Option<usize> {
        let bits = usize::from(self.bits) * usize::from(self.lanes);
        (bits > 0 && bits % 8 == 0).then_some(bits / 8)
    }
}

/// An n-dimensional array in some device's memory.
#[derive(Debug)]
#[repr(C)]
pub struct DLTensor {
    /// An address, or a buffer object of the runtime on devices that have such (this crate exchanges no tensors of those);
    /// null if there are no elements.
    pub data: *mut c_void,
    /// Whose memory it is.
    pub device: DLDevice,
    /// How many dimensions.
    pub ndim: i32,
    /// The type of an element.
    pub dtype: DLDataType,
    /// Elements in each dimension.
    pub shape: *mut i64,
    /// Elements from one to the next in each dimension. Null means compact and row-major, before 1.2.
    pub strides: *mut i64,
    /// Bytes from `data` to the first element.
    pub byte_offset: u64,
}

/// A deleter, which is called once by the consumer.
pub type Deleter<T> = unsafe extern "C-unwind" fn(*mut T);

/// A tensor with its owner, as it was before version 1.0: it cannot say that it is read-only.
#[derive(Debug)]
#[repr(C)]
pub struct DLManagedTensor {
    /// The tensor.
    pub dl_tensor: DLTensor,
    /// The producer's own.
    pub manager_ctx: *mut c_void,
    /// Called once by the consumer, with the address that it was given; it frees the struct, too.
    pub deleter: Option<Deleter<Self>>,
}

/// A tensor with its owner.
#[derive(Debug)]
#[repr(C)]
pub struct DLManagedTensorVersioned {
    /// The version. If `major` is another one, nothing but the deleter may be touched.
    pub version: DLPackVersion,
    /// The producer's own.
    pub manager_ctx: *mut c_void,
    /// Called once by the consumer, with the address that it was given; it frees the struct, too.
    pub deleter: Option<Deleter<Self>>,
    /// [`READ_ONLY`](Self::READ_ONLY), [`IS_COPIED`](Self::IS_COPIED) and such.
    pub flags: u64,
    /// The tensor.
    pub dl_tensor: DLTensor,
}

impl DLManagedTensorVersioned {
    /// Flag: nobody may write to the memory.
    pub const READ_ONLY: u64 = 1;
    /// Flag: it is a copy, the consumer's alone.
    pub const IS_COPIED: u64 = 2;
}

#[cfg(target_pointer_width = "64")]
const _: () = {
    use std::mem::offset_of;
    assert!(size_of::<DLPackVersion>() == 8 && offset_of!(DLPackVersion, minor) == 4);
    assert!(size_of::<DLDevice>() == 8 && offset_of!(DLDevice, device_id) == 4);
    assert!(size_of::<DLDataType>() == 4 && align_of::<DLDataType>() == 2);
    assert!(offset_of!(DLDataType, bits) == 1 && offset_of!(DLDataType, lanes) == 2);
    assert!(size_of::<DLTensor>() == 48);
    assert!(offset_of!(DLTensor, data) == 0 && offset_of!(DLTensor, device) == 8);
    assert!(offset_of!(DLTensor, ndim) == 16 && offset_of!(DLTensor, dtype) == 20);
    assert!(offset_of!(DLTensor, shape) == 24 && offset_of!(DLTensor, strides) == 32);
    assert!(offset_of!(DLTensor, byte_offset) == 40);
    assert!(size_of::<DLManagedTensor>() == 64 && offset_of!(DLManagedTensor, dl_tensor) == 0);
    assert!(offset_of!(DLManagedTensor, manager_ctx) == 48);
    assert!(offset_of!(DLManagedTensor, deleter) == 56);
    assert!(size_of::<DLManagedTensorVersioned>() == 80);
    assert!(offset_of!(DLManagedTensorVersioned, version) == 0);
    assert!(offset_of!(DLManagedTensorVersioned, manager_ctx) == 8);
    assert!(offset_of!(DLManagedTensorVersioned, deleter) == 16);
    assert!(offset_of!(DLManagedTensorVersioned, flags) == 24);
    assert!(offset_of!(DLManagedTensorVersioned, dl_tensor) == 32);
};

/// What both managed structs have.
///
/// # Safety
/// The pointers that the functions answer point into `this`.
pub(crate) unsafe trait Managed: Sized + 'static {
    /// The name in `dlpack.h`.
    const NAME: &'static str;

    /// A struct around a tensor, without its `manager_ctx`.
    fn new(dl_tensor: DLTensor, deleter: Deleter<Self>) -> Self;

    /// The version, if the struct says one.
    ///
    /// # Safety
    /// `this` points to a struct whose version member, if there is one, can be read.
    unsafe fn version(this: *const Self) -> Option<DLPackVersion>;

    /// # Safety
    /// `this` points to a struct of any version.
    unsafe fn manager_ctx(this: *const Self) -> *mut c_void;

    /// # Safety
    /// `this` points to a struct that nobody else uses.
    unsafe fn set_manager_ctx(this: *mut Self, manager_ctx: *mut c_void);

    /// # Safety
    /// `this` points to a struct of any version.
    unsafe fn deleter(this: *const Self) -> Option<Deleter<Self>>;

    /// The tensor in the struct at `this`.
    fn tensor(this: *const Self) -> *const DLTensor;
}

// SAFETY: all are members of the struct.
unsafe impl Managed for DLManagedTensor {
    const NAME: &'static str = "DLManagedTensor";

    fn new(dl_tensor: DLTensor, deleter: Deleter<Self>) -> Self {
        Self {
            dl_tensor,
            manager_ctx: std::ptr::null_mut(),
            deleter: Some(deleter),
        }
    }

    unsafe fn version(_: *const Self) -> Option<DLPackVersion> {
        None
    }

    unsafe fn manager_ctx(this: *const Self) -> *mut c_void {
        // SAFETY: the caller's.
        unsafe { (*this).manager_ctx }
    }

    unsafe fn set_manager_ctx(this: *mut Self, manager_ctx: *mut c_void) {
        // SAFETY: the caller's.
        unsafe { (*this).manager_ctx = manager_ctx }
    }

    unsafe fn deleter(this: *const Self) -> Option<Deleter<Self>> {
        // SAFETY: the caller's.
        unsafe { (*this).deleter }
    }

    fn tensor(this: *const Self) -> *const DLTensor {
        this.wrapping_byte_add(std::mem::offset_of!(Self, dl_tensor))
            .cast()
    }
}

// SAFETY: all are members of the struct.
unsafe impl Managed for DLManagedTensorVersioned {
    const NAME: &'static str = "DLManagedTensorVersioned";

    /// Arrow data does not change, so the tensor is read-only.
    fn new(dl_tensor: DLTensor, deleter: Deleter<Self>) -> Self {
        Self {
            version: DLPackVersion::CURRENT,
            manager_ctx: std::ptr::null_mut(),
            deleter: Some(deleter),
            flags: Self::READ_ONLY,
            dl_tensor,
        }
    }

    unsafe fn version(this: *const Self) -> Option<DLPackVersion> {
        // SAFETY: the caller's.
        Some(unsafe { (*this).version })
    }

    unsafe fn manager_ctx(this: *const Self) -> *mut c_void {
        // SAFETY: the caller's.
        unsafe { (*this).manager_ctx }
    }

    unsafe fn set_manager_ctx(this: *mut Self, manager_ctx: *mut c_void) {
        // SAFETY: the caller's.
        unsafe { (*this).manager_ctx = manager_ctx }
    }

    unsafe fn deleter(this: *const Self) -> Option<Deleter<Self>> {
        // SAFETY: the caller's.
        unsafe { (*this).deleter }
    }

    fn tensor(this: *const Self) -> *const DLTensor {
        this.wrapping_byte_add(std::mem::offset_of!(Self, dl_tensor))
            .cast()
    }
}
