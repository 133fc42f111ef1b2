//! Scans and inserts of tables by name.

use std::sync::Arc;

use arrow_device_datafusion::{
    DeviceExec, DeviceInsertExec, DeviceScanExec, DeviceSpec, DeviceTable,
};
use datafusion::error::{DataFusionError, Result};
use datafusion::logical_expr::TableProviderFilterPushDown;
use datafusion::logical_expr::dml::InsertOp;
use datafusion::physical_plan::ExecutionPlan;
use datafusion_proto::protobuf;

use super::operator::{PlanDecoder, PlanEncoder};
use super::tables::DeviceTables;
use super::values::{device_message, number, optional, read_schema, schema_message};
use super::{unreadable, wire};

/// The error of a table that has no name.
pub(super) fn of_this_process(what: &str, device: &DeviceSpec) -> DataFusionError {
    DataFusionError::Plan(format!(
        "{what} on {device} cannot be sent to another process: the batches, readers or streams of a DeviceTable belong to the process \
         that made it. If every worker has this table, give it a name with DeviceTable::with_name, and register the table of that \
         name on each worker with DeviceTables; otherwise run the query in this process, or write the rows to files that \
         the workers read"
    ))
}

pub(super) fn message(scan: &DeviceScanExec, encoder: &PlanEncoder<'_>) -> Result<wire::Scan> {
    let source = scan.source();
    let table = scan.table_name();
    let table = table.ok_or_else(|| of_this_process("DeviceScanExec", source.device()))?;
    let filter = |filter| -> Result<_> {
        Ok(wire::Filter {
            expression: encoder.expression(filter)?,
            exact: source.supports_filter(filter) == TableProviderFilterPushDown::Exact,
        })
    };
    let projection = scan.projection().map(|columns| wire::Columns {
        indices: columns.iter().map(|i| *i as u64).collect(),
    });
    let (partitioning, order) = declared(scan);
    Ok(wire::Scan {
        table: table.to_owned(),
        device: Some(device_message(source.device())),
        schema: Some(schema_message(&source.schema())?),
        projection,
        filters: scan.filters().iter().map(filter).collect::<Result<_>>()?,
        fetch: scan.fetch().map(|rows| rows as u64),
        partitioning,
        order,
        part: scan.part().map(|(index, count)| wire::Part {
            index: index as u64,
            count: count as u64,
        }),
    })
}

/// What the nodes above a scan rely on.
fn declared(scan: &DeviceScanExec) -> (String, String) {
    let properties = scan.properties();
    let order = properties.output_ordering();
    (
        properties.output_partitioning().to_string(),
        order.map(ToString::to_string).unwrap_or_default(),
    )
}

/// The scan of this process's table of the name.
pub(super) fn read(scan: &wire::Scan, decoder: &PlanDecoder<'_>) -> Result<DeviceExec> {
    let name = &scan.table;
    if !decoder.children().is_empty() {
        return Err(unreadable(format!("a scan of {name:?} with children")));
    }
    let table = table(name, &scan.schema, decoder)?;
    let indices = |columns: &wire::Columns| -> Result<Vec<usize>> {
        columns.indices.iter().map(|i| number(*i)).collect()
    };
    let projection = scan.projection.as_ref().map(indices).transpose()?;
    let plan = table.scan_on_device(projection.as_deref(), optional(scan.fetch)?)?;
    let schema = plan.source().schema();
    let mut filters = Vec::with_capacity(scan.filters.len());
    for written in &scan.filters {
        let filter = decoder.expression(&written.expression, &schema)?;
        let support = plan.source().supports_filter(&filter);
        if written.exact && support != TableProviderFilterPushDown::Exact {
            return Err(other(
                name,
                format!("does not apply the filter {filter} exactly"),
            ));
        }
        filters.push(filter);
    }
    let plan = plan.with_filters(filters)?;
    let (partitioning, order) = declared(&plan);
    if partitioning != scan.partitioning {
        let expected = &scan.partitioning;
        return Err(other(
            name,
            format!("has the partitions {partitioning}, not {expected}"),
        ));
    }
    if order != scan.order {
        let expected = &scan.order;
        return Err(other(
            name,
            format!("has the order [{order}], not [{expected}]"),
        ));
    }
    Ok(DeviceExec::from(match &scan.part {
        Some(part) => plan.with_part(number(part.index)?, number(part.count)?)?,
        None => plan,
    }))
}

pub(super) fn insert_message(insert: &DeviceInsertExec) -> Result<wire::Insert> {
    let table = insert.table_name();
    let table = table.ok_or_else(|| of_this_process("DeviceInsertExec", insert.device()))?;
    Ok(wire::Insert {
        table: table.to_owned(),
        device: Some(device_message(insert.device())),
        schema: Some(schema_message(&insert.source().schema())?),
        op: match insert.op() {
            InsertOp::Append => 0,
            InsertOp::Overwrite => 1,
            InsertOp::Replace => 2,
        },
    })
}

pub(super) fn read_insert(
    insert: &wire::Insert,
    decoder: &PlanDecoder<'_>,
) -> Result<Arc<dyn ExecutionPlan>> {
    let table = table(&insert.table, &insert.schema, decoder)?;
    let op = match insert.op {
        0 => InsertOp::Append,
        1 => InsertOp::Overwrite,
        2 => InsertOp::Replace,
        op => return Err(unreadable(format!("the operation {op} of an INSERT"))),
    };
    let input = decoder.only_child()?.clone();
    Ok(Arc::new(table.insert_on_device(input, op)?))
}

/// This process's table of a name, with the schema and the type of device of the one that was planned with.
fn table(
    name: &str,
    schema: &Option<protobuf::Schema>,
    decoder: &PlanDecoder<'_>,
) -> Result<DeviceTable> {
    let table = DeviceTables::table_of_task(decoder.context(), name)?;
    check_schema(name, &table, &*read_schema(schema)?)?;
    let (found, expected) = (table.source().device(), decoder.device());
    if found.device_type() != expected.device_type() {
        return Err(other(name, format!("is on {found}, not on {expected}")));
    }
    Ok(table)
}

/// Checks that a table is of a schema.
pub(super) fn check_schema(
    name: &str,
    table: &DeviceTable,
    expected: &datafusion::arrow::datatypes::Schema,
) -> Result<()> {
    let found = table.source().schema();
    match *found == *expected {
        true => Ok(()),
        false => Err(other(
            name,
            format!("has the schema {found}, not {expected}"),
        )),
    }
}

fn other(name: &str, how: String) -> DataFusionError {
    DataFusionError::Plan(format!(
        "this process's DeviceTable {name:?} {how}, as the one that the query was planned with; register the same table on all machines"
    ))
}
