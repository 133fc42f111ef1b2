//! What cuDF requires of a batch beyond the C device data interface.
//!
//! Sources: cuDF's `from_arrow_device`, its issues, and other producers that had to meet these
//! rules.

use std::fmt::Write;

use arrow_schema::DataType;

use crate::abi::ArrowDeviceType;
use crate::data::DeviceRecordBatch;
use crate::data::layout::{BufferKind, Nesting};
use crate::data::parts::part;
use crate::data::tree::{Tree, View};
use crate::error::Error;

/// Reports what cuDF would reject in an export of this batch: one [`Error::InvalidInput`] for each
/// rule and place, with the path of the place (`array.children[2].buffers[1]`; the batch is
/// `array`, its columns are `children`), the rule, and what to do. Returns an empty list if cuDF
/// accepts the batch.
///
/// Nothing is read, copied or waited for. The batch may be on any device; that it is on another one
/// than CUDA is reported too (rule 1).
///
/// | rule | what cuDF requires | otherwise |
/// | --- | --- | --- |
/// | 1 | memory of the device types CUDA, CUDA_HOST, CUDA_MANAGED | [`to_device`](DeviceRecordBatch::to_device) |
/// | 2 | known null counts: it takes -1 for "no nulls" | `compact()`; exports count too, except with [`AllowUnknown`](crate::NullCounts::AllowUnknown) |
/// | 3 | validity bitmaps and boolean values aligned to 4 bytes, in memory padded to 64 bytes with zeros; values and offsets aligned to their size (16 bytes for `Decimal128`) | `compact()` |
/// | 4 | values of every column that has rows | no remedy: the values are missing |
/// | 5 | offsets of every text and list column that has rows, 32 bits wide for lists | cast; no remedy if the offsets are missing |
/// | 6 | signed dictionary keys | cast |
/// | 7 | cuDF 26.08 or later for `Utf8View` | cast, for an older one |
/// | types | null, boolean, integers, `Float32`, `Float64`, `Date32`, timestamps, durations, `Utf8`, `LargeUtf8`, `List`, `Struct`, dictionaries, `Decimal32`, `Decimal64`, `Decimal128`, at any depth | cast if the text says so; otherwise not supported |
/// | lengths | offset + length + 1 of every array fits 32 bits | slices of fewer rows, then `compact()` |
///
/// - Padding (3) is a property of the memory, not of the rows: transfers, [`compact`] and slices of
///   their results have it. Whether other memory has it (foreign memory, a kernel's, parts of
///   buffers) is not known, and it is reported although it may be fine. The bitmap may have more
///   rows than a slice: cuDF respects offset and length.
/// - A bitmap that an export [has to copy](crate::DeviceArray::export) is not reported: the copy
///   complies with the rules.
/// - Imports and constructors already make sure that known null counts are correct (2), and that
///   there is a validity bitmap if they say that there are nulls.
/// - Exports always have offset 0 and no validity bitmap at the root, columns of one length, zeros
///   in `reserved`, and an event that was recorded.
/// - Arrays without rows, and null arrays, may lack all buffers.
/// - Not reported: dictionaries whose values are not sorted need cuDF 26.04, and those with
///   repeated values 26.10.
///
/// [`compact`]: DeviceRecordBatch::compact
///
/// ```
/// # use arrow_array::record_batch;
/// # use arrow_device::{Devices, check_for_cudf};
/// let batch = record_batch!(("id", Int64, [1, 2, 3]))?;
/// let batch = Devices::cpu().upload(&batch)?;
/// let problems = check_for_cudf(&batch);
/// assert_eq!(problems.len(), 1); // it is on the CPU
/// println!("{}", problems[0]);
/// # Ok::<(), arrow_device::Error>(())
/// ```
pub fn check_for_cudf(batch: &DeviceRecordBatch) -> Vec<Error> {
    let array = batch.as_struct();
    let mut check = Check {
        tree: array.tree(),
        path: "array".into(),
        problems: Vec::new(),
    };
    let id = batch.device().id();
    let taken = [
        ArrowDeviceType::CUDA,
        ArrowDeviceType::CUDA_HOST,
        ArrowDeviceType::CUDA_MANAGED,
    ];
    if !taken.contains(&id.device_type) {
        let message = format!("the memory is of {id}, not of CUDA; to_device copies it there");
        check.report("rule 1", ".device_type", message);
    }
    check.length(View {
        offset: 0,
        ..array.view()
    });
    check.children(array.view(), true);
    check.problems
}

const COMPACT: &str = "compact() fixes it";

struct Check<'a> {
    tree: &'a Tree,
    /// The path of the array that is checked.
    path: String,
    problems: Vec<Error>,
}

impl Check<'_> {
    fn report(&mut self, rule: &str, member: &str, message: impl std::fmt::Display) {
        let path = format!("{}{member}", self.path);
        let message = format!("cuDF, {rule}: {message}");
        self.problems.push(Error::invalid(path, message));
    }

    /// Checks the children as they are in the C struct.
    fn children(&mut self, view: View, batch_root: bool) {
        let dictionary = self.tree.layout(view.node).nesting == Nesting::Dictionary;
        for i in 0..self.tree.nodes[view.node].n_children as usize {
            let parent = self.path.len();
            // Writing to a `String` does not fail.
            let _ = if dictionary {
                write!(self.path, ".dictionary")
            } else {
                write!(self.path, ".children[{i}]")
            };
            self.node(part(self.tree, view, i, batch_root));
            self.path.truncate(parent);
        }
    }

    fn node(&mut self, view: View) {
        let tree = self.tree;
        let data_type = tree.data_type(view.node);
        match refusal(data_type) {
            // Its buffers do not matter then, but its children's types do.
            Some((rule, remedy)) => self.report(rule, "", format!("{data_type}: {remedy}")),
            None => {
                self.length(view);
                if view.length > 0 {
                    self.null_count(view);
                    self.buffers(view);
                }
                if matches!(data_type, DataType::Utf8View) {
                    let message = "Utf8View needs cuDF 26.08 or later; cast to Utf8 for others";
                    self.report("rule 7", "", message);
                }
            }
        }
        self.children(view, false);
    }

    fn length(&mut self, view: View) {
        let rows = view.offset.checked_add(view.length);
        let end = rows.and_then(|n| n.checked_add(1));
        if end.is_none_or(|n| i32::try_from(n).is_err()) {
            let message = format!(
                "offset {} and length {} do not fit 32 bits; slice it, then compact()",
                view.offset, view.length
            );
            self.report("lengths", ".length", message);
        }
    }

    fn null_count(&mut self, view: View) {
        if self.tree.null_count(view).is_none() {
            let message = "is not known, and -1 means no nulls; compact() or resolve_null_counts() \
                           counts, and so does an export";
            self.report("rule 2", ".null_count", message);
        }
    }

    fn buffers(&mut self, view: View) {
        let tree = self.tree;
        let padded = tree.nodes[view.node].padded;
        let layout = tree.layout(view.node);
        for (i, (kind, slot)) in layout
            .buffers()
            .iter()
            .zip(tree.slots(view.node))
            .enumerate()
        {
            let member = format!(".buffers[{i}]");
            if slot.is_null() {
                let rows = view.length;
                match kind {
                    BufferKind::Validity | BufferKind::Bytes => {}
                    BufferKind::Fixed { .. } | BufferKind::Bits => {
                        self.report("rule 4", &member, format!("no values for {rows} rows"));
                    }
                    BufferKind::Offsets { .. } => {
                        self.report("rule 5", &member, format!("no offsets for {rows} rows"));
                    }
                }
                continue;
            }
            // Bits are read as 32-bit words.
            let bits = matches!(kind, BufferKind::Validity | BufferKind::Bits);
            let align = if bits { 4 } else { kind.align() };
            // An export states the address of the bit that the values' offset says, or writes
            // another bitmap.
            let shift = match kind {
                BufferKind::Validity => view.bitmap_shift(),
                _ => Some(0),
            };
            let Some(shift) = shift else { continue };
            let address = slot.address().offset(shift);
            if address.address() % align != 0 {
                let message = format!("{address:?} is not aligned to {align} bytes; {COMPACT}");
                self.report("rule 3", &member, message);
            } else if bits && !padded {
                let message = format!("not known to be padded to 64 bytes with zeros; {COMPACT}");
                self.report("rule 3", &member, message);
            }
        }
    }
}

/// Returns the rule by which cuDF rejects a type, and what to do. Types of children are not looked
/// at.
fn refusal(data_type: &DataType) -> Option<(&'static str, &'static str)> {
    use DataType as T;
    let remedy = match data_type {
        T::Null
        | T::Boolean
        | T::Int8
        | T::Int16
        | T::Int32
        | T::Int64
        | T::UInt8
        | T::UInt16
        | T::UInt32
        | T::UInt64
        | T::Float32
        | T::Float64
        | T::Date32
        | T::Timestamp(_, _)
        | T::Duration(_)
        | T::Utf8
        | T::LargeUtf8
        | T::Utf8View
        | T::List(_)
        | T::Struct(_)
        | T::Decimal32(_, _)
        | T::Decimal64(_, _)
        | T::Decimal128(_, _) => return None,
        T::Dictionary(key, _) if key.is_signed_integer() => return None,
        T::Dictionary(_, _) => {
            return Some(("rule 6", "keys are unsigned; cast them to signed integers"));
        }
        T::LargeList(_) => return Some(("rule 5", "offsets are 64 bits wide; cast to List")),
        T::ListView(_) | T::LargeListView(_) => "cast to List",
        T::FixedSizeList(_, _) => {
            "cuDF 26.10 and later take it as a view, pylibcudf does not; cast to List for others"
        }
        T::Date64 => "cast to a timestamp in milliseconds",
        T::Time32(_) | T::Time64(_) => "cast to an integer or a duration",
        T::Float16 => "cast to Float32",
        T::Decimal256(_, _) => "cast to Decimal128 if the values fit",
        T::RunEndEncoded(_, _) => "cast to the type of its values",
        T::Binary
        | T::LargeBinary
        | T::BinaryView
        | T::FixedSizeBinary(_)
        | T::Map(_, _)
        | T::Union(_, _)
        | T::Interval(_) => "not supported by cuDF",
    };
    Some(("types", remedy))
}
