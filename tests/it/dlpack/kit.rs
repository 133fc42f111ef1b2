//! A consumer and a producer of tensors, in both of DLPack's forms.

use std::ffi::c_void;
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use arrow_device::dlpack::{
    DLDataType, DLDevice, DLManagedTensor, DLManagedTensorVersioned, DLPackVersion, DLTensor,
    DlpackOptions, DlpackStream, DlpackTensor,
};
use arrow_device::{ArrowDeviceType, DeviceArray, Queue, Result};

pub(crate) const CPU: DLDevice = DLDevice {
    device_type: ArrowDeviceType::CPU,
    device_id: 0,
};
pub(crate) const INT32: DLDataType = DLDataType {
    code: DLDataType::INT,
    bits: 32,
    lanes: 1,
};

/// For a consumer that names no stream.
pub(crate) fn plain() -> DlpackOptions<'static> {
    DlpackOptions::new(DlpackStream::NONE)
}

/// A deleter, which the consumer calls once.
pub(crate) type Deleter<T> = unsafe extern "C-unwind" fn(*mut T);

/// One of the two structs.
pub(crate) trait Form: Sized + 'static {
    fn out(tensor: DlpackTensor) -> *mut Self;
    fn tensor(&self) -> &DLTensor;
    fn tensor_mut(&mut self) -> &mut DLTensor;
    fn deleter_mut(&mut self) -> &mut Option<Deleter<Self>>;
    fn context_mut(&mut self) -> &mut *mut c_void;
    fn around(tensor: DLTensor, deleter: Deleter<Self>) -> Self;
    /// # Safety
    /// As `DeviceArray::import_dlpack`.
    unsafe fn import(this: *mut Self, queue: &Queue) -> Result<DeviceArray>;
}

impl Form for DLManagedTensorVersioned {
    fn out(tensor: DlpackTensor) -> *mut Self {
        tensor.into_versioned()
    }
    fn tensor(&self) -> &DLTensor {
        &self.dl_tensor
    }
    fn tensor_mut(&mut self) -> &mut DLTensor {
        &mut self.dl_tensor
    }
    fn deleter_mut(&mut self) -> &mut Option<Deleter<Self>> {
        &mut self.deleter
    }
    fn context_mut(&mut self) -> &mut *mut c_void {
        &mut self.manager_ctx
    }
    fn around(dl_tensor: DLTensor, deleter: Deleter<Self>) -> Self {
        Self {
            version: DLPackVersion { major: 1, minor: 0 },
            manager_ctx: std::ptr::null_mut(),
            deleter: Some(deleter),
            flags: 0,
            dl_tensor,
        }
    }
    unsafe fn import(this: *mut Self, queue: &Queue) -> Result<DeviceArray> {
        // SAFETY: the caller guarantees a tensor that keeps to DLPack and that nothing else uses.
        unsafe { DeviceArray::import_dlpack(this, queue) }
    }
}

impl Form for DLManagedTensor {
    fn out(tensor: DlpackTensor) -> *mut Self {
        // SAFETY: the tests' consumers do not write to the tensor's memory.
        unsafe { tensor.into_unversioned() }
    }
    fn tensor(&self) -> &DLTensor {
        &self.dl_tensor
    }
    fn tensor_mut(&mut self) -> &mut DLTensor {
        &mut self.dl_tensor
    }
    fn deleter_mut(&mut self) -> &mut Option<Deleter<Self>> {
        &mut self.deleter
    }
    fn context_mut(&mut self) -> &mut *mut c_void {
        &mut self.manager_ctx
    }
    fn around(dl_tensor: DLTensor, deleter: Deleter<Self>) -> Self {
        Self {
            dl_tensor,
            manager_ctx: std::ptr::null_mut(),
            deleter: Some(deleter),
        }
    }
    unsafe fn import(this: *mut Self, queue: &Queue) -> Result<DeviceArray> {
        // SAFETY: the caller guarantees a tensor that keeps to DLPack and that nothing else uses.
        unsafe { DeviceArray::import_dlpack(this, queue) }
    }
}

/// A tensor in a consumer's hands: dropping it calls the deleter.
pub(crate) struct Held<F: Form>(pub(crate) *mut F);

// SAFETY: DLPack lets a tensor be read, and its deleter be called, on any thread.
unsafe impl<F: Form> Send for Held<F> {}

impl<F: Form> Held<F> {
    pub(crate) fn new(tensor: DlpackTensor) -> Self {
        Self(F::out(tensor))
    }

    /// Gives the struct away.
    pub(crate) fn into_raw(self) -> *mut F {
        std::mem::ManuallyDrop::new(self).0
    }

    pub(crate) fn shape(&self) -> &[i64] {
        // SAFETY: the producer guarantees `ndim` numbers until the deleter is called.
        unsafe { std::slice::from_raw_parts(self.tensor().shape, self.tensor().ndim as usize) }
    }

    pub(crate) fn strides(&self) -> &[i64] {
        assert!(!self.tensor().strides.is_null(), "1.2 wants strides");
        // SAFETY: the producer guarantees `ndim` numbers, which are not null, until the deleter is called.
        unsafe { std::slice::from_raw_parts(self.tensor().strides, self.tensor().ndim as usize) }
    }

    /// The bytes of a tensor in host memory, as its shape and strides say.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let tensor = self.tensor();
        let width = usize::from(tensor.dtype.bits) / 8;
        let mut bytes = Vec::new();
        let elements: i64 = self.shape().iter().product();
        for n in 0..elements {
            let (mut rest, mut at) = (n, 0);
            for (size, stride) in self.shape().iter().zip(self.strides()).rev() {
                at += rest % size * stride;
                rest /= size;
            }
            let at = tensor.byte_offset as usize + at as usize * width;
            // SAFETY: the producer guarantees that all elements that shape and strides name are
            // readable.
            bytes.extend_from_slice(unsafe {
                std::slice::from_raw_parts(tensor.data.cast::<u8>().add(at), width)
            });
        }
        bytes
    }
}

impl<F: Form> Deref for Held<F> {
    type Target = F;

    fn deref(&self) -> &F {
        // SAFETY: the struct lives until its deleter is called, which only this type's owner does.
        unsafe { &*self.0 }
    }
}

impl<F: Form> Drop for Held<F> {
    fn drop(&mut self) {
        // SAFETY: the consumer owns the tensor, and this is the one call of its deleter.
        unsafe {
            let deleter = *(*self.0).deleter_mut();
            deleter.expect("there is a deleter")(self.0);
        }
    }
}

/// How often deleters were called.
#[derive(Clone, Default)]
pub(crate) struct Calls(pub(crate) Arc<AtomicUsize>);

impl Calls {
    pub(crate) fn get(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }
}

/// What a producer's struct lies in.
#[repr(C)]
struct Produced<F> {
    form: F,
    _dims: Vec<i64>,
    _keep: Box<dyn Send>,
    calls: Calls,
}

unsafe extern "C-unwind" fn delete<F: Form>(this: *mut F) {
    // SAFETY: `produce` gave up the box, and the deleter, which takes it back, is called once.
    let produced = unsafe { Box::from_raw((*(*this).context_mut()).cast::<Produced<F>>()) };
    produced.calls.0.fetch_add(1, Ordering::SeqCst);
}

/// A producer's tensor over memory that `keep` keeps.
pub(crate) fn produce<F: Form>(
    data: *mut c_void,
    device: DLDevice,
    dtype: DLDataType,
    shape: &[i64],
    keep: impl Send + 'static,
    calls: &Calls,
) -> *mut F {
    let mut strides = vec![1; shape.len()];
    for i in (1..shape.len()).rev() {
        strides[i - 1] = strides[i] * shape[i];
    }
    let mut dims = shape.to_vec();
    dims.extend(strides);
    let start = dims.as_mut_ptr();
    let tensor = DLTensor {
        data,
        device,
        ndim: shape.len() as i32,
        dtype,
        shape: start,
        strides: start.wrapping_add(shape.len()),
        byte_offset: 0,
    };
    let produced = Box::into_raw(Box::new(Produced {
        form: F::around(tensor, delete::<F>),
        _dims: dims,
        _keep: Box::new(keep),
        calls: calls.clone(),
    }));
    // SAFETY: the struct was just made, and nothing else has it.
    unsafe {
        let form = &raw mut (*produced).form;
        *(*form).context_mut() = produced.cast();
        form
    }
}

/// A producer's tensor of one dimension over numbers in host memory.
pub(crate) fn numbers<F: Form>(values: Vec<i32>, calls: &Calls) -> *mut F {
    let mut values = values;
    let (data, shape) = (values.as_mut_ptr().cast(), [values.len() as i64]);
    produce(data, CPU, INT32, &shape, values, calls)
}
