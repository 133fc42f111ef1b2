//! What cannot travel says so, and writes nothing.

use std::slice::from_ref;
use std::sync::Arc;

use arrow_device_cluster::codec::{DeviceCodec, DevicePlanCodec, PlanDecoder, PlanEncoder};
use arrow_device_datafusion::{
    DeviceExec, DeviceOperator, DeviceSpec, DeviceTable, DeviceTask, DeviceToHostExec,
    HostToDeviceExec, SendableDeviceStream,
};
use datafusion::error::{DataFusionError, Result};
use datafusion::logical_expr::dml::InsertOp;
use datafusion::physical_plan::ExecutionPlan;
use datafusion::prelude::SessionContext;
use datafusion_proto::physical_plan::{DefaultPhysicalProtoConverter, PhysicalExtensionCodec};

use crate::kit::{self, SIM, codec, host_rows, node};

/// Encodes a node, and returns its error, after a check that nothing was written.
fn refused(codec: &DeviceCodec, plan: Arc<dyn ExecutionPlan>) -> String {
    let mut buf = b"before".to_vec();
    let e = codec.try_encode(plan, &mut buf, &DefaultPhysicalProtoConverter {});
    assert_eq!(buf, b"before");
    e.unwrap_err().to_string()
}

/// Tables of this process say what to do instead, in scans and inserts, in physical and logical plans.
#[test]
fn tables_of_this_process() {
    let device = kit::sim();
    let schema = kit::batch(0).schema();
    let batches = vec![vec![kit::upload(&kit::batch(0), &device)]];
    let of_batches = DeviceTable::from_batches(schema.clone(), device.clone(), batches).unwrap();
    let of_streams = DeviceTable::from_streams(schema, SIM, 1, |request| async move {
        Ok(request.stream(futures::stream::empty()))
    });
    let insert = of_batches
        .insert_on_device(host_rows(1), InsertOp::Append)
        .unwrap();
    let scan = |table: &DeviceTable| node(table.scan_on_device(None, None).unwrap());
    for plan in [scan(&of_batches), scan(&of_streams), Arc::new(insert)] {
        let e = refused(&codec(), plan);
        for part in [
            "cannot be sent to another process",
            "belong to the process that made it",
            "DeviceTable::with_name",
            "DeviceTables",
        ] {
            assert!(e.contains(part), "{e}");
        }
    }
}

/// An operator that passes batches on.
#[derive(Debug)]
struct Passed;

impl DeviceOperator for Passed {
    fn name(&self) -> &str {
        "PassedExec"
    }

    fn execute(&self, task: &DeviceTask<'_>) -> Result<SendableDeviceStream> {
        task.input(0)
    }
}

/// In the place of a node that passes them on, too.
fn passes(input: Arc<dyn ExecutionPlan>, device: DeviceSpec) -> DeviceExec {
    DeviceExec::new(
        Arc::new(DeviceToHostExec::new(input)),
        device,
        Arc::new(Passed),
    )
}

fn passed() -> Arc<dyn ExecutionPlan> {
    let input = HostToDeviceExec::default().above(host_rows(2), SIM);
    Arc::new(passes(input, SIM))
}

#[test]
fn operators_without_a_codec() {
    let e = refused(&codec(), passed());
    assert!(
        e.contains("no codec for the device operator PassedExec"),
        "{e}"
    );
    assert!(e.contains("DeviceCodec::with_plan"), "{e}");
    // The other side says so, too.
    let writes = DeviceCodec::new().with_plan(Arc::new(PassedCodec::default()));
    let mut buf = Vec::new();
    let converter = DefaultPhysicalProtoConverter {};
    writes.try_encode(passed(), &mut buf, &converter).unwrap();
    let input = HostToDeviceExec::default().above(host_rows(2), SIM);
    let context = SessionContext::new().task_ctx();
    let e = codec()
        .try_decode(&buf, &[input], &context, &converter)
        .unwrap_err();
    assert!(
        e.to_string()
            .contains("no codec for the device operator PassedExec"),
        "{e}"
    );
}

#[test]
fn nodes_of_others() {
    let e = refused(&codec(), host_rows(1));
    assert!(e.contains("PhysicalExtensionCodec is not provided"), "{e}");
}

/// A codec with mistakes.
#[derive(Clone, Debug, Default)]
struct PassedCodec {
    fails: bool,
    to: Option<DeviceSpec>,
    one_partition: bool,
}

impl DevicePlanCodec for PassedCodec {
    fn name(&self) -> &str {
        "PassedExec"
    }

    fn encode(&self, plan: &DeviceExec, buf: &mut Vec<u8>, _: &PlanEncoder<'_>) -> Result<()> {
        assert_eq!(plan.name(), "PassedExec");
        buf.push(7);
        match self.fails {
            true => Err(DataFusionError::Execution("not today".into())),
            false => Ok(()),
        }
    }

    fn decode(&self, buf: &[u8], decoder: &PlanDecoder<'_>) -> Result<DeviceExec> {
        assert_eq!(buf, [7]);
        let device = self.to.as_ref().unwrap_or(decoder.device()).clone();
        let input = match self.one_partition {
            true => HostToDeviceExec::default().above(host_rows(1), SIM),
            false => decoder.only_child()?.clone(),
        };
        Ok(passes(input, device))
    }
}

/// A plugin's codec that fails has written nothing, and one that reads another operator than it wrote is found out.
#[test]
fn mistakes_of_codecs() {
    let codec = |codec: PassedCodec| DeviceCodec::new().with_plan(Arc::new(codec));
    let right = PassedCodec::default();
    let fails = PassedCodec {
        fails: true,
        ..right.clone()
    };
    assert!(refused(&codec(fails), passed()).contains("not today"));
    let mut buf = Vec::new();
    let converter = DefaultPhysicalProtoConverter {};
    codec(right.clone())
        .try_encode(passed(), &mut buf, &converter)
        .unwrap();
    let input = HostToDeviceExec::default().above(host_rows(2), SIM);
    let context = SessionContext::new().task_ctx();
    let two = from_ref(&input);
    let read = |of: PassedCodec, inputs: &[Arc<dyn ExecutionPlan>]| {
        let read = codec(of).try_decode(&buf, inputs, &context, &converter);
        read.map_err(|e| e.to_string())
    };
    assert_eq!(read(right.clone(), two).unwrap().name(), "PassedExec");
    let other = PassedCodec {
        to: Some("cuda".parse().unwrap()),
        ..right.clone()
    };
    let e = read(other, two).unwrap_err();
    assert!(e.contains("another device"), "{e}");
    let other = PassedCodec {
        one_partition: true,
        ..right.clone()
    };
    let e = read(other, two).unwrap_err();
    assert!(e.contains("another children"), "{e}");
    // One partition instead of two, and another schema.
    let one = HostToDeviceExec::default().above(host_rows(1), SIM);
    let e = read(right.clone(), &[one]).unwrap_err();
    assert!(e.contains("another number of partitions"), "{e}");
    let e = read(right.clone(), &[]).unwrap_err();
    assert!(e.contains("has 0 here"), "{e}");
    let down: Arc<dyn ExecutionPlan> = Arc::new(DeviceToHostExec::new(input.clone()));
    let narrow = datafusion::physical_plan::projection::ProjectionExec::try_new(
        vec![datafusion::physical_plan::projection::ProjectionExpr {
            expr: Arc::new(datafusion::physical_expr::expressions::Column::new("id", 0)),
            alias: "id".into(),
        }],
        down,
    );
    let narrow = HostToDeviceExec::default().above(Arc::new(narrow.unwrap()), SIM);
    let e = read(right, &[narrow]).unwrap_err();
    assert!(e.contains("another schema"), "{e}");
}
