//! Shaders: how they are compiled and run.

use arrow_device_wgpu::{Binding, WgpuDevice, wgpu};
use wgpu::util::DeviceExt;

/// Compiles a shader.
pub(crate) fn pipeline(gpu: &wgpu::Device, texts: &[&str]) -> wgpu::ComputePipeline {
    let module = gpu.create_shader_module(wgpu::ShaderModuleDescriptor {
        label: None,
        source: wgpu::ShaderSource::Wgsl(texts.concat().into()),
    });
    gpu.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
        label: None,
        layout: None,
        module: &module,
        entry_point: None,
        compilation_options: Default::default(),
        cache: None,
    })
}

/// Adds a shader's run: the numbers are its uniform, and bound before the memory.
pub(crate) fn dispatch(
    gpu: &wgpu::Device,
    encoder: &mut wgpu::CommandEncoder,
    pipeline: &wgpu::ComputePipeline,
    numbers: &[u32],
    memory: &[&Binding],
    groups: usize,
) {
    let contents: Vec<u8> = numbers.iter().flat_map(|n| n.to_ne_bytes()).collect();
    let numbers = gpu.create_buffer_init(&wgpu::util::BufferInitDescriptor {
        label: None,
        contents: &contents,
        usage: wgpu::BufferUsages::UNIFORM,
    });
    let memory = memory.iter().map(|binding| binding.resource());
    let resources = std::iter::once(numbers.as_entire_binding()).chain(memory);
    let entries = (0..).zip(resources);
    let entries = entries.map(|(binding, resource)| wgpu::BindGroupEntry { binding, resource });
    let entries: Vec<_> = entries.collect();
    let group = gpu.create_bind_group(&wgpu::BindGroupDescriptor {
        label: None,
        layout: &pipeline.get_bind_group_layout(0),
        entries: &entries,
    });
    let mut pass = encoder.begin_compute_pass(&Default::default());
    pass.set_pipeline(pipeline);
    pass.set_bind_group(0, &group, &[]);
    pass.dispatch_workgroups(groups as u32, 1, 1);
}

/// Submits a shader's run on its own.
pub(crate) fn run(
    gpu: &WgpuDevice,
    pipeline: &wgpu::ComputePipeline,
    numbers: &[u32],
    memory: &[&Binding],
    groups: usize,
) {
    let mut encoder = gpu.device().create_command_encoder(&Default::default());
    dispatch(
        gpu.device(),
        &mut encoder,
        pipeline,
        numbers,
        memory,
        groups,
    );
    gpu.queue().submit([encoder.finish()]);
}
