//! What several arrays may share, and is then kept once: dictionaries, the children of list views and dense unions, the data
//! buffers of view arrays.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hash, Hasher};
use std::sync::Arc;

use arrow_schema::{DataType, UnionMode};

use crate::data::layout::{BufferKind, Layout};
use crate::device::DevicePtr;
use crate::error::Result;
use crate::transfer::concat::merge::{Change, Merger, Part};
use crate::transfer::fix::{Fix, Piece};
use crate::transfer::plan::too_large;

impl<'a> Merger<'a> {
    /// Adds the buffers of a view type. Data buffers that several parts share are kept once.
    pub(super) fn views(&mut self, at: usize, parts: &[Part], length: usize) -> Result<()> {
        self.validity(at, parts, length)?;
        let mut buffers: Vec<Option<Piece>> = Vec::new();
        let mut seen: HashMap<(DevicePtr, usize), u32> = HashMap::new();
        let mut changes = Vec::with_capacity(parts.len());
        for (k, part) in parts.iter().enumerate() {
            let n = self.node_of(*part).regions.len().saturating_sub(3);
            let mut indices = Vec::with_capacity(n);
            for i in 0..n {
                let piece = self.piece(*part, 2 + i);
                let next = buffers.len() as u32;
                let index = match piece {
                    Some(piece) => *seen.entry((piece.src, piece.dst_bytes)).or_insert(next),
                    // The first part keeps its indices.
                    None if k == 0 => next,
                    None => 0,
                };
                // A buffer that the first part has twice keeps both its indices.
                if index == next || k == 0 {
                    buffers.push(piece);
                    indices.push(next);
                } else {
                    indices.push(index);
                }
            }
            let same = |(i, index): (usize, &u32)| {
                *index == i as u32 || self.piece(*part, 2 + i).is_none()
            };
            changes.push(match indices.iter().enumerate().all(same) {
                true => None,
                false => Some(Arc::from(indices)),
            });
        }
        let change = |k: usize| match &changes[k] {
            Some(indices) => Change::Views(Arc::clone(indices)),
            None => Change::None,
        };
        self.values(at, 1, parts, 16, change)?;
        for piece in buffers {
            match piece {
                Some(piece) => {
                    self.straight(piece.src, self.merged.bytes, piece.dst_bytes);
                    self.close(piece.dst_bytes)?;
                }
                None => self.nothing(),
            }
        }
        // Their sizes.
        self.nothing();
        Ok(())
    }

    /// Adds the keys of a dictionary array, and its values. A dictionary that several parts share is kept once.
    pub(super) fn dictionary(
        &mut self,
        at: usize,
        data_type: &'a DataType,
        layout: &Layout,
        parts: &[Part],
        length: usize,
    ) -> Result<()> {
        let (values, starts, n) = self.distinct(&self.children_of(parts, 0))?;
        if let (DataType::Dictionary(key, _), true) = (data_type, values.len() > 1) {
            let bits =
                8 * key.primitive_width().unwrap_or(8) - usize::from(key.is_signed_integer());
            let most = (u64::MAX >> (64 - bits)).saturating_add(1);
            let instead = "give the arrays one dictionary, or cast them to wider keys";
            self.check_most(at, n, most, "dictionary values", instead)?;
        }
        self.validity(at, parts, length)?;
        let width = match layout.buffers().get(1) {
            Some(BufferKind::Fixed { width, .. }) => *width as usize,
            _ => 0,
        };
        self.values(at, 1, parts, width, |k| Change::Add(starts[k]))?;
        self.children(at, data_type, vec![values]);
        Ok(())
    }

    /// Adds the buffers of a list view or a dense union, and the children. A child that several parts share is kept once.
    pub(super) fn anywhere(
        &mut self,
        at: usize,
        data_type: &'a DataType,
        layout: &Layout,
        parts: &[Part],
        length: usize,
    ) -> Result<()> {
        let mut children = Vec::new();
        let mut starts = Vec::new();
        let instead = "concatenate fewer arrays";
        for i in 0..layout.n_children() {
            let (distinct, of_parts, n) = self.distinct(&self.children_of(parts, i))?;
            if distinct.len() > 1 && !matches!(data_type, DataType::LargeListView(_)) {
                let what = format!("rows in child {i}");
                self.check_most(at, n, i32::MAX as u64, &what, instead)?;
            }
            children.push(distinct);
            starts.push(of_parts);
        }
        if let DataType::Union(fields, UnionMode::Dense) = data_type {
            let ids: Vec<_> = fields.iter().map(|(id, _)| id).collect();
            let change = |k: usize| {
                let mut table = [0; 128];
                for (id, starts) in ids.iter().zip(&starts) {
                    if let Some(start) = usize::try_from(*id).ok().and_then(|i| table.get_mut(i)) {
                        *start = starts[k] as i32;
                    }
                }
                match table == [0; 128] {
                    true => Change::None,
                    false => Change::Union(Arc::new(table)),
                }
            };
            self.values(at, 0, parts, 1, |_| Change::None)?;
            self.values(at, 1, parts, 4, change)?;
        } else {
            self.validity(at, parts, length)?;
            let width = match layout.buffers().get(1) {
                Some(BufferKind::Fixed { width, .. }) => *width as usize,
                _ => 0,
            };
            let start = |k: usize| Change::Add(starts.first().map_or(0, |starts| starts[k]));
            self.values(at, 1, parts, width, start)?;
            self.values(at, 2, parts, width, |_| Change::None)?;
        }
        self.children(at, data_type, children);
        Ok(())
    }

    /// The parts that are not the same memory as an earlier one; for each part the rows before it among those, and the
    /// rows of all of them.
    fn distinct(&self, parts: &[Part]) -> Result<(Vec<Part>, Vec<usize>, usize)> {
        let mut kept: Vec<(Part, usize)> = Vec::new();
        let mut starts = Vec::with_capacity(parts.len());
        let mut seen: HashMap<_, Vec<usize>> = HashMap::new();
        let hasher = seen.hasher().clone();
        let mut rows = 0usize;
        for part in parts {
            let node = self.node_of(*part);
            let mut hash = hasher.build_hasher();
            self.hash(*part, &mut hash);
            let alike = seen.entry(hash.finish()).or_default();
            let same = alike.iter().find(|i| self.same(kept[**i].0, *part));
            starts.push(match same {
                Some(i) => kept[*i].1,
                None => {
                    alike.push(kept.len());
                    kept.push((*part, rows));
                    let start = rows;
                    rows = rows.checked_add(node.length).ok_or_else(too_large)?;
                    start
                }
            });
        }
        Ok((
            kept.into_iter().map(|(part, _)| part).collect(),
            starts,
            rows,
        ))
    }

    /// Hashes what [`same`](Self::same) compares: where the bytes are, or the bytes themselves if the host has made them.
    fn hash(&self, part: Part, to: &mut impl Hasher) {
        let node = self.node_of(part);
        node.length.hash(to);
        for piece in (0..node.regions.len()).filter_map(|i| self.piece(part, i)) {
            match self.made(part, piece) {
                Some(bytes) => bytes.hash(to),
                None => piece.src.hash(to),
            }
        }
        (0..node.n_children).for_each(|i| self.hash(self.child(part, i), to));
    }

    /// The bytes that the host has made, if it has.
    fn made(&self, part: Part, piece: Piece) -> Option<&'a [u8]> {
        match piece.fix {
            Fix::Ready(at) => Some(&self.plans[part.plan].ready[at..][..piece.dst_bytes]),
            _ => None,
        }
    }

    /// Whether two nodes have the same rows of the same memory.
    fn same(&self, a: Part, b: Part) -> bool {
        let (left, right) = (self.node_of(a), self.node_of(b));
        if left.length != right.length || left.regions.len() != right.regions.len() {
            return false;
        }
        let same_buffer = |i: usize| match (self.piece(a, i), self.piece(b, i)) {
            (None, None) => true,
            (Some(x), Some(y)) => {
                let fixes = match (x.fix, y.fix) {
                    (Fix::Ready(_), Fix::Ready(_)) => self.made(a, x) == self.made(b, y),
                    (Fix::Bits { skip: x, .. }, Fix::Bits { skip: y, .. }) => x == y,
                    (x, y) => x == y,
                };
                fixes && x.src == y.src && x.dst_bytes == y.dst_bytes
            }
            _ => false,
        };
        (0..left.regions.len()).all(same_buffer)
            && (0..left.n_children).all(|i| self.same(self.child(a, i), self.child(b, i)))
    }
}
