//! Nodes of plans, and plans of lines.

use arrow_device_datafusion::{DeviceCoalesceBatchesExec, DeviceToDeviceExec, HostToDeviceExec};
use datafusion::physical_plan::buffer::BufferExec;
use datafusion::physical_plan::filter::FilterExecBuilder;
use datafusion::physical_plan::limit::{GlobalLimitExec, LocalLimitExec};
use datafusion::physical_plan::sorts::sort::SortExec;
use datafusion::physical_plan::sorts::sort_preserving_merge::SortPreservingMergeExec;

use crate::kit::*;

pub(crate) fn up(child: Plan, device: &Device) -> Plan {
    HostToDeviceExec::default().above(child, device.clone())
}

pub(crate) fn down(child: Plan) -> Plan {
    Arc::new(DeviceToHostExec::new(child))
}

/// A node on the host.
pub(crate) fn on_host(child: Plan) -> Plan {
    Arc::new(CoalescePartitionsExec::new(child))
}

/// A device scan, and nothing above it.
pub(crate) async fn device_leaf(table: Arc<DeviceTable>) -> Plan {
    scan(table).await.children()[0].clone()
}

/// So many partitions of ten rows.
fn tens(partitions: usize) -> Vec<Vec<RecordBatch>> {
    let partitions = 0..partitions as i64;
    partitions.map(|i| vec![rows(i * 10, 10)]).collect()
}

/// The device form of a node, as a node.
pub(crate) fn form(node: Plan, device: impl Into<DeviceSpec>) -> Plan {
    DeviceForm::of(node, device).unwrap().expect("a form")
}

pub(crate) fn joining(child: Plan, device: &Sim, rows: usize) -> Plan {
    DeviceCoalesceBatchesExec::new(rows).above(child, device)
}

pub(crate) fn projected(child: Plan, expr: Arc<dyn PhysicalExpr>) -> Plan {
    let alias = "x".to_owned();
    let expr = ProjectionExpr { expr, alias };
    Arc::new(ProjectionExec::try_new([expr], child).unwrap())
}

/// Columns by number, with new names.
pub(crate) fn project(child: Plan, columns: &[(usize, &str)]) -> Plan {
    let schema = child.schema();
    let expr = columns.iter().map(|(i, name)| ProjectionExpr {
        expr: Arc::new(Column::new(schema.field(*i).name(), *i)),
        alias: (*name).to_owned(),
    });
    Arc::new(ProjectionExec::try_new(expr, child).unwrap())
}

pub(crate) fn union(children: impl Into<Vec<Plan>>) -> Plan {
    UnionExec::try_new(children.into()).unwrap()
}

pub(crate) fn round_robin(child: Plan, outputs: usize) -> Plan {
    let to = Partitioning::RoundRobinBatch(outputs);
    Arc::new(RepartitionExec::try_new(child, to).unwrap())
}

/// By the values of a.
pub(crate) fn hashed(child: Plan, outputs: usize) -> Plan {
    let to = Partitioning::Hash(vec![col("a", &child.schema()).unwrap()], outputs);
    Arc::new(RepartitionExec::try_new(child, to).unwrap())
}

fn by_a(plan: &Plan) -> LexOrdering {
    let a = col("a", &plan.schema()).unwrap();
    LexOrdering::new([PhysicalSortExpr::new(a, SortOptions::default())]).unwrap()
}

/// Each partition by itself.
pub(crate) fn sort(child: Plan) -> Plan {
    Arc::new(SortExec::new(by_a(&child), child).with_preserve_partitioning(true))
}

pub(crate) fn merge(child: Plan, fetch: Option<usize>) -> Plan {
    Arc::new(SortPreservingMergeExec::new(by_a(&child), child).with_fetch(fetch))
}

/// The plan of a line in the notation of [`shape`]: each node above its child, and several children in brackets. After its name, a
/// node has its device and its arguments: columns, perhaps with a new name (`s:x`), or numbers.
///
/// | line | node |
/// | --- | --- |
/// | `DataSource 2`, `Scan A 2` | a table of two partitions of ten rows, on the host and on the first device |
/// | `Numbers 3 2`, `Numbers A 3 2` | one of three and two batches of 16 numbers, which go on counting |
/// | `Map A` | the operator that doubles the first column |
/// | `Filter` | `a < 5`; `Filter 3` returns at most three rows of each partition, `Filter true` all rows |
/// | `Computed` | `b + 1`, which has no form on a device |
/// | `Repartition 4`, `Repartition a 4` | round robin, and by the hash of a |
/// | `Buffer` | a node of which the crate knows nothing, as those of engines |
///
/// Other leaves are the plans in `own`.
pub(crate) fn planned(line: &str, devices: &[&Sim], own: &[(&str, &Plan)]) -> Plan {
    if let Some((_, plan)) = own.iter().find(|(name, _)| *name == line) {
        return (*plan).clone();
    }
    let (node, below) = line.split_once(" < ").unwrap_or((line, ""));
    let children = children_of(below).into_iter();
    let children: Vec<Plan> = children.map(|c| planned(c, devices, own)).collect();
    let child = || children[0].clone();
    let mut words = node.split(' ').peekable();
    let name = words.next().unwrap();
    let of_device = words.next_if(|word| ["A", "B"].contains(word));
    let of_device = of_device.map(|word| devices[usize::from(word == "B")]);
    let device = || of_device.unwrap_or_else(|| panic!("no device of {node}"));
    let (columns, numbers): (Vec<_>, Vec<_>) =
        words.partition(|word| word.parse::<usize>().is_err());
    let number = |i: usize| numbers.get(i).map(|n: &&str| n.parse::<usize>().unwrap());
    // Tokio's budget of a task, which may be spent here, would stop it for good.
    let leaf = |table| futures::executor::block_on(tokio::task::unconstrained(scan(table)));
    let partitions = || tens(number(0).unwrap_or(1));
    match name {
        "DataSource" => leaf(host_table(&partitions())),
        "Scan" => leaf(device_table(device(), &partitions())).children()[0].clone(),
        "Numbers" => {
            let mut first = 0;
            let partitions = (0..numbers.len()).map(|i| {
                let n = number(i).unwrap() as i64;
                first += n * 16;
                batches(first - n * 16, n)
            });
            let partitions: Vec<_> = partitions.collect();
            match of_device {
                None => leaf(host_table(&partitions)),
                Some(device) => leaf(device_table(device, &partitions)).children()[0].clone(),
            }
        }
        "Up" => up(child(), device()),
        "Down" => down(child()),
        "Move" => DeviceToDeviceExec::above(child(), device()),
        "CoalesceBatches" => joining(child(), device(), number(0).unwrap()),
        "Map" if children.len() == 1 => double(child(), device()),
        "Map" => map(children, device(), Ok),
        "Filter" => {
            let schema = child().schema();
            let small = binary(col("a", &schema).unwrap(), Operator::Lt, lit(5i64), &schema);
            let predicate = match columns == ["true"] {
                true => lit(true),
                false => small.unwrap(),
            };
            let filter = FilterExec::try_new(predicate, child()).unwrap();
            let filter = FilterExecBuilder::from(&filter).with_fetch(number(0));
            Arc::new(filter.build().unwrap())
        }
        "Computed" => {
            let schema = child().schema();
            let sum = binary(
                col("b", &schema).unwrap(),
                Operator::Plus,
                lit(1i64),
                &schema,
            );
            projected(child(), sum.unwrap())
        }
        "Projection" => {
            let columns = columns.iter().map(|word| {
                let (column, alias) = word.split_once(':').unwrap_or((word, word));
                (child().schema().index_of(column).unwrap(), alias)
            });
            project(child(), &columns.collect::<Vec<_>>())
        }
        "Repartition" if columns == ["a"] => hashed(child(), number(0).unwrap()),
        "Repartition" => round_robin(child(), number(0).unwrap()),
        "CoalescePartitions" => {
            Arc::new(CoalescePartitionsExec::new(child()).with_fetch(number(0)))
        }
        "Sort" => sort(child()),
        "SortPreservingMerge" => merge(child(), number(0)),
        "Union" => union(children),
        "LocalLimit" => Arc::new(LocalLimitExec::new(child(), number(0).unwrap())),
        "GlobalLimit" => Arc::new(GlobalLimitExec::new(child(), number(0).unwrap(), number(1))),
        "Buffer" => Arc::new(BufferExec::new(child(), 1 << 20)),
        _ => panic!("what is {node}?"),
    }
}

/// The same as the rule makes it.
pub(crate) fn ruled(line: &str, devices: &[&Sim]) -> Plan {
    with_transitions(planned(line, devices, &[]))
}

/// The lines of a node's children.
fn children_of(below: &str) -> Vec<&str> {
    let Some(inner) = below.strip_prefix('(') else {
        return Vec::from_iter((!below.is_empty()).then_some(below));
    };
    let inner = inner
        .strip_suffix(')')
        .expect("brackets around all children");
    let (mut depth, mut start, mut children) = (0, 0, Vec::new());
    for (at, char) in inner.char_indices() {
        match char {
            '(' => depth += 1,
            ')' => depth -= 1,
            ',' if depth == 0 => {
                children.push(&inner[start..at]);
                start = at + 2;
            }
            _ => (),
        }
    }
    children.push(&inner[start..]);
    children
}
