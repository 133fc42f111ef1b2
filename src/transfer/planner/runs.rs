//! Plans run-end encoded arrays.

use crate::data::gather::{int, push_int};
use crate::device::DevicePtr;
use crate::error::{Error, Result};
use crate::transfer::planner::{Need, Parts, Planner, int_width, request};

impl<'a> Planner<'a> {
    /// Plans the children of slices, or of several arrays, for which the run ends are read first.
    pub(super) fn runs(&mut self, node: usize, parts: Parts<'a>) -> Result<()> {
        let ends = parts.iter().map(|view| {
            let ends = view.child(0);
            let buffer = &ends.node.buffers[1];
            let width = int_width(&ends.node.data_type);
            match view.length == 0 || buffer.is_null() {
                true => (DevicePtr::NULL, 0),
                false => (
                    buffer.address().offset(ends.offset * width),
                    ends.length * width,
                ),
            }
        });
        let ends: Vec<_> = ends.collect();
        if self.readable || ends.iter().all(|(_, bytes)| *bytes == 0) {
            let read = |&(at, bytes): &(DevicePtr, usize)| match bytes {
                0 => &[][..],
                // SAFETY: the buffer has `offset + length` run ends, which was checked when the array was made; the host can
                // read it (`readable`), and it is ready (`plan_with` waited).
                _ => unsafe { std::slice::from_raw_parts(at.as_ptr().cast(), bytes) },
            };
            let ends: Vec<_> = ends.iter().map(read).collect();
            return self.cut_runs(node, &parts, &ends);
        }
        let requests = ends.into_iter().map(|(at, bytes)| request(at, bytes));
        self.wait_for(node, parts, Need::Runs, requests.collect());
        Ok(())
    }

    /// Adds the runs that contain the rows of each part; `ends` are all its run ends.
    pub(super) fn cut_runs(
        &mut self,
        node: usize,
        parts: &Parts<'a>,
        ends: &[&[u8]],
    ) -> Result<()> {
        let of = parts.first.child(0);
        let width = int_width(&of.node.data_type);
        let (mut cut, mut values, mut rows) = (Vec::new(), Vec::new(), 0i64);
        for (view, bytes) in parts.iter().zip(ends) {
            let ends: Vec<i64> = bytes
                .chunks_exact(width)
                .map(|end| int(end, width))
                .collect();
            let (from, to) = (view.offset as i64, (view.offset + view.length) as i64);
            let first = ends.partition_point(|end| *end <= from);
            let runs = match view.length {
                0 => first..first,
                _ => first..ends.partition_point(|end| *end < to) + 1,
            };
            let of = view.child(1);
            if runs.end > ends.len().min(of.length) || runs.start > runs.end {
                return Err(Error::invalid(
                    self.node_path(view.child(0)),
                    format!("run ends do not cover rows {from} to {to}"),
                ));
            }
            for end in &ends[runs.clone()] {
                let end = (*end).min(to).wrapping_sub(from);
                push_int(&mut cut, rows.wrapping_add(end), width);
            }
            rows = rows.saturating_add(view.length as i64);
            values.push(of.slice(runs.start, runs.len()));
        }
        if !parts.is_one() {
            let most = u64::MAX >> (65 - 8 * width);
            let instead = "concatenate fewer arrays, or cast them to wider run ends";
            self.check_most(of, rows as usize, most, "rows", instead)?;
        }
        self.plan.begin_children(node, 2);
        let ends = self.plan.node(cut.len() / width, 2);
        match cut.is_empty() {
            true => self.plan.fill(ends, 1, self.nothing, []),
            false => self.ready(ends, 1, &cut),
        }
        match Parts::of(values) {
            Some(values) => self.node(values, None),
            None => Ok(()),
        }
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
