// Adds up the partial sums of all batches, and writes the columns of the result, which have one row. One workgroup.

struct Places {
    // The partial sums, and the element of each column.
    first: u32,
    sums: u32,
    revenue: u32,
    revenue_bits: u32,
    rows: u32,
}

@group(0) @binding(0) var<uniform> places: Places;
@group(0) @binding(1) var<storage, read> partial_sums: array<Sum>;
@group(0) @binding(2) var<storage, read_write> revenue: array<vec4<u32>>;
@group(0) @binding(3) var<storage, read_write> revenue_bits: array<u32>;
@group(0) @binding(4) var<storage, read_write> rows: array<vec2<u32>>;

@compute @workgroup_size(256)
fn add_sums(@builtin(local_invocation_index) here: u32) {
    var sum = Sum();
    for (var i = here; i < places.sums; i += 256u) {
        sum = add(sum, partial_sums[places.first + i]);
    }
    sum = sum_workgroup(here, sum);
    if here == 0u {
        // As in SQL, the sum of no rows is null.
        revenue[places.revenue] = sum.revenue;
        revenue_bits[places.revenue_bits] = u32(any(sum.rows != vec2(0u, 0u)));
        rows[places.rows] = sum.rows;
    }
}
