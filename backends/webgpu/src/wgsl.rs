//! Arrow's memory in WGSL.

/// WGSL functions that read and write Arrow's memory, to be put in front of a shader: validity bits, 8- and 16-bit values, strings,
/// 64-bit integers and floats, and decimals, in WGSL that every device supports. The text begins with how it is used.
///
/// All names begin with `arrow_` or `ARROW_`, and nothing is bound, so the text can stand in any shader:
///
/// ```
/// use arrow_device_wgpu::{ARROW_WGSL, wgpu};
///
/// /// Sums a column of 64-bit integers, one sum for each 64 rows, and leaves out nulls.
/// const SUMS: &str = "
///     struct Column { rows: u32, first: u32, first_bit: u32 }
///     @group(0) @binding(0) var<uniform> column: Column;
///     @group(0) @binding(1) var<storage, read> values: array<vec2<u32>>;
///     @group(0) @binding(2) var<storage, read> bitmap: array<u32>;
///     @group(0) @binding(3) var<storage, read_write> sums: array<vec2<u32>>;
///
///     fn is_valid(row: u32) -> bool {
///         let bit = column.first_bit + row;
///         return column.first_bit == ARROW_NO_BITMAP || arrow_bit(bitmap[bit / 32u], bit);
///     }
///
///     @compute @workgroup_size(64)
///     fn main(@builtin(global_invocation_id) id: vec3<u32>) {
///         var sum = vec2<u32>();
///         for (var row = 64u * id.x; row < min(64u * id.x + 64u, column.rows); row++) {
///             if is_valid(row) {
///                 sum = arrow_add64(sum, values[column.first + row]);
///             }
///         }
///         if 64u * id.x < column.rows {
///             sums[id.x] = sum;
///         }
///     }";
///
/// fn shader(device: &wgpu::Device) -> wgpu::ShaderModule {
///     device.create_shader_module(wgpu::ShaderModuleDescriptor {
///         label: Some("sums"),
///         source: wgpu::ShaderSource::Wgsl([ARROW_WGSL, SUMS].concat().into()),
///     })
/// }
/// # if let Ok(device) = arrow_device_wgpu::WgpuConfig::best().open() {
/// #     shader(arrow_device_wgpu::WgpuDevice::of(&device).unwrap().device());
/// # }
/// ```
pub const ARROW_WGSL: &str = include_str!("arrow.wgsl");

/// What a shader that uses [`ARROW_WGSL`] takes as the first bit of a column that has no validity bitmap: `ARROW_NO_BITMAP`.
pub const ARROW_NO_BITMAP: u32 = u32::MAX;
