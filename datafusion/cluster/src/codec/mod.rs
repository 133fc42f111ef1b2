//! [`DeviceCodec`]: plans with device operators on their way to other processes.

mod forms;
mod logical;
mod nodes;
mod operator;
mod scan;
#[cfg(feature = "ballista")]
mod split;
mod tables;
mod values;
mod wire;

use std::fmt;
use std::sync::Arc;

use arrow_device_datafusion::{DeviceExec, DeviceInsertExec, DeviceToHostExec};
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::TaskContext;
use datafusion::logical_expr::{AggregateUDF, HigherOrderUDF, ScalarUDF, WindowUDF};
use datafusion::physical_expr::PhysicalExpr;
use datafusion::physical_expr_common::physical_expr::proto_decode::PhysicalExprDecodeCtx;
use datafusion::physical_expr_common::physical_expr::proto_encode::PhysicalExprEncodeCtx;
use datafusion::physical_plan::ExecutionPlan;
use datafusion_proto::physical_plan::{
    DefaultPhysicalExtensionCodec, PhysicalExtensionCodec, PhysicalProtoConverterExtension,
};

pub use logical::DeviceTableCodec;
pub use operator::{DevicePlanCodec, PlanDecoder, PlanEncoder};
pub use tables::DeviceTables;

/// Carries plans with device operators to other processes, as the codec of datafusion-distributed, of Ballista, or of any engine that
/// sends DataFusion's plans with `datafusion-proto`.
///
/// All nodes of `arrow-device-datafusion` travel: uploads, downloads, moves, [`DeviceForm`](arrow_device_datafusion::DeviceForm)s,
/// [`DeviceCoalesceBatchesExec`](arrow_device_datafusion::DeviceCoalesceBatchesExec), and the scans and inserts of tables with a
/// [name](arrow_device_datafusion::DeviceTable::with_name), which the other side looks up in its [`DeviceTables`]. A plugin's operators travel
/// with a [`DevicePlanCodec`] each. Both sides need the same release of this crate and the same codecs.
///
/// A plan carries descriptions of devices and no device. `cuda` means any CUDA device of the worker, of which its
/// [`DeviceResolver`](arrow_device_datafusion::DeviceResolver) chooses one; `cuda:1`, and a description that was made of an opened device,
/// mean the worker's device of this type and id. So plans that travel best say [`DeviceSpec::any`](arrow_device_datafusion::DeviceSpec::any).
/// Nothing is opened while a plan is written or read. A worker without such a device reports that when a partition starts.
///
/// ```
/// # use std::sync::Arc;
/// # use arrow_device_cluster::codec::{DeviceCodec, DevicePlanCodec};
/// # fn with(filter: Arc<dyn DevicePlanCodec>) {
/// let codec = DeviceCodec::new().with_plan(filter);
/// # let _ = codec;
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct DeviceCodec {
    plans: Vec<Arc<dyn DevicePlanCodec>>,
    /// That of all other nodes, and of functions in expressions.
    others: Arc<dyn PhysicalExtensionCodec>,
    /// Whether a scheduler that does not know the nodes runs some of a plan's partitions in each task.
    #[cfg(feature = "ballista")]
    splits: bool,
}

impl Default for DeviceCodec {
    fn default() -> Self {
        Self::new()
    }
}

impl DeviceCodec {
    /// Makes a codec of the nodes of `arrow-device-datafusion`.
    pub fn new() -> Self {
        Self {
            plans: Vec::new(),
            others: Arc::new(DefaultPhysicalExtensionCodec {}),
            #[cfg(feature = "ballista")]
            splits: false,
        }
    }

    /// Adds the codec of a plugin's operator. Of two for the same name, the last counts.
    pub fn with_plan(mut self, plan: Arc<dyn DevicePlanCodec>) -> Self {
        self.plans.push(plan);
        self
    }

    /// Makes this codec the one for device nodes in front of another codec, which writes and reads all other nodes, and the functions in
    /// expressions. What either has written, the same combination reads.
    pub fn around(mut self, others: Arc<dyn PhysicalExtensionCodec>) -> Self {
        self.others = others;
        self
    }

    fn plan_codec(&self, name: &str) -> Result<&dyn DevicePlanCodec> {
        let mut plans = self.plans.iter().rev();
        let plan = plans.find(|plan| plan.name() == name);
        plan.map(|plan| &**plan).ok_or_else(|| {
            DataFusionError::NotImplemented(format!(
                "no codec for the device operator {name}: add its DevicePlanCodec with DeviceCodec::with_plan, both where queries \
                 are planned and where they run"
            ))
        })
    }
}

/// Whether a node is one of `arrow-device-datafusion`.
fn is_device_node(node: &Arc<dyn ExecutionPlan>) -> bool {
    DeviceExec::of(node).is_some() || node.is::<DeviceToHostExec>() || node.is::<DeviceInsertExec>()
}

/// The error of bytes that are no device plan.
fn unreadable(why: impl fmt::Display) -> DataFusionError {
    DataFusionError::Execution(format!("a device plan cannot be read: {why}"))
}

impl PhysicalExtensionCodec for DeviceCodec {
    fn try_decode(
        &self,
        buf: &[u8],
        inputs: &[Arc<dyn ExecutionPlan>],
        ctx: &TaskContext,
        proto_converter: &dyn PhysicalProtoConverterExtension,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        match wire::is_ours(buf) {
            true => self.read(buf, inputs, ctx, proto_converter),
            false => self.others.try_decode(buf, inputs, ctx, proto_converter),
        }
    }

    /// Writes nothing if it fails.
    fn try_encode(
        &self,
        node: Arc<dyn ExecutionPlan>,
        buf: &mut Vec<u8>,
        proto_converter: &dyn PhysicalProtoConverterExtension,
    ) -> Result<()> {
        if is_device_node(&node) {
            wire::write(&self.message(&node, proto_converter)?, buf);
            return Ok(());
        }
        let before = buf.len();
        let encoded = self.others.try_encode(node, buf, proto_converter);
        if encoded.is_err() {
            buf.truncate(before);
        }
        encoded
    }

    fn try_decode_udf(&self, name: &str, buf: &[u8]) -> Result<Arc<ScalarUDF>> {
        self.others.try_decode_udf(name, buf)
    }

    fn try_encode_udf(&self, node: &ScalarUDF, buf: &mut Vec<u8>) -> Result<()> {
        self.others.try_encode_udf(node, buf)
    }

    fn try_decode_higher_order_function(
        &self,
        name: &str,
        buf: &[u8],
    ) -> Result<Arc<HigherOrderUDF>> {
        self.others.try_decode_higher_order_function(name, buf)
    }

    fn try_encode_higher_order_function(
        &self,
        node: &HigherOrderUDF,
        buf: &mut Vec<u8>,
    ) -> Result<()> {
        self.others.try_encode_higher_order_function(node, buf)
    }

    fn try_decode_expr(
        &self,
        buf: &[u8],
        inputs: &[Arc<dyn PhysicalExpr>],
        ctx: &PhysicalExprDecodeCtx<'_>,
    ) -> Result<Arc<dyn PhysicalExpr>> {
        self.others.try_decode_expr(buf, inputs, ctx)
    }

    fn try_encode_expr(
        &self,
        node: &Arc<dyn PhysicalExpr>,
        buf: &mut Vec<u8>,
        ctx: &PhysicalExprEncodeCtx<'_>,
    ) -> Result<()> {
        self.others.try_encode_expr(node, buf, ctx)
    }

    fn try_decode_udaf(&self, name: &str, buf: &[u8]) -> Result<Arc<AggregateUDF>> {
        self.others.try_decode_udaf(name, buf)
    }

    fn try_encode_udaf(&self, node: &AggregateUDF, buf: &mut Vec<u8>) -> Result<()> {
        self.others.try_encode_udaf(node, buf)
    }

    fn try_decode_udwf(&self, name: &str, buf: &[u8]) -> Result<Arc<WindowUDF>> {
        self.others.try_decode_udwf(name, buf)
    }

    fn try_encode_udwf(&self, node: &WindowUDF, buf: &mut Vec<u8>) -> Result<()> {
        self.others.try_encode_udwf(node, buf)
    }
}
