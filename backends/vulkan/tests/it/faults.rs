//! Every call of Vulkan fails once: through an interposer that takes the loader's place in a process of each test's own.

mod barriers;
mod every_call;
mod foreign;
mod polls;
