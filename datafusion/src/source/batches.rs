//! Batches in device memory as a source.

use std::sync::{Arc, Mutex};

use arrow_device::{Device, DeviceRecordBatch, Error, Result};
use arrow_schema::SchemaRef;
use async_trait::async_trait;
use datafusion_catalog::{MemTable, Session, TableProvider};
use datafusion_common::Statistics;
use datafusion_common::stats::Precision;
use datafusion_expr::Expr;
use datafusion_expr::dml::InsertOp;
use datafusion_physical_expr::Partitioning;
use datafusion_physical_plan::ExecutionPlan;
use futures::stream::iter;

use super::contract::{DeviceSink, DeviceSource, InsertRequest, ScanRequest};
use crate::metrics::to_datafusion;
use crate::spec::DeviceSpec;
use crate::stream::SendableDeviceStream;
use crate::timer::unpoisoned;

/// The batches of each partition, which do not change.
type Partitions = Arc<[Arc<[DeviceRecordBatch]>]>;

/// Partitions of batches, to which more may be added.
#[derive(Clone, Debug)]
pub(super) struct Memory {
    schema: SchemaRef,
    device: DeviceSpec,
    /// The description does not keep it, and without batches nothing else might.
    kept: Device,
    /// What the next scan reads. A statement puts others in their place.
    now: Arc<Mutex<Partitions>>,
}

impl Memory {
    pub(super) fn new(
        schema: SchemaRef,
        device: &Device,
        partitions: Vec<Vec<DeviceRecordBatch>>,
    ) -> Result<Self> {
        let fitted = |batch: DeviceRecordBatch| {
            let own = batch.device();
            if own == device {
                return batch.with_schema(schema.clone());
            }
            let what =
                format!("DeviceTable::from_batches: a batch is on {own}, the table on {device}");
            Err(Error::InvalidArgument(what.into()))
        };
        let partitions = partitions.into_iter();
        let partitions = partitions.map(|batches| batches.into_iter().map(fitted).collect());
        Ok(Self {
            now: Arc::new(Mutex::new(partitions.collect::<Result<_>>()?)),
            device: device.into(),
            kept: device.clone(),
            schema,
        })
    }

    /// Changes the rows as a table on the host changes them, where they come for it: by an UPDATE with assignments, and else by a DELETE. Nothing
    /// has changed after an error.
    pub(super) async fn change(
        &self,
        state: &dyn Session,
        assignments: Option<Vec<(String, Expr)>>,
        filters: Vec<Expr>,
    ) -> datafusion_common::Result<Arc<dyn ExecutionPlan>> {
        loop {
            let before = unpoisoned(&self.now).clone();
            let mut rows = Vec::new();
            for partition in before.iter() {
                let mut batches = Vec::new();
                for batch in partition.iter() {
                    let download = batch.start_to_host(None).map_err(to_datafusion)?.await;
                    batches.push(download.map_err(to_datafusion)?);
                }
                rows.push(batches);
            }
            let host = MemTable::try_new(self.schema.clone(), rows)?;
            let (assignments, filters) = (assignments.clone(), filters.clone());
            let changed = match assignments {
                Some(assignments) => host.update(state, assignments, filters).await?,
                None => host.delete_from(state, filters).await?,
            };
            let mut partitions = Vec::new();
            for partition in &host.batches {
                let batches = partition.read().await;
                let up = batches.iter().map(|batch| self.kept.upload(batch));
                let up = up.collect::<Result<Arc<[_]>>>();
                partitions.push(up.map_err(to_datafusion)?);
            }
            let mut now = unpoisoned(&self.now);
            // Another statement may have changed the rows meanwhile.
            if Arc::ptr_eq(&now, &before) {
                *now = partitions.into();
                return Ok(changed);
            }
        }
    }
}

impl DeviceSource for Memory {
    fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }

    fn device(&self) -> &DeviceSpec {
        &self.device
    }

    fn partitioning(&self) -> Partitioning {
        Partitioning::UnknownPartitioning(unpoisoned(&self.now).len())
    }

    fn statistics(&self, partition: Option<usize>) -> Statistics {
        let now = unpoisoned(&self.now).clone();
        let of = match partition {
            Some(i) => now.get(i..=i).unwrap_or_default(),
            None => &now,
        };
        let rows = of.iter().flat_map(|p| p.iter()).map(|b| b.num_rows()).sum();
        Statistics::new_unknown(&self.schema).with_num_rows(Precision::Exact(rows))
    }

    fn snapshot(&self) -> Option<Arc<dyn DeviceSource>> {
        let now = unpoisoned(&self.now).clone();
        let now = Arc::new(Mutex::new(now));
        Some(Arc::new(Self {
            now,
            ..self.clone()
        }))
    }

    fn open(&self, request: ScanRequest) -> Result<SendableDeviceStream> {
        let batches = unpoisoned(&self.now).get(request.partition).cloned();
        let (batches, projection) = (batches.unwrap_or_default(), request.projection.clone());
        let count = batches.len();
        let batch = move |i| {
            let batch: &DeviceRecordBatch = &batches[i];
            match &projection {
                Some(projection) => batch.project(projection),
                None => Ok(batch.clone()),
            }
        };
        Ok(request.stream(iter((0..count).map(batch))))
    }

    fn supports_insert(&self, op: InsertOp) -> bool {
        // Without a key, no row collides with another.
        !matches!(op, InsertOp::Replace)
    }

    fn insert(&self, request: InsertRequest) -> Result<Box<dyn DeviceSink>> {
        Ok(Box::new(Added {
            now: self.now.clone(),
            batches: Vec::new(),
            overwrite: matches!(request.op, InsertOp::Overwrite),
        }))
    }
}

/// What an `INSERT` adds.
struct Added {
    now: Arc<Mutex<Partitions>>,
    batches: Vec<DeviceRecordBatch>,
    overwrite: bool,
}

#[async_trait]
impl DeviceSink for Added {
    async fn write(&mut self, batch: DeviceRecordBatch) -> Result<()> {
        self.batches.push(batch);
        Ok(())
    }

    async fn commit(self: Box<Self>) -> Result<()> {
        let mut now = unpoisoned(&self.now);
        let count = now.len().max(1);
        let old = |i: usize| now.get(i).filter(|_| !self.overwrite);
        let mut partitions: Vec<Vec<_>> = (0..count)
            .map(|i| old(i).map_or_else(Vec::new, |old| old.to_vec()))
            .collect();
        for (i, batch) in self.batches.into_iter().enumerate() {
            partitions[i % count].push(batch);
        }
        *now = partitions.into_iter().map(Arc::from).collect();
        Ok(())
    }
}
