//! Arrays of a foreign producer: the tests' C structs, filled from a [`Node`], whose members an input may spoil.
//!
//! `DeviceArray::import` asks that pointers that are not null are valid for what the structs say; "Null pointers", counts, sizes and
//! values it checks. So inputs are kept to this, and to nothing else:
//! - a list of buffers or children that is not null has as many entries as its count says, unless the count is negative or beyond
//!   2^25: then the list must not be read;
//! - what a list of children and a dictionary point to are structs, or misaligned;
//! - **where the host reads the memory** (CPU, and page-locked memory without a backend), and no device knows allocations, a buffer
//!   that is not null has just the bytes that length and offset claim, the last offset of binary and text, and the sizes of a view's
//!   buffers. Offsets before the last, views, keys, type ids, run ends and text are anything;
//! - on a simulated device buffers are anything: it knows its allocations. The sizes of a view's buffers may be in host memory;
//!   those are there.
//!
//! Lengths, offsets and counts are anything, as are null and misaligned pointers of the structs, released structs, and labels of
//! devices.

use std::ffi::c_void;
use std::ptr;

use arrow_array::UInt8Array;
use arrow_buffer::Buffer;
use arrow_data::ArrayData;
use arrow_device::{Device, DeviceArray, DeviceBuffer, ImportOptions, Result};
use arrow_schema::DataType;

use crate::input::Input;
use crate::kinds;
use crate::sketch::{self, Holds, LIMIT, Node, ODD, Place as At, buffers, is_view, window};
use crate::support_c::{self, CArray, DICTIONARY};
use crate::world::{Place, World};

/// Types of devices whose memory an import may read in place.
const READ_IN_PLACE: [i32; 3] = [1, 3, 11];

type Release = unsafe extern "C" fn(*mut CArray);

/// An array that was not given away yet.
pub(crate) struct Foreign<'a> {
    made: support_c::Foreign,
    /// Where each struct is, the root first.
    paths: Vec<Vec<usize>>,
    /// Structs that say that they are released, with the callbacks that they had.
    unreleased: Vec<(usize, *mut CArray, Release)>,
    place: &'a Place,
    arena: &'a [u8],
    /// On a device: one allocation with all buffers, which may overlap. Else each has one of its own.
    shared: Option<usize>,
    /// The same content whatever the device: nothing is left to the device to refuse.
    tame: bool,
}

/// A member to change.
pub(crate) struct Spoil {
    node: usize,
    what: usize,
    i: usize,
    value: i64,
    more: usize,
}

impl Spoil {
    pub(crate) fn read_all(input: &mut Input<'_>, nodes: usize) -> Vec<Self> {
        let mut all = vec![];
        while !input.is_empty() {
            let (node, what, i) = (input.choice(nodes), input.choice(24), input.choice(4));
            let value = input.count();
            let more = matches!(what, 12 | 13 | 20).then(|| input.choice(4));
            let more = more.unwrap_or_default();
            all.push(Self {
                node,
                what,
                i,
                value,
                more,
            });
        }
        all
    }

    /// What an array claims of its memory, if that is to be changed.
    pub(crate) fn claim(&self, root: &mut Node) {
        let Some(node) = root.nth(&mut self.node.clone()) else {
            return;
        };
        match self.what {
            0 => node.length = self.value,
            1 => node.offset = self.value,
            2 => node.null_count = self.value,
            _ => {}
        }
    }
}

/// An array with the lists of its type, and nothing in its buffers.
fn shape(node: &Node, data_type: &DataType) -> ArrayData {
    let validity = usize::from(arrow_data::layout(data_type).can_contain_null_mask);
    let children = node.children.iter().zip(kinds::children(data_type));
    let made = ArrayData::builder(data_type.clone())
        .buffers(vec![
            Buffer::default();
            node.buffers.len() - validity + node.variadic.len()
        ])
        .child_data(children.map(|(child, t)| shape(child, t)).collect());
    // SAFETY: no rows; nobody reads it but to count its lists.
    unsafe { made.build_unchecked() }
}

impl<'a> Foreign<'a> {
    pub(crate) fn new(
        data_type: &DataType,
        node: &Node,
        arena: &'a [u8],
        place: &'a Place,
        shared: bool,
        tame: bool,
    ) -> Self {
        let mut this = Self {
            made: support_c::Foreign::new(&shape(node, data_type), &place.device),
            paths: vec![],
            unreleased: vec![],
            place,
            arena,
            shared: None,
            tame,
        };
        if shared && !place.is_cpu() {
            let mut bytes = arena.to_vec();
            bytes.resize(arena.len().max(64), 0);
            this.shared = Some(this.put(bytes, false));
        }
        this.fill(&mut vec![], node, data_type);
        this
    }

    /// The address of a copy of `bytes` on the device, one byte off if `odd`.
    fn put(&mut self, mut bytes: Vec<u8>, odd: bool) -> usize {
        if odd {
            bytes.insert(0, 0);
        }
        let start = match self.place.is_cpu() {
            true => self.put_on_host(bytes.into()),
            false => self.put_on(&self.place.device, bytes),
        };
        start + usize::from(odd)
    }

    fn put_on(&mut self, device: &Device, bytes: Vec<u8>) -> usize {
        let memory = on_device(device, bytes);
        let address = memory.address().address();
        self.made.keep(memory);
        address
    }

    /// The address of these, in an allocation of just their number.
    fn put_on_host<T: Send + 'static>(&mut self, content: Box<[T]>) -> usize {
        let address = content.as_ptr().expose_provenance();
        self.made.keep(content);
        address
    }

    fn fill(&mut self, path: &mut Vec<usize>, node: &Node, data_type: &DataType) {
        self.paths.push(path.clone());
        let rows = node.length.max(0).saturating_add(node.offset.max(0)) as u64;
        let mut contents: Vec<Option<Vec<u8>>> = vec![];
        for (kind, at) in buffers(data_type).into_iter().zip(&node.buffers) {
            let needed = match (kind, contents.last_mut()) {
                (Holds::Bytes, Some(Some(offsets))) => self.last_offset(offsets, rows),
                (kind, _) => kind.bytes(rows),
            };
            contents.push(at.and_then(|at| window(self.arena, at, needed?)));
        }
        let mut sizes = vec![];
        for (at, bytes) in &node.variadic {
            let n = usize::try_from(*bytes).unwrap_or(0);
            let content = at.and_then(|at| window(self.arena, at, n));
            // What is not there is not claimed where nobody could tell.
            let there = content.is_some() || !(self.tame || self.place.is_cpu());
            sizes.push(if there || *bytes < 0 { *bytes } else { 0 });
            contents.push(content);
        }
        let places = node
            .buffers
            .iter()
            .chain(node.variadic.iter().map(|(at, _)| at));
        for (i, (at, content)) in places.zip(contents).enumerate() {
            let address = self.buffer(*at, content);
            self.made.set_buffer(path, i, address);
        }
        if is_view(data_type) {
            let last = node.buffers.len() + sizes.len();
            sizes.resize(sizes.len().max(1), 0);
            // In memory of either kind.
            let address = match node.null_count % 2 {
                0 => self.put_on_host(sizes.into()),
                _ => self.put(sizes.iter().flat_map(|n| n.to_ne_bytes()).collect(), false),
            };
            self.made
                .set_buffer(path, last, ptr::with_exposed_provenance(address));
        }
        let array = self.made.at(path);
        (array.length, array.offset, array.null_count) =
            (node.length, node.offset, node.null_count);
        let is_dictionary = matches!(data_type, DataType::Dictionary(_, _));
        for (i, (child, t)) in node
            .children
            .iter()
            .zip(kinds::children(data_type))
            .enumerate()
        {
            path.push(if is_dictionary { DICTIONARY } else { i });
            self.fill(path, child, t);
            path.pop();
        }
    }

    /// What the last offset claims: bytes. Where no device could tell that they are not there, the offset is changed.
    fn last_offset(&self, offsets: &mut [u8], rows: u64) -> Option<usize> {
        let claimed = sketch::last(offsets, rows)?;
        if claimed > LIMIT as i64 && (self.tame || self.place.is_cpu()) {
            let width = offsets.len() / (usize::try_from(rows).ok()? + 1);
            let last = offsets.len() - width;
            offsets[last..].copy_from_slice(&(LIMIT as i64).to_ne_bytes()[..width]);
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
            (Some(arena), None) => arena + usize::from(at & !ODD),
            (None, None) if !self.place.is_cpu() && !self.tame => self.put(vec![7; 64], odd),
            _ => 0,
        };
        ptr::with_exposed_provenance(address)
    }

    /// A list that is as long as its count says, if that is not too much.
    fn relisted(&mut self, list: usize, now: i64, count: i64) -> (usize, i64) {
        let Some(n) = usize::try_from(count).ok().filter(|n| *n < 1 << 25) else {
            return (list, count);
        };
        let n = n.min(1 << 16);
        let mut entries = vec![0usize; n].into_boxed_slice();
        // A count that must not be believed says nothing about its list.
        if list != 0 && list % 8 == 0 && (0..1 << 25).contains(&now) {
            let both = n.min(now as usize);
            // SAFETY: the list has as many entries as its count has said so far, and they are addresses.
            entries[..both]
                .copy_from_slice(unsafe { std::slice::from_raw_parts(list as *const usize, both) });
        }
        (self.put_on_host(entries), n as i64)
    }

    /// Changes one member.
    pub(crate) fn spoil(&mut self, spoil: &Spoil, world: &World) {
        let &Spoil {
            node,
            what,
            i,
            value,
            more,
        } = spoil;
        let any = value.unsigned_abs() as usize;
        let path = self.paths[node].clone();
        let on_cpu = self.place.is_cpu();
        let other = self.paths[any % self.paths.len()].clone();
        let other = [ptr::null_mut(), ptr::from_mut(self.made.at(&other))][i % 2];
        let array = self.made.at(&path);
        let (buffers, children) = (array.buffers.addr(), array.children.addr());
        let (n_buffers, n_children) = (array.n_buffers, array.n_children);
        let is_list = |list: usize, n: i64| list != 0 && list % 8 == 0 && (1..1 << 25).contains(&n);
        let list: &mut [*const c_void] = match is_list(buffers, n_buffers) {
            // SAFETY: the list has as many entries as its count says, and nobody else uses it now.
            true => unsafe { std::slice::from_raw_parts_mut(array.buffers, n_buffers as usize) },
            false => &mut [],
        };
        let at = i % list.len().max(1);
        match what {
            0 if !on_cpu => array.length = value,
            1 if !on_cpu => array.offset = value,
            2 if !on_cpu => array.null_count = value,
            3 => {
                let (list, n) = self.relisted(buffers, n_buffers, value);
                let array = self.made.at(&path);
                (array.buffers, array.n_buffers) = (ptr::with_exposed_provenance_mut(list), n);
            }
            4 => {
                let (list, n) = self.relisted(children, n_children, value);
                let array = self.made.at(&path);
                (array.children, array.n_children) = (ptr::with_exposed_provenance_mut(list), n);
            }
            5 => array.buffers = ptr::null_mut(),
            6 => array.children = ptr::null_mut(),
            // Other structs claim other bytes.
            7 | 8 if on_cpu && !other.is_null() => {}
            7 if is_list(children, n_children) => {
                self.made.set_child(&path, any % n_children as usize, other);
            }
            8 => array.dictionary = other,
            9 if node > 0 => {
                if let Some(release) = array.release.take() {
                    self.unreleased.push((node, array, release));
                }
            }
            10 if !list.is_empty() => list[at] = ptr::null(),
            11 if !on_cpu && !list.is_empty() => {
                list[at] = list[at].wrapping_byte_offset((value % 128) as isize);
            }
            12 | 13 if !on_cpu && !list.is_empty() => {
                let address = match more {
                    0 => self.put_on_host(Box::new([1u8; 64])),
                    1 => {
                        // Another device's memory.
                        let on_last = self.place.device == world.places[2].device;
                        self.put_on(&world.places[2 - usize::from(on_last)].device, vec![1; 64])
                    }
                    // Freed.
                    2 => on_device(&world.places[1].device, vec![1; 64])
                        .address()
                        .address(),
                    _ => 0,
                };
                list[at] = ptr::with_exposed_provenance(address);
            }
            14 if !on_cpu && !list.is_empty() => list.swap(0, at),
            // Misaligned, however often.
            15 => array.buffers = array.buffers.map_addr(|address| address | 4),
            16 => array.children = array.children.map_addr(|address| address | 4),
            17 => array.dictionary = array.dictionary.map_addr(|address| address | 4),
            18 => self.made.device_array.sync_event = ptr::null_mut(),
            19 => {
                let garbage = self.put_on_host(Box::new([3u8; 64]));
                self.made.device_array.sync_event = ptr::with_exposed_provenance_mut(garbage);
            }
            20 => {
                let root = &mut self.made.device_array;
                let device_type = match i {
                    0 => (value % 20) as i32,
                    1 => [3, 11, 1, -1][value as usize % 4],
                    _ => root.device_type,
                };
                if on_cpu || !READ_IN_PLACE.contains(&device_type) {
                    root.device_type = device_type;
                }
                // Few, for page-locked memory of each id is a device of its own.
                root.device_id = match more {
                    0 => value % 4,
                    1 => [i64::MIN, i64::MAX][i % 2],
                    _ => root.device_id,
                };
            }
            21 => self.made.device_array.reserved = [value; 3],
            22 => {
                // An event of the other device.
                let other = &world.places[1 + i % 2];
                if let Ok(Some(event)) = other.device.default_queue().record() {
                    self.made.set_event(event);
                }
            }
            _ => {}
        }
    }

    /// Moves the array out, as a consumer does, and imports it.
    pub(crate) fn import(&mut self, options: &ImportOptions) -> Result<DeviceArray> {
        self.made.import(options)
    }

    /// The same as a batch.
    pub(crate) fn import_batch(&mut self, options: &ImportOptions) -> Result<DeviceArray> {
        let batch = self.made.import_batch(options)?;
        Ok(batch.as_struct().clone())
    }

    /// Nobody has the array any more: each struct was released once.
    pub(crate) fn assert_released(self, world: &World) {
        // Structs that say that they are released, and what is below them, the producer's release leaves out.
        let spared = |path: &&Vec<usize>| {
            let mut spared = self.unreleased.iter();
            spared.any(|(node, ..)| path.starts_with(&self.paths[*node]))
        };
        let spared = self.paths.iter().filter(spared).count();
        world.eventually("the array is released", || {
            let (released, all) = self.made.releases();
            released + spared >= all
        });
        for (_, array, release) in &self.unreleased {
            // SAFETY: the struct lives as long as `made`, and nobody else has it any more.
            unsafe { (**array).release = Some(*release) };
        }
        for (_, array, release) in &self.unreleased {
            // SAFETY: as above; one of those above it may have released it.
            unsafe {
                if (**array).release.is_some() {
                    release(*array);
                }
            }
        }
        self.made.assert_released("an import");
    }
}

/// These bytes in memory of a device.
fn on_device(device: &Device, mut bytes: Vec<u8>) -> DeviceBuffer {
    bytes.resize(bytes.len().max(1), 0);
    let bytes = UInt8Array::new(Buffer::from_vec(bytes).into(), None);
    let array = device.upload_array(&bytes).expect("there is room");
    array.buffer(1).expect("values are there")
}
