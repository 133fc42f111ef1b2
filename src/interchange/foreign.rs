//! A look into foreign structs before they are checked.

use arrow_schema::DataType;

use crate::abi::c_data::CArray;
use crate::data::layout::{Layout, Nesting, child_type};
use crate::device::DevicePtr;

/// The most buffers that an array and its descendants may have. Structs may share one list of them.
pub(super) const MAX_BUFFERS: usize = 1 << 22;

/// Returns the first buffer that is not null, of the struct or its descendants. Follows no pointer that an import would refuse: this
/// stops where the struct is not one of the type.
///
/// # Safety
/// `array` complies with the C data interface: pointers that are not null are valid for what it says.
pub(super) unsafe fn first_address(array: &CArray, data_type: &DataType) -> Option<DevicePtr> {
    fn usable<T>(pointer: *mut T) -> bool {
        !pointer.is_null() && pointer.is_aligned()
    }
    let layout = Layout::of(data_type);
    let fixed = layout.buffers().len();
    if array.is_released() || !n_buffers_fit(layout, array.n_buffers) {
        return None;
    }
    if fixed > 0 && !usable(array.buffers) {
        return None;
    }
    let found = (0..fixed).find_map(|i| {
        // SAFETY: the list is usable and, as the caller guarantees, has `n_buffers` pointers, which are at least `fixed`.
        let address = DevicePtr::new(unsafe { *array.buffers.add(i) }.cast_mut());
        (!address.is_null()).then_some(address)
    });
    if found.is_some() {
        return found;
    }
    if layout.nesting == Nesting::Dictionary {
        let values = child_type(data_type, 0)?;
        // SAFETY: the dictionary is usable; the caller guarantees that it is a struct that complies with the interface.
        return usable(array.dictionary)
            .then(|| unsafe { first_address(&*array.dictionary, values) })?;
    }
    let n_children = layout.n_children();
    if array.n_children != n_children as i64 || n_children > 0 && !usable(array.children) {
        return None;
    }
    (0..n_children).find_map(|i| {
        // SAFETY: the list is usable and, as the caller guarantees, has `n_children` pointers.
        let child = unsafe { *array.children.add(i) };
        let of_type = child_type(data_type, i)?;
        // SAFETY: the child is usable; the caller guarantees that it is a struct that complies with the interface.
        usable(child).then(|| unsafe { first_address(&*child, of_type) })?
    })
}

/// Whether a struct of the layout may have so many buffers.
pub(super) fn n_buffers_fit(layout: Layout, n_buffers: i64) -> bool {
    let fixed = layout.buffers().len() as i64;
    match layout.variadic {
        true => (fixed + 1..=MAX_BUFFERS as i64).contains(&n_buffers),
        // polars gives a null array the pointer of a validity bitmap, which is null.
        false if layout.is_null_type() => (0..=1).contains(&n_buffers),
        false => n_buffers == fixed,
    }
}
