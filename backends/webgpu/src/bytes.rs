//! Fills and copies of any bytes, by a compute shader: WebGPU's own need offsets and lengths of whole words.

use arrow_device::Result;
use wgpu::{
    BindGroupDescriptor, BindGroupEntry, BindingResource, BufferBinding, BufferDescriptor,
    BufferSize, BufferUsages, CommandEncoder, ComputePipeline, ComputePipelineDescriptor,
};

use crate::sys::Gpu;

/// The bytes of a [`Job`] in the shader.
const PARAMETERS: u64 = 16;
/// The bytes that a workgroup writes.
const GROUP: u64 = 64 * 4;

/// The compute shader.
pub(crate) struct Bytes {
    fill: ComputePipeline,
    copy: ComputePipeline,
    /// The alignments of bindings.
    storage: u64,
    uniform: u64,
    /// The most bytes of a job.
    most: u64,
    /// The most jobs whose parameters are in one buffer.
    together: usize,
}

/// Bytes of a buffer to write.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    pub(crate) buffer: wgpu::Buffer,
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
    pub(crate) what: What,
}

/// What a [`Job`] writes.
#[derive(Clone, Debug)]
pub(crate) enum What {
    /// Those bytes of each word that lie in the job. The first byte of a word is the lowest.
    Word(u32),
    /// The bytes of another buffer from this offset on.
    From(wgpu::Buffer, u64),
}

/// A part of a buffer to bind.
struct Window<'a> {
    buffer: &'a wgpu::Buffer,
    offset: u64,
    size: u64,
    /// Where the job's first byte is in it.
    skip: u64,
}

impl<'a> Window<'a> {
    fn new(buffer: &'a wgpu::Buffer, first: u64, bytes: u64, alignment: u64) -> Self {
        let offset = first / alignment * alignment;
        let end = (first + bytes).next_multiple_of(4).min(buffer.size());
        Self {
            buffer,
            offset,
            size: end - offset,
            skip: first - offset,
        }
    }

    fn entry(&self, binding: u32) -> BindGroupEntry<'a> {
        let (buffer, offset) = (self.buffer, self.offset);
        let size = BufferSize::new(self.size);
        BindGroupEntry {
            binding,
            resource: BindingResource::Buffer(BufferBinding {
                buffer,
                offset,
                size,
            }),
        }
    }
}

impl Bytes {
    pub(crate) fn new(gpu: &Gpu) -> Result<Self> {
        let limits = &gpu.limits;
        let storage = u64::from(limits.min_storage_buffer_offset_alignment).max(4);
        let bound = (limits.max_storage_buffer_binding_size / storage).saturating_sub(1) * storage;
        let groups = u64::from(limits.max_compute_workgroups_per_dimension);
        // One group more where the first word is not whole.
        let most = bound.min(groups.saturating_sub(1) * GROUP).min(1 << 30) / 4 * 4;
        let uniform = u64::from(limits.min_uniform_buffer_offset_alignment).max(PARAMETERS);
        let together = (limits.max_buffer_size / uniform).min(1024) as usize;
        if most == 0 || together == 0 {
            return Err(gpu.not_supported(
                "copy",
                "bytes that are not whole words (4 bytes) are copied by a compute shader, for which the limits of the device leave no room",
            ));
        }
        gpu.call("create_compute_pipeline", |device, _| {
            let module = device.create_shader_module(wgpu::include_wgsl!("bytes.wgsl"));
            let pipeline = |entry_point| {
                device.create_compute_pipeline(&ComputePipelineDescriptor {
                    label: Some("arrow-device bytes"),
                    layout: None,
                    module: &module,
                    entry_point: Some(entry_point),
                    compilation_options: Default::default(),
                    cache: None,
                })
            };
            Self {
                fill: pipeline("fill_bytes"),
                copy: pipeline("copy_bytes"),
                storage,
                uniform,
                most,
                together,
            }
        })
    }

    /// Encodes jobs, which run one after the other. Within [`Gpu::call`].
    pub(crate) fn encode(&self, device: &wgpu::Device, encoder: &mut CommandEncoder, jobs: &[Job]) {
        let jobs: Vec<Job> = jobs.iter().flat_map(|job| self.cut(job)).collect();
        for jobs in jobs.chunks(self.together) {
            self.encode_together(device, encoder, jobs);
        }
    }

    fn encode_together(&self, device: &wgpu::Device, encoder: &mut CommandEncoder, jobs: &[Job]) {
        let parameters = device.create_buffer(&BufferDescriptor {
            label: Some("arrow-device bytes"),
            size: jobs.len() as u64 * self.uniform,
            usage: BufferUsages::UNIFORM,
            mapped_at_creation: true,
        });
        let Ok(mut mapped) = parameters.get_mapped_range_mut(..) else {
            // The device is lost: nothing that is encoded runs.
            return;
        };
        let mut pass = encoder.begin_compute_pass(&Default::default());
        for (job, at) in jobs.iter().zip((0..).step_by(self.uniform as usize)) {
            let dst = Window::new(&job.buffer, job.offset, job.bytes, self.storage);
            let src = match &job.what {
                What::Word(_) => None,
                What::From(buffer, offset) => {
                    Some(Window::new(buffer, *offset, job.bytes, self.storage))
                }
            };
            let word = match job.what {
                What::Word(word) => word,
                What::From(..) => 0,
            };
            let skip = src.as_ref().map_or(0, |src| src.skip);
            let values = [dst.skip as u32, skip as u32, job.bytes as u32, word];
            let values: Vec<u8> = values.into_iter().flat_map(u32::to_le_bytes).collect();
            mapped.slice(at..at + values.len()).copy_from_slice(&values);

            let pipeline = if src.is_some() {
                &self.copy
            } else {
                &self.fill
            };
            let own = Window {
                buffer: &parameters,
                offset: at as u64,
                size: PARAMETERS,
                skip: 0,
            };
            let mut entries = vec![own.entry(0), dst.entry(1)];
            entries.extend(src.map(|src| src.entry(2)));
            let group = device.create_bind_group(&BindGroupDescriptor {
                label: Some("arrow-device bytes"),
                layout: &pipeline.get_bind_group_layout(0),
                entries: &entries,
            });
            pass.set_pipeline(pipeline);
            pass.set_bind_group(0, &group, &[]);
            pass.dispatch_workgroups((job.bytes + 4).div_ceil(GROUP) as u32, 1, 1);
        }
        drop(pass);
        drop(mapped);
        parameters.unmap();
    }

    /// Cuts a job into such as one dispatch can do.
    fn cut<'a>(&self, job: &'a Job) -> impl Iterator<Item = Job> + use<'a> {
        let most = self.most;
        (0..job.bytes).step_by(most as usize).map(move |done| Job {
            buffer: job.buffer.clone(),
            offset: job.offset + done,
            bytes: most.min(job.bytes - done),
            what: match &job.what {
                What::Word(word) => What::Word(*word),
                What::From(buffer, offset) => What::From(buffer.clone(), offset + done),
            },
        })
    }
}
