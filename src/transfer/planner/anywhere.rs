//! Plans what rows refer to anywhere: dictionaries, the children of list views and dense unions, the data buffers of view arrays.
//! What several arrays share is kept once.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hash, Hasher};

use arrow_schema::{DataType, UnionMode};

use crate::data::node::View;
use crate::device::{AddressClass, DevicePtr};
use crate::error::Result;
use crate::transfer::fix::Fix;
use crate::transfer::plan::too_large;
use crate::transfer::planner::{
    Extent, Need, Parts, Planner, int_width, is_whole, region_of, request,
};

impl<'a> Planner<'a> {
    /// Adds the views, and the variadic buffers: those that the rows refer to if the host can read the views, otherwise all.
    pub(super) fn views(&mut self, node: usize, parts: Parts<'a>) -> Result<()> {
        let unknown = |view: &View<'_>| data_of(*view).iter().any(|data| data.bytes().is_none());
        if parts.iter().any(|view| unknown(&view)) {
            let backend = self.device.backend();
            let requests = parts.iter().map(|view| {
                let sizes = view.node.buffers.last().filter(|_| unknown(&view));
                let at = sizes.map_or(DevicePtr::NULL, |sizes| sizes.address());
                let mut sizes = request(at, sizes.map_or(0, |_| data_of(view).len() * 8));
                let class = (sizes.bytes > 0).then(|| backend.classify(at, sizes.bytes).class);
                sizes.on_host = class == Some(AddressClass::Host);
                sizes
            });
            let requests = requests.collect();
            self.wait_for(node, parts, Need::Sizes, requests);
            return Ok(());
        }
        let (buffers, tables) = data_buffers(&parts);
        let mut used = vec![!self.readable; buffers.len()];
        if self.readable {
            for (view, table) in parts.iter().zip(&tables) {
                // SAFETY: the host can read the views (`readable`), which are ready (`plan_with` waited); that there are
                // `offset + length` of them was checked when the array was made.
                unsafe { mark(view, table, &mut used) };
            }
        }
        let first = self.plan.made.tables.len();
        let same = |table: &[u32]| table.iter().enumerate().all(|(i, to)| *to == i as u32);
        let fix = |k: usize| match same(&tables[k]) {
            true => Fix::None,
            false => Fix::Views((first + k) as u32),
        };
        self.values(node, &parts, 1, fix)?;
        let one = parts.is_one();
        for (i, (view, data)) in buffers.into_iter().enumerate() {
            let buffer = &data_of(view)[data];
            let bytes = buffer.bytes().unwrap_or(0);
            let wanted = used[i] && view.length > 0;
            let region = region_of(buffer, 0, bytes).whole(one && is_whole(view));
            self.plan
                .fill(node, 2 + i, self.nothing, wanted.then_some(region));
        }
        self.plan.made.tables.extend(tables);
        // Their sizes.
        let sizes = self.plan.n_buffers(node) - 1;
        self.plan.fill(node, sizes, self.nothing, []);
        Ok(())
    }

    /// Adds the keys of a dictionary array, and its values. A dictionary that several parts share is kept once.
    pub(super) fn dictionary(&mut self, node: usize, parts: &Parts<'a>) -> Result<()> {
        let (values, starts, n) = distinct(&parts.map(|view| view.child(0)))?;
        if let (DataType::Dictionary(key, _), false) =
            (&parts.first.node.data_type, values.is_one())
        {
            let bits = 8 * int_width(key) - usize::from(key.is_signed_integer());
            let most = (u64::MAX >> (64 - bits)).saturating_add(1);
            let instead = "give the arrays one dictionary, or cast them to wider keys";
            self.check_most(parts.first, n, most, "dictionary values", instead)?;
        }
        self.values(node, parts, 1, |k| from(parts, 1, starts[k]))?;
        self.plan.begin_children(node, 1);
        self.node(values, None)
    }

    /// Adds the buffers of a list view or a dense union, and the children. A child that several parts share is kept once.
    pub(super) fn anywhere(&mut self, node: usize, parts: &Parts<'a>) -> Result<()> {
        let data_type = &parts.first.node.data_type;
        let n = parts.first.layout().n_children();
        let (mut children, mut starts) = (Vec::with_capacity(n), Vec::with_capacity(n));
        for i in 0..n {
            let none = parts.first.length == 0 && self.extent != Extent::Reachable;
            let all = parts.map(|view| match none {
                true => view.child(i).slice(0, 0),
                false => view.child(i),
            });
            let (distinct, of_parts, rows) = distinct(&all)?;
            if !distinct.is_one() && !matches!(data_type, DataType::LargeListView(_)) {
                let what = format!("rows in child {i}");
                let instead = "concatenate fewer arrays";
                self.check_most(parts.first, rows, i32::MAX as u64, &what, instead)?;
            }
            children.push(distinct);
            starts.push(of_parts);
        }
        if let DataType::Union(fields, UnionMode::Dense) = data_type {
            let first = self.plan.made.tables.len();
            let fix = |k: usize| {
                let view = parts.iter().nth(k).unwrap_or(parts.first);
                let ids = view.node.buffers[0].address().offset(view.offset);
                match starts.iter().all(|starts| starts[k] == 0) {
                    true => Fix::None,
                    false => Fix::Union {
                        ids,
                        starts: (first + k) as u32,
                    },
                }
            };
            self.values(node, parts, 0, |_| Fix::None)?;
            self.values(node, parts, 1, fix)?;
            let table = |k: usize| {
                let mut table = vec![0; 128];
                for ((id, _), starts) in fields.iter().zip(&starts) {
                    let id = usize::try_from(id).ok();
                    if let Some(start) = id.and_then(|id| table.get_mut(id)) {
                        *start = starts[k] as u32;
                    }
                }
                table
            };
            self.plan
                .made
                .tables
                .extend((0..1 + parts.more.len()).map(table));
        } else {
            self.values(node, parts, 1, |k| from(parts, 1, starts[0][k]))?;
            self.values(node, parts, 2, |_| Fix::None)?;
        }
        self.plan.begin_children(node, children.len());
        for child in children {
            self.node(child, None)?;
        }
        Ok(())
    }
}

/// Adds a number to each value of buffer `i`.
fn from(parts: &Parts<'_>, i: usize, start: usize) -> Fix {
    use crate::data::layout::BufferKind;
    match (start, parts.first.layout().buffers().get(i)) {
        (1.., Some(BufferKind::Fixed { width, .. })) => Fix::Offsets {
            width: *width as u8,
            base: -(start as i64),
        },
        _ => Fix::None,
    }
}

/// The data buffers of a view array.
fn data_of(view: View<'_>) -> &[crate::data::node::NodeBuffer] {
    match &view.node.buffers[..] {
        [_, _, data @ .., _] => data,
        _ => &[],
    }
}

/// The data buffers that the result of some view arrays has, and for each array which of them its own become. One keeps its own.
pub(super) fn data_buffers<'a>(parts: &Parts<'a>) -> (Vec<(View<'a>, usize)>, Vec<Vec<u32>>) {
    let (mut buffers, mut tables) = (Vec::new(), Vec::new());
    let mut seen: HashMap<DevicePtr, u32> = HashMap::new();
    for (k, view) in parts.iter().enumerate() {
        let own = data_of(view).iter().enumerate().map(|(i, buffer)| {
            let next = buffers.len() as u32;
            let known = match buffer.is_null() {
                // No view of a later array refers to it.
                true => (k > 0).then_some(0),
                false => Some(*seen.entry(buffer.address()).or_insert(next)),
            };
            match known {
                Some(index) if k > 0 && index != next => index,
                _ => {
                    buffers.push((view, i));
                    next
                }
            }
        });
        tables.push(own.collect());
    }
    (buffers, tables)
}

/// Marks which of the result's data buffers the rows of an array refer to, null rows included.
///
/// # Safety
/// The host can read the array's views, which are ready.
unsafe fn mark(view: View<'_>, table: &[u32], used: &mut [bool]) {
    let views = &view.node.buffers[1];
    if table.is_empty() || views.is_null() {
        return;
    }
    let first = views.address().as_ptr().cast::<u128>().cast_const();
    for row in view.offset..view.offset + view.length {
        // SAFETY: the caller guarantees readable views, of which there are `offset + length`, and `row` is one of them.
        let value = unsafe { first.add(row).read_unaligned() };
        // The low 32 bits are the length; if it is more than 12, bits 64 to 95 are the buffer's index.
        if value as u32 > 12 {
            let index = table.get((value >> 64) as u32 as usize);
            if let Some(used) = index.and_then(|index| used.get_mut(*index as usize)) {
                *used = true;
            }
        }
    }
}

/// The parts that are not the same memory as an earlier one; for each part the rows before it among those, and the
/// rows of all of them.
fn distinct<'a>(parts: &Parts<'a>) -> Result<(Parts<'a>, Vec<usize>, usize)> {
    if parts.is_one() {
        return Ok((parts.clone(), vec![0], parts.first.length));
    }
    let mut kept: Vec<(View<'a>, usize)> = Vec::new();
    let mut starts = Vec::with_capacity(1 + parts.more.len());
    let mut seen: HashMap<u64, Vec<usize>> = HashMap::new();
    let hasher = seen.hasher().clone();
    let mut rows = 0usize;
    for view in parts.iter() {
        let mut hash = hasher.build_hasher();
        places(view, &mut hash);
        let alike = seen.entry(hash.finish()).or_default();
        let same = alike.iter().find(|i| is_same(kept[**i].0, view));
        starts.push(match same {
            Some(i) => kept[*i].1,
            None => {
                alike.push(kept.len());
                kept.push((view, rows));
                let start = rows;
                rows = rows.checked_add(view.length).ok_or_else(too_large)?;
                start
            }
        });
    }
    let kept = Parts::of(kept.into_iter().map(|(view, _)| view));
    Ok((kept.unwrap_or_else(|| parts.clone()), starts, rows))
}

/// Hashes what [`is_same`] compares.
fn places(view: View<'_>, to: &mut impl Hasher) {
    (view.offset, view.length, view.validity_offset).hash(to);
    for buffer in &view.node.buffers {
        buffer.address().hash(to);
    }
    for child in &view.node.children {
        places(View::whole(child), to);
    }
}

/// Whether two views are the same rows of the same memory.
fn is_same(a: View<'_>, b: View<'_>) -> bool {
    let rows = |view: View<'_>| (view.offset, view.length, view.validity_offset);
    let (left, right) = (&a.node, &b.node);
    let buffers = left.buffers.iter().zip(&right.buffers);
    let children = left.children.iter().zip(&right.children);
    rows(a) == rows(b)
        && left.buffers.len() == right.buffers.len()
        && buffers.into_iter().all(|(x, y)| x.address() == y.address())
        && children
            .into_iter()
            .all(|(x, y)| is_same(View::whole(x), View::whole(y)))
}
