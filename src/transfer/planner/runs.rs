//! Plans run-end encoded arrays.

use arrow_schema::DataType;

use crate::data::gather::{int, push_int};
use crate::data::node::View;
use crate::error::{Error, Result};
use crate::transfer::plan::{PlanNode, Region};
use crate::transfer::planner::{Need, Planner};

impl<'a> Planner<'a> {
    /// Plans the children of a slice, for which the run ends are read first.
    pub(super) fn runs(&mut self, node: usize, view: View<'a>) -> Result<()> {
        let run_ends = view.child(0);
        let width = run_end_width(run_ends);
        let buffer = &run_ends.node.buffers[1];
        if view.length == 0 || buffer.is_null() {
            return self.cut_runs(node, view, &[]);
        }
        let address = buffer.address().offset(run_ends.offset * width);
        let bytes = run_ends.length * width;
        if self.readable {
            // SAFETY: the buffer has `offset + length` run ends, which was checked when the array was made; the host can
            // read it (`readable`), and it is ready (`plan_with` waited).
            let ends = unsafe { std::slice::from_raw_parts(address.as_ptr().cast(), bytes) };
            return self.cut_runs(node, view, ends);
        }
        self.wait_for(node, view, Need::Runs, &[(address, bytes)]);
        Ok(())
    }

    /// Adds the runs that contain a view's rows; `bytes` are all run ends.
    pub(super) fn cut_runs(&mut self, node: usize, view: View<'a>, bytes: &[u8]) -> Result<()> {
        let (run_ends, values) = (view.child(0), view.child(1));
        let width = run_end_width(run_ends);
        let ends: Vec<i64> = bytes.chunks_exact(width).map(|b| int(b, width)).collect();
        let (from, to) = (view.offset as i64, (view.offset + view.length) as i64);
        let first = ends.partition_point(|end| *end <= from);
        let last = ends.partition_point(|end| *end < to);
        let runs = if view.length == 0 {
            first..first
        } else {
            first..last + 1
        };
        if runs.end > ends.len().min(values.length) || runs.start > runs.end {
            return Err(Error::invalid(
                self.array.node().path(run_ends.node),
                format!("run ends do not cover rows {from} to {to}"),
            ));
        }
        let mut cut = Vec::with_capacity(runs.len() * width);
        for end in &ends[runs.clone()] {
            let end = (*end).min(to).wrapping_sub(from);
            push_int(&mut cut, end, width);
        }
        self.begin_children(node, 2);
        let first = self.plan.regions.len();
        self.plan.regions.push(Region::absent());
        self.plan.regions.push(Region::empty(self.nothing));
        let mut ends = PlanNode::new(*run_ends.layout(), runs.len(), node, first);
        ends.regions.end += 2;
        self.plan.nodes.push(ends);
        if !cut.is_empty() {
            self.ready(first + 1, &cut);
        }
        self.node(values.slice(runs.start, runs.len()), None, node)
    }
}

/// Returns the number of bytes of one run end.
fn run_end_width(run_ends: View<'_>) -> usize {
    match run_ends.node.data_type {
        DataType::Int16 => 2,
        DataType::Int32 => 4,
        _ => 8,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow_array::types::{Int16Type, Int32Type, Int64Type, RunEndIndexType};
    use arrow_array::{ArrayRef, PrimitiveArray, RunArray, StringArray};

    use crate::{DeviceArray, Devices};

    /// Run ends are cut and joined on the host, in each width; Miri does it with the other order of bytes.
    fn cut_and_joined<R: RunEndIndexType>(of: fn(i64) -> R::Native) {
        let runs = |ends: &[i64], values: &[&str]| -> ArrayRef {
            let ends = PrimitiveArray::<R>::from_iter_values(ends.iter().map(|end| of(*end)));
            let values = StringArray::from_iter_values(values);
            Arc::new(RunArray::<R>::try_new(&ends, &values).unwrap())
        };
        let array = runs(&[300, 301, 700], &["a", "b", "c"]);
        let up = Devices::cpu().upload_array(&array).unwrap();
        let cut = up.slice(299, 100).unwrap().compact().unwrap();
        let expected = runs(&[1, 2, 100], &["a", "b", "c"]);
        assert_eq!(cut.to_host().unwrap().to_data(), expected.to_data());
        let both = DeviceArray::concat(&[&cut, &up]).unwrap();
        let values = ["a", "b", "c", "a", "b", "c"];
        let expected = runs(&[1, 2, 100, 400, 401, 800], &values);
        assert_eq!(both.to_host().unwrap().to_data(), expected.to_data());
    }

    #[test]
    fn run_ends_of_each_width() {
        cut_and_joined::<Int16Type>(|end| end as i16);
        cut_and_joined::<Int32Type>(|end| end as i32);
        cut_and_joined::<Int64Type>(|end| end);
    }
}
