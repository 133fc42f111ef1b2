//! What more than one file of the tests uses of the crates.

pub(crate) use std::collections::BTreeMap;
pub(crate) use std::ops::RangeInclusive;
pub(crate) use std::path::PathBuf;
pub(crate) use std::process::Command;
pub(crate) use std::slice::from_ref;
pub(crate) use std::sync::atomic::Ordering::SeqCst;
pub(crate) use std::sync::atomic::{AtomicBool, AtomicUsize};
pub(crate) use std::sync::{Arc, Mutex, mpsc};
pub(crate) use std::task::{Context, Poll, Waker, ready};
pub(crate) use std::time::{Duration, Instant};
pub(crate) use std::{fmt, thread};

pub(crate) use arrow_device::device::sim::{FaultOp, SimConfig, SimDevice};
pub(crate) use arrow_device::{
    ArrowDeviceType, Device, DeviceId, DeviceRecordBatch, DeviceRecordBatchReader,
    DeviceRecordBatchStreamReader, DeviceRecordBatches, Devices, Error, ExportOptions,
    FFI_ArrowDeviceArrayStream, SyncPolicy, TransferStats,
};
pub(crate) use arrow_device_datafusion::{
    DeviceExec, DeviceForm, DeviceOperator, DeviceOptions, DevicePlugin, DevicePools,
    DeviceReservation, DeviceResolver, DeviceRule, DeviceSpec, DeviceTable, DeviceToHostExec,
    ScanRequest, SendableDeviceStream, Verdict, declined, execute_on_device, export_plan,
    to_datafusion,
};
pub(crate) use datafusion::arrow::array::{
    Array, ArrayRef, AsArray, Date32Array, DictionaryArray, Float64Array, Int8Array, Int32Array,
    Int64Array, NullArray, RecordBatch, StringArray, StringViewArray,
};
pub(crate) use datafusion::arrow::compute::{SortOptions, cast, concat_batches};
pub(crate) use datafusion::arrow::datatypes::{DataType, Field, Int8Type, Schema, SchemaRef};
pub(crate) use datafusion::arrow::error::ArrowError;
pub(crate) use datafusion::arrow::util::display::{ArrayFormatter, FormatOptions};
pub(crate) use datafusion::arrow::util::pretty::pretty_format_batches;
pub(crate) use datafusion::catalog::TableProvider;
pub(crate) use datafusion::common::config::ConfigOptions;
pub(crate) use datafusion::common::tree_node::{Transformed, TreeNode, TreeNodeRecursion};
pub(crate) use datafusion::common::{Constraints, DataFusionError, ScalarValue, Statistics};
pub(crate) use datafusion::datasource::MemTable;
pub(crate) use datafusion::datasource::listing::ListingTableUrl;
pub(crate) use datafusion::execution::memory_pool::{GreedyMemoryPool, MemoryPool};
pub(crate) use datafusion::execution::{
    SendableRecordBatchStream, SessionStateBuilder, TaskContext,
};
pub(crate) use datafusion::logical_expr::dml::InsertOp;
pub(crate) use datafusion::logical_expr::{Operator, TableProviderFilterPushDown};
pub(crate) use datafusion::object_store::memory::InMemory;
pub(crate) use datafusion::physical_expr::expressions::{Column, binary, col, lit};
pub(crate) use datafusion::physical_expr::{
    LexOrdering, Partitioning, PhysicalExpr, PhysicalSortExpr,
};
pub(crate) use datafusion::physical_optimizer::PhysicalOptimizerRule;
pub(crate) use datafusion::physical_optimizer::limit_pushdown::LimitPushdown;
pub(crate) use datafusion::physical_plan::coalesce_partitions::CoalescePartitionsExec;
pub(crate) use datafusion::physical_plan::execution_plan::Boundedness;
pub(crate) use datafusion::physical_plan::filter::FilterExec;
pub(crate) use datafusion::physical_plan::projection::{ProjectionExec, ProjectionExpr};
pub(crate) use datafusion::physical_plan::repartition::RepartitionExec;
pub(crate) use datafusion::physical_plan::statistics::{StatisticsArgs, StatisticsContext};
pub(crate) use datafusion::physical_plan::union::UnionExec;
pub(crate) use datafusion::physical_plan::{
    ExecutionPlan, ExecutionPlanProperties, collect, collect_partitioned, displayable,
    execute_stream,
};
pub(crate) use datafusion::prelude::{SessionConfig, SessionContext};
pub(crate) use futures::channel::mpsc::UnboundedSender;
pub(crate) use futures::executor::block_on;
pub(crate) use futures::{FutureExt, Stream, StreamExt, TryStreamExt};
pub(crate) use tokio::runtime::{Builder, Runtime};
pub(crate) use tokio::time::timeout;
