//! Every call of the runtime fails once: through the stand-in for OpenCL's loader (`fakes/opencl`), which passes all others on.

mod calls;
mod endings;
mod every_call;
mod forks;
