//! Reads a device stream that another library produces.
//!
//! The module `theirs` stands for that library: it knows only the C structs of the specification and builds an
//! `ArrowDeviceArrayStream` by hand. `main` stands for a program that receives a pointer to it and reads record batches.

use arrow_array::RecordBatchReader;
use arrow_device::{
    DeviceRecordBatchReader, DeviceRecordBatchStreamReader, FFI_ArrowDeviceArrayStream,
};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // The struct lives here, as in C: the consumer provides the space, the producer fills it in.
    let mut stream = theirs::DeviceArrayStream::numbers(3);
    let pointer: *mut FFI_ArrowDeviceArrayStream = (&raw mut stream).cast();

    // SAFETY: `from_raw` requires a live stream that follows the specification and yields valid data: `theirs` does. The
    // content moves into the reader, and `stream` is marked as released.
    let reader = unsafe { DeviceRecordBatchStreamReader::from_raw(pointer) }?;

    // This reader returns batches in host memory, whatever device the stream is on. On the CPU they are the producer's own
    // memory, which is released when the last array is dropped.
    let reader = reader.into_host_reader();
    println!("{}", reader.schema());
    let mut rows = 0;
    for batch in reader {
        let batch = batch?;
        println!("{:?}", batch.column(0));
        rows += batch.num_rows();
    }
    assert_eq!(rows, 12);
    assert_eq!(theirs::live_objects(), 0, "everything was released");
    Ok(())
}

/// Another library, as it would be written in C.
mod theirs {
    use std::ffi::{CStr, c_char, c_int, c_void};
    use std::ptr::{null, null_mut};
    use std::sync::atomic::{AtomicUsize, Ordering};

    const ARROW_DEVICE_CPU: i32 = 1;
    const ARROW_FLAG_NULLABLE: i64 = 2;
    const EINVAL: c_int = 22;

    /// `struct ArrowSchema`
    #[repr(C)]
    struct Schema {
        format: *const c_char,
        name: *const c_char,
        metadata: *const c_char,
        flags: i64,
        n_children: i64,
        children: *mut *mut Schema,
        dictionary: *mut Schema,
        release: Option<unsafe extern "C" fn(*mut Schema)>,
        private_data: *mut c_void,
    }

    /// `struct ArrowArray`
    #[repr(C)]
    struct Array {
        length: i64,
        null_count: i64,
        offset: i64,
        n_buffers: i64,
        n_children: i64,
        buffers: *mut *const c_void,
        children: *mut *mut Array,
        dictionary: *mut Array,
        release: Option<unsafe extern "C" fn(*mut Array)>,
        private_data: *mut c_void,
    }

    /// `struct ArrowDeviceArray`
    #[repr(C)]
    struct DeviceArray {
        array: Array,
        device_id: i64,
        device_type: i32,
        sync_event: *mut c_void,
        reserved: [i64; 3],
    }

    /// `struct ArrowDeviceArrayStream`
    #[repr(C)]
    pub(crate) struct DeviceArrayStream {
        device_type: i32,
        get_schema: Option<unsafe extern "C" fn(*mut Self, *mut Schema) -> c_int>,
        get_next: Option<unsafe extern "C" fn(*mut Self, *mut DeviceArray) -> c_int>,
        get_last_error: Option<unsafe extern "C" fn(*mut Self) -> *const c_char>,
        release: Option<unsafe extern "C" fn(*mut Self)>,
        private_data: *mut c_void,
    }

    /// How many streams, schemas and arrays are not released yet.
    static LIVE: AtomicUsize = AtomicUsize::new(0);

    pub(crate) fn live_objects() -> usize {
        LIVE.load(Ordering::SeqCst)
    }

    /// `private_data` of a stream.
    struct Producer {
        batches: i32,
        next: i32,
        error: Option<&'static CStr>,
    }

    impl DeviceArrayStream {
        /// Creates a stream of `batches` batches with one column of four numbers, of which the second is null.
        pub(crate) fn numbers(batches: i32) -> Self {
            LIVE.fetch_add(1, Ordering::SeqCst);
            let producer = Producer {
                batches,
                next: 0,
                error: None,
            };
            Self {
                device_type: ARROW_DEVICE_CPU,
                get_schema: Some(get_schema),
                get_next: Some(get_next),
                get_last_error: Some(get_last_error),
                release: Some(release_stream),
                private_data: Box::into_raw(Box::new(producer)).cast(),
            }
        }
    }

    impl Drop for DeviceArrayStream {
        /// Releases the stream, as its owner must in C, unless its content was moved elsewhere.
        fn drop(&mut self) {
            if let Some(release) = self.release {
                // SAFETY: `release` must be called once, on a live stream. It is set, so the stream was neither moved nor
                // released before.
                unsafe { release(self) }
            }
        }
    }

    /// A batch is a struct array, its columns are the children: format `+s`, one child `i`.
    unsafe extern "C" fn get_schema(_: *mut DeviceArrayStream, out: *mut Schema) -> c_int {
        let column = schema(c"i", c"number", ARROW_FLAG_NULLABLE, Vec::new());
        let root = schema(c"+s", c"", 0, vec![Box::into_raw(Box::new(column))]);
        // SAFETY: the specification obliges the caller to pass a pointer to writable space for one struct.
        unsafe { out.write(root) };
        0
    }

    /// The next batch; at the end of the stream a struct that is already released.
    unsafe extern "C" fn get_next(stream: *mut DeviceArrayStream, out: *mut DeviceArray) -> c_int {
        // SAFETY: the specification obliges the caller to pass a live stream, from one thread at a time. `private_data` was set
        // by `numbers`.
        let producer = unsafe { &mut *(*stream).private_data.cast::<Producer>() };
        if out.is_null() {
            producer.error = Some(c"get_next needs a place for the array");
            return EINVAL;
        }
        let root = if producer.next == producer.batches {
            released_array()
        } else {
            let first = producer.next * 4;
            producer.next += 1;
            let values = Column {
                validity: 0b1101,
                values: [first, first + 1, first + 2, first + 3],
            };
            batch(Box::new(values))
        };
        let device_array = DeviceArray {
            array: root,
            // The specification recommends -1 for the CPU.
            device_id: -1,
            device_type: ARROW_DEVICE_CPU,
            // Nothing to wait for.
            sync_event: null_mut(),
            reserved: [0; 3],
        };
        // SAFETY: the caller passes writable space for one struct; null was refused above.
        unsafe { out.write(device_array) };
        0
    }

    /// Why the last call failed; valid until the next call.
    unsafe extern "C" fn get_last_error(stream: *mut DeviceArrayStream) -> *const c_char {
        // SAFETY: the specification obliges the caller to pass a live stream, from one thread at a time. `private_data` was set
        // by `numbers`.
        let producer = unsafe { &*(*stream).private_data.cast::<Producer>() };
        producer.error.map_or(null(), CStr::as_ptr)
    }

    unsafe extern "C" fn release_stream(stream: *mut DeviceArrayStream) {
        // SAFETY: the specification obliges the caller to release a live stream, once. `private_data` is the box that `numbers`
        // made.
        unsafe {
            drop(Box::from_raw((*stream).private_data.cast::<Producer>()));
            (*stream).release = None;
        }
        LIVE.fetch_sub(1, Ordering::SeqCst);
    }

    fn schema(
        format: &'static CStr,
        name: &'static CStr,
        flags: i64,
        children: Vec<*mut Schema>,
    ) -> Schema {
        LIVE.fetch_add(1, Ordering::SeqCst);
        let (n_children, children) = into_pointers(children);
        Schema {
            format: format.as_ptr(),
            name: name.as_ptr(),
            metadata: null(),
            flags,
            n_children,
            children,
            dictionary: null_mut(),
            release: Some(release_schema),
            private_data: null_mut(),
        }
    }

    unsafe extern "C" fn release_schema(schema: *mut Schema) {
        // SAFETY: the specification obliges the caller to release a live schema, once. `schema` made it: its list of children
        // came from `into_pointers`, each child from a box. A child that the consumer moved away has no release callback.
        unsafe {
            for child in from_pointers((*schema).n_children, (*schema).children) {
                if let Some(release) = (*child).release {
                    release(child);
                }
                drop(Box::from_raw(child));
            }
            (*schema).release = None;
        }
        LIVE.fetch_sub(1, Ordering::SeqCst);
    }

    /// The memory of one column, `private_data` of its array.
    struct Column {
        validity: u8,
        values: [i32; 4],
    }

    fn batch(column: Box<Column>) -> Array {
        LIVE.fetch_add(2, Ordering::SeqCst);
        // `private_data` keeps the box, so the addresses stay valid.
        let column = Box::into_raw(column);
        // SAFETY: `column` is live, as it was just leaked. Only addresses are taken.
        let buffers = unsafe {
            vec![
                (&raw const (*column).validity).cast(),
                (&raw const (*column).values).cast(),
            ]
        };
        let (n_buffers, buffers) = into_pointers(buffers);
        let child = Array {
            length: 4,
            null_count: 1,
            n_buffers,
            buffers,
            release: Some(release_array),
            private_data: column.cast(),
            ..released_array()
        };
        // A struct array has one buffer, its validity, which may be absent.
        let (n_buffers, buffers) = into_pointers(vec![null()]);
        let (n_children, children) = into_pointers(vec![Box::into_raw(Box::new(child))]);
        Array {
            length: 4,
            n_buffers,
            n_children,
            buffers,
            children,
            release: Some(release_array),
            ..released_array()
        }
    }

    fn released_array() -> Array {
        Array {
            length: 0,
            null_count: 0,
            offset: 0,
            n_buffers: 0,
            n_children: 0,
            buffers: null_mut(),
            children: null_mut(),
            dictionary: null_mut(),
            release: None,
            private_data: null_mut(),
        }
    }

    unsafe extern "C" fn release_array(array: *mut Array) {
        // SAFETY: the specification obliges the caller to release a live array, once. `batch` made it: its lists came from
        // `into_pointers`, each child and the `private_data` of a column from a box. A child that the consumer moved away has
        // no release callback.
        unsafe {
            for child in from_pointers((*array).n_children, (*array).children) {
                if let Some(release) = (*child).release {
                    release(child);
                }
                drop(Box::from_raw(child));
            }
            drop(from_pointers((*array).n_buffers, (*array).buffers));
            if !(*array).private_data.is_null() {
                drop(Box::from_raw((*array).private_data.cast::<Column>()));
            }
            (*array).release = None;
        }
        LIVE.fetch_sub(1, Ordering::SeqCst);
    }

    /// Turns a list into a count and a pointer, as C has it.
    fn into_pointers<T>(list: Vec<T>) -> (i64, *mut T) {
        if list.is_empty() {
            return (0, null_mut());
        }
        let list = Box::leak(list.into_boxed_slice());
        (list.len() as i64, list.as_mut_ptr())
    }

    /// Takes back a list.
    ///
    /// # Safety
    /// `count` and `list` come from [`into_pointers`], and are passed here once.
    unsafe fn from_pointers<T>(count: i64, list: *mut T) -> Vec<T> {
        if list.is_null() {
            return Vec::new();
        }
        let list = std::ptr::slice_from_raw_parts_mut(list, count as usize);
        // SAFETY: `into_pointers` leaked a box of this length, and the caller passes it once (see `# Safety`).
        unsafe { Box::from_raw(list) }.into_vec()
    }
}
