//! Hostile `ArrowSchema`s.
//!
//! The contract: strings end with a null byte, a list of children has as many pointers as `n_children`
//! says (negative counts and those beyond 2^24 are refused before the list is read), pointers to
//! structs are null, misaligned or structs, and metadata has the bytes that its counts announce. Structs
//! may be each other's children in any way: that a schema is a tree nobody promises.

use std::ffi::{c_char, c_void};
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use arrow_device::{
    ArrowDeviceType, DeviceRecordBatchReader, DeviceRecordBatchStreamReader, DeviceRecordBatches,
    ExportOptions, FFI_ArrowDeviceArrayStream, ImportOptions, Result, SyncPolicy,
};
use arrow_schema::ffi::FFI_ArrowSchema;
use arrow_schema::{Schema, SchemaRef};

use crate::input::Input;
use crate::panics::caught;
use crate::support::producer::Producer;

/// Formats, of which those of structs come more often.
const FORMATS: &str = "n b c C s S i I l L e f g z Z u U vz vu d:19,10 d:19,10,256 d:9,2,32 d:0,0 d:77,0,256 w:3 w:-1 \
    w:99999999999 tdD tdm tts ttm ttu ttn tss: tsm:UTC tsn:+05:30 tDs tDn tiM tiD tin +s +s +s +l +L \
    +vl +vL +w:2 +w:-1 +m +r +ud:0,1 +us:0,1 +us:5,5 +ud:";

#[repr(C)]
#[derive(Clone, Copy)]
struct CSchema {
    format: *const c_char,
    name: *const c_char,
    metadata: *const c_char,
    flags: i64,
    n_children: i64,
    children: *mut *mut CSchema,
    dictionary: *mut CSchema,
    release: Option<unsafe extern "C" fn(*mut CSchema)>,
    private_data: *mut c_void,
}

const _: () = assert!(size_of::<CSchema>() == size_of::<FFI_ArrowSchema>());

unsafe extern "C" fn release(schema: *mut CSchema) {
    // SAFETY: a root of this file; its counter lives as long as the target.
    unsafe {
        (*(*schema).private_data.cast::<AtomicUsize>()).fetch_add(1, SeqCst);
        (*schema).release = None;
    }
}

unsafe extern "C" fn release_child(_: *mut CSchema) {
    panic!("a child schema was released");
}

/// Structs that point to each other, and what they point into.
struct Graph {
    nodes: Vec<*mut CSchema>,
    texts: Vec<Box<[u8]>>,
    lists: Vec<Box<[*mut CSchema]>>,
    released: AtomicUsize,
}

impl Drop for Graph {
    fn drop(&mut self) {
        for node in &self.nodes {
            // SAFETY: made by `Box::into_raw`.
            drop(unsafe { Box::from_raw(*node) });
        }
    }
}

impl Graph {
    fn read(input: &mut Input<'_>) -> Self {
        let n = 1 + input.choice(24);
        let nodes = (0..n).map(|_| {
            // SAFETY: all zero is a released schema.
            Box::into_raw(Box::new(unsafe { std::mem::zeroed::<CSchema>() }))
        });
        let mut this = Self {
            nodes: nodes.collect(),
            texts: vec![],
            lists: vec![],
            released: AtomicUsize::new(0),
        };
        for i in 0..n {
            let node = this.node(input, i);
            // SAFETY: a live box.
            unsafe { *this.nodes[i] = node };
        }
        this
    }

    fn text(&mut self, text: &[u8]) -> *const c_char {
        let end = text
            .iter()
            .position(|byte| *byte == 0)
            .unwrap_or(text.len());
        let text = [&text[..end], &[0]].concat();
        self.bytes(text)
    }

    fn bytes(&mut self, bytes: Vec<u8>) -> *const c_char {
        self.texts.push(bytes.into());
        self.texts[self.texts.len() - 1].as_ptr().cast()
    }

    fn node(&mut self, input: &mut Input<'_>, at: usize) -> CSchema {
        let flags = input.u8();
        let format = match input.u8() {
            0 => std::ptr::null(),
            n @ 1..=200 => {
                let mut formats = FORMATS.split(' ').cycle();
                self.text(formats.nth(n.into()).unwrap_or("n").as_bytes())
            }
            _ => {
                let format = input.text();
                self.text(format)
            }
        };
        let name = match flags & 3 {
            0 => std::ptr::null(),
            1 => self.text("näme".as_bytes()),
            2 => self.text(b""),
            _ => {
                let name = input.text();
                self.text(name)
            }
        };
        let metadata = match flags & 12 {
            12 => {
                let metadata = metadata(input);
                self.bytes(metadata)
            }
            _ => std::ptr::null(),
        };
        // Most often those further on, so that there is a tree.
        let pick = |input: &mut Input<'_>, i: usize| {
            let to = match input.u8() {
                0 => at + 1 + i,
                n => usize::from(n),
            };
            match input.u8() {
                253 => std::ptr::null_mut(),
                254 => self.nodes[0].wrapping_byte_add(1),
                _ => self.nodes[to % self.nodes.len()],
            }
        };
        let children: Vec<_> = (0..input.choice(7)).map(|i| pick(input, i)).collect();
        let dictionary = match flags & 48 {
            48 => pick(input, 0),
            _ => std::ptr::null_mut(),
        };
        let n = children.len() as i64;
        let mut children = children.into_boxed_slice();
        let list = children.as_mut_ptr();
        self.lists.push(children);
        let (n_children, children) = match input.u8() {
            250 => (input.count(), list),
            251 => (n, std::ptr::null_mut()),
            252 => (n, list.wrapping_byte_add(4)),
            _ => (n, list),
        };
        // What the list does not have must be refused unread.
        let n_children = if n_children > n && n_children <= 1 << 24 {
            n
        } else {
            n_children
        };
        CSchema {
            format,
            name,
            metadata,
            flags: match input.u8() {
                255 => input.i64(),
                flags => flags.into(),
            },
            n_children,
            children,
            dictionary,
            release: (input.u8() != 255).then_some(if at == 0 { release } else { release_child }),
            private_data: std::ptr::from_ref(&self.released).cast_mut().cast(),
        }
    }

    /// The root, for a consumer that releases it.
    fn root(&self) -> CSchema {
        // SAFETY: a live box.
        let mut root = unsafe { *self.nodes[0] };
        root.private_data = std::ptr::from_ref(&self.released).cast_mut().cast();
        root
    }
}

/// Encoded pairs, which end where a count is negative.
fn metadata(input: &mut Input<'_>) -> Vec<u8> {
    let n = input.choice(5);
    let negative = input.u8() == 255;
    let mut out = (if negative { -1 } else { n as i32 })
        .to_ne_bytes()
        .to_vec();
    for _ in 0..2 * n {
        let text = input.text();
        let negative = input.u8() == 255;
        out.extend((if negative { -5 } else { text.len() as i32 }).to_ne_bytes());
        if negative {
            break;
        }
        out.extend_from_slice(text);
    }
    out
}

pub(crate) fn target(input: &mut Input<'_>) {
    // Inputs that are kept begin with it.
    let _ = input.bool();
    let graph = Graph::read(input);
    let alive = usize::from(graph.root().release.is_some());
    let stream = stream(graph.root());
    // SAFETY: the stream keeps to the interface, and its schema to the contract above.
    let reader = unsafe { DeviceRecordBatchStreamReader::new(stream, ImportOptions::default()) };
    assert_eq!(graph.released.load(SeqCst), alive);
    let Ok(reader) = reader else { return };
    let schema = reader.schema();
    let again = reimported(schema.clone()).expect("our own schema");
    assert_eq!(again, schema, "out and in again");
    // arrow-rs divides the flags, which takes bits of negative ones for others.
    // SAFETY: live boxes.
    if graph.nodes.iter().any(|node| unsafe { (**node).flags } < 0) {
        return;
    }
    // It loses the metadata of a dictionary's values.
    let loses = |node: &*mut CSchema| {
        // SAFETY: live boxes, whose dictionaries are others of these or null.
        let values = unsafe { (**node).dictionary.as_ref() };
        values.is_some_and(|values| !values.metadata.is_null())
    };
    if graph.nodes.iter().any(loses) {
        return;
    }
    // Bounded by now: arrow-rs bounds nothing.
    let root = graph.root();
    // SAFETY: the same C struct, borrowed; it is not dropped.
    let c = unsafe { &*std::ptr::from_ref(&root).cast::<FFI_ArrowSchema>() };
    if let Some(Ok(theirs)) = caught(|| Schema::try_from(c)) {
        assert_eq!(theirs, *schema, "arrow-rs reads another schema");
    }
}

/// The schema through our own export.
fn reimported(schema: SchemaRef) -> Result<SchemaRef> {
    let reader = DeviceRecordBatches::new([], schema, ArrowDeviceType::CPU);
    let options = ExportOptions::new(SyncPolicy::Event);
    let stream = FFI_ArrowDeviceArrayStream::new(reader, options)?;
    // SAFETY: our own stream.
    let reader = unsafe { DeviceRecordBatchStreamReader::new(stream, ImportOptions::default()) }?;
    Ok(reader.schema())
}

/// A stream of no arrays with this schema.
fn stream(schema: CSchema) -> FFI_ArrowDeviceArrayStream {
    let root = Root(schema);
    let mut producer = Producer::new(&Schema::empty(), |_| 0);
    producer.schema = Box::new(move |out| {
        let Root(schema) = &root;
        // SAFETY: the stream's schema, moved to where its consumer wants it.
        unsafe { out.cast::<CSchema>().write(*schema) };
        0
    });
    producer.stream(ArrowDeviceType::CPU).0
}

struct Root(CSchema);

// SAFETY: the stream stays on this thread.
unsafe impl Send for Root {}
