//! The walk of a plan over what rows refer to anywhere: dictionaries, runs, the children of list views and dense unions, the data
//! buffers of view arrays. What several arrays share is kept once.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

use arrow_data::ArrayData;
use arrow_schema::{DataType, UnionMode};
use smallvec::{SmallVec, smallvec};

use crate::data::DeviceArray;
use crate::data::host::unwrap;
use crate::data::layout::Nesting;
use crate::data::node::{Node, NodeBuffer, View};
use crate::data::numbers::{int, push_int};
use crate::error::{Error, Result};
use crate::transfer::plan::{Parts, Planner, Scope, is_whole, too_large};
use crate::transfer::region::CopyRegion;

/// What the parts refer to, without what is there already: the rows that are kept, and for each part where its own start among
/// them.
struct Kept<'a> {
    rows: Parts<'a>,
    starts: SmallVec<[usize; 1]>,
    /// The number of rows.
    n: usize,
}

impl<'a> Planner<'a> {
    /// Adds the runs that hold the rows of each part, for which all its run ends are read.
    pub(super) fn runs(&mut self, parts: &[View<'a>], node: &mut Node) -> Result<()> {
        let ends_of = parts[0].child(0);
        let width = ends_of.node.data_type.primitive_width().unwrap_or(8);
        let (mut cut, mut values, mut rows) = (Vec::new(), Parts::new(), 0i64);
        for view in parts {
            let ends = view.child(0);
            let buffer = &ends.node.buffers[1];
            let bytes = match view.length == 0 || buffer.is_null() {
                true => 0,
                false => ends.length * width,
            };
            let at = buffer.address().offset(ends.offset * width);
            let Some(bytes) = self.numbers.read(at, bytes, false) else {
                continue;
            };
            let ends = bytes.chunks_exact(width).map(|end| int(end, width));
            let ends: Vec<i64> = ends.collect();
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
        if values.len() < parts.len() {
            return Ok(());
        }
        if parts.len() > 1 {
            let most = u64::MAX >> (65 - 8 * width);
            let instead = "concatenate fewer arrays, or cast them to wider run ends";
            self.check_most(ends_of, rows as usize, most, "rows", instead)?;
        }
        let n = cut.len() / width;
        self.add_known(cut)?;
        let buffers = smallvec![NodeBuffer::absent(), self.finish(self.to_device)?];
        let of = ends_of.node.data_type.clone();
        node.children.push(Arc::new(Node {
            padded: true,
            ..Node::new(of, n, buffers, Vec::new())
        }));
        self.child(&values, node)
    }

    /// Adds the keys of a dictionary array, and its values.
    pub(super) fn dictionary(&mut self, parts: &[View<'a>], node: &mut Node) -> Result<()> {
        let values = self.kept(parts, |view| view.child(0))?;
        if let (DataType::Dictionary(key, _), 2..) = (&parts[0].node.data_type, values.rows.len()) {
            let bits =
                8 * key.primitive_width().unwrap_or(8) - usize::from(key.is_signed_integer());
            let most = (u64::MAX >> (64 - bits)).saturating_add(1);
            let instead = "give the arrays one dictionary, or cast them to wider keys";
            self.check_most(parts[0], values.n, most, "dictionary values", instead)?;
        }
        node.buffers
            .push(self.values(parts, 1, |k| values.starts[k])?);
        self.child(&values.rows, node)
    }

    /// Adds the buffers of a list view or a dense union, and the children.
    pub(super) fn anywhere(&mut self, parts: &[View<'a>], node: &mut Node) -> Result<()> {
        let data_type = &parts[0].node.data_type;
        let none = parts[0].length == 0 && self.scope != Scope::Reachable;
        let mut all = Vec::new();
        for i in 0..parts[0].layout().n_children() {
            let kept = self.kept(parts, |view| match none {
                true => view.child(i).slice(0, 0),
                false => view.child(i),
            })?;
            if kept.rows.len() > 1 && !matches!(data_type, DataType::LargeListView(_)) {
                let what = format!("rows in child {i}");
                let instead = "concatenate fewer arrays";
                self.check_most(parts[0], kept.n, i32::MAX as u64, &what, instead)?;
            }
            all.push(kept);
        }
        if let DataType::Union(fields, UnionMode::Dense) = data_type {
            node.buffers.push(self.values(parts, 0, |_| 0)?);
            match all.iter().all(|kept| kept.rows.len() == 1) {
                true => node.buffers.push(self.values(parts, 1, |_| 0)?),
                false => {
                    let starts = |k: usize| {
                        let mut starts = [0; 256];
                        for ((id, _), kept) in fields.iter().zip(&all) {
                            starts[usize::from(id as u8)] = kept.starts[k] as i32;
                        }
                        starts
                    };
                    node.buffers.push(self.union_offsets(parts, starts)?);
                }
            }
        } else {
            node.buffers
                .push(self.values(parts, 1, |k| all[0].starts[k])?);
            node.buffers.push(self.values(parts, 2, |_| 0)?);
        }
        all.iter().try_for_each(|kept| self.child(&kept.rows, node))
    }

    /// The offsets of several dense unions: to each is added what `starts` says of the part and of the row's type id. The host reads both.
    fn union_offsets(
        &mut self,
        parts: &[View<'a>],
        starts: impl Fn(usize) -> [i32; 256],
    ) -> Result<NodeBuffer> {
        self.check_present(parts, 1)?;
        let mut moved = Vec::new();
        for (k, view) in parts.iter().enumerate() {
            let at = |i: usize, width| view.node.buffers[i].address().offset(view.offset * width);
            let ids = self.numbers.read(at(0, 1), view.length, false);
            let offsets = self.numbers.read(at(1, 4), view.length * 4, false);
            let (starts, offsets) = (starts(k), offsets.unwrap_or_default().chunks_exact(4));
            for (id, offset) in ids.unwrap_or_default().iter().zip(offsets) {
                let start = starts[usize::from(*id)];
                moved.extend((int(offset, 4) as i32).wrapping_add(start).to_ne_bytes());
            }
        }
        self.add_known(moved)?;
        self.finish(self.to_device)
    }

    /// Adds the views, and the data buffers: those that the rows refer to if the host can read the views, otherwise all.
    pub(super) fn views(&mut self, parts: &[View<'a>], node: &mut Node) -> Result<()> {
        let mut known = true;
        for view in parts {
            known &= self.know_sizes(*view)?;
        }
        if !known {
            return Ok(());
        }
        let (data, tables) = data_buffers(parts);
        let one = parts.len() == 1;
        if !one {
            self.check_present(parts, 1)?;
        }
        let mut used = vec![!self.readable; data.len()];
        for (view, table) in parts.iter().zip(&tables) {
            let buffer = &view.node.buffers[1];
            let (from, bytes) = (view.offset * 16, view.length.saturating_mul(16));
            let is_same = table.iter().enumerate().all(|(i, to)| *to == i as u32);
            let mut views = None;
            if !table.is_empty() && (self.readable || !is_same) {
                views = (self.numbers).read(buffer.address().offset(from), bytes, false);
            }
            if self.readable {
                mark(views.unwrap_or_default(), table, &mut used);
            }
            match views.filter(|_| !is_same) {
                Some(views) => self.add_known(renumbered(views, table))?,
                None if buffer.is_null() => {}
                None => {
                    let region = CopyRegion::of(buffer, from, bytes);
                    self.add(region.padded(one && is_whole(*view)))?;
                }
            }
        }
        node.buffers.push(self.finish(self.to_device)?);
        for ((view, buffer), used) in data.into_iter().zip(used) {
            if used && view.length > 0 {
                let region = CopyRegion::of(buffer, 0, buffer.bytes().unwrap_or(0));
                self.add(region.padded(one && is_whole(view)))?;
            }
            node.buffers.push(self.finish(self.to_device)?);
        }
        // Their sizes.
        node.buffers.push(self.finish(self.to_device)?);
        Ok(())
    }

    /// What the parts refer to, each to the rows that `of` says. The same rows of the same memory are kept once; where the host can
    /// read them, so are a dictionary's values that are equal to those kept last.
    fn kept(&self, parts: &[View<'a>], of: impl Fn(View<'a>) -> View<'a>) -> Result<Kept<'a>> {
        let (mut rows, mut starts, mut n) = (Parts::new(), SmallVec::new(), 0usize);
        let mut seen: HashMap<Vec<usize>, usize> = HashMap::new();
        let merges =
            self.readable && parts.len() > 1 && parts[0].layout().nesting == Nesting::Dictionary;
        let mut last: Option<(ArrayData, usize)> = None;
        for view in parts.iter().map(|view| of(*view)) {
            let mut place = Vec::new();
            if parts.len() > 1 {
                places(view, &mut place);
            }
            let new = match seen.entry(place) {
                Entry::Occupied(seen) => {
                    starts.push(*seen.get());
                    continue;
                }
                Entry::Vacant(new) => new,
            };
            let values = (merges && view.node.children.is_empty())
                .then(|| unwrap(&DeviceArray::from_node(self.device.clone(), view.to_node())))
                .transpose()?;
            let start = match &last {
                Some((before, start)) if values.as_ref() == Some(before) => *start,
                _ => {
                    last = values.map(|values| (values, n));
                    rows.push(view);
                    n = n.checked_add(view.length).ok_or_else(too_large)?;
                    n - view.length
                }
            };
            starts.push(*new.insert(start));
        }
        Ok(Kept { rows, starts, n })
    }
}

/// The data buffers that the result of some view arrays has, and for each array which of them its own become. One keeps its own.
fn data_buffers<'a>(parts: &[View<'a>]) -> (Vec<(View<'a>, &'a NodeBuffer)>, Vec<Vec<u32>>) {
    let (mut buffers, mut tables) = (Vec::new(), vec![Vec::new(); parts.len()]);
    // Memory of one address is another buffer where it is longer.
    let mut seen = HashMap::new();
    for (k, view) in parts.iter().enumerate() {
        let [_, _, data @ .., _] = &view.node.buffers[..] else {
            continue;
        };
        for buffer in data {
            let next = buffers.len() as u32;
            let place = (buffer.address(), buffer.bytes());
            let mut index = *seen.entry(place).or_insert(next);
            if k == 0 || index == next {
                buffers.push((*view, buffer));
                index = next;
            }
            tables[k].push(index);
        }
    }
    (buffers, tables)
}

/// Marks which of the result's data buffers views refer to, those of null rows included.
fn mark(views: &[u8], table: &[u32], used: &mut [bool]) {
    for index in views.chunks_exact(16).filter_map(buffer_of) {
        let used = table.get(index).and_then(|new| used.get_mut(*new as usize));
        if let Some(used) = used {
            *used = true;
        }
    }
}

/// Views whose data buffers are those in `table` instead.
fn renumbered(views: &[u8], table: &[u32]) -> Vec<u8> {
    let mut views = views.to_vec();
    for view in views.chunks_exact_mut(16) {
        if let Some(new) = buffer_of(view).and_then(|index| table.get(index)) {
            view[8..12].copy_from_slice(&new.to_ne_bytes());
        }
    }
    views
}

/// The data buffer that a view refers to; `None` if its bytes are in the view.
fn buffer_of(view: &[u8]) -> Option<usize> {
    let word = |at: usize| int(&view[at..], 4) as u32;
    (word(0) > 12).then(|| word(8) as usize)
}

/// Adds what is the same for the same rows of the same memory, and only for those.
fn places(view: View<'_>, all: &mut Vec<usize>) {
    let buffers = view.node.buffers.iter();
    all.extend([
        buffers.len(),
        view.offset,
        view.length,
        view.validity_offset,
    ]);
    all.extend(buffers.map(|buffer| buffer.address().address()));
    let children = view.node.children.iter();
    children.for_each(|child| places(View::whole(child), all));
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
