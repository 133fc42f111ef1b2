// Sums price * discount over the selected rows of a batch, exactly, in 128 bits: one partial sum for each workgroup. A null price adds
// nothing.

struct Columns {
    rows: u32,
    // The first row's element of each column, and its bit of the bitmap.
    price: u32,
    price_bit: u32,
    discount: u32,
    selected: u32,
    // Where this batch's partial sums begin.
    partial: u32,
}

@group(0) @binding(0) var<uniform> columns: Columns;
@group(0) @binding(1) var<storage, read> prices: array<vec4<u32>>;
@group(0) @binding(2) var<storage, read> price_bits: array<u32>;
@group(0) @binding(3) var<storage, read> discounts: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read> selected: array<u32>;
@group(0) @binding(5) var<storage, read_write> partial_sums: array<Sum>;

fn has_price(row: u32) -> bool {
    let bit = columns.price_bit + row;
    return columns.price_bit == ARROW_NO_BITMAP || arrow_bit(price_bits[bit / 32u], bit);
}

@compute @workgroup_size(256)
fn sum_rows(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(local_invocation_index) here: u32,
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    var sum = Sum();
    for (var row = id.x; row < columns.rows; row += 256u * groups.x) {
        if arrow_bit(selected[columns.selected + row / 32u], row) && has_price(row) {
            let revenue = arrow_mul128(prices[columns.price + row], discounts[columns.discount + row]);
            sum = add(sum, Sum(revenue, vec2(1u, 0u)));
        }
    }
    sum = sum_workgroup(here, sum);
    if here == 0u {
        partial_sums[columns.partial + group.x] = sum;
    }
}
