//! A stand-in for the CUDA driver library (`libcuda.so`), on the simulated device, for tests.
