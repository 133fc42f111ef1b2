//! The nodes of `arrow-device-datafusion` as messages, and back.

use std::sync::Arc;

use arrow_device_datafusion::{
    DeviceCoalesceBatchesExec, DeviceExec, DeviceForm, DeviceInsertExec, DeviceScanExec,
    DeviceToDeviceExec, DeviceToHostExec, HostToDeviceExec,
};
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
        } else if let Some(exec) = DeviceExec::of(node) {
            #[cfg(feature = "ballista")]
            self.check_split(node, exec)?;
            self.operator_message(node, exec, &encoder)?
        } else {
            let name = node.name();
            return Err(DataFusionError::Internal(format!(
                "{name} is no device node"
            )));
        };
        Ok(wire::Node { kind: Some(kind) })
    }

    fn operator_message(
        &self,
        node: &Arc<dyn ExecutionPlan>,
        exec: &DeviceExec,
        encoder: &PlanEncoder<'_>,
    ) -> Result<Kind> {
        let device = Some(device_message(exec.device()));
        Ok(
            if let Some(up) = DeviceExec::operator::<HostToDeviceExec>(node) {
                if up.schema_on_device(&node.schema()) != node.schema() {
                    let why = "an upload that casts columns for a plugin stays in this process; a worker's own rule inserts it there";
                    return Err(DataFusionError::NotImplemented(why.into()));
                }
                Kind::ToDevice(wire::ToDevice { device })
            } else if DeviceExec::operator::<DeviceToDeviceExec>(node).is_some() {
                Kind::Between(wire::Between { device })
            } else if let Some(coalesce) = DeviceExec::operator::<DeviceCoalesceBatchesExec>(node) {
                let rows = coalesce.rows() as u64;
                Kind::CoalesceBatches(wire::CoalesceBatches { device, rows })
            } else if DeviceExec::operator::<DeviceForm>(node).is_some() {
                let form = Some(forms::message(exec.node(), encoder)?);
                Kind::Form(wire::FormOf { device, form })
            } else if let Some(scan) = exec.node().downcast_ref::<DeviceScanExec>() {
                Kind::Scan(scan::message(scan, encoder)?)
            } else {
                let name = node.name().to_owned();
                let mut bytes = Vec::new();
                let codec = self.plan_codec(&name)?;
                codec.encode(exec, &mut bytes, encoder)?;
                Kind::Operator(wire::Operator {
                    device,
                    bytes,
                    schema: Some(schema_message(&node.schema())?),
                    partitions: partitions_of(exec) as u64,
                    name,
                })
            },
        )
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
        Ok(match kind {
            Kind::ToHost(_) => Arc::new(DeviceToHostExec::new(only(inputs)?.clone())),
            Kind::Insert(insert) => scan::read_insert(&insert, &on(&insert.device)?)?,
            Kind::ToDevice(up) => {
                let decoder = on(&up.device)?;
                let node = HostToDeviceExec::default();
                node.above(decoder.only_child()?.clone(), decoder.device.clone())
            }
            Kind::Between(between) => {
                let decoder = on(&between.device)?;
                let input = decoder.only_child()?.clone();
                if DeviceExec::of(&input).is_none() {
                    return Err(unreadable("a move between devices of rows on the host"));
                }
                DeviceToDeviceExec::above(input, decoder.device.clone())
            }
            Kind::CoalesceBatches(coalesce) => {
                let decoder = on(&coalesce.device)?;
                let (input, rows) = (decoder.only_child()?.clone(), number(coalesce.rows)?);
                let device = decoder.device.clone();
                DeviceCoalesceBatchesExec::new(rows).above(input, device)
            }
            Kind::Form(form) => forms::read(form.form, &on(&form.device)?)?,
            Kind::Scan(scan) => Arc::new(scan::read(&scan, &on(&scan.device)?)?),
            Kind::Operator(operator) => {
                let decoder = on(&operator.device)?;
                let codec = self.plan_codec(&operator.name)?;
                let plan = codec.decode(&operator.bytes, &decoder)?;
                check_operator(&plan, &operator, &decoder)?;
                Arc::new(plan)
            }
        })
    }
}

/// Checks that a plugin's codec has made the operator that was written.
fn check_operator(
    plan: &DeviceExec,
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
    } else if plan.schema() != read_schema(&written.schema)? {
        differs("schema")
    } else if partitions_of(plan) as u64 != written.partitions {
        differs("number of partitions")
    } else {
        Ok(())
    }
}

fn partitions_of(plan: &DeviceExec) -> usize {
    plan.properties().output_partitioning().partition_count()
}
