use std::sync::Arc;

use arrow_device::ArrowDeviceType;
use arrow_device_datafusion::{
    DeviceSource, DeviceSpec, DeviceTable, DeviceRule, ScanRequest, SendableDeviceStream,
};
use datafusion::arrow::array::{ArrayRef, Float64Array, Int64Array, RecordBatch};
use datafusion::arrow::datatypes::{DataType, Field, Schema, SchemaRef};
use datafusion::execution::SessionStateBuilder;
use datafusion::physical_expr::{LexOrdering, Partitioning, PhysicalSortExpr, expressions::col};
use datafusion::physical_plan::displayable;
use datafusion::prelude::SessionContext;
use futures::stream;

/// Numbers and their square roots, which a partition makes on its device, 1000 rows a batch.
#[derive(Debug)]
struct Roots {
    schema: SchemaRef,
    device: DeviceSpec,
}

impl Roots {
    /// A batch of the columns that are asked for, of numbers from `first` on.
    fn batch(first: i64, request: &ScanRequest) -> arrow_device::Result<RecordBatch> {
        let (numbers, schema) = (first..first + 1000, request.schema());
        let columns = schema.fields().iter().map(|field| -> ArrayRef {
            match field.name().as_str() {
                "n" => Arc::new(Int64Array::from_iter_values(numbers.clone())),
                _ => Arc::new(Float64Array::from_iter_values(
                    numbers.clone().map(|n| (n as f64).sqrt()),
                )),
            }
        });
        Ok(RecordBatch::try_new(schema.clone(), columns.collect())?)
    }
}

impl DeviceSource for Roots {
    fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }

    fn device(&self) -> &DeviceSpec {
        &self.device
    }

    fn partitioning(&self) -> Partitioning {
        Partitioning::UnknownPartitioning(4)
    }

    fn orderings(&self) -> Vec<LexOrdering> {
        // The numbers of each partition ascend.
        let n = col("n", &self.schema).map(PhysicalSortExpr::new_default);
        n.ok().and_then(|n| LexOrdering::new([n])).into_iter().collect()
    }

    fn open(&self, request: ScanRequest) -> arrow_device::Result<SendableDeviceStream> {
        let first = request.partition as i64 * 100_000;
        // Not more batches than the rows that are needed.
        let batches = request.fetch.map_or(100, |rows| rows.div_ceil(1000).min(100));
        let of = request.clone();
        let batch = move |i| of.device.upload(&Self::batch(first + i * 1000, &of)?);
        Ok(request.stream(stream::iter((0..batches as i64).map(batch))))
    }
}

#[tokio::main]
async fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let state = SessionStateBuilder::new()
        .with_default_features()
        .with_physical_optimizer_rule(Arc::new(DeviceRule::default()));
    let context = SessionContext::new_with_state(state.build());
    let schema = Arc::new(Schema::new(vec![
        Field::new("n", DataType::Int64, false),
        Field::new("root", DataType::Float64, false),
    ]));
    let device = DeviceSpec::any(ArrowDeviceType::EXT_DEV); // the simulated device
    let table = DeviceTable::new(Arc::new(Roots { schema, device }))?;
    context.register_table("roots", Arc::new(table))?;

    let query = context.sql("SELECT n FROM roots ORDER BY n LIMIT 3").await?;
    let plan = query.clone().create_physical_plan().await?;
    let text = displayable(&*plan).indent(false).to_string();
    let scan = "DeviceScanExec: device=sim, partitions=4, projection=[n], fetch=3";
    assert!(text.contains(scan) && !text.contains("SortExec"), "{text}");
    let expected = [0, 1, 2].map(Some).into_iter().collect::<Int64Array>();
    assert_eq!(query.collect().await?[0].column(0).as_ref(), &expected);
    Ok(())
}
