//! The walk of a plan over what rows refer to anywhere: dictionaries, runs, the children of list views and dense unions, the data
//! buffers of view arrays. What several arrays share is kept once.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use arrow_data::ArrayData;
use arrow_schema::{DataType, UnionMode};
use smallvec::SmallVec;

use crate::data::DeviceArray;
use crate::data::gather::{int, push_int};
use crate::data::host::unwrap;
use crate::data::layout::BufferKind;
use crate::data::node::{Buffers, Node, NodeBuffer, View};
use crate::device::{AddressClass, DevicePtr};
use crate::error::{Error, Result};
use crate::transfer::plan::{Parts, Planner, Scope, is_whole, too_large, unchanged};
use crate::transfer::region::Rewrite;

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
    pub(super) fn runs(
        &mut self,
        of: &DataType,
        parts: &[View<'a>],
        children: &mut Vec<Arc<Node>>,
    ) -> Result<()> {
        let ends_of = parts[0].child(0);
        let width = int_width(&ends_of.node.data_type);
        let mut all = Vec::with_capacity(parts.len());
        for view in parts {
            let ends = view.child(0);
            let buffer = &ends.node.buffers[1];
            let bytes = match view.length == 0 || buffer.is_null() {
                true => 0,
                false => ends.length * width,
            };
            all.extend(self.read(buffer.address().offset(ends.offset * width), bytes, false));
        }
        if all.len() < parts.len() {
            return Ok(());
        }
        let (mut cut, mut values, mut rows) = (Vec::new(), Parts::new(), 0i64);
        for (view, bytes) in parts.iter().zip(all) {
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
        if parts.len() > 1 {
            let most = u64::MAX >> (65 - 8 * width);
            let instead = "concatenate fewer arrays, or cast them to wider run ends";
            self.check_most(ends_of, rows as usize, most, "rows", instead)?;
        }
        let (n, cut) = (cut.len() / width, self.known(cut));
        let buffers = [NodeBuffer::absent(), self.buffer(self.to_device, [cut])?];
        children.push(Arc::new(Node {
            padded: true,
            ..Node::new(
                ends_of.node.data_type.clone(),
                n,
                buffers.into_iter().collect(),
                Vec::new(),
            )
        }));
        children.push(self.child(of, 1, &values)?);
        Ok(())
    }

    /// Adds the keys of a dictionary array, and its values.
    pub(super) fn dictionary(
        &mut self,
        of: &DataType,
        parts: &[View<'a>],
        buffers: &mut Buffers,
        children: &mut Vec<Arc<Node>>,
    ) -> Result<()> {
        let values = self.kept(parts, true, |view| view.child(0))?;
        if let (DataType::Dictionary(key, _), 2..) = (&parts[0].node.data_type, values.rows.len()) {
            let bits = 8 * int_width(key) - usize::from(key.is_signed_integer());
            let most = (u64::MAX >> (64 - bits)).saturating_add(1);
            let instead = "give the arrays one dictionary, or cast them to wider keys";
            self.check_most(parts[0], values.n, most, "dictionary values", instead)?;
        }
        buffers.push(self.values(parts, 1, |k| later(parts, 1, values.starts[k]))?);
        children.push(self.child(of, 0, &values.rows)?);
        Ok(())
    }

    /// Adds the buffers of a list view or a dense union, and the children.
    pub(super) fn anywhere(
        &mut self,
        of: &DataType,
        parts: &[View<'a>],
        buffers: &mut Buffers,
        children: &mut Vec<Arc<Node>>,
    ) -> Result<()> {
        let data_type = &parts[0].node.data_type;
        let none = parts[0].length == 0 && self.scope != Scope::Reachable;
        let mut all = Vec::new();
        for i in 0..parts[0].layout().n_children() {
            let kept = self.kept(parts, false, |view| match none {
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
            buffers.push(self.values(parts, 0, |_| Rewrite::None)?);
            match all.iter().all(|kept| kept.rows.len() == 1) {
                true => buffers.push(self.values(parts, 1, |_| Rewrite::None)?),
                false => {
                    let starts = |k: usize| {
                        let mut starts = [0; 256];
                        for ((id, _), kept) in fields.iter().zip(&all) {
                            starts[usize::from(id as u8)] = kept.starts[k] as i32;
                        }
                        starts
                    };
                    buffers.push(self.union_offsets(parts, starts)?);
                }
            }
        } else {
            buffers.push(self.values(parts, 1, |k| later(parts, 1, all[0].starts[k]))?);
            buffers.push(self.values(parts, 2, |_| Rewrite::None)?);
        }
        for (i, kept) in all.iter().enumerate() {
            children.push(self.child(of, i, &kept.rows)?);
        }
        Ok(())
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
            let ids = self.read(at(0, 1), view.length, false);
            let offsets = self.read(at(1, 4), view.length * 4, false);
            let (starts, offsets) = (starts(k), offsets.unwrap_or_default().chunks_exact(4));
            for (id, offset) in ids.unwrap_or_default().iter().zip(offsets) {
                let start = starts[usize::from(*id)];
                moved.extend((int(offset, 4) as i32).wrapping_add(start).to_ne_bytes());
            }
        }
        let moved = self.known(moved);
        self.buffer(self.to_device, [moved])
    }

    /// Adds the views, and the data buffers: those that the rows refer to if the host can read the views, otherwise all.
    pub(super) fn views(&mut self, parts: &[View<'a>], buffers: &mut Buffers) -> Result<()> {
        let mut known = true;
        for view in parts {
            known &= self.know_sizes(*view)?;
        }
        if !known {
            return Ok(());
        }
        let (data, tables) = data_buffers(parts);
        let mut used = vec![!self.readable; data.len()];
        if self.readable {
            for (view, table) in parts.iter().zip(&tables) {
                let views = view.node.buffers[1].address().offset(view.offset * 16);
                let bytes = if table.is_empty() {
                    0
                } else {
                    view.length * 16
                };
                let views = self.read(views, bytes, false);
                mark(views.unwrap_or_default(), table, &mut used);
            }
        }
        let first = self.tables.len();
        let same = |table: &[u32]| table.iter().enumerate().all(|(i, to)| *to == i as u32);
        let views = self.values(parts, 1, |k| match same(&tables[k]) {
            true => Rewrite::None,
            false => Rewrite::Views((first + k) as u32),
        })?;
        buffers.push(views);
        let one = parts.len() == 1;
        for ((view, buffer), used) in data.into_iter().zip(used) {
            let bytes = buffer.bytes().unwrap_or(0);
            let region = unchanged(buffer, 0, bytes, one && is_whole(view));
            let wanted = used && view.length > 0;
            buffers.push(self.buffer(self.to_device, wanted.then_some(region))?);
        }
        self.tables.extend(tables);
        // Their sizes.
        buffers.push(self.buffer(self.to_device, [])?);
        Ok(())
    }

    /// Reads the sizes of a view array's data buffers that are not known yet. Returns whether they are known now.
    fn know_sizes(&mut self, view: View<'a>) -> Result<bool> {
        let data = data_of(view);
        let sizes = view.node.buffers.last();
        let Some(sizes) = sizes.filter(|_| data.iter().any(|data| data.bytes().is_none())) else {
            return Ok(true);
        };
        let (at, bytes) = (sizes.address(), data.len() * 8);
        let class = self.device().backend().classify(at, bytes).class;
        let Some(sizes) = self.read(at, bytes, class == AddressClass::Host) else {
            return Ok(false);
        };
        for (i, size) in sizes.chunks_exact(8).enumerate() {
            self.keep_size(view, 2 + i, int(size, 8))?;
        }
        Ok(true)
    }

    /// What the parts refer to, each to the rows that `of` says. The same rows of the same memory are kept once, and with `merges` and
    /// where the host can read them, values that are equal to those before.
    fn kept(
        &self,
        parts: &[View<'a>],
        merges: bool,
        of: impl Fn(View<'a>) -> View<'a>,
    ) -> Result<Kept<'a>> {
        let mut kept = Kept {
            rows: Parts::new(),
            starts: SmallVec::new(),
            n: 0,
        };
        if let [one] = parts {
            kept.rows.push(of(*one));
            kept.starts.push(0);
            kept.n = kept.rows[0].length;
            return Ok(kept);
        }
        #[allow(clippy::mutable_key_type, reason = "rows and addresses do not change")]
        let mut seen = HashMap::new();
        // The values that were kept last, and where they start.
        let mut last: Option<(ArrayData, usize)> = None;
        for view in parts.iter().map(|view| of(*view)) {
            let start = match seen.entry(Same(view)) {
                Entry::Occupied(seen) => *seen.get(),
                Entry::Vacant(new) => {
                    let values = match merges && self.readable && view.node.children.is_empty() {
                        true => unwrap(&DeviceArray::from_view(self.device().clone(), view)).ok(),
                        false => None,
                    };
                    match (values, &last) {
                        (Some(values), Some((before, start))) if values == *before => {
                            *new.insert(*start)
                        }
                        (values, _) => {
                            last = values.map(|values| (values, kept.n));
                            let start = *new.insert(kept.n);
                            kept.n = kept.n.checked_add(view.length).ok_or_else(too_large)?;
                            kept.rows.push(view);
                            start
                        }
                    }
                }
            };
            kept.starts.push(start);
        }
        Ok(kept)
    }
}

/// Adds a number to each value of buffer `i`.
fn later(parts: &[View<'_>], i: usize, start: usize) -> Rewrite {
    match (start, parts[0].layout().buffers().get(i)) {
        (1.., Some(BufferKind::Fixed { width, .. })) => Rewrite::Add {
            width: *width as u8,
            n: start as i64,
        },
        _ => Rewrite::None,
    }
}

/// The bytes of an integer of the type, which is that of keys or run ends.
fn int_width(data_type: &DataType) -> usize {
    data_type.primitive_width().unwrap_or(8)
}

/// The data buffers of a view array.
fn data_of(view: View<'_>) -> &[NodeBuffer] {
    match &view.node.buffers[..] {
        [_, _, data @ .., _] => data,
        _ => &[],
    }
}

/// The data buffers that the result of some view arrays has, and for each array which of them its own become. One keeps its own.
fn data_buffers<'a>(parts: &[View<'a>]) -> (Vec<(View<'a>, &'a NodeBuffer)>, Vec<Vec<u32>>) {
    let (mut buffers, mut tables) = (Vec::new(), Vec::new());
    let mut seen: HashMap<DevicePtr, u32> = HashMap::new();
    for (k, view) in parts.iter().enumerate() {
        let own = data_of(*view).iter().map(|buffer| {
            let next = buffers.len() as u32;
            let known = match buffer.is_null() {
                // No view of a later array refers to it.
                true => (k > 0).then_some(0),
                false => Some(*seen.entry(buffer.address()).or_insert(next)),
            };
            match known {
                Some(index) if k > 0 && index != next => index,
                _ => {
                    buffers.push((*view, buffer));
                    next
                }
            }
        });
        tables.push(own.collect());
    }
    (buffers, tables)
}

/// Marks which of the result's data buffers views refer to, those of null rows included.
fn mark(views: &[u8], table: &[u32], used: &mut [bool]) {
    for view in views.chunks_exact(16) {
        // The first 32 bits are the length; if it is more than 12, the third are the buffer's index.
        let word = |at: usize| int(&view[at..], 4) as u32;
        if word(0) > 12 {
            let index = table.get(word(8) as usize);
            if let Some(used) = index.and_then(|index| used.get_mut(*index as usize)) {
                *used = true;
            }
        }
    }
}

/// Rows that are the same if they are those of the same memory.
struct Same<'a>(View<'a>);

impl Same<'_> {
    fn rows(&self) -> (usize, usize, usize) {
        (self.0.offset, self.0.length, self.0.validity_offset)
    }

    fn addresses(&self) -> impl Iterator<Item = DevicePtr> {
        self.0.node.buffers.iter().map(NodeBuffer::address)
    }

    fn children(&self) -> impl Iterator<Item = Same<'_>> {
        self.0
            .node
            .children
            .iter()
            .map(|child| Same(View::whole(child)))
    }
}

impl Hash for Same<'_> {
    fn hash<H: Hasher>(&self, to: &mut H) {
        self.rows().hash(to);
        self.addresses().for_each(|address| address.hash(to));
        self.children().for_each(|child| child.hash(to));
    }
}

impl PartialEq for Same<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.rows() == other.rows()
            && self.addresses().eq(other.addresses())
            && self.children().eq(other.children())
    }
}

impl Eq for Same<'_> {}

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
