//! [`Manifest`]: the description of an array or batch in one allocation, in plain bytes.

use std::collections::VecDeque;
use std::sync::OnceLock;

use arrow_device::ArrowDeviceType;
use arrow_ipc::{FieldNode, MessageBuilder, MessageHeader, MetadataVersion, RecordBatchBuilder};
use arrow_schema::{DataType, UnionMode};
use flatbuffers::FlatBufferBuilder;

use crate::error::{Error, Result};

/// Where the parts of an array are. Only lengths and positions: nothing of it is read from the memory.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Manifest {
    pub(crate) device_type: ArrowDeviceType,
    /// Which GPU it is on, or which start of which machine.
    pub(crate) origin: [u8; 16],
    /// Which allocation of the publisher's it is, for people who look for it; 0 if the array has no memory.
    pub(crate) memory: u64,
    /// Bytes of the allocation.
    pub(crate) size: u64,
    /// Whether the memory may be read now; otherwise another message says when, and so does the event, if there is one.
    pub(crate) ready: bool,
    /// A handle of the device's driver.
    pub(crate) event: Option<[u8; 64]>,
    pub(crate) parts: Parts,
}

/// The content of Arrow's IPC message `RecordBatch`, whose buffers lie in the allocation, and where the rows begin in them.
#[derive(Clone, PartialEq, Debug, Default)]
pub(crate) struct Parts {
    pub(crate) rows: i64,
    /// The rows and nulls of each array, parents before children, without those of dictionaries; -1 if the nulls are not known.
    pub(crate) nodes: VecDeque<[i64; 2]>,
    /// The start and length in bytes of each buffer.
    pub(crate) buffers: VecDeque<[i64; 2]>,
    /// The number of data buffers of each array of views.
    pub(crate) variadic: VecDeque<i64>,
    /// The first row of each array in its buffers, and the first bit in its validity bitmap: all 0 for what is not a slice, which is
    /// then as IPC has it.
    pub(crate) starts: VecDeque<[u64; 2]>,
}

const FIXED: usize = 48;
const READY: u32 = 1;
/// A flag, and the bytes of the event at the end.
const EVENT: u32 = 64;

impl Manifest {
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let header = self.parts.to_message();
        let mut bytes = Vec::with_capacity(FIXED + header.len() + self.parts.starts.len() * 16);
        bytes.extend(self.device_type.value().to_le_bytes());
        let event = self.event.map_or(0, |_| EVENT);
        bytes.extend((u32::from(self.ready) | event).to_le_bytes());
        bytes.extend(self.origin);
        bytes.extend(self.memory.to_le_bytes());
        bytes.extend(self.size.to_le_bytes());
        bytes.extend((header.len() as u64).to_le_bytes());
        bytes.extend(header);
        for start in self.parts.starts.iter().flatten() {
            bytes.extend(start.to_le_bytes());
        }
        bytes.extend(self.event.iter().flatten());
        bytes
    }

    /// # Errors
    /// Returns [`Error::Protocol`] for bytes that are no manifest.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let short = || Error::protocol("a manifest is cut short");
        let (fixed, rest) = bytes.split_first_chunk::<FIXED>().ok_or_else(short)?;
        let read = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().unwrap_or([0; 8]));
        let number = |at: usize| read(&fixed[at..at + 8]);
        let flags = (number(0) >> 32) as u32;
        if flags & !(READY | EVENT) != 0 {
            return Error::broken("a manifest has unknown flags");
        }
        let header = usize::try_from(number(40)).map_err(|_| short())?;
        let (header, starts) = rest.split_at_checked(header).ok_or_else(short)?;
        let mut parts = Parts::from_message(header)?;
        let starts = starts.split_at_checked(parts.nodes.len() * 16);
        let (starts, event) = starts.ok_or_else(short)?;
        if event.len() != (flags & EVENT) as usize {
            return Error::broken("a manifest has another length than it says");
        }
        let both = |both: &[u8]| [read(&both[..8]), read(&both[8..])];
        parts.starts = starts.chunks_exact(16).map(both).collect();
        Ok(Self {
            device_type: ArrowDeviceType::new(number(0) as i32),
            origin: fixed[8..24].try_into().unwrap_or([0; 16]),
            memory: number(24),
            size: number(32),
            ready: flags & READY != 0,
            event: event.try_into().ok(),
            parts,
        })
    }
}

impl Parts {
    fn to_message(&self) -> Vec<u8> {
        let mut builder = FlatBufferBuilder::new();
        let node = |[rows, nulls]: &[i64; 2]| FieldNode::new(*rows, *nulls);
        let nodes = builder.create_vector_from_iter(self.nodes.iter().map(node));
        let buffer = |[start, bytes]: &[i64; 2]| arrow_ipc::Buffer::new(*start, *bytes);
        let buffers = builder.create_vector_from_iter(self.buffers.iter().map(buffer));
        let variadic = builder.create_vector_from_iter(self.variadic.iter());
        let mut batch = RecordBatchBuilder::new(&mut builder);
        batch.add_length(self.rows);
        batch.add_nodes(nodes);
        batch.add_buffers(buffers);
        batch.add_variadicBufferCounts(variadic);
        let batch = batch.finish().as_union_value();
        message(builder, MessageHeader::RecordBatch, batch)
    }

    fn from_message(bytes: &[u8]) -> Result<Self> {
        let message = arrow_ipc::root_as_message(bytes);
        let message = message.map_err(|e| Error::protocol(format!("a manifest: {e}")))?;
        let batch = message.header_as_record_batch();
        let batch = batch.ok_or_else(|| Error::protocol("a manifest describes no batch"))?;
        if batch.compression().is_some() {
            return Error::broken("a manifest describes compressed buffers");
        }
        let node = |node: &FieldNode| [node.length(), node.null_count()];
        let nodes = batch.nodes().into_iter().flatten();
        let buffers = batch.buffers().into_iter().flatten();
        Ok(Self {
            rows: batch.length(),
            nodes: nodes.map(node).collect(),
            buffers: buffers.map(|of| [of.offset(), of.length()]).collect(),
            variadic: batch.variadicBufferCounts().into_iter().flatten().collect(),
            starts: VecDeque::new(),
        })
    }
}

/// Returns an IPC message with this header.
pub(crate) fn message(
    mut builder: FlatBufferBuilder<'_>,
    of: MessageHeader,
    header: flatbuffers::WIPOffset<flatbuffers::UnionWIPOffset>,
) -> Vec<u8> {
    let mut message = MessageBuilder::new(&mut builder);
    message.add_version(MetadataVersion::V5);
    message.add_header_type(of);
    message.add_header(header);
    let message = message.finish();
    builder.finish(message, None);
    builder.finished_data().to_vec()
}

/// A dictionary of a schema. Both sides number them in the same order, those inside a dictionary's values before it.
#[derive(Clone, Debug)]
pub(crate) struct Slot {
    pub(crate) values: DataType,
    /// The first of the dictionaries inside the values.
    pub(crate) first: usize,
}

/// Returns the dictionaries of a type.
pub(crate) fn slots(data_type: &DataType, into: &mut Vec<Slot>) {
    match data_type {
        DataType::Dictionary(_, values) => {
            let first = into.len();
            slots(values, into);
            let values = values.as_ref().clone();
            into.push(Slot { values, first });
        }
        other => children(other).for_each(|child| slots(child, into)),
    }
}

/// Returns the types of an array's children, except the values of a dictionary.
pub(crate) fn children(data_type: &DataType) -> Box<dyn Iterator<Item = &DataType> + '_> {
    use DataType as T;
    match data_type {
        T::List(field)
        | T::LargeList(field)
        | T::ListView(field)
        | T::LargeListView(field)
        | T::FixedSizeList(field, _)
        | T::Map(field, _) => Box::new([field.data_type()].into_iter()),
        T::Struct(fields) => Box::new(fields.iter().map(|field| field.data_type())),
        T::Union(fields, _) => Box::new(fields.iter().map(|(_, field)| field.data_type())),
        T::RunEndEncoded(ends, values) => {
            Box::new([ends.data_type(), values.data_type()].into_iter())
        }
        _ => Box::new(std::iter::empty()),
    }
}

/// Returns whether an array's children have exactly its rows, or a fixed number for each, so that no array of the type has a first row
/// other than 0.
pub(crate) fn is_cut(data_type: &DataType) -> bool {
    use DataType as T;
    matches!(
        data_type,
        T::Struct(_) | T::Union(_, UnionMode::Sparse) | T::FixedSizeList(_, _)
    )
}

/// Returns what names the machine, and its start.
pub(crate) fn machine() -> [u8; 16] {
    static MACHINE: OnceLock<[u8; 16]> = OnceLock::new();
    *MACHINE.get_or_init(|| {
        let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let digits: String = id.chars().filter(char::is_ascii_hexdigit).collect();
        u128::from_str_radix(&digits, 16).unwrap_or(0).to_be_bytes()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_and_back() {
        let parts = Parts {
            rows: 3,
            nodes: [[3, -1], [2, 1]].into(),
            buffers: [[0, 64], [64, 12], [128, 0]].into(),
            variadic: [2].into(),
            starts: [[0, 0], [5, 13]].into(),
        };
        let manifest = Manifest {
            device_type: ArrowDeviceType::EXT_DEV,
            origin: *b"0123456789abcdef",
            memory: 7,
            size: 4096,
            ready: false,
            event: Some([9; 64]),
            parts,
        };
        let bytes = manifest.to_bytes();
        assert_eq!(Manifest::from_bytes(&bytes).unwrap(), manifest);
        for cut in 0..bytes.len() {
            assert!(Manifest::from_bytes(&bytes[..cut]).is_err(), "{cut}");
        }
    }
}
