//! How the worked plugin's filter travels, for plans that are made elsewhere than where they run.

use std::sync::Arc;

use arrow_device_cluster::codec::{DevicePlanCodec, PlanDecoder, PlanEncoder};
use arrow_device_datafusion::{DeviceExec, DevicePlugin};
use datafusion::error::{DataFusionError, Result};
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::filter::{FilterExec, FilterExecBuilder};
use prost::Message;

use crate::device_filter::FilterPlugin;

/// Writes and reads filters. Those that it reads share their kernels.
#[derive(Debug)]
pub(crate) struct FilterCodec {
    plugin: Arc<dyn DevicePlugin>,
}

impl Default for FilterCodec {
    fn default() -> Self {
        let plugin = Arc::new(FilterPlugin::default());
        Self { plugin }
    }
}

/// What a filter is made of.
#[derive(Clone, PartialEq, Message)]
struct Filter {
    #[prost(bytes = "vec", tag = "1")]
    predicate: Vec<u8>,
    #[prost(message, optional, tag = "2")]
    projection: Option<Columns>,
    #[prost(uint64, optional, tag = "3")]
    fetch: Option<u64>,
}

#[derive(Clone, PartialEq, Message)]
struct Columns {
    #[prost(uint32, repeated, tag = "1")]
    indices: Vec<u32>,
}

impl DevicePlanCodec for FilterCodec {
    fn name(&self) -> &str {
        "DeviceFilterExec"
    }

    fn encode(
        &self,
        plan: &DeviceExec,
        buf: &mut Vec<u8>,
        encoder: &PlanEncoder<'_>,
    ) -> Result<()> {
        let host: Option<&FilterExec> = plan.node().downcast_ref();
        let host = host.ok_or_else(|| {
            let name = plan.name();
            DataFusionError::Internal(format!("{name} is not the example's DeviceFilterExec"))
        })?;
        let projection = host.projection().as_deref().map(|columns| Columns {
            indices: columns.iter().map(|column| *column as u32).collect(),
        });
        let message = Filter {
            predicate: encoder.expression(host.predicate())?,
            projection,
            fetch: host.fetch().map(|rows| rows as u64),
        };
        buf.extend(message.encode_to_vec());
        Ok(())
    }

    fn decode(&self, buf: &[u8], decoder: &PlanDecoder<'_>) -> Result<DeviceExec> {
        let bad = |e: String| DataFusionError::Execution(format!("DeviceFilterExec: {e}"));
        let message = Filter::decode(buf).map_err(|e| bad(e.to_string()))?;
        let input = decoder.only_child()?;
        let columns = input.schema().fields().len();
        let projection = message.projection.map(|of| {
            let indices = of.indices.into_iter().map(|column| column as usize);
            indices.collect::<Vec<_>>()
        });
        if let Some(column) = projection
            .iter()
            .flatten()
            .find(|column| **column >= columns)
        {
            return Err(bad(format!("column {column} of {columns}")));
        }
        let fetch = message.fetch.map(usize::try_from).transpose();
        let predicate = decoder.expression(&message.predicate, &input.schema())?;
        let host = FilterExecBuilder::new(predicate, input.clone())
            .apply_projection(projection)?
            .with_fetch(fetch.map_err(|e| bad(e.to_string()))?)
            .build()?;
        DeviceExec::in_place_of(Arc::new(host), decoder.device().clone(), &self.plugin)
    }
}
