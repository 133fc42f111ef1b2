//! A foreign producer: `ArrowDeviceArray`s written by hand, as C code would write them, whose every member a test may
//! spoil, and whose releases are counted.
#![allow(dead_code)]

pub(crate) mod export;
pub(crate) mod sim;

use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use arrow_array::UInt8Array;
use arrow_buffer::{BooleanBuffer, Buffer};
use arrow_data::ArrayData;
use arrow_device::{
    Device, DeviceArray, DeviceId, DeviceRecordBatch, FFI_ArrowDeviceArray, ImportOptions, Result,
    SyncEvent,
};
use arrow_schema::{DataType, Field, Schema};

/// `struct ArrowArray`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CArray {
    pub length: i64,
    pub null_count: i64,
    pub offset: i64,
    pub n_buffers: i64,
    pub n_children: i64,
    pub buffers: *mut *const c_void,
    pub children: *mut *mut CArray,
    pub dictionary: *mut CArray,
    pub release: Option<unsafe extern "C" fn(*mut CArray)>,
    pub private_data: *mut c_void,
}

/// `struct ArrowDeviceArray`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct CDeviceArray {
    pub array: CArray,
    pub device_id: i64,
    pub device_type: i32,
    pub sync_event: *mut c_void,
    pub reserved: [i64; 3],
}

const _: () = assert!(size_of::<CDeviceArray>() == size_of::<FFI_ArrowDeviceArray>());

/// What a node owns. It stays until the test ends, so that a second release is counted and does no harm; its memory
/// goes at the first.
struct Private {
    releases: AtomicUsize,
    /// The first release has returned, or is about to: it does not touch this any more.
    released: AtomicBool,
    buffers: Vec<*const c_void>,
    children: Vec<*mut CArray>,
    /// Struct of the dictionary, or null.
    dictionary: *mut CArray,
    memory: Mutex<Vec<Box<dyn std::any::Any + Send>>>,
}

/// Child index that means the dictionary, in [`Foreign::at`].
pub(crate) const DICTIONARY: usize = usize::MAX;

/// An array of a foreign producer. Spoil it with [`at`](Self::at), import it, then check its releases.
pub(crate) struct Foreign {
    /// Where the struct stands, as C code would have it; released once it was taken.
    pub device_array: Box<CDeviceArray>,
    pub data_type: DataType,
    nodes: Vec<*mut Private>,
    structs: Vec<*mut CArray>,
}

impl Foreign {
    /// `data` on the CPU or, copied buffer by buffer without a look inside, on another device.
    pub(crate) fn new(data: &ArrayData, device: &Device) -> Self {
        let mut foreign = Self {
            device_array: Box::new(CDeviceArray {
                array: empty(),
                device_id: device.id().id,
                device_type: device.id().device_type.value(),
                sync_event: ptr::null_mut(),
                reserved: [0; 3],
            }),
            data_type: data.data_type().clone(),
            nodes: vec![],
            structs: vec![],
        };
        foreign.device_array.array = foreign.node(data, device);
        if !device.is_synchronous() {
            let event = device.default_queue().record().unwrap().unwrap();
            foreign.set_event(event);
        }
        foreign
    }

    /// These rows of `around`, by the struct's own offset: its buffers and children hold the others too.
    pub(crate) fn part(around: &ArrayData, offset: usize, rows: usize, device: &Device) -> Self {
        let mut foreign = Self::new(around, device);
        let nulls = around.nulls().map(|nulls| nulls.slice(offset, rows));
        let root = foreign.root();
        root.offset += offset as i64;
        root.length = rows as i64;
        if let Some(nulls) = nulls {
            root.null_count = nulls.null_count() as i64;
        }
        foreign
    }

    /// Hands the event over with the array; it lives until the root's release.
    pub(crate) fn set_event(&mut self, event: SyncEvent) {
        self.device_array.sync_event = event.as_ptr().as_ptr();
        // SAFETY: `private_data` of the root is its `Private`, which lives as long as `self`.
        let root = unsafe { &*self.device_array.array.private_data.cast::<Private>() };
        root.memory.lock().unwrap().push(Box::new(event));
    }

    /// Drops something with the root.
    pub(crate) fn keep(&mut self, owner: impl std::any::Any + Send) {
        // SAFETY: `private_data` of the root is its `Private`, which lives as long as `self`.
        let root = unsafe { &*self.device_array.array.private_data.cast::<Private>() };
        root.memory.lock().unwrap().push(Box::new(owner));
    }

    fn node(&mut self, data: &ArrayData, device: &Device) -> CArray {
        let layout = arrow_data::layout(data.data_type());
        let mut memory: Vec<Box<dyn std::any::Any + Send>> = vec![];
        let mut buffers = vec![];
        let mut place = |buffer: &Buffer| {
            if buffer.is_empty() {
                return ptr::null();
            }
            if device.id() == DeviceId::CPU {
                memory.push(Box::new(buffer.clone()));
                return buffer.as_ptr().cast::<c_void>();
            }
            let bytes = UInt8Array::new(buffer.clone().into(), None);
            let bytes = device.upload_array(&bytes).unwrap().buffer(1).unwrap();
            let address = bytes.address().as_ptr().cast_const();
            memory.push(Box::new(bytes));
            address
        };
        if layout.can_contain_null_mask {
            buffers.push(data.nulls().map_or(ptr::null(), |nulls| {
                let offset = data.offset();
                let bit = |i: usize| i < offset || nulls.is_valid(i - offset);
                let mask = BooleanBuffer::collect_bool(offset + data.len(), bit);
                place(mask.inner())
            }));
        }
        buffers.extend(data.buffers().iter().map(&mut place));
        if layout.variadic {
            let sizes: Vec<i64> = data.buffers()[1..].iter().map(|b| b.len() as i64).collect();
            // One more, so that the list is there even if it is empty.
            let sizes = Box::new([sizes, vec![0]].concat());
            buffers.push(sizes.as_ptr().cast());
            memory.push(sizes);
        }
        let is_dictionary = matches!(data.data_type(), DataType::Dictionary(..));
        let children: Vec<*mut CArray> = data
            .child_data()
            .iter()
            .map(|child| {
                let child = Box::into_raw(Box::new(self.node(child, device)));
                self.structs.push(child);
                child
            })
            .collect();
        let (children, dictionary) = if is_dictionary {
            (vec![], children[0])
        } else {
            (children, ptr::null_mut())
        };
        let private = Box::into_raw(Box::new(Private {
            releases: AtomicUsize::new(0),
            released: AtomicBool::new(false),
            buffers,
            children,
            dictionary,
            memory: Mutex::new(memory),
        }));
        self.nodes.push(private);
        // SAFETY: the struct was just made, and nothing else has it.
        let p = unsafe { &mut *private };
        CArray {
            length: data.len() as i64,
            null_count: data.null_count() as i64,
            offset: data.offset() as i64,
            n_buffers: p.buffers.len() as i64,
            n_children: p.children.len() as i64,
            buffers: p.buffers.as_mut_ptr(),
            children: p.children.as_mut_ptr(),
            dictionary,
            release: Some(release),
            private_data: private.cast(),
        }
    }

    /// The struct at the end of a path of child indices.
    pub(crate) fn at(&mut self, path: &[usize]) -> &mut CArray {
        let mut at: *mut CArray = &mut self.device_array.array;
        for &i in path {
            // SAFETY: `at` and its descendants were made by `Foreign::new` and live as long as
            // `self`; the path names one of them.
            at = unsafe {
                let private = &*(*at).private_data.cast::<Private>();
                if i == DICTIONARY {
                    private.dictionary
                } else {
                    private.children[i]
                }
            };
        }
        // SAFETY: `at` points to a struct that lives as long as `self`, which is borrowed mutably.
        unsafe { &mut *at }
    }

    pub(crate) fn root(&mut self) -> &mut CArray {
        self.at(&[])
    }

    /// Sets the address of a buffer.
    pub(crate) fn set_buffer(&mut self, path: &[usize], i: usize, address: *const c_void) {
        let array = self.at(path);
        assert!((i as i64) < array.n_buffers);
        // SAFETY: the list has `n_buffers` pointers, and `i` is below that.
        unsafe { *array.buffers.add(i) = address }
    }

    /// The address of a buffer.
    pub(crate) fn buffer(&mut self, path: &[usize], i: usize) -> *const c_void {
        let array = self.at(path);
        assert!((i as i64) < array.n_buffers);
        // SAFETY: the list has `n_buffers` pointers, and `i` is below that.
        unsafe { *array.buffers.add(i) }
    }

    /// Sets the lengths of a view array's variadic buffers.
    pub(crate) fn set_sizes(&mut self, path: &[usize], sizes: &[i64]) {
        let sizes = Box::new(sizes.to_vec());
        let last = self.at(path).n_buffers as usize - 1;
        self.set_buffer(path, last, sizes.as_ptr().cast());
        self.keep(sizes);
    }

    /// Sets a child's pointer in its parent's list.
    pub(crate) fn set_child(&mut self, parent: &[usize], i: usize, child: *mut CArray) {
        let array = self.at(parent);
        assert!((i as i64) < array.n_children);
        // The list is not `Private::children`'s own buffer any more, so that `release` still finds the child.
        // SAFETY: the list has `n_children` pointers.
        let mut list =
            unsafe { std::slice::from_raw_parts(array.children, array.n_children as usize) }
                .to_vec();
        list[i] = child;
        let list = Box::new(List(list));
        array.children = list.0.as_ptr().cast_mut();
        self.keep(list);
    }

    /// Releases the struct at the path, as a consumer may that moved it out.
    pub(crate) fn release(&mut self, path: &[usize]) {
        let array = self.at(path);
        // SAFETY: the struct was made by `Foreign::new` and is not released yet.
        unsafe { array.release.unwrap()(array) };
    }

    /// Moves the array out, as a consumer does.
    pub(crate) fn take(&mut self) -> FFI_ArrowDeviceArray {
        let source = ptr::from_mut::<CDeviceArray>(&mut self.device_array).cast();
        // SAFETY: `CDeviceArray` has the layout of `struct ArrowDeviceArray`; what tests spoil in
        // it is what an import checks.
        unsafe { FFI_ArrowDeviceArray::from_raw(source) }
    }

    pub(crate) fn field(&self) -> Arc<Field> {
        Arc::new(Field::new("f", self.data_type.clone(), true))
    }

    pub(crate) fn import(&mut self, options: &ImportOptions) -> Result<DeviceArray> {
        let field = self.field();
        // SAFETY: what tests spoil in the struct is what an import checks; all else is valid.
        unsafe { DeviceArray::import_as(self.take(), field, options) }
    }

    /// As a batch: the type is a struct.
    pub(crate) fn import_batch(&mut self, options: &ImportOptions) -> Result<DeviceRecordBatch> {
        let DataType::Struct(fields) = &self.data_type else {
            panic!("{} is no batch", self.data_type);
        };
        let schema = Arc::new(Schema::new(fields.clone()));
        // SAFETY: what tests spoil in the struct is what an import checks; all else is valid.
        unsafe { DeviceRecordBatch::import_as(self.take(), schema, options) }
    }

    /// The only child struct whose node was not released yet.
    pub(crate) fn lost(&mut self) -> &mut CArray {
        // SAFETY: structs and nodes live as long as `self`.
        let lost = self.structs.iter().find(|s| unsafe {
            let private = (***s).private_data.cast::<Private>();
            (*private).releases.load(Ordering::Acquire) == 0
        });
        // SAFETY: the struct lives as long as `self`, which is borrowed mutably.
        unsafe { &mut **lost.unwrap() }
    }

    /// How often nodes were released, all together, and how many there are.
    pub(crate) fn releases(&self) -> (usize, usize) {
        // SAFETY: nodes live as long as `self`.
        let count = |p: &*mut Private| unsafe { (**p).releases.load(Ordering::Acquire) };
        (self.nodes.iter().map(count).sum(), self.nodes.len())
    }

    /// As `assert_released`, once the device has finished what reads the array.
    #[track_caller]
    pub(crate) fn assert_released_by(&self, device: &Device, context: &str) {
        let _ = device.synchronize();
        self.wait_for_releases();
        self.assert_released(context);
    }

    /// Waits until the first release of each node has finished: on another thread, its count is visible before it has freed the
    /// node's memory.
    fn wait_for_releases(&self) {
        let end = Instant::now() + Duration::from_secs(5);
        // SAFETY: nodes live as long as `self`.
        let released = |p: &*mut Private| unsafe { (**p).released.load(Ordering::Acquire) };
        while !self.nodes.iter().all(released) && Instant::now() < end {
            std::thread::sleep(Duration::from_micros(50));
        }
    }

    /// Panics unless each node was released exactly once.
    #[track_caller]
    pub(crate) fn assert_released(&self, context: &str) {
        for (i, node) in self.nodes.iter().enumerate() {
            // SAFETY: nodes live as long as `self`.
            let releases = unsafe { (**node).releases.load(Ordering::Acquire) };
            assert_eq!(
                releases,
                1,
                "{context}: releases of node {i} of {}",
                self.nodes.len()
            );
        }
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        let array = &mut self.device_array.array;
        if let Some(release) = array.release {
            // SAFETY: the struct was not taken, so its callback has not been called.
            unsafe { release(array) };
        }
        if !std::thread::panicking() {
            // The device's thread releases an array whose use it waits for, which may be a moment after the test.
            self.wait_for_releases();
        }
        let (released, nodes) = self.releases();
        if !std::thread::panicking() {
            assert!(released >= nodes, "the array outlives its test");
        } else if released < nodes {
            return;
        }
        self.wait_for_releases();
        for child in self.structs.drain(..) {
            // SAFETY: the box was given up by `Box::into_raw`, and nobody holds the array any more.
            drop(unsafe { Box::from_raw(child) });
        }
        for node in self.nodes.drain(..) {
            // SAFETY: the box was given up by `Box::into_raw`; nobody holds the array any more, and
            // each node is dropped once.
            drop(unsafe { Box::from_raw(node) });
        }
    }
}

/// Moves a struct out, as C code does.
///
/// # Safety
/// `from` is a live struct that nobody else uses meanwhile.
pub(crate) unsafe fn take(from: *mut CArray) -> CArray {
    // SAFETY: the caller guarantees a live struct that nobody else uses meanwhile (see `# Safety`).
    unsafe {
        let taken = from.read();
        (*from).release = None;
        taken
    }
}

/// A struct that was moved out of its parent: released on drop.
pub(crate) struct Moved(pub CArray);

// SAFETY: the interface lets a struct be released on any thread.
unsafe impl Send for Moved {}

impl Drop for Moved {
    fn drop(&mut self) {
        if let Some(release) = self.0.release {
            // SAFETY: `self` is the only copy of the struct, so its callback has not been called.
            unsafe { release(&mut self.0) }
        }
    }
}

/// The struct of an export, as C code sees it.
pub(crate) fn c(array: &mut FFI_ArrowDeviceArray) -> &mut CDeviceArray {
    // SAFETY: `CDeviceArray` has the layout of `struct ArrowDeviceArray`; the borrow is exclusive.
    unsafe { &mut *ptr::from_mut(array).cast() }
}

struct List(Vec<*mut CArray>);

// SAFETY: the pointers are not followed; the list is only kept and dropped.
unsafe impl Send for List {}

pub(crate) fn empty() -> CArray {
    CArray {
        length: 0,
        null_count: 0,
        offset: 0,
        n_buffers: 0,
        n_children: 0,
        buffers: ptr::null_mut(),
        children: ptr::null_mut(),
        dictionary: ptr::null_mut(),
        release: None,
        private_data: ptr::null_mut(),
    }
}

/// Counts; lets go of the node's memory; releases children that were not moved out. Counts and lengths are the
/// producer's own, not those in the struct, which tests spoil.
unsafe extern "C" fn release(array: *mut CArray) {
    // SAFETY: the struct was made by `Foreign::new`, or is a bitwise move of such a one; its
    // `Private` lives as long as the test.
    unsafe {
        let private = &*(*array).private_data.cast::<Private>();
        (*array).release = None;
        let before = private.releases.fetch_add(1, Ordering::AcqRel);
        if before > 0 {
            return;
        }
        let children = private.children.iter().copied();
        for child in children.chain([private.dictionary]) {
            if !child.is_null() {
                if let Some(release) = (*child).release {
                    release(child);
                }
            }
        }
        let memory = std::mem::take(&mut *private.memory.lock().unwrap());
        drop(memory);
        private.released.store(true, Ordering::Release);
    }
}
