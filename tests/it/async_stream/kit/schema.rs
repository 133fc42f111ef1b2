//! Schemas that count.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};

use arrow_schema::ffi::FFI_ArrowSchema;

/// A schema whose releases are counted.
pub(crate) struct CountedSchema {
    pub(crate) c: FFI_ArrowSchema,
    pub(crate) releases: Arc<AtomicUsize>,
}

type SchemaRelease = unsafe extern "C" fn(*mut FFI_ArrowSchema);
const RELEASE: usize = 7;
const PRIVATE: usize = 8;

struct Wrapped {
    release: Option<SchemaRelease>,
    private: *mut c_void,
    releases: Arc<AtomicUsize>,
}

unsafe extern "C" fn release_counted(schema: *mut FFI_ArrowSchema) {
    let words = schema.cast::<*mut c_void>();
    // SAFETY: `CountedSchema::of` put the box there; the struct has nine words.
    unsafe {
        let wrapped = Box::from_raw(words.add(PRIVATE).read().cast::<Wrapped>());
        wrapped.releases.fetch_add(1, SeqCst);
        words.add(PRIVATE).write(wrapped.private);
        words
            .add(RELEASE)
            .cast::<Option<SchemaRelease>>()
            .write(wrapped.release);
        if let Some(release) = wrapped.release {
            release(schema);
        }
    }
}

impl CountedSchema {
    pub(crate) fn of(mut c: FFI_ArrowSchema) -> Self {
        let releases = Arc::new(AtomicUsize::new(0));
        let words = (&raw mut c).cast::<*mut c_void>();
        // SAFETY: the struct has nine words, as the C definition says, and is live and not shared.
        unsafe {
            let wrapped = Box::new(Wrapped {
                release: words.add(RELEASE).cast::<Option<SchemaRelease>>().read(),
                private: words.add(PRIVATE).read(),
                releases: releases.clone(),
            });
            words.add(PRIVATE).write(Box::into_raw(wrapped).cast());
            words
                .add(RELEASE)
                .cast::<Option<SchemaRelease>>()
                .write(Some(release_counted));
        }
        Self { c, releases }
    }
}
