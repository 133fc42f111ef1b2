//! Schemas as another library would write them.

use std::ffi::CString;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use super::*;

/// A schema written by hand, whose members a test may spoil: what it frees it finds in its private
/// data. Counts its own and its descendants' releases, and asserts on drop that there was one each.
pub(super) struct Foreign {
    pub(super) schema: *mut ForeignSchema,
    nodes: usize,
    pub(super) releases: Arc<AtomicUsize>,
}

#[derive(Default)]
pub(super) struct Private {
    strings: Vec<CString>,
    metadata: Vec<u8>,
    children: Vec<*mut ForeignSchema>,
    /// What `children` of the struct points to.
    pub(super) list: Vec<*mut ForeignSchema>,
    releases: Arc<AtomicUsize>,
}

unsafe extern "C-unwind" fn release(schema: *mut ForeignSchema) {
    // SAFETY: called once, on a struct that `Foreign::new` made.
    unsafe {
        (*schema).release = None;
        let private = Box::from_raw((*schema).private_data.cast::<Private>());
        private.releases.fetch_add(1, Relaxed);
        for &child in &private.children {
            drop(Box::from_raw(child));
        }
    }
}

impl Foreign {
    pub(super) fn new(format: &str, mut children: Vec<Foreign>) -> Self {
        let releases = Arc::new(AtomicUsize::new(0));
        let mut private = Box::new(Private {
            strings: vec![CString::new(format).unwrap(), c"name".into()],
            releases: releases.clone(),
            ..Private::default()
        });
        let mut nodes = 1;
        for child in &mut children {
            nodes += child.adopt(&releases);
            private.children.push(child.schema);
            child.schema = ptr::null_mut();
        }
        private.list.clone_from(&private.children);
        let schema = Box::new(ForeignSchema {
            format: private.strings[0].as_ptr(),
            name: private.strings[1].as_ptr(),
            flags: Flags::NULLABLE.bits(),
            n_children: private.list.len() as i64,
            children: private.list.as_mut_ptr(),
            release: Some(release),
            private_data: Box::into_raw(private).cast(),
            ..ForeignSchema::empty()
        });
        Self {
            schema: Box::into_raw(schema),
            nodes,
            releases,
        }
    }

    pub(super) fn leaf(format: &str) -> Self {
        Self::new(format, vec![])
    }

    pub(super) fn private(&mut self) -> &mut Private {
        // SAFETY: made by `new`, and not released.
        unsafe { &mut *self.private_data.cast() }
    }

    /// Lets a new parent count the releases of all nodes here; their number.
    fn adopt(&mut self, releases: &Arc<AtomicUsize>) -> usize {
        fn adopt(schema: *mut ForeignSchema, releases: &Arc<AtomicUsize>) {
            // SAFETY: made by `new`; children too.
            unsafe {
                if (*schema).release.is_none() {
                    return;
                }
                let private = &mut *(*schema).private_data.cast::<Private>();
                private.releases = releases.clone();
                for &child in &private.children {
                    adopt(child, releases);
                }
            }
        }
        adopt(self.schema, releases);
        std::mem::take(&mut self.nodes) - self.releases.load(Relaxed)
    }

    pub(super) fn dictionary(mut self, mut values: Foreign) -> Self {
        let releases = self.releases.clone();
        self.nodes += values.adopt(&releases);
        self.dictionary = values.schema;
        self.private().children.push(values.schema);
        values.schema = ptr::null_mut();
        self
    }

    pub(super) fn flags(mut self, flags: i64) -> Self {
        self.flags = flags;
        self
    }

    pub(super) fn metadata(mut self, bytes: &[u8]) -> Self {
        self.private().metadata = bytes.to_vec();
        self.metadata = self.private().metadata.as_ptr().cast();
        self
    }

    pub(super) fn change(mut self, change: impl FnOnce(&mut Foreign)) -> Self {
        change(&mut self);
        self
    }

    pub(super) fn released(self) -> Self {
        // SAFETY: made by `new`, not released yet.
        unsafe { release(self.schema) };
        self
    }

    pub(super) fn import(&self) -> Result<Field> {
        import_field(self.as_ref())
    }
}

impl Deref for Foreign {
    type Target = ForeignSchema;

    fn deref(&self) -> &ForeignSchema {
        // SAFETY: made by `new`, alive until drop.
        unsafe { &*self.schema }
    }
}

impl DerefMut for Foreign {
    fn deref_mut(&mut self) -> &mut ForeignSchema {
        // SAFETY: made by `new`, alive until drop, and borrowed mutably.
        unsafe { &mut *self.schema }
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        if self.schema.is_null() {
            return;
        }
        // SAFETY: made by `new`, and nobody else's.
        unsafe {
            drop(Box::from_raw(self.schema));
        }
        if !std::thread::panicking() {
            assert_eq!(self.releases.load(Relaxed), self.nodes, "releases");
        }
    }
}
