//! What kernels there are.

use std::fmt::Debug;

use arrow_device::device::DevicePtr;
use arrow_device::{DeviceBufferMut, Queue, Result};

use super::column::{Bits, Column};
use super::key::{Key, Kind};

/// The kernels of a device. Each method queues work, and none waits. `passing` has a byte for each row, which is 1 if the row
/// passes, else 0; numbers in device memory are of type `u64`.
pub(crate) trait Kernels: Debug + Send + Sync {
    /// Sets `passing` to 0 where a bit is not `wanted`.
    fn keep(
        &self,
        queue: &Queue,
        bits: Bits,
        wanted: bool,
        passing: &mut DeviceBufferMut,
    ) -> Result<()>;

    /// Sets `passing` to 0 where the bit of the result of the comparison is unset in `orderings`: 1 for less, 2 for equal, 4 for
    /// greater.
    fn compare(
        &self,
        queue: &Queue,
        column: Column,
        kind: Kind,
        orderings: u8,
        literal: Key,
        passing: &mut DeviceBufferMut,
    ) -> Result<()>;

    /// As [`compare`](Self::compare), byte by byte with those of `literal`, a number of them at an address.
    fn compare_bytes(
        &self,
        queue: &Queue,
        column: Column,
        orderings: u8,
        literal: (DevicePtr, usize),
        passing: &mut DeviceBufferMut,
    ) -> Result<()>;

    /// Writes the numbers of the rows that pass, in their order, and at `count` how many there are.
    fn select(
        &self,
        queue: &Queue,
        passing: &DeviceBufferMut,
        picked: &mut DeviceBufferMut,
        counts: &mut DeviceBufferMut,
        count: usize,
    ) -> Result<()>;

    /// Adds to number `count` how many of the rows that pass are null.
    fn count_nulls(
        &self,
        queue: &Queue,
        column: Column,
        passing: &DeviceBufferMut,
        counts: &mut DeviceBufferMut,
        count: usize,
    ) -> Result<()>;

    /// Writes for each row that passes how many bytes those before it have, and to number `count` how many all have. The bytes
    /// of nulls do not count, nor those that lie in views.
    fn measure(
        &self,
        queue: &Queue,
        column: Column,
        passing: &DeviceBufferMut,
        starts: &mut DeviceBufferMut,
        counts: &mut DeviceBufferMut,
        count: usize,
    ) -> Result<()>;

    /// Copies the picked rows' values of fixed width to `out`, from row `to.row` on.
    fn gather(
        &self,
        queue: &Queue,
        column: Column,
        picked: &Picked<'_>,
        out: &mut DeviceBufferMut,
        to: To,
    ) -> Result<()>;

    /// Sets the bits of the picked rows in `out`, whose bits are all unset, from row `to.row` on.
    fn gather_bits(
        &self,
        queue: &Queue,
        bits: Bits,
        picked: &Picked<'_>,
        out: &mut DeviceBufferMut,
        to: To,
    ) -> Result<()>;

    /// Copies the picked rows' bytes to `data` from byte `to.byte` on, and writes their offsets or views to `out` from row
    /// `to.row` on, and one more offset.
    #[expect(clippy::too_many_arguments)]
    fn gather_bytes(
        &self,
        queue: &Queue,
        column: Column,
        picked: &Picked<'_>,
        starts: &DeviceBufferMut,
        out: &mut DeviceBufferMut,
        data: &mut DeviceBufferMut,
        to: To,
    ) -> Result<()>;
}

/// The numbers of rows, and how many there are.
pub(crate) struct Picked<'a> {
    pub(crate) rows: &'a DeviceBufferMut,
    pub(crate) count: usize,
}

/// Where in a result the rows of a batch begin.
#[derive(Clone, Copy, Default)]
pub(crate) struct To {
    pub(crate) row: usize,
    /// Of the bytes of text or binary.
    pub(crate) byte: usize,
}
