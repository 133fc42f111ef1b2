//! Which kernels there are stand-ins for.

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Emulation {
    /// `product_f64(a, a_mask, a_bit, b, b_mask, b_bit, out, out_mask, rows)`: out[i] = a[i] *
    /// b[i], 0 where one of them is null. A mask of 0 has no nulls.
    ProductF64,
    /// `double_f64(input, output, rows)`: output[i] = 2 * input[i].
    DoubleF64,
    /// `above_f64(values, bits, bit, limit, kept, count, rows)`: kept = the valid values above
    /// limit, in their order; count = how many. Bits of 0 have no nulls.
    AboveF64,
    /// `fill_i64(out, value, n)`
    FillI64,
    /// `fail()`: the engine fails with 719.
    Fail,
}

impl Emulation {
    pub(crate) fn of(name: &str) -> Option<Self> {
        match name {
            "product_f64" => Some(Self::ProductF64),
            "double_f64" => Some(Self::DoubleF64),
            "above_f64" => Some(Self::AboveF64),
            "fill_i64" => Some(Self::FillI64),
            "fail" => Some(Self::Fail),
            _ => None,
        }
    }

    /// How many parameters it takes; each has 8 bytes.
    pub(crate) fn parameters(self) -> usize {
        match self {
            Self::ProductF64 => 9,
            Self::AboveF64 => 7,
            Self::DoubleF64 | Self::FillI64 => 3,
            Self::Fail => 0,
        }
    }
}
