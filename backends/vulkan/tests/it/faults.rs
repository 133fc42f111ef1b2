//! Every call of Vulkan fails once, and each submission is looked at: through an interposer that takes the loader's place in a process of
//! each test's own.

mod every_call;
mod order;
