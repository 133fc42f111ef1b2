//! A device and what cudarc has of it.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaStream};

use crate::rig::Rig;
use crate::vendor::{Memory, unset_context};

/// A device, cudarc's handle of its context and a stream of it.
pub(crate) struct World {
    pub(crate) rig: Rig,
    pub(crate) context: Arc<CudaContext>,
    pub(crate) stream: Arc<CudaStream>,
}

impl World {
    pub(crate) fn new(flags: u32, memory: Memory) -> Self {
        let rig = Rig::with(flags, memory);
        let context = rig.device.cuda_context().unwrap();
        let stream = context.new_stream().unwrap();
        unset_context();
        Self {
            rig,
            context,
            stream,
        }
    }

    #[track_caller]
    pub(crate) fn end(self) {
        assert!(self.context.check_err().is_ok());
        drop((self.stream, self.context));
        unset_context();
        self.rig.end();
    }
}
