//! Tables by name: another process's table of the name must be the one that was planned with.

use std::sync::Arc;

use arrow_device_cluster::codec::DeviceTables;
use arrow_device_datafusion::DeviceTable;
use datafusion::error::DataFusionError;
use datafusion::physical_plan::ExecutionPlan;
use datafusion::prelude::SessionContext;

use crate::kit::{Made, bytes, node, read, scan, t, worker};

fn error(plan: &Arc<dyn ExecutionPlan>, there: &SessionContext) -> String {
    let e = read(&bytes(plan).unwrap(), &there.task_ctx()).unwrap_err();
    e.to_string()
}

#[test]
fn of_nobody() {
    let e = error(&scan(2), &SessionContext::new());
    assert!(
        e.contains("\"t\"") && e.contains("no DeviceTables; add them with"),
        "{e}"
    );
    let e = error(&scan(2), &worker(DeviceTables::of([("u", t(2))])));
    assert!(
        e.contains("\"t\"") && e.contains("no table of this name"),
        "{e}"
    );
    let broken = DeviceTables::new(|name| {
        Err(DataFusionError::Execution(format!(
            "{name} is on a disk that is gone"
        )))
    });
    let e = error(&scan(2), &worker(broken));
    assert!(e.contains("t is on a disk that is gone"), "{e}");
}

#[test]
fn of_another_shape() {
    let with = |table: DeviceTable| worker(DeviceTables::of([("t", table)]));
    let e = error(&scan(2), &with(Made::new(3).table()));
    assert!(
        e.contains("UnknownPartitioning(3), not UnknownPartitioning(2)"),
        "{e}"
    );
    let schema = Made::new(2).schema.project(&[0, 1]).unwrap();
    let narrow = Made {
        schema: Arc::new(schema),
        ..Made::new(2)
    };
    let e = error(&scan(2), &with(narrow.table()));
    assert!(e.contains("has the schema"), "{e}");
    let cpu = Made {
        device: "cpu".parse().unwrap(),
        ..Made::new(2)
    };
    let e = error(&scan(2), &with(cpu.table()));
    assert!(e.contains("is on cpu, not on sim"), "{e}");
    let sorted = Made {
        ordered: true,
        ..Made::new(2)
    };
    let table = sorted.table().with_name("t");
    let plan = node(table.scan_on_device(None, None).unwrap());
    let e = error(&plan, &with(t(2)));
    assert!(e.contains("has the order [], not [id@0 ASC"), "{e}");
    let e = error(&scan(2), &with(table));
    assert!(e.contains("not []"), "{e}");
}

/// The name of a table is that of the plan, whatever the worker's own table was called.
#[test]
fn names() {
    let tables = DeviceTables::of([("t", Made::new(2).table().with_name("another"))]);
    assert_eq!(tables.table("t").unwrap().name(), Some("t"));
    let found = read(&bytes(&scan(2)).unwrap(), &worker(tables).task_ctx()).unwrap();
    // It can go on to a third process.
    assert_eq!(bytes(&found).unwrap(), bytes(&scan(2)).unwrap());
}
