// Sums of revenue and rows, and how a workgroup adds up those of its invocations.

struct Sum {
    revenue: vec4<u32>,
    rows: vec2<u32>,
}

fn add(a: Sum, b: Sum) -> Sum {
    return Sum(arrow_add128(a.revenue, b.revenue), arrow_add64(a.rows, b.rows));
}

var<workgroup> sums: array<Sum, 256>;

// Returns the sum over a workgroup of 256, to its first invocation.
fn sum_workgroup(here: u32, own: Sum) -> Sum {
    sums[here] = own;
    workgroupBarrier();
    for (var half = 128u; half > 0u; half /= 2u) {
        if here < half {
            sums[here] = add(sums[here], sums[here + half]);
        }
        workgroupBarrier();
    }
    return sums[0];
}
