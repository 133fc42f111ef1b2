// Selects the rows of TPC-H's query 6: bit r of `selected` is set if row r was shipped in 1994, with a discount of 0.05 to 0.07 and a
// quantity below 24. A null satisfies no condition. One invocation for each row; all bits are 0 before.

struct Columns {
    rows: u32,
    // The first row's element of each column, and its bit of each bitmap.
    ship_date: u32,
    ship_date_bit: u32,
    discount: u32,
    discount_bit: u32,
    quantity: u32,
    quantity_bit: u32,
    selected: u32,
}

@group(0) @binding(0) var<uniform> columns: Columns;
@group(0) @binding(1) var<storage, read> ship_dates: array<i32>;
@group(0) @binding(2) var<storage, read> ship_date_bits: array<u32>;
@group(0) @binding(3) var<storage, read> discounts: array<vec4<u32>>;
@group(0) @binding(4) var<storage, read> discount_bits: array<u32>;
@group(0) @binding(5) var<storage, read> quantities: array<vec4<u32>>;
@group(0) @binding(6) var<storage, read> quantity_bits: array<u32>;
@group(0) @binding(7) var<storage, read_write> selected: array<atomic<u32>>;

const YEAR_1994: i32 = 8766; // days since 1970
const YEAR_1995: i32 = 9131;

fn has_ship_date(row: u32) -> bool {
    let bit = columns.ship_date_bit + row;
    return columns.ship_date_bit == ARROW_NO_BITMAP || arrow_bit(ship_date_bits[bit / 32u], bit);
}

fn has_discount(row: u32) -> bool {
    let bit = columns.discount_bit + row;
    return columns.discount_bit == ARROW_NO_BITMAP || arrow_bit(discount_bits[bit / 32u], bit);
}

fn has_quantity(row: u32) -> bool {
    let bit = columns.quantity_bit + row;
    return columns.quantity_bit == ARROW_NO_BITMAP || arrow_bit(quantity_bits[bit / 32u], bit);
}

fn is_selected(row: u32) -> bool {
    if !has_ship_date(row) || !has_discount(row) || !has_quantity(row) {
        return false;
    }
    let ship_date = ship_dates[columns.ship_date + row];
    if ship_date < YEAR_1994 || ship_date >= YEAR_1995 {
        return false;
    }
    // Decimals with two places.
    let discount = discounts[columns.discount + row];
    if arrow_less_i128(discount, vec4(5u, 0u, 0u, 0u)) || !arrow_less_i128(discount, vec4(8u, 0u, 0u, 0u)) {
        return false;
    }
    return arrow_less_i128(quantities[columns.quantity + row], vec4(2400u, 0u, 0u, 0u));
}

@compute @workgroup_size(256)
fn filter_rows(@builtin(global_invocation_id) id: vec3<u32>) {
    let row = id.x;
    if row < columns.rows && is_selected(row) {
        // 32 invocations share a word, few of which have a bit to set.
        atomicOr(&selected[columns.selected + row / 32u], 1u << (row & 31u));
    }
}
