//! Batches in device memory as a source.

use std::fmt;
use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};

use arrow_device::{Device, DeviceRecordBatch, Error, Result};
use arrow_schema::SchemaRef;
use async_trait::async_trait;
use datafusion_catalog::MemTable;
use datafusion_common::Statistics;
use datafusion_common::stats::Precision;
use datafusion_expr::dml::InsertOp;
use datafusion_physical_expr::Partitioning;
use futures::stream::iter;

use super::contract::{DeviceSource, ScanRequest};
use super::insertion::{DeviceSink, InsertRequest};
use crate::metrics::to_datafusion;
use crate::spec::DeviceSpec;
use crate::stream::SendableDeviceStream;

/// Partitions of batches, to which more may be added.
#[derive(Debug)]
pub(super) struct Memory {
    device: DeviceSpec,
    /// What the next scan reads. Nothing in it changes: an `INSERT` puts another one in its place.
    now: Arc<Mutex<Arc<Batches>>>,
}

impl Memory {
    pub(super) fn new(
        schema: SchemaRef,
        device: &Device,
        partitions: Vec<Vec<DeviceRecordBatch>>,
    ) -> Result<Self> {
        let batches = Batches::new(schema, device, partitions)?;
        Ok(Self {
            device: batches.device.clone(),
            now: Arc::new(Mutex::new(Arc::new(batches))),
        })
    }

    fn now(&self) -> Arc<Batches> {
        self.now
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Changes the rows as `change` changes those of a table on the host, where they come for it. Nothing has changed after an error.
    pub(super) async fn change<T, F>(
        &self,
        mut change: impl FnMut(Arc<MemTable>) -> F,
    ) -> datafusion_common::Result<T>
    where
        F: Future<Output = datafusion_common::Result<T>>,
    {
        loop {
            let before = self.now();
            let mut rows = Vec::new();
            for partition in &before.partitions {
                let mut batches = Vec::new();
                for batch in partition.iter() {
                    let batch = batch.clone().with_schema(before.schema.clone());
                    let download = batch.and_then(|batch| batch.start_to_host(None));
                    let download = download.map_err(to_datafusion)?.await;
                    batches.push(download.map_err(to_datafusion)?);
                }
                rows.push(batches);
            }
            let host = Arc::new(MemTable::try_new(before.schema.clone(), rows)?);
            let changed = change(host.clone()).await?;
            let mut partitions = Vec::new();
            for partition in &host.batches {
                let batches = partition.read().await;
                let up = batches.iter().map(|batch| before.kept.upload(batch));
                let up = up.collect::<Result<Arc<[_]>>>();
                partitions.push(up.map_err(to_datafusion)?);
            }
            let mut now = self.now.lock().unwrap_or_else(PoisonError::into_inner);
            // Another statement may have changed the rows meanwhile.
            if Arc::ptr_eq(&now, &before) {
                *now = Arc::new(before.with(partitions));
                return Ok(changed);
            }
        }
    }
}

impl DeviceSource for Memory {
    fn schema(&self) -> SchemaRef {
        self.now().schema()
    }

    fn device(&self) -> &DeviceSpec {
        &self.device
    }

    fn partitioning(&self) -> Partitioning {
        self.now().partitioning()
    }

    fn statistics(&self, partition: Option<usize>) -> Statistics {
        self.now().statistics(partition)
    }

    fn snapshot(&self) -> Option<Arc<dyn DeviceSource>> {
        Some(self.now())
    }

    fn open(&self, request: ScanRequest) -> Result<SendableDeviceStream> {
        self.now().open(request)
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
    now: Arc<Mutex<Arc<Batches>>>,
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
        let mut now = self.now.lock().unwrap_or_else(PoisonError::into_inner);
        let count = now.partitions.len().max(1);
        let old = |i: usize| now.partitions.get(i).filter(|_| !self.overwrite);
        let mut partitions: Vec<Vec<_>> = (0..count)
            .map(|i| old(i).map_or_else(Vec::new, |old| old.to_vec()))
            .collect();
        for (i, batch) in self.batches.into_iter().enumerate() {
            partitions[i % count].push(batch);
        }
        *now = Arc::new(now.with(partitions.into_iter().map(Arc::from).collect()));
        Ok(())
    }
}

/// Partitions of batches that do not change.
struct Batches {
    schema: SchemaRef,
    device: DeviceSpec,
    /// The description does not keep it, and without batches nothing else might.
    kept: Device,
    partitions: Vec<Arc<[DeviceRecordBatch]>>,
}

impl Batches {
    fn new(
        schema: SchemaRef,
        device: &Device,
        partitions: Vec<Vec<DeviceRecordBatch>>,
    ) -> Result<Self> {
        let fitted = |batch: DeviceRecordBatch| match batch.device() == device {
            true => batch.with_schema(schema.clone()),
            false => Err(Error::InvalidArgument(
                format!(
                    "DeviceTable::from_batches: a batch is on {}, the table on {device}",
                    batch.device()
                )
                .into(),
            )),
        };
        let partitions = partitions
            .into_iter()
            .map(|batches| batches.into_iter().map(fitted).collect());
        Ok(Self {
            partitions: partitions.collect::<Result<_>>()?,
            device: device.into(),
            kept: device.clone(),
            schema,
        })
    }
}

impl Batches {
    /// The same with other rows.
    fn with(&self, partitions: Vec<Arc<[DeviceRecordBatch]>>) -> Self {
        Self {
            schema: self.schema.clone(),
            device: self.device.clone(),
            kept: self.kept.clone(),
            partitions,
        }
    }
}

impl fmt::Debug for Batches {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Batches")
            .field("device", &self.device)
            .field("partitions", &self.partitions.len())
            .finish_non_exhaustive()
    }
}

impl DeviceSource for Batches {
    fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }

    fn device(&self) -> &DeviceSpec {
        &self.device
    }

    fn partitioning(&self) -> Partitioning {
        Partitioning::UnknownPartitioning(self.partitions.len())
    }

    fn statistics(&self, partition: Option<usize>) -> Statistics {
        let of = match partition {
            Some(i) => self.partitions.get(i..=i).unwrap_or_default(),
            None => &self.partitions,
        };
        let rows = of.iter().flat_map(|p| p.iter()).map(|b| b.num_rows()).sum();
        Statistics::new_unknown(&self.schema).with_num_rows(Precision::Exact(rows))
    }

    fn open(&self, request: ScanRequest) -> Result<SendableDeviceStream> {
        let batches = self.partitions.get(request.partition).cloned();
        let (batches, projection) = (batches.unwrap_or_default(), request.projection.clone());
        let batch = move |i| {
            let batch: &DeviceRecordBatch = &batches[i];
            match &projection {
                Some(projection) => batch.project(projection),
                None => Ok(batch.clone()),
            }
        };
        let count = self
            .partitions
            .get(request.partition)
            .map_or(0, |p| p.len());
        Ok(request.stream(iter((0..count).map(batch))))
    }
}
