//! The structs of `dlpack.h`, version 1.3, and which of its types are Arrow's.
//!
//! They are defined here because no crate's serve. Those with the current structs (dlpark, dlpack-rs, dlpack-ffi) type the
//! deleter as `extern "C"`. A C++ exception or a panic that leaves such a deleter is undefined behaviour, where
//! `extern "C-unwind"` ends in a defined abort or a caught panic. Their structs are also `Copy`, dlpark depends on procedural
//! macros for its errors, and the crate `dlpack` has no versioned structs. The layout of the structs is checked below.

use std::collections::HashMap;
use std::ffi::c_void;

use arrow_schema::extension::{EXTENSION_TYPE_METADATA_KEY, EXTENSION_TYPE_NAME_KEY};
use arrow_schema::{DataType, Field, IntervalUnit};

use crate::abi::ArrowDeviceType;
use crate::device::DeviceId;
use crate::device::backend::not_supported;
use crate::error::{Error, Result};

/// The version of the structs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct DLPackVersion {
    /// Structs of another major version have another layout.
    pub major: u32,
    /// A newer minor version has more codes.
    pub minor: u32,
}

impl DLPackVersion {
    /// The version of the structs that this crate makes: 1.3.
    pub const CURRENT: Self = Self { major: 1, minor: 3 };
}

/// The device of a tensor. DLPack and Arrow have the same device types, with the same codes.
///
/// ```
/// use arrow_device::dlpack::DLDevice;
/// use arrow_device::{ArrowDeviceType, DeviceId};
/// let cpu = DLDevice { device_type: ArrowDeviceType::CPU, device_id: 0 };
/// assert_eq!(DeviceId::from(cpu), DeviceId::CPU);
/// assert_eq!(DLDevice::try_from(DeviceId::CPU)?, cpu);
/// # Ok::<(), arrow_device::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct DLDevice {
    /// `DLDeviceType`.
    pub device_type: ArrowDeviceType,
    /// The number of the device among those of its type. 0 for the CPU, page-locked and managed memory.
    pub device_id: i32,
}

impl From<DLDevice> for DeviceId {
    /// Returns Arrow's id of the device, to look up in [`Devices`](crate::Devices). For page-locked and managed memory it is
    /// 0, whichever device the memory belongs to.
    fn from(device: DLDevice) -> Self {
        match device.device_type {
            ArrowDeviceType::CPU => Self::CPU,
            device_type => Self::new(device_type, device.device_id.into()),
        }
    }
}

impl TryFrom<DeviceId> for DLDevice {
    type Error = Error;

    /// Returns DLPack's name of a device.
    ///
    /// # Errors
    /// Returns [`Error::NotSupported`] for an id that does not fit into 32 bits.
    fn try_from(id: DeviceId) -> Result<Self> {
        let device_id = match id.device_type {
            t if shares_ids(t) => 0,
            _ => i32::try_from(id.id)
                .map_err(|_| not_supported(id, "DLPack", "DLPack's device ids have 32 bits"))?,
        };
        Ok(Self {
            device_type: id.device_type,
            device_id,
        })
    }
}

/// Refuses devices for which DLPack's `data` is an object of the runtime (an `MTLBuffer`, a `cl_mem`) with an offset into
/// it, while Arrow's `buffers[i]` is an address. The two must not be mixed up.
///
/// # Errors
/// Returns [`Error::NotSupported`].
pub(super) fn check_addresses(device: DeviceId) -> Result<()> {
    use ArrowDeviceType as T;
    match device.device_type {
        T::METAL | T::OPENCL | T::VULKAN | T::WEBGPU => Err(not_supported(
            device,
            "DLPack",
            "a DLPack tensor of this device type holds a buffer object of its runtime, and an Arrow array an address; \
             this crate does not convert between them; copy the data to the CPU and exchange it there",
        )),
        _ => Ok(()),
    }
}

/// Whether DLPack's header requires 0 as the id of memory of this type.
pub(super) fn shares_ids(device_type: ArrowDeviceType) -> bool {
    use ArrowDeviceType as T;
    matches!(
        device_type,
        T::CPU | T::CUDA_HOST | T::ROCM_HOST | T::CUDA_MANAGED
    )
}

/// The type of an element: `lanes` numbers, each of `bits` bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct DLDataType {
    /// `DLDataTypeCode`: one of this type's constants, or a newer code.
    pub code: u8,
    /// Bits of one number.
    pub bits: u8,
    /// Numbers per element: 1, except for vectors.
    pub lanes: u16,
}

impl DLDataType {
    /// Signed integers.
    pub const INT: u8 = 0;
    /// Unsigned integers.
    pub const UINT: u8 = 1;
    /// IEEE floating point.
    pub const FLOAT: u8 = 2;
    /// bfloat16.
    pub const BFLOAT: u8 = 4;
    /// Complex numbers: pairs of floats.
    pub const COMPLEX: u8 = 5;
    /// Booleans, of a byte each.
    pub const BOOL: u8 = 6;

    /// Bytes of an element, or `None` if that is not a whole number.
    pub(super) fn bytes(self) -> Option<usize> {
        let bits = usize::from(self.bits) * usize::from(self.lanes);
        (bits > 0 && bits % 8 == 0).then_some(bits / 8)
    }
}

/// An n-dimensional array in some device's memory.
#[derive(Debug)]
#[repr(C)]
pub struct DLTensor {
    /// An address, or null if there are no elements. On some devices a buffer object of the runtime; this crate does not
    /// exchange tensors of those.
    pub data: *mut c_void,
    /// The device of the memory.
    pub device: DLDevice,
    /// The number of dimensions.
    pub ndim: i32,
    /// The type of an element.
    pub dtype: DLDataType,
    /// Elements in each dimension.
    pub shape: *mut i64,
    /// Elements between neighbours in each dimension. Before version 1.2, null means compact and row-major.
    pub strides: *mut i64,
    /// Bytes from `data` to the first element.
    pub byte_offset: u64,
}

/// A deleter, which the consumer calls once.
pub(super) type Deleter<T> = unsafe extern "C-unwind" fn(*mut T);

/// A tensor with its owner, in the struct of versions before 1.0, which has no mark for read-only memory.
#[derive(Debug)]
#[repr(C)]
pub struct DLManagedTensor {
    /// The tensor.
    pub dl_tensor: DLTensor,
    /// For the producer's use.
    pub manager_ctx: *mut c_void,
    /// The consumer calls this once, with the address that it was given. It frees the struct, too.
    pub deleter: Option<Deleter<Self>>,
}

/// A tensor with its owner.
#[derive(Debug)]
#[repr(C)]
pub struct DLManagedTensorVersioned {
    /// The version. If `major` is not 1, only the deleter may be used.
    pub version: DLPackVersion,
    /// For the producer's use.
    pub manager_ctx: *mut c_void,
    /// The consumer calls this once, with the address that it was given. It frees the struct, too.
    pub deleter: Option<Deleter<Self>>,
    /// A combination of [`READ_ONLY`](Self::READ_ONLY), [`IS_COPIED`](Self::IS_COPIED) and newer flags.
    pub flags: u64,
    /// The tensor.
    pub dl_tensor: DLTensor,
}

impl DLManagedTensorVersioned {
    /// The flag of memory that the consumer must not write to.
    pub const READ_ONLY: u64 = 1;
    /// The flag of a copy that was made for the consumer alone.
    pub const IS_COPIED: u64 = 2;
}

/// Arrow's canonical extension type for booleans of a byte each.
const BOOL8: &str = "arrow.bool8";

/// The DLPack type that values of an Arrow type are exported as, or `None` if there is none. Times are exported as integers,
/// booleans only if they are bytes.
pub(super) fn element(data_type: &DataType, field: Option<&Field>) -> Option<DLDataType> {
    use DataType as T;
    let code = match data_type {
        T::Int8 if field.and_then(Field::extension_type_name) == Some(BOOL8) => DLDataType::BOOL,
        T::Interval(unit) if *unit != IntervalUnit::YearMonth => return None,
        t if t.is_signed_integer() || t.is_temporal() => DLDataType::INT,
        t if t.is_unsigned_integer() => DLDataType::UINT,
        t if t.is_floating() => DLDataType::FLOAT,
        _ => return None,
    };
    let bits = 8 * data_type.primitive_width()?;
    Some(DLDataType {
        code,
        bits: bits as u8,
        lanes: 1,
    })
}

/// The Arrow type of a tensor's elements, as the field of a list's items, or `None` if there is none.
pub(super) fn field(of: DLDataType) -> Option<Field> {
    use DataType as T;
    if (of.code, of.bits, of.lanes) == (DLDataType::BOOL, 8, 1) {
        let metadata = HashMap::from([
            (EXTENSION_TYPE_NAME_KEY.into(), BOOL8.into()),
            (EXTENSION_TYPE_METADATA_KEY.into(), String::new()),
        ]);
        return Some(Field::new_list_field(T::Int8, true).with_metadata(metadata));
    }
    let signed = [T::Int8, T::Int16, T::Int32, T::Int64];
    let unsigned = [T::UInt8, T::UInt16, T::UInt32, T::UInt64];
    let floats = [T::Float16, T::Float32, T::Float64];
    let mut numbers = signed.into_iter().chain(unsigned).chain(floats);
    let number = numbers.find(|number| element(number, None) == Some(of))?;
    Some(Field::new_list_field(number, true))
}

#[cfg(target_pointer_width = "64")]
const _: () = {
    use std::mem::offset_of;
    type Versioned = DLManagedTensorVersioned;
    assert!(size_of::<DLPackVersion>() == 8 && size_of::<DLDevice>() == 8);
    assert!(size_of::<DLDataType>() == 4 && align_of::<DLDataType>() == 2);
    assert!(size_of::<DLTensor>() == 48 && offset_of!(DLTensor, shape) == 24);
    assert!(size_of::<DLManagedTensor>() == 64 && offset_of!(DLManagedTensor, deleter) == 56);
    assert!(size_of::<Versioned>() == 80 && offset_of!(Versioned, deleter) == 16);
    assert!(offset_of!(Versioned, flags) == 24 && offset_of!(Versioned, dl_tensor) == 32);
};
