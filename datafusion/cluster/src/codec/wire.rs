//! What travels: one message for each node, after four bytes that no other codec's message begins with.

use datafusion::error::Result;
use datafusion_proto::protobuf::Schema;
use prost::{Message, Oneof};

use super::unreadable;

/// The lowest three bits of the first byte are 7, which no Protocol Buffers message begins with.
const MAGIC: [u8; 3] = [0x97, b'a', b'd'];
const VERSION: u8 = 1;

/// Whether these bytes are a device plan's node, of any version.
pub(super) fn is_ours(bytes: &[u8]) -> bool {
    bytes.starts_with(&MAGIC)
}

/// Appends a message.
pub(super) fn write(message: &impl Message, buf: &mut Vec<u8>) {
    buf.extend(MAGIC);
    buf.push(VERSION);
    buf.extend(message.encode_to_vec());
}

/// Reads a message of this version.
pub(super) fn read<M: Message + Default>(bytes: &[u8]) -> Result<M> {
    let rest = bytes.strip_prefix(&MAGIC);
    match rest.and_then(<[u8]>::split_first) {
        Some((&VERSION, message)) => M::decode(message).map_err(unreadable),
        Some((other, _)) => Err(unreadable(format!(
            "it is of version {other}, and this process reads version {VERSION}; run the same release of arrow-device-cluster on all machines"
        ))),
        None => Err(unreadable("these are not the bytes of one")),
    }
}

/// A table, in a logical plan.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Table {
    #[prost(string, tag = "1")]
    pub(super) name: String,
}

/// A node.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Node {
    #[prost(oneof = "Kind", tags = "1, 2, 3, 4, 5, 6, 7, 8")]
    pub(super) kind: Option<Kind>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(super) enum Kind {
    #[prost(message, tag = "1")]
    ToHost(ToHost),
    #[prost(message, tag = "2")]
    ToDevice(ToDevice),
    #[prost(message, tag = "3")]
    Between(Between),
    #[prost(message, tag = "4")]
    CoalesceBatches(CoalesceBatches),
    #[prost(message, tag = "5")]
    Form(FormOf),
    #[prost(message, tag = "6")]
    Scan(Scan),
    #[prost(message, tag = "7")]
    Insert(Insert),
    #[prost(message, tag = "8")]
    Operator(Operator),
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Device {
    #[prost(int32, tag = "1")]
    pub(super) device_type: i32,
    #[prost(int64, optional, tag = "2")]
    pub(super) id: Option<i64>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct ToHost {}

#[derive(Clone, PartialEq, Message)]
pub(super) struct ToDevice {
    #[prost(message, optional, tag = "1")]
    pub(super) device: Option<Device>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Between {
    #[prost(message, optional, tag = "1")]
    pub(super) device: Option<Device>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct CoalesceBatches {
    #[prost(message, optional, tag = "1")]
    pub(super) device: Option<Device>,
    #[prost(uint64, tag = "2")]
    pub(super) rows: u64,
}

/// A node of DataFusion's in its form on a device.
#[derive(Clone, PartialEq, Message)]
pub(super) struct FormOf {
    #[prost(message, optional, tag = "1")]
    pub(super) device: Option<Device>,
    #[prost(oneof = "Form", tags = "2, 3, 4, 5, 6, 7")]
    pub(super) form: Option<Form>,
}

#[derive(Clone, PartialEq, Oneof)]
pub(super) enum Form {
    #[prost(message, tag = "2")]
    Projection(Projection),
    #[prost(message, tag = "3")]
    Union(Union),
    #[prost(message, tag = "4")]
    GlobalLimit(GlobalLimit),
    #[prost(message, tag = "5")]
    LocalLimit(LocalLimit),
    #[prost(message, tag = "6")]
    CoalescePartitions(CoalescePartitions),
    #[prost(message, tag = "7")]
    Merge(Merge),
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Projection {
    #[prost(message, repeated, tag = "1")]
    pub(super) columns: Vec<Column>,
    /// That of the rows. A cast's name, metadata and nulls are not in its expression.
    #[prost(message, optional, tag = "2")]
    pub(super) schema: Option<Schema>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Column {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) expression: Vec<u8>,
    #[prost(string, tag = "2")]
    pub(super) name: String,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Union {}

#[derive(Clone, PartialEq, Message)]
pub(super) struct GlobalLimit {
    #[prost(uint64, tag = "1")]
    pub(super) skip: u64,
    #[prost(uint64, optional, tag = "2")]
    pub(super) fetch: Option<u64>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct LocalLimit {
    #[prost(uint64, tag = "1")]
    pub(super) fetch: u64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct CoalescePartitions {
    #[prost(uint64, optional, tag = "1")]
    pub(super) fetch: Option<u64>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Merge {
    #[prost(message, repeated, tag = "1")]
    pub(super) order: Vec<SortBy>,
    #[prost(uint64, optional, tag = "2")]
    pub(super) fetch: Option<u64>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct SortBy {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) expression: Vec<u8>,
    #[prost(bool, tag = "2")]
    pub(super) descending: bool,
    #[prost(bool, tag = "3")]
    pub(super) nulls_first: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Scan {
    #[prost(string, tag = "1")]
    pub(super) table: String,
    #[prost(message, optional, tag = "2")]
    pub(super) device: Option<Device>,
    /// That of the table.
    #[prost(message, optional, tag = "3")]
    pub(super) schema: Option<Schema>,
    #[prost(message, optional, tag = "4")]
    pub(super) projection: Option<Columns>,
    #[prost(message, repeated, tag = "5")]
    pub(super) filters: Vec<Filter>,
    #[prost(uint64, optional, tag = "6")]
    pub(super) fetch: Option<u64>,
    /// What the nodes above rely on.
    #[prost(string, tag = "7")]
    pub(super) partitioning: String,
    #[prost(string, tag = "8")]
    pub(super) order: String,
    #[prost(message, optional, tag = "9")]
    pub(super) part: Option<Part>,
}

/// One of so many tasks' part of a table.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Part {
    #[prost(uint64, tag = "1")]
    pub(super) index: u64,
    #[prost(uint64, tag = "2")]
    pub(super) count: u64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Columns {
    #[prost(uint64, repeated, tag = "1")]
    pub(super) indices: Vec<u64>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Filter {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) expression: Vec<u8>,
    /// Whether no other node evaluates it.
    #[prost(bool, tag = "2")]
    pub(super) exact: bool,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Insert {
    #[prost(string, tag = "1")]
    pub(super) table: String,
    #[prost(message, optional, tag = "2")]
    pub(super) device: Option<Device>,
    #[prost(message, optional, tag = "3")]
    pub(super) schema: Option<Schema>,
    /// 0: append, 1: overwrite, 2: replace.
    #[prost(uint32, tag = "4")]
    pub(super) op: u32,
}

/// A plugin's operator.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Operator {
    #[prost(string, tag = "1")]
    pub(super) name: String,
    #[prost(message, optional, tag = "2")]
    pub(super) device: Option<Device>,
    #[prost(bytes = "vec", tag = "3")]
    pub(super) bytes: Vec<u8>,
    /// That of the rows.
    #[prost(message, optional, tag = "4")]
    pub(super) schema: Option<Schema>,
    #[prost(uint64, tag = "5")]
    pub(super) partitions: u64,
}
