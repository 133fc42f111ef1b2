/* A producer and a consumer in plain C, which know the Arrow C Device data interface and Vulkan, and nothing of arrow-device.
   Functions return 0, or the number of the line that went wrong. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <vulkan/vulkan.h>

#define ARROW_DEVICE_VULKAN 7

struct ArrowArray {
  int64_t length;
  int64_t null_count;
  int64_t offset;
  int64_t n_buffers;
  int64_t n_children;
  const void** buffers;
  struct ArrowArray** children;
  struct ArrowArray* dictionary;
  void (*release)(struct ArrowArray*);
  void* private_data;
};

struct ArrowDeviceArray {
  struct ArrowArray array;
  int64_t device_id;
  int32_t device_type;
  void* sync_event;
  int64_t reserved[3];
};

#define CHECK(condition) do { if (!(condition)) return __LINE__; } while (0)

/* What the libraries of a program share. `submit` is vkQueueSubmit on the program's queue, under the program's lock. */
struct shared {
  VkPhysicalDevice physical;
  VkDevice device;
  uint32_t family;
  VkResult (*submit)(const VkSubmitInfo*, VkFence, void*);
  void* context;
};

/* A buffer with an address, in memory that the host can write. */
struct memory {
  VkBuffer buffer;
  VkDeviceMemory memory;
  float* host;
  VkDeviceAddress address;
};

static int make(const struct shared* s, size_t bytes, struct memory* out) {
  VkBufferCreateInfo info = {.sType = VK_STRUCTURE_TYPE_BUFFER_CREATE_INFO, .size = bytes};
  info.usage = VK_BUFFER_USAGE_TRANSFER_SRC_BIT | VK_BUFFER_USAGE_TRANSFER_DST_BIT | VK_BUFFER_USAGE_STORAGE_BUFFER_BIT |
               VK_BUFFER_USAGE_SHADER_DEVICE_ADDRESS_BIT;
  CHECK(vkCreateBuffer(s->device, &info, NULL, &out->buffer) == VK_SUCCESS);
  VkMemoryRequirements needs;
  vkGetBufferMemoryRequirements(s->device, out->buffer, &needs);
  VkPhysicalDeviceMemoryProperties kinds;
  vkGetPhysicalDeviceMemoryProperties(s->physical, &kinds);
  VkMemoryPropertyFlags wanted = VK_MEMORY_PROPERTY_HOST_VISIBLE_BIT | VK_MEMORY_PROPERTY_HOST_COHERENT_BIT;
  uint32_t kind = 0;
  while (kind < kinds.memoryTypeCount && !((needs.memoryTypeBits >> kind & 1) &&
                                           (kinds.memoryTypes[kind].propertyFlags & wanted) == wanted)) kind++;
  CHECK(kind < kinds.memoryTypeCount);
  VkMemoryAllocateFlagsInfo flags = {.sType = VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_FLAGS_INFO,
                                     .flags = VK_MEMORY_ALLOCATE_DEVICE_ADDRESS_BIT};
  VkMemoryAllocateInfo allocate = {.sType = VK_STRUCTURE_TYPE_MEMORY_ALLOCATE_INFO, .pNext = &flags,
                                   .allocationSize = needs.size, .memoryTypeIndex = kind};
  CHECK(vkAllocateMemory(s->device, &allocate, NULL, &out->memory) == VK_SUCCESS);
  CHECK(vkBindBufferMemory(s->device, out->buffer, out->memory, 0) == VK_SUCCESS);
  void* host;
  CHECK(vkMapMemory(s->device, out->memory, 0, VK_WHOLE_SIZE, 0, &host) == VK_SUCCESS);
  out->host = host;
  VkBufferDeviceAddressInfo ask = {.sType = VK_STRUCTURE_TYPE_BUFFER_DEVICE_ADDRESS_INFO, .buffer = out->buffer};
  out->address = vkGetBufferDeviceAddress(s->device, &ask);
  return 0;
}

static void unmake(const struct shared* s, struct memory* m) {
  vkDestroyBuffer(s->device, m->buffer, NULL);
  vkFreeMemory(s->device, m->memory, NULL);
}

struct producer {
  struct shared shared;
  struct memory memory, source;
  VkEvent event;
  VkCommandPool pool;
  VkCommandBuffer commands;
  VkFence fence;
  int64_t rows;
  const void* buffers[2];
};

/* When the event is set: by commands that peer_open submits, by commands that were submitted before the array is handed over, or by the
   host before that; or there is none. */
enum { LATER, BY_QUEUE, SET_BEFORE, NO_EVENT };

static int releases;

int peer_releases(void) { return __atomic_load_n(&releases, __ATOMIC_SEQ_CST); }

static void release(struct ArrowArray* array) {
  struct producer* p = array->private_data;
  VkDevice device = p->shared.device;
  if (p->fence) vkWaitForFences(device, 1, &p->fence, VK_TRUE, UINT64_MAX);
  vkDestroyFence(device, p->fence, NULL);
  vkDestroyCommandPool(device, p->pool, NULL);
  vkDestroyEvent(device, p->event, NULL);
  unmake(&p->shared, &p->memory);
  unmake(&p->shared, &p->source);
  free(p);
  array->release = NULL;
  __atomic_add_fetch(&releases, 1, __ATOMIC_SEQ_CST);
}

static void fill(struct producer* p, float* to) {
  for (int64_t i = 0; i < p->rows; i++) to[i] = 3 * i;
}

static int begin(const struct shared* s, VkCommandPool* pool, VkCommandBuffer* commands) {
  VkCommandPoolCreateInfo info = {.sType = VK_STRUCTURE_TYPE_COMMAND_POOL_CREATE_INFO, .queueFamilyIndex = s->family};
  CHECK(vkCreateCommandPool(s->device, &info, NULL, pool) == VK_SUCCESS);
  VkCommandBufferAllocateInfo allocate = {.sType = VK_STRUCTURE_TYPE_COMMAND_BUFFER_ALLOCATE_INFO, .commandPool = *pool,
                                          .commandBufferCount = 1};
  CHECK(vkAllocateCommandBuffers(s->device, &allocate, commands) == VK_SUCCESS);
  VkCommandBufferBeginInfo start = {.sType = VK_STRUCTURE_TYPE_COMMAND_BUFFER_BEGIN_INFO,
                                    .flags = VK_COMMAND_BUFFER_USAGE_ONE_TIME_SUBMIT_BIT};
  CHECK(vkBeginCommandBuffer(*commands, &start) == VK_SUCCESS);
  return 0;
}

static int submit(const struct shared* s, VkCommandBuffer commands, VkFence* fence) {
  CHECK(vkEndCommandBuffer(commands) == VK_SUCCESS);
  VkFenceCreateInfo info = {.sType = VK_STRUCTURE_TYPE_FENCE_CREATE_INFO};
  CHECK(vkCreateFence(s->device, &info, NULL, fence) == VK_SUCCESS);
  VkSubmitInfo work = {.sType = VK_STRUCTURE_TYPE_SUBMIT_INFO, .commandBufferCount = 1, .pCommandBuffers = &commands};
  CHECK(s->submit(&work, *fence, s->context) == VK_SUCCESS);
  return 0;
}

/* Produces the floats 0, 3, 6... which are there once the event is set. *buffer and *bytes are its memory, *producer
   is for peer_open. */
int peer_produce(const struct shared* s, struct ArrowDeviceArray* out, int64_t device_id, int64_t rows, int who,
                 VkBuffer* buffer, uint64_t* bytes, void** producer) {
  struct producer* p = calloc(1, sizeof *p);
  int line;
  p->shared = *s;
  p->rows = rows;
  *bytes = rows * sizeof(float);
  if ((line = make(s, *bytes, &p->memory)) || (line = make(s, *bytes, &p->source))) return line;
  memset(p->memory.host, 0xFF, *bytes);
  VkEventCreateInfo info = {.sType = VK_STRUCTURE_TYPE_EVENT_CREATE_INFO};
  if (who != NO_EVENT) CHECK(vkCreateEvent(s->device, &info, NULL, &p->event) == VK_SUCCESS);
  if (who == SET_BEFORE || who == NO_EVENT) fill(p, p->memory.host);
  if (who == SET_BEFORE) CHECK(vkSetEvent(s->device, p->event) == VK_SUCCESS);
  if (who == BY_QUEUE || who == LATER) {
    fill(p, p->source.host);
    VkCommandBuffer commands;
    if ((line = begin(s, &p->pool, &commands))) return line;
    p->commands = commands;
    VkBufferCopy all = {.size = *bytes};
    vkCmdCopyBuffer(commands, p->source.buffer, p->memory.buffer, 1, &all);
    VkMemoryBarrier written = {.sType = VK_STRUCTURE_TYPE_MEMORY_BARRIER, .srcAccessMask = VK_ACCESS_TRANSFER_WRITE_BIT,
                               .dstAccessMask = VK_ACCESS_MEMORY_READ_BIT};
    vkCmdPipelineBarrier(commands, VK_PIPELINE_STAGE_TRANSFER_BIT, VK_PIPELINE_STAGE_ALL_COMMANDS_BIT, 0, 1, &written, 0, NULL, 0, NULL);
    vkCmdSetEvent(commands, p->event, VK_PIPELINE_STAGE_ALL_COMMANDS_BIT);
    if (who == BY_QUEUE && (line = submit(s, commands, &p->fence))) return line;
  }
  p->buffers[1] = (const void*)(uintptr_t)p->memory.address;
  *buffer = p->memory.buffer;
  *producer = p;

  memset(out, 0, sizeof *out);
  out->array.length = rows;
  out->array.n_buffers = 2;
  out->array.buffers = p->buffers;
  out->array.release = release;
  out->array.private_data = p;
  out->device_id = device_id;
  out->device_type = ARROW_DEVICE_VULKAN;
  out->sync_event = who == NO_EVENT ? NULL : &p->event;
  return 0;
}

/* Submits the commands that write the values and set the event: for LATER. */
int peer_open(void* producer) {
  struct producer* p = producer;
  return submit(&p->shared, p->commands, &p->fence);
}

/* Whether the event of an array is set: 1 or 0. */
int peer_poll(const struct shared* s, const struct ArrowDeviceArray* in) {
  return vkGetEventStatus(s->device, *(VkEvent*)in->sync_event) == VK_EVENT_SET;
}

/* Doubles the only column of a batch, of floats without nulls, with a kernel that gets its address; then releases the batch. Polls
   the batch's event before. The kernel's push constants are two addresses and the number of rows. */
int peer_double(const struct shared* s, struct ArrowDeviceArray* in, const uint32_t* kernel, size_t bytes, float* out) {
  CHECK(in->device_type == ARROW_DEVICE_VULKAN);
  CHECK(in->sync_event != NULL);
  while (!peer_poll(s, in)) {}
  CHECK(in->array.n_children == 1);
  struct ArrowArray* column = in->array.children[0];
  CHECK(column->n_buffers == 2 && column->null_count == 0);
  uint32_t rows = (uint32_t)in->array.length;
  struct { VkDeviceAddress from, to; uint32_t rows; } push;
  push.from = (VkDeviceAddress)(uintptr_t)column->buffers[1] + sizeof(float) * (column->offset + in->array.offset);
  push.rows = rows;
  struct memory doubled;
  int line;
  if ((line = make(s, rows * sizeof(float), &doubled))) return line;
  push.to = doubled.address;

  VkShaderModuleCreateInfo code = {.sType = VK_STRUCTURE_TYPE_SHADER_MODULE_CREATE_INFO, .codeSize = bytes, .pCode = kernel};
  VkShaderModule module;
  CHECK(vkCreateShaderModule(s->device, &code, NULL, &module) == VK_SUCCESS);
  VkPushConstantRange range = {.stageFlags = VK_SHADER_STAGE_COMPUTE_BIT, .size = 20};
  VkPipelineLayoutCreateInfo shape = {.sType = VK_STRUCTURE_TYPE_PIPELINE_LAYOUT_CREATE_INFO, .pushConstantRangeCount = 1,
                                      .pPushConstantRanges = &range};
  VkPipelineLayout layout;
  CHECK(vkCreatePipelineLayout(s->device, &shape, NULL, &layout) == VK_SUCCESS);
  VkComputePipelineCreateInfo info = {.sType = VK_STRUCTURE_TYPE_COMPUTE_PIPELINE_CREATE_INFO, .layout = layout};
  info.stage.sType = VK_STRUCTURE_TYPE_PIPELINE_SHADER_STAGE_CREATE_INFO;
  info.stage.stage = VK_SHADER_STAGE_COMPUTE_BIT;
  info.stage.module = module;
  info.stage.pName = "main";
  VkPipeline pipeline;
  CHECK(vkCreateComputePipelines(s->device, VK_NULL_HANDLE, 1, &info, NULL, &pipeline) == VK_SUCCESS);

  VkCommandPool pool;
  VkCommandBuffer commands;
  VkFence fence;
  if ((line = begin(s, &pool, &commands))) return line;
  /* The producer recorded a barrier before the event was set, which the commands of this VkQueue come after. */
  vkCmdBindPipeline(commands, VK_PIPELINE_BIND_POINT_COMPUTE, pipeline);
  vkCmdPushConstants(commands, layout, VK_SHADER_STAGE_COMPUTE_BIT, 0, range.size, &push);
  vkCmdDispatch(commands, (rows + 63) / 64, 1, 1);
  VkMemoryBarrier done = {.sType = VK_STRUCTURE_TYPE_MEMORY_BARRIER, .srcAccessMask = VK_ACCESS_SHADER_WRITE_BIT,
                          .dstAccessMask = VK_ACCESS_HOST_READ_BIT};
  vkCmdPipelineBarrier(commands, VK_PIPELINE_STAGE_COMPUTE_SHADER_BIT, VK_PIPELINE_STAGE_HOST_BIT, 0, 1, &done, 0, NULL, 0, NULL);
  if ((line = submit(s, commands, &fence))) return line;
  CHECK(vkWaitForFences(s->device, 1, &fence, VK_TRUE, UINT64_MAX) == VK_SUCCESS);
  memcpy(out, doubled.host, rows * sizeof(float));

  vkDestroyFence(s->device, fence, NULL);
  vkDestroyCommandPool(s->device, pool, NULL);
  vkDestroyPipeline(s->device, pipeline, NULL);
  vkDestroyPipelineLayout(s->device, layout, NULL);
  vkDestroyShaderModule(s->device, module, NULL);
  unmake(s, &doubled);
  in->array.release(&in->array);
  return 0;
}
