//! `CREATE EXTERNAL TABLE` on a device.

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;

use arrow_device::{ArrowDeviceType, Devices};
use arrow_device_datafusion::{
    DeviceResolver, DeviceRule, DeviceSource, DeviceSourceFactory, DeviceSpec, DeviceTableFactory,
    NewDeviceTable, ScanRequest, SendableDeviceStream,
};
use async_trait::async_trait;
use datafusion::arrow::datatypes::SchemaRef;
use datafusion::catalog::Session;
use datafusion::common::{Constraints, DataFusionError, Result};
use datafusion::execution::SessionStateBuilder;
use datafusion::parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use datafusion::parquet::arrow::{ArrowWriter, ProjectionMask};
use datafusion::physical_expr::LexOrdering;
use datafusion::physical_plan::execution_plan::Boundedness;
use datafusion::prelude::{SessionConfig, SessionContext};

use crate::kit::*;
use crate::queries::result;

/// A Parquet file that is decoded on the host and uploaded: what a GPU reader does, without a GPU.
#[derive(Debug)]
struct Uploaded {
    path: PathBuf,
    rows: usize,
    schema: SchemaRef,
    device: DeviceSpec,
    orderings: Vec<LexOrdering>,
    constraints: Constraints,
}

impl DeviceSource for Uploaded {
    fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }

    fn device(&self) -> &DeviceSpec {
        &self.device
    }

    fn orderings(&self) -> Vec<LexOrdering> {
        self.orderings.clone()
    }

    fn constraints(&self) -> Option<&Constraints> {
        Some(&self.constraints)
    }

    fn open(&self, request: ScanRequest) -> arrow_device::Result<SendableDeviceStream> {
        let (path, rows, asked) = (self.path.clone(), self.rows, request.clone());
        Ok(request.stream_later(async move {
            let file = File::open(&path).map_err(|e| external(&path, e))?;
            let reader = ParquetRecordBatchReaderBuilder::try_new(file);
            let mut reader = reader
                .map_err(|e| external(&path, e))?
                .with_batch_size(rows);
            if let Some(columns) = &asked.projection {
                let columns = columns.iter().copied();
                let mask = ProjectionMask::roots(reader.parquet_schema(), columns);
                reader = reader.with_projection(mask);
            }
            if let Some(rows) = asked.fetch {
                reader = reader.with_limit(rows);
            }
            let reader = reader.build().map_err(|e| external(&path, e))?;
            let device = asked.device.clone();
            let schema = asked.schema().clone();
            // The file's order of columns is not the query's.
            let batches = reader.map(move |batch| {
                let batch = batch?;
                let fields = schema.fields().iter();
                let order = fields.map(|f| batch.schema().index_of(f.name()));
                let order = order.collect::<std::result::Result<Vec<_>, _>>()?;
                device.upload(&batch.project(&order)?)
            });
            Ok(asked.stream(futures::stream::iter(batches)))
        }))
    }
}

fn external(path: &std::path::Path, e: impl std::fmt::Display) -> arrow_device::Error {
    arrow_device::Error::InvalidArgument(format!("{}: {e}", path.display()).into())
}

#[derive(Debug)]
struct UploadedParquet;

#[async_trait]
impl DeviceSourceFactory for UploadedParquet {
    async fn create(
        &self,
        _: &dyn Session,
        table: &mut NewDeviceTable<'_>,
    ) -> Result<Arc<dyn DeviceSource>> {
        let rows = table
            .take_option("rows")
            .map_or(Ok(16), |rows| rows.parse());
        let rows = rows.map_err(|e| DataFusionError::External(Box::new(e)))?;
        let path = PathBuf::from(&table.command().locations[0]);
        let reader = ParquetRecordBatchReaderBuilder::try_new(File::open(&path)?)?;
        // Without the writer's metadata.
        let schema = reader.schema().as_ref().clone();
        let schema: SchemaRef = Arc::new(schema.with_metadata(Default::default()));
        Ok(Arc::new(Uploaded {
            path,
            rows,
            device: table.device().clone(),
            orderings: table.orderings(&schema)?,
            constraints: table.command().constraints.clone(),
            schema,
        }))
    }
}

const TEXTS: &str = "SET datafusion.sql_parser.map_string_types_to_utf8view = false";

/// A file of 100 rows, which is removed with this.
struct Parquet(PathBuf);

impl Parquet {
    fn new(name: &str) -> Self {
        let name = format!("arrow-device-{}-{name}.parquet", std::process::id());
        let path = std::env::temp_dir().join(name);
        let mut writer =
            ArrowWriter::try_new(File::create(&path).unwrap(), schema(), None).unwrap();
        writer.write(&rows(0, 100)).unwrap();
        writer.close().unwrap();
        Self(path)
    }

    fn create(&self, columns: &str, rest: &str) -> String {
        let path = self.0.display();
        format!("CREATE EXTERNAL TABLE t {columns} STORED AS UPLOADED LOCATION '{path}' {rest}")
    }
}

impl Drop for Parquet {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn context(sim: &Sim, device: Option<DeviceSpec>) -> SessionContext {
    let mut factory = DeviceTableFactory::new(Arc::new(UploadedParquet));
    if let Some(device) = device {
        factory = factory.with_device(device);
    }
    let devices = DeviceResolver::of([sim.device.clone()]);
    let config = SessionConfig::new()
        .with_target_partitions(1)
        .with_extension(Arc::new(devices));
    let mut state = SessionStateBuilder::new()
        .with_config(config)
        .with_default_features()
        .with_physical_optimizer_rule(Arc::new(DeviceRule::default()))
        .build();
    let factories = state.table_factories_mut();
    factories.insert("UPLOADED".into(), Arc::new(factory));
    SessionContext::new_with_state(state)
}

#[tokio::test]
async fn sql_creates_a_table_of_a_file_on_the_device() {
    let sim = Sim::new();
    let file = Parquet::new("created");
    let ctx = context(&sim, None);
    let create = file.create("", "OPTIONS ('device' 'sim', 'rows' '8')");
    query(&ctx, &create).await.unwrap();
    let plan = plan(&ctx, "SELECT s, a FROM t LIMIT 24").await;
    says(&text(&plan, &[]), &["projection=[s, a], fetch=24"]);
    let before = sim.stats();
    let found = numbers_in(&ctx, "SELECT a FROM t LIMIT 24").await;
    assert_eq!(found, multiples(24, 1));
    let moved = sim.stats().since(&before);
    let bytes = (moved.bytes_to_device, moved.bytes_to_host);
    assert_eq!(bytes, (24 * 8, 24 * 8));
    let sql = "SELECT b, max(s) AS s, count(*) AS n FROM t WHERE a >= 20 GROUP BY b";
    let found = result(&ctx, sql).await;
    ctx.deregister_table("t").unwrap();
    register(&ctx, "t", host_table(&[vec![rows(0, 100)]]));
    assert_eq!(found, result(&ctx, sql).await);
    drop((plan, ctx));
    sim.assert_done();
}

#[tokio::test]
async fn order_and_constraints_of_the_statement_are_the_tables() {
    let sim = Sim::new();
    let file = Parquet::new("declared");
    let ctx = context(&sim, Some(DeviceSpec::any(ArrowDeviceType::EXT_DEV)));
    let columns = "(a BIGINT NOT NULL, b BIGINT NOT NULL, s VARCHAR, PRIMARY KEY (a))";
    query(&ctx, TEXTS).await.unwrap();
    let create = file.create(columns, "WITH ORDER (a ASC NULLS LAST)");
    query(&ctx, &create).await.unwrap();
    let plan = plan(&ctx, "SELECT a, s FROM t ORDER BY a").await;
    assert_eq!(shape(&plan, &[]), "Down < Scan");
    says(&text(&plan, &[]), &["order=[a@0 ASC NULLS LAST]"]);
    // Column b depends on the key.
    let found = numbers_in(&ctx, "SELECT a, b FROM t GROUP BY a").await;
    assert_eq!(sorted(found), (0..100).collect::<Vec<_>>());
}

/// Nothing that was written is ignored.
#[tokio::test]
async fn what_a_statement_declares_in_vain_is_an_error() {
    let sim = Sim::new();
    let file = Parquet::new("refused");
    let any = || Some(DeviceSpec::any(ArrowDeviceType::EXT_DEV));
    let other = "the columns are not those of its source";
    let unknown = "OPTIONS ('rows' '8', 'colour' 'red', 'x.y' '1')";
    for (device, columns, rest, expected) in [
        (None, "", "", "no device is named"),
        (any(), "", "OPTIONS ('device' 'abacus')", "abacus"),
        (any(), "", unknown, "unknown options: colour, x.y"),
        (any(), "(a BIGINT NOT NULL)", "", other),
        (any(), "", "OPTIONS ('rows' 'many')", "invalid digit"),
    ] {
        let ctx = context(&sim, device);
        let error = fails(query(&ctx, &file.create(columns, rest)).await, &[expected]);
        assert!(!ctx.table_exist("t").unwrap());
        if expected != "invalid digit" {
            says(&error, &["CREATE EXTERNAL TABLE t STORED AS UPLOADED"]);
        }
    }
    let unbounded = file
        .create("", "")
        .replace("EXTERNAL", "UNBOUNDED EXTERNAL");
    let found = query(&context(&sim, any()), &unbounded).await;
    fails(found, &["unbounded"]);
}

/// A source that ignores the statement's order, constraints or device.
#[derive(Debug)]
struct Ignores(DeviceSpec);

#[async_trait]
impl DeviceSourceFactory for Ignores {
    async fn create(
        &self,
        state: &dyn Session,
        table: &mut NewDeviceTable<'_>,
    ) -> Result<Arc<dyn DeviceSource>> {
        let source = UploadedParquet.create(state, table).await?;
        Ok(Arc::new(Bare(source, self.0.clone())))
    }
}

#[derive(Debug)]
struct Bare(Arc<dyn DeviceSource>, DeviceSpec);

impl DeviceSource for Bare {
    fn schema(&self) -> SchemaRef {
        self.0.schema()
    }

    fn device(&self) -> &DeviceSpec {
        &self.1
    }

    fn boundedness(&self) -> Boundedness {
        Boundedness::Bounded
    }

    fn open(&self, request: ScanRequest) -> arrow_device::Result<SendableDeviceStream> {
        self.0.open(request)
    }
}

#[tokio::test]
async fn a_source_that_ignores_the_statement_is_refused() {
    let sim = Sim::new();
    let file = Parquet::new("ignored");
    let columns = "(a BIGINT NOT NULL, b BIGINT NOT NULL, s VARCHAR, PRIMARY KEY (a))";
    let cpu = DeviceSpec::from(&Devices::cpu());
    let any = DeviceSpec::any(ArrowDeviceType::EXT_DEV);
    let order = "does not have the order [a@0 ASC";
    for (device, columns, rest, expected) in [
        (&any, "", "WITH ORDER (a)", order),
        (&any, columns, "", "does not declare the constraints"),
        (&cpu, "", "", "its source is on cpu, not on sim"),
    ] {
        let ctx = context(&sim, None);
        let factory = DeviceTableFactory::new(Arc::new(Ignores(device.clone())));
        let factory = Arc::new(factory.with_device(any.clone()));
        let state = ctx.state_ref();
        let name = "UPLOADED".to_owned();
        state.write().table_factories_mut().insert(name, factory);
        query(&ctx, TEXTS).await.unwrap();
        fails(query(&ctx, &file.create(columns, rest)).await, &[expected]);
    }
}
