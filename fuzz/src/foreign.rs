//! Arrays of a foreign producer: C structs made of a [`Sketch`], whose members an input may spoil.

use std::any::Any;
use std::ffi::c_void;
use std::ops::Range;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use arrow_array::UInt8Array;
use arrow_buffer::Buffer;
use arrow_device::{DeviceBuffer, FFI_ArrowDeviceArray, SyncEvent};
use arrow_schema::DataType;

use crate::input::Input;
use crate::kinds;
use crate::sketch::{Holds, LIMIT, Node, ODD, Place as At, buffers, is_view, window};
use crate::world::{Place, World};

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
#[derive(Debug)]
pub(crate) struct CDeviceArray {
    pub array: CArray,
    pub device_id: i64,
    pub device_type: i32,
    pub sync_event: *mut c_void,
    pub reserved: [i64; 3],
}

const _: () = assert!(size_of::<CDeviceArray>() == size_of::<FFI_ArrowDeviceArray>());

/// Releases of children: consumers of whole arrays call none.
static CHILD_RELEASES: AtomicUsize = AtomicUsize::new(0);

/// What a root's release frees: all of the array's memory.
struct Private {
    memory: Vec<Box<dyn Any + Send>>,
    structs: Vec<*mut CArray>,
    released: Arc<AtomicUsize>,
}

impl Drop for Private {
    fn drop(&mut self) {
        for node in &self.structs {
            // SAFETY: made by `Box::into_raw`; the array is not used any more.
            drop(unsafe { Box::from_raw(*node) });
        }
    }
}

unsafe extern "C" fn release(array: *mut CArray) {
    // SAFETY: a root of this file, or a bitwise move of one, released once.
    unsafe {
        (*array).release = None;
        let private = Box::from_raw((*array).private_data.cast::<Private>());
        private.released.fetch_add(1, SeqCst);
    }
}

unsafe extern "C" fn release_child(array: *mut CArray) {
    CHILD_RELEASES.fetch_add(1, SeqCst);
    // SAFETY: a struct of this file.
    unsafe { (*array).release = None };
}

/// How the memory of an array is laid out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Memory {
    /// Each buffer in an allocation of its own, of just the bytes that the counts claim.
    Exact,
    /// All of them in one allocation, where they may overlap.
    Shared,
}

/// An array that was not given away yet.
pub(crate) struct Foreign<'a> {
    pub root: CDeviceArray,
    pub data_type: &'a DataType,
    /// Host memory that pointers may point into.
    pub regions: Vec<Range<usize>>,
    released: Arc<AtomicUsize>,
    /// The root and its descendants, in order; the root is not boxed.
    nodes: Vec<*mut CArray>,
    private: Private,
    place: &'a Place,
    arena: &'a [u8],
    shared: Option<usize>,
    /// The same content whatever the device: nothing is left to the device to refuse.
    tame: bool,
}

impl<'a> Foreign<'a> {
    pub(crate) fn new(
        data_type: &'a DataType,
        node: &Node,
        arena: &'a [u8],
        place: &'a Place,
        memory: Memory,
        tame: bool,
    ) -> Self {
        let released = Arc::new(AtomicUsize::new(0));
        let id = place.device.id();
        let private = Private {
            memory: vec![],
            structs: vec![],
            released: released.clone(),
        };
        let mut this = Self {
            root: CDeviceArray {
                // SAFETY: all zero is a released struct.
                array: unsafe { std::mem::zeroed() },
                device_id: id.id,
                device_type: id.device_type.value(),
                sync_event: ptr::null_mut(),
                reserved: [0; 3],
            },
            data_type,
            regions: vec![],
            released,
            nodes: vec![],
            private,
            place,
            arena,
            shared: None,
            tame,
        };
        if memory == Memory::Shared {
            let mut bytes = arena.to_vec();
            bytes.resize(arena.len().max(64), 0);
            this.shared = Some(this.put(bytes, false));
        }
        this.root.array = CArray {
            release: Some(release),
            ..this.node(node, data_type)
        };
        if let Ok(Some(event)) = place.device.default_queue().record() {
            this.set_event(event);
        }
        this
    }

    fn set_event(&mut self, event: SyncEvent) {
        self.root.sync_event = event.as_ptr().as_ptr();
        self.keep(event);
    }

    fn keep(&mut self, owner: impl Any + Send) {
        self.private.memory.push(Box::new(owner));
    }

    /// The address of a copy of `bytes` on the device, one byte off if `odd`.
    fn put(&mut self, mut bytes: Vec<u8>, odd: bool) -> usize {
        if odd {
            bytes.insert(0, 0);
        }
        if self.place.is_cpu() {
            return self.put_on_host(bytes) + usize::from(odd);
        }
        let memory = on_device(self.place, bytes);
        let address = memory.address().address();
        self.keep(memory);
        address + usize::from(odd)
    }

    /// The address of these bytes, in an allocation of just their number.
    fn put_on_host(&mut self, bytes: Vec<u8>) -> usize {
        let bytes = bytes.into_boxed_slice();
        let address = bytes.as_ptr().addr();
        self.regions.push(address..address + bytes.len());
        self.keep(bytes);
        address
    }

    /// A list of a C struct.
    fn list<T: 'static>(&mut self, list: Vec<*const T>) -> *mut *const T {
        let list = List(list.into_boxed_slice().into());
        let start = list.0.as_ptr();
        self.regions
            .push(start.addr()..start.addr() + size_of_val(&*list.0));
        self.keep(list);
        start.cast_mut()
    }

    fn node(&mut self, node: &Node, data_type: &DataType) -> CArray {
        let index = self.nodes.len();
        self.nodes.push(ptr::null_mut());
        let rows = u64::try_from(node.length.max(0).saturating_add(node.offset.max(0)));
        let rows = rows.unwrap_or(0);
        let mut contents: Vec<Option<Vec<u8>>> = Vec::new();
        for (kind, at) in buffers(data_type).into_iter().zip(&node.buffers) {
            let needed = match (kind, contents.last_mut()) {
                (Holds::Bytes, Some(offsets)) => self.last_offset(offsets.as_deref_mut(), rows),
                (kind, _) => kind.bytes(rows),
            };
            let needed = needed.unwrap_or(usize::MAX);
            contents.push(at.and_then(|at| window(self.arena, at, needed)));
        }
        let mut list = vec![];
        for (at, content) in node.buffers.iter().zip(contents) {
            list.push(self.buffer(*at, content));
        }
        if is_view(data_type) {
            let mut sizes = vec![];
            for (at, bytes) in &node.variadic {
                let n = usize::try_from(*bytes).unwrap_or(0);
                let content = at.and_then(|at| window(self.arena, at, n));
                // What is not there is not claimed where nobody could tell.
                let there = content.is_some() || !(self.tame || self.place.is_cpu());
                sizes.push(if there || *bytes < 0 { *bytes } else { 0 });
                list.push(self.buffer(*at, content));
            }
            let mut bytes: Vec<u8> = sizes.iter().flat_map(|n| n.to_ne_bytes()).collect();
            if bytes.is_empty() {
                bytes.resize(8, 0);
            }
            // In memory of either kind.
            let on_host = node.null_count % 2 == 0;
            let address = if on_host {
                self.put_on_host(bytes)
            } else {
                self.put(bytes, false)
            };
            list.push(ptr::without_provenance(address));
        }
        let types = kinds::children(data_type).into_iter();
        let children = node.children.iter().zip(types);
        let children: Vec<*const CArray> = children
            .map(|(child, data_type)| {
                let child_index = self.nodes.len();
                let child = self.node(child, data_type);
                let child = Box::into_raw(Box::new(CArray {
                    release: Some(release_child),
                    ..child
                }));
                self.private.structs.push(child);
                self.nodes[child_index] = child;
                child.cast_const()
            })
            .collect();
        let is_dictionary = matches!(data_type, DataType::Dictionary(_, _));
        let dictionary = children.first().filter(|_| is_dictionary);
        let dictionary = dictionary.map_or(ptr::null_mut(), |values| values.cast_mut());
        let children = if is_dictionary { vec![] } else { children };
        debug_assert!(self.nodes.len() > index);
        CArray {
            length: node.length,
            null_count: node.null_count,
            offset: node.offset,
            n_buffers: list.len() as i64,
            n_children: children.len() as i64,
            buffers: self.list(list),
            children: self.list(children).cast(),
            dictionary,
            release: None,
            private_data: ptr::null_mut(),
        }
    }

    /// What the last offset claims: bytes. Where no device could tell that they are not there, the offset
    /// is changed.
    fn last_offset(&self, offsets: Option<&mut [u8]>, rows: u64) -> Option<usize> {
        let offsets = offsets?;
        let at = usize::try_from(rows).ok()?;
        let width = offsets.len() / (at + 1);
        let last = &mut offsets[at * width..];
        let claimed = match width {
            4 => i32::from_ne_bytes((&*last).try_into().ok()?).into(),
            _ => i64::from_ne_bytes((&*last).try_into().ok()?),
        };
        if claimed > LIMIT as i64 && (self.tame || self.place.is_cpu()) {
            last.copy_from_slice(&(LIMIT as i64).to_ne_bytes()[..width]);
            return Some(LIMIT);
        }
        Some(usize::try_from(claimed).unwrap_or(0))
    }

    /// The address of a buffer; `content` is what an allocation of its own would hold.
    fn buffer(&mut self, at: At, content: Option<Vec<u8>>) -> *const c_void {
        let Some(at) = at else { return ptr::null() };
        let odd = at & ODD != 0;
        let address = match (self.shared, content) {
            (Some(arena), Some(content)) if content.len() + 1 < self.arena.len() => {
                let room = self.arena.len() - content.len();
                arena + usize::from(at & !ODD) % room + usize::from(odd)
            }
            (_, Some(content)) => self.put(content, odd),
            // More than there is.
            (Some(arena), None) if !self.place.is_cpu() => arena + usize::from(at & !ODD),
            (None, None) if !self.place.is_cpu() && !self.tame => self.put(vec![7; 64], odd),
            _ => 0,
        };
        ptr::without_provenance(address)
    }

    /// Changes one member, as the input says.
    pub(crate) fn spoil(&mut self, input: &mut Input<'_>, world: &World) {
        let node = input.choice(self.nodes.len());
        let (what, i) = (input.choice(24), input.choice(4));
        let value = input.count();
        let other = self.nodes[value.unsigned_abs() as usize % self.nodes.len()];
        let mut address = |this: &mut Self| match input.choice(4) {
            0 => this.put_on_host(vec![1; 64]),
            1 => {
                // Another device's memory.
                let memory = on_device(
                    &world.places[2 - usize::from(this.is_on(&world.places[2]))],
                    vec![1; 64],
                );
                let address = memory.address().address();
                this.keep(memory);
                address
            }
            // Freed.
            2 => on_device(&world.places[1], vec![1; 64]).address().address(),
            _ => 0,
        };
        let address = match what {
            12 | 13 => address(self),
            _ => 0,
        };
        let label = (self.root.device_type, self.root.device_id);
        let garbage = if what == 19 {
            self.put_on_host(vec![3; 64])
        } else {
            0
        };
        let array: &mut CArray = match self.nodes[node] {
            root if root.is_null() => &mut self.root.array,
            // SAFETY: a box of this array, which nobody else uses now.
            child => unsafe { &mut *child },
        };
        // Lists are this file's, with as many entries as they had at first; counts may be spoiled.
        let listed = |start: usize, width: usize| {
            let region = self.regions.iter().find(|region| region.start == start);
            region.map_or(0, |region| region.len() / width)
        };
        let (n_buffers, n_children) = (
            listed(array.buffers.addr(), 8),
            listed(array.children.addr(), 8),
        );
        match what {
            0 => array.length = value,
            1 => array.offset = value,
            2 => array.null_count = value,
            3 => array.n_buffers = value,
            4 => array.n_children = value,
            5 => array.buffers = ptr::null_mut(),
            6 => array.children = ptr::null_mut(),
            7 if n_children > 0 => {
                let child = [ptr::null_mut(), other][i % 2];
                // SAFETY: the list has so many entries.
                unsafe {
                    *array
                        .children
                        .add(value.unsigned_abs() as usize % n_children) = child
                };
            }
            8 => array.dictionary = [ptr::null_mut(), other][i % 2],
            9 if !self.nodes[node].is_null() => array.release = None,
            10 if n_buffers > 0 => {
                // SAFETY: the list has so many entries.
                unsafe { *array.buffers.add(i % n_buffers) = ptr::null() };
            }
            11 if n_buffers > 0 => {
                // SAFETY: the list has so many entries.
                unsafe {
                    let buffer = array.buffers.add(i % n_buffers);
                    *buffer = (*buffer).wrapping_byte_offset((value % 128) as isize);
                }
            }
            12 | 13 if n_buffers > 0 => {
                // SAFETY: the list has so many entries.
                unsafe { *array.buffers.add(i % n_buffers) = ptr::without_provenance(address) };
            }
            14 if n_buffers > 1 => {
                // SAFETY: the list has so many entries.
                unsafe {
                    let list = std::slice::from_raw_parts_mut(array.buffers, n_buffers);
                    list.swap(0, i % n_buffers);
                }
            }
            // Misaligned, however often.
            15 => array.buffers = array.buffers.map_addr(|address| address | 4),
            16 => array.children = array.children.map_addr(|address| address | 4),
            17 => array.dictionary = array.dictionary.map_addr(|address| address | 4),
            18 => self.root.sync_event = ptr::null_mut(),
            19 => self.root.sync_event = ptr::without_provenance_mut(garbage),
            20 => {
                let (device_type, device_id) = label;
                self.root.device_type = match i {
                    0 => (value % 20) as i32,
                    1 => [3, 11, 1, -1][value as usize % 4],
                    _ => device_type,
                };
                // Few, for page-locked memory of each id is a device of its own.
                self.root.device_id = match input.choice(4) {
                    0 => value % 4,
                    1 => [i64::MIN, i64::MAX][i % 2],
                    _ => device_id,
                };
            }
            21 => self.root.reserved = [value; 3],
            22 => {
                // An event of the other device.
                let other = &world.places[1 + i % 2];
                if let Ok(Some(event)) = other.device.default_queue().record() {
                    self.set_event(event);
                }
            }
            _ => {}
        }
    }

    fn is_on(&self, place: &Place) -> bool {
        self.place.device == place.device
    }

    /// Moves the array out, as a consumer does. How often it was released says the number.
    pub(crate) fn give(self) -> (FFI_ArrowDeviceArray, Arc<AtomicUsize>) {
        let Self {
            mut root,
            private,
            released,
            ..
        } = self;
        root.array.private_data = Box::into_raw(Box::new(private)).cast();
        let source = ptr::from_mut(&mut root).cast();
        // SAFETY: the same C struct. That what it says holds where no import can check it is `contract`'s.
        (unsafe { FFI_ArrowDeviceArray::from_raw(source) }, released)
    }
}

/// Panics if children were released.
pub(crate) fn assert_children_kept() {
    assert_eq!(
        CHILD_RELEASES.swap(0, SeqCst),
        0,
        "an import released a child"
    );
}

/// These bytes in memory of a simulated device.
fn on_device(place: &Place, mut bytes: Vec<u8>) -> DeviceBuffer {
    bytes.resize(bytes.len().max(1), 0);
    let bytes = UInt8Array::new(Buffer::from_vec(bytes).into(), None);
    let array = place.device.upload_array(&bytes).expect("there is room");
    array.buffer(1).expect("values are there")
}

struct List<T>(Vec<*const T>);

// SAFETY: only kept and dropped.
unsafe impl<T> Send for List<T> {}
