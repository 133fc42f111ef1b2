/* Takes the place of Vulkan's loader in the test's process: found by its SONAME, once it is loaded. */
typedef void (*function)(void);
typedef function (*finder)(void*, const char*);

static finder real;

void loader_set(finder find) { real = find; }

function vkGetInstanceProcAddr(void* instance, const char* name) { return real(instance, name); }
