//! [`DevicePlanCodec`]: how a plugin's operators travel.

use std::fmt;
use std::sync::Arc;

use arrow_device_datafusion::{DeviceExec, DeviceSpec};
use datafusion::arrow::datatypes::Schema;
use datafusion::error::Result;
use datafusion::execution::TaskContext;
use datafusion::physical_expr::PhysicalExpr;
use datafusion::physical_expr::utils::collect_columns;
use datafusion::physical_plan::ExecutionPlan;
use datafusion_proto::physical_plan::{
    PhysicalExtensionCodec, PhysicalPlanDecodeContext, PhysicalProtoConverterExtension,
};
use datafusion_proto::protobuf::PhysicalExprNode;
use prost::Message;

use super::unreadable;

/// Writes and reads the operators of one name. A [`DeviceCodec`](super::DeviceCodec) holds one for each operator of the plugins that a
/// cluster runs, on the machine that plans and on those that run the plans.
///
/// The operator's device and children travel without it. It writes the rest: expressions, limits, modes.
///
/// ```
/// # use std::sync::Arc;
/// # use arrow_device_datafusion::{DeviceExec, DevicePlugin};
/// # use datafusion::error::{DataFusionError, Result};
/// # use datafusion::physical_plan::limit::LocalLimitExec;
/// use arrow_device_cluster::codec::{DevicePlanCodec, PlanDecoder, PlanEncoder};
///
/// /// `SampleExec` is in the place of a limit.
/// #[derive(Debug)]
/// struct SampleCodec(Arc<dyn DevicePlugin>);
///
/// impl DevicePlanCodec for SampleCodec {
///     fn name(&self) -> &str {
///         "SampleExec"
///     }
///
///     fn encode(&self, plan: &DeviceExec, buf: &mut Vec<u8>, _: &PlanEncoder<'_>) -> Result<()> {
///         let limit: Option<&LocalLimitExec> = plan.node().downcast_ref();
///         let limit = limit.ok_or_else(|| DataFusionError::Internal("not a limit".into()))?;
///         buf.extend((limit.fetch() as u64).to_le_bytes());
///         Ok(())
///     }
///
///     fn decode(&self, buf: &[u8], decoder: &PlanDecoder<'_>) -> Result<DeviceExec> {
///         let rows = buf.try_into().map(u64::from_le_bytes);
///         let rows = rows.map_err(|e| DataFusionError::Execution(format!("SampleExec: {e}")))?;
///         let limit = LocalLimitExec::new(decoder.only_child()?.clone(), rows as usize);
///         DeviceExec::in_place_of(Arc::new(limit), decoder.device().clone(), &self.0)
///     }
/// }
/// ```
pub trait DevicePlanCodec: fmt::Debug + Send + Sync {
    /// Returns the name of the operators, which is that of their [`DeviceOperator`](arrow_device_datafusion::DeviceOperator).
    fn name(&self) -> &str;

    /// Appends what the operator is made of, except its device and children. What an encoder that fails has written is dropped.
    ///
    /// # Errors
    /// Returns an error if this operator cannot travel.
    fn encode(&self, plan: &DeviceExec, buf: &mut Vec<u8>, encoder: &PlanEncoder<'_>)
    -> Result<()>;

    /// Makes the operator, on [`PlanDecoder::device`] and over [`PlanDecoder::children`], of what [`encode`](Self::encode) wrote. It runs
    /// for each task, on a thread of the runtime: it should be quick, and opens no device.
    ///
    /// The bytes come from another process. Those that make no sense are an error, and must not panic. The operator must have the
    /// name, device, schema and number of partitions of the one that was written, which is checked.
    ///
    /// # Errors
    /// Returns an error if the operator cannot be made.
    fn decode(&self, buf: &[u8], decoder: &PlanDecoder<'_>) -> Result<DeviceExec>;
}

/// What an encoder of an operator needs.
pub struct PlanEncoder<'a> {
    pub(super) converter: &'a dyn PhysicalProtoConverterExtension,
    pub(super) functions: &'a dyn PhysicalExtensionCodec,
}

impl PlanEncoder<'_> {
    /// Returns the bytes of an expression, as DataFusion encodes it.
    ///
    /// # Errors
    /// Returns an error if DataFusion, or the codec of the functions in the expression, cannot encode it.
    pub fn expression(&self, expression: &Arc<dyn PhysicalExpr>) -> Result<Vec<u8>> {
        let node = self
            .converter
            .physical_expr_to_proto(expression, self.functions)?;
        Ok(node.encode_to_vec())
    }
}

impl fmt::Debug for PlanEncoder<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PlanEncoder")
    }
}

/// The child of a node that has one.
pub(super) fn only(children: &[Arc<dyn ExecutionPlan>]) -> Result<&Arc<dyn ExecutionPlan>> {
    match children {
        [child] => Ok(child),
        _ => Err(unreadable(format!(
            "a node with one child has {} here",
            children.len()
        ))),
    }
}

/// What a decoder of an operator gets besides the bytes.
pub struct PlanDecoder<'a> {
    pub(super) device: DeviceSpec,
    pub(super) children: &'a [Arc<dyn ExecutionPlan>],
    pub(super) context: &'a TaskContext,
    pub(super) converter: &'a dyn PhysicalProtoConverterExtension,
    pub(super) functions: &'a dyn PhysicalExtensionCodec,
}

impl PlanDecoder<'_> {
    /// Returns which device the operator's batches are on.
    pub fn device(&self) -> &DeviceSpec {
        &self.device
    }

    /// Returns the operator's children, which have been decoded.
    pub fn children(&self) -> &[Arc<dyn ExecutionPlan>] {
        self.children
    }

    /// Returns the child of an operator that has one.
    ///
    /// # Errors
    /// Returns an error for any other number of children.
    pub fn only_child(&self) -> Result<&Arc<dyn ExecutionPlan>> {
        only(self.children)
    }

    /// Returns the task context of the session that will run the plan: its configuration, extensions and functions.
    pub fn context(&self) -> &TaskContext {
        self.context
    }

    /// Reads an expression over the columns of a schema, which is that of a child in most operators.
    ///
    /// # Errors
    /// Returns an error for bytes that are no expression, for functions that the session does not have, and for columns that
    /// the schema does not have.
    pub fn expression(&self, bytes: &[u8], schema: &Schema) -> Result<Arc<dyn PhysicalExpr>> {
        let node = PhysicalExprNode::decode(bytes).map_err(unreadable)?;
        let context = PhysicalPlanDecodeContext::new(self.context, self.functions);
        let expression = self
            .converter
            .proto_to_physical_expr(&node, schema, &context)?;
        let is_there = |name: &str, index: usize| {
            let field = schema.fields().get(index);
            field.is_some_and(|field| field.name() == name)
        };
        let columns = collect_columns(&expression);
        match columns.iter().find(|c| !is_there(c.name(), c.index())) {
            None => Ok(expression),
            Some(column) => Err(unreadable(format!(
                "an expression has the column {column}, which is not in {schema}"
            ))),
        }
    }
}

impl fmt::Debug for PlanDecoder<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PlanDecoder")
            .field("device", &self.device)
            .field("children", &self.children.len())
            .finish_non_exhaustive()
    }
}
