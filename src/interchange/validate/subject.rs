//! [`Subject`]: what of an imported array the host has to look at.

use std::sync::Arc;

use arrow_schema::{DataType, FieldRef};

use crate::data::DeviceArray;
use crate::data::build::struct_array;
use crate::data::layout::{BufferKind, Layout, Nesting, child_field};
use crate::data::node::Node;
use crate::error::{Error, Result};

/// An imported array with values that may be invalid. Its structure and its null counts have been checked.
#[derive(Debug)]
pub(crate) struct Subject {
    array: DeviceArray,
    /// The columns of a struct that are left in `array`, by their number; empty if all of them are.
    columns: Vec<usize>,
}

impl Subject {
    /// `None` if no value can be invalid: numbers and bits, say. Such columns of a struct stay where they are if the host
    /// cannot read them.
    pub(crate) fn of(array: &DeviceArray) -> Result<Option<Self>> {
        let root = array.node();
        if !matters(root, true) {
            return Ok(None);
        }
        let whole = Self {
            array: array.clone(),
            columns: Vec::new(),
        };
        let DataType::Struct(fields) = array.data_type() else {
            return Ok(Some(whole));
        };
        if array.device().is_host_readable() || array.null_count() != Some(0) {
            return Ok(Some(whole));
        }
        let matters = |i: &usize| matters(&root.children[*i], fields[*i].is_nullable());
        let columns: Vec<_> = (0..fields.len()).filter(matters).collect();
        if columns.len() == fields.len() {
            return Ok(Some(whole));
        }
        let left: Vec<FieldRef> = columns.iter().map(|&i| fields[i].clone()).collect();
        let children: Vec<_> = columns.iter().filter_map(|&i| array.child(i)).collect();
        let root = DataType::Struct(left.into());
        let array = struct_array(array.device(), root, array.len(), &children)?;
        Ok(Some(Self { array, columns }))
    }

    /// What the host needs, as far as safe calls can reach.
    pub(crate) fn array(&self) -> &DeviceArray {
        &self.array
    }

    /// An error about the array that is left, with the number that a column has in the whole one.
    pub(crate) fn numbered(&self, e: Error) -> Error {
        const COLUMN: &str = "array.children[";
        let Error::InvalidInput { path, message } = e else {
            return e;
        };
        let number = path.strip_prefix(COLUMN).and_then(|rest| {
            let (i, rest) = rest.split_once(']')?;
            let column = self.columns.get(i.parse::<usize>().ok()?)?;
            Some(format!("{COLUMN}{column}]{rest}"))
        });
        let path = number.map_or(path, Into::into);
        Error::InvalidInput { path, message }
    }
}

/// Whether a node, whose field may be nullable, or one of its descendants may be invalid, although its structure is not.
fn matters(node: &Node, nullable: bool) -> bool {
    let has_nulls = !node.has_no_nulls() && !node.layout.is_null_type();
    let child = |(i, child): (usize, &Arc<Node>)| {
        let field = child_field(&node.data_type, i);
        matters(child, field.is_none_or(|field| field.is_nullable()))
    };
    !takes_any_value(&node.layout)
        || has_nulls && !nullable
        || node.children.iter().enumerate().any(child)
}

/// Whether a node of this layout is valid whatever its buffers hold.
fn takes_any_value(layout: &Layout) -> bool {
    let nested = matches!(
        layout.nesting,
        Nesting::Leaf | Nesting::RowByRow | Nesting::Times(_)
    );
    let any = |kind: &BufferKind| {
        matches!(
            kind,
            BufferKind::Validity | BufferKind::Bits | BufferKind::Fixed { .. }
        )
    };
    // Without a validity bitmap it is a union, whose first buffer refers to its fields.
    let is_union = !layout.has_validity() && !layout.is_null_type();
    nested && !layout.variadic && !is_union && layout.buffers().iter().all(any)
}
