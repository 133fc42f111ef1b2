// out[i] = value. A thread has one value.
extern "C" __global__ void fill_i64(long long *out, long long value, unsigned long long n) {
    unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        out[i] = value;
    }
}
