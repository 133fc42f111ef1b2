//! The nodes of `arrow-device-datafusion` as messages, and back.

use std::any::Any;
use std::sync::Arc;

use arrow_device_datafusion::{
    DeviceCoalesceBatchesExec, DeviceExec, DeviceForm, DeviceInsertExec, DevicePlan,
    DeviceScanExec, DeviceToDeviceExec, DeviceToHostExec, HostToDeviceExec,
};
use datafusion::arrow::datatypes::SchemaRef;
use datafusion::error::{DataFusionError, Result};
use datafusion::execution::TaskContext;
use datafusion::physical_plan::ExecutionPlan;
use datafusion_proto::physical_plan::PhysicalProtoConverterExtension;

use super::operator::{PlanDecoder, PlanEncoder, only};
use super::values::{device_message, device_of, number, read_schema, schema_message};
use super::wire::{self, Kind};
use super::{DeviceCodec, forms, scan, unreadable};

impl DeviceCodec {
    /// The message of a device node.
    pub(super) fn message(
        &self,
        node: &Arc<dyn ExecutionPlan>,
        converter: &dyn PhysicalProtoConverterExtension,
    ) -> Result<wire::Node> {
        let encoder = PlanEncoder {
            converter,
            functions: &*self.others,
        };
        let kind = if node.is::<DeviceToHostExec>() {
            Kind::ToHost(wire::ToHost {})
        } else if let Some(insert) = node.downcast_ref::<DeviceInsertExec>() {
            Kind::Insert(scan::insert_message(insert)?)
        } else if let Some(node) = DeviceExec::of(node) {
            #[cfg(feature = "ballista")]
            self.check_split(node)?;
            self.operator_message(node, &encoder)?
        } else {
            let name = node.name();
            return Err(DataFusionError::Internal(format!(
                "{name} is no device node"
            )));
        };
        Ok(wire::Node { kind: Some(kind) })
    }

    fn operator_message(&self, node: &DeviceExec, encoder: &PlanEncoder<'_>) -> Result<Kind> {
        let device = Some(device_message(node.device()));
        let plan: &dyn Any = &**node.plan();
        Ok(if let Some(up) = plan.downcast_ref::<HostToDeviceExec>() {
            let target = up.target().map(|(rows, bytes)| wire::Target {
                rows: rows as u64,
                bytes: bytes as u64,
            });
            Kind::ToDevice(wire::ToDevice { device, target })
        } else if plan.is::<DeviceToDeviceExec>() {
            Kind::Between(wire::Between { device })
        } else if let Some(coalesce) = plan.downcast_ref::<DeviceCoalesceBatchesExec>() {
            let rows = coalesce.rows() as u64;
            Kind::CoalesceBatches(wire::CoalesceBatches { device, rows })
        } else if let Some(form) = plan.downcast_ref::<DeviceForm>() {
            let form = Some(forms::message(form, encoder)?);
            Kind::Form(wire::FormOf { device, form })
        } else if let Some(scan) = plan.downcast_ref::<DeviceScanExec>() {
            Kind::Scan(scan::message(scan, encoder)?)
        } else {
            let name = node.plan().name().to_owned();
            let mut bytes = Vec::new();
            let codec = self.plan_codec(&name)?;
            codec.encode(&**node.plan(), &mut bytes, encoder)?;
            Kind::Operator(wire::Operator {
                device,
                bytes,
                schema: Some(schema_message(&schema_of(&**node.plan()))?),
                partitions: partitions_of(&**node.plan()) as u64,
                name,
            })
        })
    }

    /// The node of a message.
    pub(super) fn read(
        &self,
        buf: &[u8],
        inputs: &[Arc<dyn ExecutionPlan>],
        context: &TaskContext,
        converter: &dyn PhysicalProtoConverterExtension,
    ) -> Result<Arc<dyn ExecutionPlan>> {
        let node: wire::Node = wire::read(buf)?;
        let kind = node.kind.ok_or_else(|| unreadable("an empty node"))?;
        let on = |device: &Option<wire::Device>| -> Result<PlanDecoder<'_>> {
            Ok(PlanDecoder {
                device: device_of(device)?,
                children: inputs,
                context,
                converter,
                functions: &*self.others,
            })
        };
        let plan: Arc<dyn DevicePlan> = match kind {
            Kind::ToHost(_) => {
                let input = only(inputs)?.clone();
                return Ok(Arc::new(DeviceToHostExec::new(input)));
            }
            Kind::Insert(insert) => return scan::read_insert(&insert, &on(&insert.device)?),
            Kind::ToDevice(up) => {
                let decoder = on(&up.device)?;
                let plan =
                    HostToDeviceExec::new(decoder.only_child()?.clone(), decoder.device.clone());
                match up.target {
                    Some(target) => {
                        Arc::new(plan.with_target(number(target.rows)?, number(target.bytes)?))
                    }
                    None => Arc::new(plan),
                }
            }
            Kind::Between(between) => {
                let decoder = on(&between.device)?;
                let input = decoder.only_child()?.clone();
                if DeviceExec::of(&input).is_none() {
                    return Err(unreadable("a move between devices of rows on the host"));
                }
                Arc::new(DeviceToDeviceExec::new(input, decoder.device.clone()))
            }
            Kind::CoalesceBatches(coalesce) => {
                let decoder = on(&coalesce.device)?;
                let (input, rows) = (decoder.only_child()?.clone(), number(coalesce.rows)?);
                let device = decoder.device.clone();
                Arc::new(DeviceCoalesceBatchesExec::new(input, device, rows))
            }
            Kind::Form(form) => forms::read(form.form, &on(&form.device)?)?,
            Kind::Scan(scan) => scan::read(&scan, &on(&scan.device)?)?,
            Kind::Operator(operator) => {
                let decoder = on(&operator.device)?;
                let codec = self.plan_codec(&operator.name)?;
                let plan = codec.decode(&operator.bytes, &decoder)?;
                check_operator(&*plan, &operator, &decoder)?;
                plan
            }
        };
        Ok(Arc::new(DeviceExec::new(plan)))
    }
}

/// Checks that a plugin's codec has made the operator that was written.
fn check_operator(
    plan: &dyn DevicePlan,
    written: &wire::Operator,
    decoder: &PlanDecoder<'_>,
) -> Result<()> {
    let differs = |what: &str| {
        let name = &written.name;
        Err(unreadable(format!(
            "the codec of {name} made an operator with another {what} than the one that was written"
        )))
    };
    let children = plan.children();
    let mut same = children.iter().zip(decoder.children);
    if plan.name() != written.name {
        differs("name")
    } else if *plan.device() != decoder.device {
        differs("device")
    } else if children.len() != decoder.children.len() || !same.all(|(a, b)| Arc::ptr_eq(a, b)) {
        differs("children")
    } else if schema_of(plan) != read_schema(&written.schema)? {
        differs("schema")
    } else if partitions_of(plan) as u64 != written.partitions {
        differs("number of partitions")
    } else {
        Ok(())
    }
}

fn schema_of(plan: &dyn DevicePlan) -> SchemaRef {
    plan.properties().equivalence_properties().schema().clone()
}

fn partitions_of(plan: &dyn DevicePlan) -> usize {
    plan.properties().output_partitioning().partition_count()
}
