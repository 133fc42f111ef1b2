//! [`DeviceTableCodec`]: tables by name in logical plans.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use arrow_device_datafusion::DeviceTable;
use datafusion::arrow::datatypes::SchemaRef;
use datafusion::catalog::TableProvider;
use datafusion::common::TableReference;
use datafusion::datasource::file_format::FileFormatFactory;
use datafusion::error::Result;
use datafusion::execution::TaskContext;
use datafusion::logical_expr::{
    AggregateUDF, Extension, HigherOrderUDF, LogicalPlan, ScalarUDF, WindowUDF,
};
use datafusion_proto::logical_plan::{DefaultLogicalExtensionCodec, LogicalExtensionCodec};

use super::scan::{check_schema, of_this_process};
use super::tables::DeviceTables;
use super::wire;

/// Carries [`DeviceTable`]s in logical plans, by [name](DeviceTable::with_name), in front of another codec, which does everything else. The
/// process that reads the plan has the tables in its [`DeviceTables`]. Ballista's clients and schedulers take it with
/// `with_ballista_logical_extension_codec`, around `BallistaLogicalExtensionCodec`.
#[derive(Clone)]
pub struct DeviceTableCodec(Arc<dyn LogicalExtensionCodec>);

impl Default for DeviceTableCodec {
    /// The codec of plans that have nothing else that needs one.
    fn default() -> Self {
        Self::new(Arc::new(DefaultLogicalExtensionCodec {}))
    }
}

impl DeviceTableCodec {
    /// Makes a codec in front of another.
    pub fn new(others: Arc<dyn LogicalExtensionCodec>) -> Self {
        Self(others)
    }
}

impl fmt::Debug for DeviceTableCodec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("DeviceTableCodec").field(&self.0).finish()
    }
}

impl LogicalExtensionCodec for DeviceTableCodec {
    fn try_decode(
        &self,
        buf: &[u8],
        inputs: &[LogicalPlan],
        ctx: &TaskContext,
    ) -> Result<Extension> {
        self.0.try_decode(buf, inputs, ctx)
    }

    fn try_encode(&self, node: &Extension, buf: &mut Vec<u8>) -> Result<()> {
        self.0.try_encode(node, buf)
    }

    fn try_decode_table_provider(
        &self,
        buf: &[u8],
        table_ref: &TableReference,
        schema: SchemaRef,
        ctx: &TaskContext,
    ) -> Result<Arc<dyn TableProvider>> {
        if !wire::is_ours(buf) {
            return self
                .0
                .try_decode_table_provider(buf, table_ref, schema, ctx);
        }
        let wire::Table { name } = wire::read(buf)?;
        let table = DeviceTables::table_of_task(ctx, &name)?;
        check_schema(&name, &table, &schema)?;
        Ok(Arc::new(table))
    }

    fn try_encode_table_provider(
        &self,
        table_ref: &TableReference,
        node: Arc<dyn TableProvider>,
        buf: &mut Vec<u8>,
    ) -> Result<()> {
        let any: &dyn Any = &*node;
        let Some(table) = any.downcast_ref::<DeviceTable>() else {
            return self.0.try_encode_table_provider(table_ref, node, buf);
        };
        let what = format!("the DeviceTable {table_ref}");
        let name = table.name();
        let name = name.ok_or_else(|| of_this_process(&what, table.source().device()))?;
        let name = name.to_owned();
        wire::write(&wire::Table { name }, buf);
        Ok(())
    }

    fn try_decode_file_format(
        &self,
        buf: &[u8],
        ctx: &TaskContext,
    ) -> Result<Arc<dyn FileFormatFactory>> {
        self.0.try_decode_file_format(buf, ctx)
    }

    fn try_encode_file_format(
        &self,
        buf: &mut Vec<u8>,
        node: Arc<dyn FileFormatFactory>,
    ) -> Result<()> {
        self.0.try_encode_file_format(buf, node)
    }

    fn try_decode_udf(&self, name: &str, buf: &[u8]) -> Result<Arc<ScalarUDF>> {
        self.0.try_decode_udf(name, buf)
    }

    fn try_encode_udf(&self, node: &ScalarUDF, buf: &mut Vec<u8>) -> Result<()> {
        self.0.try_encode_udf(node, buf)
    }

    fn try_decode_higher_order_function(
        &self,
        name: &str,
        buf: &[u8],
    ) -> Result<Arc<HigherOrderUDF>> {
        self.0.try_decode_higher_order_function(name, buf)
    }

    fn try_encode_higher_order_function(
        &self,
        node: &HigherOrderUDF,
        buf: &mut Vec<u8>,
    ) -> Result<()> {
        self.0.try_encode_higher_order_function(node, buf)
    }

    fn try_decode_udaf(&self, name: &str, buf: &[u8]) -> Result<Arc<AggregateUDF>> {
        self.0.try_decode_udaf(name, buf)
    }

    fn try_encode_udaf(&self, node: &AggregateUDF, buf: &mut Vec<u8>) -> Result<()> {
        self.0.try_encode_udaf(node, buf)
    }

    fn try_decode_udwf(&self, name: &str, buf: &[u8]) -> Result<Arc<WindowUDF>> {
        self.0.try_decode_udwf(name, buf)
    }

    fn try_encode_udwf(&self, node: &WindowUDF, buf: &mut Vec<u8>) -> Result<()> {
        self.0.try_encode_udwf(node, buf)
    }
}
