// Writes any bytes of a buffer, where WebGPU's own copies and fills need whole words.

struct Job {
    // The first byte to write, and to read, in the bindings below.
    dst: u32,
    src: u32,
    bytes: u32,
    // What a fill writes.
    word: u32,
}

@group(0) @binding(0) var<uniform> job: Job;
@group(0) @binding(1) var<storage, read_write> output: array<u32>;
@group(0) @binding(2) var<storage, read> input: array<u32>;

// Writes those bytes of a word that are the job's. Each word is one invocation's, and dispatches run one after the other.
fn write(word: u32, value: u32) {
    let first = word * 4u;
    let end = job.dst + job.bytes;
    var mask = 0xffffffffu;
    if first < job.dst {
        mask = mask << ((job.dst - first) * 8u);
    }
    if first + 4u > end {
        mask = mask & (0xffffffffu >> ((first + 4u - end) * 8u));
    }
    output[word] = (output[word] & ~mask) | (value & mask);
}

fn is_outside(word: u32) -> bool {
    return word * 4u >= job.dst + job.bytes;
}

@compute @workgroup_size(64)
fn fill_bytes(@builtin(global_invocation_id) id: vec3<u32>) {
    let word = job.dst / 4u + id.x;
    if is_outside(word) {
        return;
    }
    write(word, job.word);
}

@compute @workgroup_size(64)
fn copy_bytes(@builtin(global_invocation_id) id: vec3<u32>) {
    let word = job.dst / 4u + id.x;
    if is_outside(word) {
        return;
    }
    // The byte to read for the first byte of the word, plus 4, since it may lie before the first one.
    let byte = job.src + word * 4u + 4u - job.dst;
    let next = byte / 4u;
    let shift = (byte % 4u) * 8u;
    var value = 0u;
    if next > 0u {
        value = input[next - 1u] >> shift;
    }
    if shift > 0u {
        value = value | (input[next] << (32u - shift));
    }
    write(word, value);
}
