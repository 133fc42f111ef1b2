//! Tables in logical plans.

use std::sync::Arc;

use arrow_device_cluster::codec::{DeviceTableCodec, DeviceTables};
use arrow_device_datafusion::DeviceTable;
use datafusion::datasource::MemTable;
use datafusion::error::Result;
use datafusion::logical_expr::LogicalPlan;
use datafusion::prelude::SessionContext;
use datafusion_proto::bytes::{
    logical_plan_from_bytes_with_extension_codec, logical_plan_to_bytes_with_extension_codec,
};

use crate::kit::{Made, batch, t, worker, worker_with_t};

async fn plan(table: DeviceTable) -> Result<LogicalPlan> {
    let context = SessionContext::new();
    context.register_table("mine", Arc::new(table))?;
    let query = context.sql("SELECT s, count(*) FROM mine WHERE id > 150 GROUP BY s ORDER BY s");
    Ok(query.await?.into_unoptimized_plan())
}

#[tokio::test]
async fn travel_by_name() -> Result<()> {
    let sent = logical_plan_to_bytes_with_extension_codec(
        &plan(t(2)).await?,
        &DeviceTableCodec::default(),
    )?;
    let there = worker_with_t();
    let read = |context: &SessionContext| {
        let codec = DeviceTableCodec::default();
        logical_plan_from_bytes_with_extension_codec(&sent, &context.task_ctx(), &codec)
    };
    let found = there
        .execute_logical_plan(read(&there)?)
        .await?
        .collect()
        .await?;
    let rows: usize = found.iter().map(|batch| batch.num_rows()).sum();
    // Six of the 49 have no text, and make one group.
    assert_eq!(rows, 43);
    let e = read(&SessionContext::new()).unwrap_err().to_string();
    assert!(e.contains("no DeviceTables"), "{e}");
    let schema = Made::new(2).schema.project(&[0]).unwrap();
    let narrow = Made {
        schema: Arc::new(schema),
        ..Made::new(2)
    };
    let e = read(&worker(DeviceTables::of([("t", narrow.table())]))).unwrap_err();
    assert!(e.to_string().contains("has the schema"), "{e}");
    Ok(())
}

#[tokio::test]
async fn without_a_name_say_so() -> Result<()> {
    let plan = plan(Made::new(2).table()).await?;
    let e = logical_plan_to_bytes_with_extension_codec(&plan, &DeviceTableCodec::default());
    let e = e.unwrap_err().to_string();
    assert!(
        e.contains("the DeviceTable mine on sim cannot be sent to another process"),
        "{e}"
    );
    assert!(e.contains("DeviceTable::with_name"), "{e}");
    Ok(())
}

/// Tables of others are the other codec's.
#[tokio::test]
async fn of_others() -> Result<()> {
    let context = SessionContext::new();
    let table = MemTable::try_new(batch(0).schema(), vec![vec![batch(0)]])?;
    context.register_table("host", Arc::new(table))?;
    let plan = context
        .sql("SELECT id FROM host")
        .await?
        .into_unoptimized_plan();
    let e = logical_plan_to_bytes_with_extension_codec(&plan, &DeviceTableCodec::default());
    let e = e.unwrap_err().to_string();
    assert!(e.contains("LogicalExtensionCodec is not provided"), "{e}");
    Ok(())
}
