// Doubles 32-bit floats. Compiled twice: into kernel.spv, which finds its memory by addresses, and, with
// HANDLES defined, into handles.spv, which finds it by descriptors.
//   bash backends/vulkan/examples/kernel/compile
#version 460
#extension GL_EXT_buffer_reference : require

layout(local_size_x = 64) in;

#ifdef HANDLES
// A descriptor starts at a multiple of minStorageBufferOffsetAlignment: where the rows start after that, in floats, is pushed.
layout(set = 0, binding = 0) readonly buffer Input { float input_values[]; };
layout(set = 0, binding = 1) writeonly buffer Output { float output_values[]; };
layout(push_constant) uniform Push {
  uint input_at;
  uint output_at;
  uint rows;
};
#define INPUT(row) input_values[input_at + (row)]
#define OUTPUT(row) output_values[output_at + (row)]
#else
layout(buffer_reference, std430, buffer_reference_align = 4) readonly buffer Input { float values[]; };
layout(buffer_reference, std430, buffer_reference_align = 4) writeonly buffer Output { float values[]; };
layout(push_constant) uniform Push {
  Input from;
  Output to;
  uint rows;
};
#define INPUT(row) from.values[row]
#define OUTPUT(row) to.values[row]
#endif

void main() {
  uint step = gl_NumWorkGroups.x * gl_WorkGroupSize.x;
  for (uint row = gl_GlobalInvocationID.x; row < rows; row += step) OUTPUT(row) = 2.0 * INPUT(row);
}
