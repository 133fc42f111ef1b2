//! Where memory belongs, and lies.

use std::ffi::c_int;
use std::sync::Arc;

use arrow_device::device::Backend;

use crate::engine::{Engine, Queue};
use crate::ffi::*;
use crate::memory::{Block, What};
use crate::registry::Registry;

/// Where a new block belongs.
pub(crate) struct Home {
    pub(crate) engine: Arc<Engine>,
    pub(crate) context: usize,
    pub(crate) ordinal: i32,
    pub(crate) pool: Option<usize>,
}

impl Home {
    /// The current context.
    pub(crate) fn current(registry: &Registry) -> Outcome<Self> {
        let (context, found) = registry.current()?;
        Ok(Self {
            engine: found.engine.clone(),
            context,
            ordinal: found.ordinal,
            pool: None,
        })
    }

    /// Allocates and adds to the table.
    pub(crate) fn allocate(
        self,
        registry: &mut Registry,
        what: What,
        bytes: usize,
        queue: Option<&Queue>,
    ) -> Outcome<usize> {
        if bytes == 0 {
            return Err(INVALID_VALUE);
        }
        let engine = self.engine;
        let memory = match (what, queue) {
            (What::Device, Some(queue)) => queue.allocate(bytes).map(Some),
            (What::Device, None) => engine
                .sim
                .default_queue()
                .and_then(|q| q.allocate(bytes).map(Some)),
            _ => engine.sim.allocate_host(bytes),
        };
        let memory = memory.map_err(|error| engine.code_of(&error))?;
        let start = memory.ok_or(OUT_OF_MEMORY)?.as_ptr().expose_provenance();
        registry.memory.insert(Block {
            what,
            start,
            bytes,
            engine,
            ordinal: self.ordinal,
            context: self.context,
            pool: self.pool,
            reported: None,
        });
        Ok(start)
    }
}

/// `CUmemLocation`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Location {
    pub(crate) kind: c_int,
    pub(crate) id: c_int,
}
