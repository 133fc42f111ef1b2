//! Bytes that were cut off or changed are errors, or other plans, and never a panic.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::slice::from_ref;
use std::sync::Arc;

use arrow_device_cluster::codec::{DeviceTableCodec, DeviceTables};
use arrow_device_datafusion::{
    DeviceCoalesceBatchesExec, DeviceForm, DeviceRule, DeviceToDeviceExec, DeviceToHostExec,
    HostToDeviceExec,
};
use datafusion::logical_expr::TableProviderFilterPushDown;
use datafusion::logical_expr::dml::InsertOp;
use datafusion::physical_expr::expressions::{Column, binary, col, lit};
use datafusion::physical_expr::{LexOrdering, PhysicalSortExpr};
use datafusion::physical_plan::ExecutionPlan;
use datafusion::physical_plan::coalesce_partitions::CoalescePartitionsExec;
use datafusion::physical_plan::filter::FilterExec;
use datafusion::physical_plan::limit::{GlobalLimitExec, LocalLimitExec};
use datafusion::physical_plan::projection::{ProjectionExec, ProjectionExpr};
use datafusion::physical_plan::sorts::sort_preserving_merge::SortPreservingMergeExec;
use datafusion::physical_plan::union::UnionExec;
use datafusion_proto::logical_plan::LogicalExtensionCodec;
use datafusion_proto::physical_plan::{DefaultPhysicalProtoConverter, PhysicalExtensionCodec};

use crate::device_filter::FilterPlugin;
use crate::kit::{Made, SIM, codec, host_rows, node, scan, t, text, worker};

/// A plan of each kind of node.
fn plans() -> Vec<Arc<dyn ExecutionPlan>> {
    let of = |plan: Arc<dyn ExecutionPlan>| DeviceForm::of(plan, SIM).unwrap().unwrap();
    let made = Made {
        ordered: true,
        filters: TableProviderFilterPushDown::Exact,
        ..Made::new(2)
    };
    let table = made.table().with_name("sorted");
    let schema = table.source().schema();
    let id = col("id", &schema).unwrap();
    let more = binary(
        id.clone(),
        datafusion::logical_expr::Operator::Gt,
        lit(5i64),
        &schema,
    );
    let more = more.unwrap();
    let sorted = table.scan_on_device(Some(&[0, 2]), Some(20)).unwrap();
    let sorted = sorted.with_filters(vec![more.clone()]).unwrap();
    let insert = t(2).insert_on_device(host_rows(1), InsertOp::Append);
    let columns = [ProjectionExpr {
        expr: Arc::new(Column::new("s", 2)),
        alias: "text".into(),
    }];
    let rule = DeviceRule::default().with_plugin(Arc::new(FilterPlugin::default()));
    let filter = Arc::new(FilterExec::try_new(more, scan(2)).unwrap());
    let filter = rule.rewrite(filter, &Default::default()).unwrap();
    let by = LexOrdering::new([PhysicalSortExpr::new_default(id)]).unwrap();
    let plans = vec![
        node(sorted),
        scan(2),
        HostToDeviceExec::default().above(host_rows(2), SIM),
        DeviceToDeviceExec::above(scan(2), SIM),
        DeviceCoalesceBatchesExec::new(100).above(scan(2), SIM),
        Arc::new(DeviceToHostExec::new(scan(2))),
        filter.children()[0].clone(),
        of(Arc::new(ProjectionExec::try_new(columns, scan(2)).unwrap())),
        of(UnionExec::try_new(vec![scan(2), scan(2)]).unwrap()),
        of(Arc::new(LocalLimitExec::new(scan(2), 7))),
        of(Arc::new(GlobalLimitExec::new(scan(2), 1, Some(7)))),
        of(Arc::new(CoalescePartitionsExec::new(scan(2)))),
        of(Arc::new(SortPreservingMergeExec::new(by, scan(1)))),
    ];
    let insert = insert.map(|insert| Arc::new(insert) as _);
    plans.into_iter().chain(insert).collect()
}

/// Every prefix, every bit changed, and thousands of other changes, with the children that the node had and with others.
#[test]
fn bytes() {
    let made = || Made {
        ordered: true,
        filters: TableProviderFilterPushDown::Exact,
        ..Made::new(2)
    };
    let there = worker(DeviceTables::of([("t", t(2)), ("sorted", made().table())]));
    let context = there.task_ctx();
    let (codec, converter) = (codec(), DefaultPhysicalProtoConverter {});
    let (mut errors, mut others, mut same) = (0, 0, 0);
    let mut random = 1u64;
    let mut next = |below: usize| {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (random >> 33) as usize % below
    };
    let plans = plans();
    assert!(plans.len() >= 13);
    for plan in plans {
        let mut written = Vec::new();
        codec
            .try_encode(plan.clone(), &mut written, &converter)
            .unwrap();
        let children: Vec<_> = plan.children().into_iter().cloned().collect();
        let mut read = |bytes: &[u8], children: &[Arc<dyn ExecutionPlan>]| {
            let read = || codec.try_decode(bytes, children, &context, &converter);
            let read = catch_unwind(AssertUnwindSafe(read));
            match read.unwrap_or_else(|_| panic!("{bytes:?} of {}", text(&plan))) {
                Err(_) => errors += 1,
                // What is made of it can be looked at.
                Ok(other) if text(&other) != text(&plan) => others += 1,
                Ok(_) => same += 1,
            }
        };
        read(&written, &children);
        for end in 0..written.len() {
            read(&written[..end], &children);
        }
        for (at, bit) in (0..written.len()).flat_map(|at| (0..8).map(move |bit| (at, bit))) {
            let mut bytes = written.clone();
            bytes[at] ^= 1 << bit;
            read(&bytes, &children);
        }
        for _ in 0..300 {
            let mut bytes = written.clone();
            for _ in 0..=next(4) {
                let (at, new) = (next(bytes.len()), next(256) as u8);
                match next(3) {
                    0 => bytes[at] = new,
                    1 => bytes.insert(at, new),
                    _ => drop(bytes.remove(at)),
                }
            }
            read(&bytes, &children);
        }
        for wrong in [vec![], vec![host_rows(1)], vec![scan(1), host_rows(3)]] {
            read(&written, &wrong);
        }
    }
    assert!(
        errors > 5_000 && others > 100 && same > 13,
        "{errors} {others} {same}"
    );
}

/// Nodes over children that they were not written with: columns that are not there.
#[test]
fn children() {
    let there = worker(DeviceTables::of([("t", t(2))]));
    let (context, codec) = (there.task_ctx(), codec());
    let converter = DefaultPhysicalProtoConverter {};
    let of = |plan: Arc<dyn ExecutionPlan>| DeviceForm::of(plan, SIM).unwrap().unwrap();
    let column = |name: &str, index| ProjectionExpr {
        expr: Arc::new(Column::new(name, index)),
        alias: name.into(),
    };
    let narrow = ProjectionExec::try_new([column("id", 0)], scan(1)).unwrap();
    let narrow = of(Arc::new(narrow));
    let by = PhysicalSortExpr::new_default(Arc::new(Column::new("s", 2)));
    let by = LexOrdering::new([by]).unwrap();
    let read = |plan: Arc<dyn ExecutionPlan>, children: &[Arc<dyn ExecutionPlan>]| {
        let mut written = Vec::new();
        codec.try_encode(plan, &mut written, &converter).unwrap();
        let read = codec.try_decode(&written, children, &context, &converter);
        read.unwrap_err().to_string()
    };
    let merge = of(Arc::new(SortPreservingMergeExec::new(by, scan(1))));
    let e = read(merge, from_ref(&narrow));
    assert!(e.contains("has the column s@2, which is not in"), "{e}");
    let projection = ProjectionExec::try_new([column("n", 1)], scan(1)).unwrap();
    let e = read(of(Arc::new(projection)), from_ref(&narrow));
    assert!(e.contains("has the column n@1, which is not in"), "{e}");
    let union = of(UnionExec::try_new(vec![scan(1), scan(1)]).unwrap());
    let e = read(union, &[narrow, scan(1)]);
    assert!(e.contains("a union of different numbers of columns"), "{e}");
}

#[test]
fn names_of_tables() {
    let there = worker(DeviceTables::of([("t", t(2))]));
    let (context, codec) = (there.task_ctx(), DeviceTableCodec::default());
    let (name, schema) = ("t".into(), Made::new(2).schema);
    let mut written = Vec::new();
    codec
        .try_encode_table_provider(&name, Arc::new(t(2)), &mut written)
        .unwrap();
    let read = |bytes: &[u8]| {
        codec
            .try_decode_table_provider(bytes, &name, schema.clone(), &context)
            .is_ok()
    };
    assert!(read(&written));
    assert!((0..written.len()).all(|end| !read(&written[..end])));
    for at in 0..written.len() {
        let mut bytes = written.clone();
        bytes[at] ^= 0x10;
        assert!(!read(&bytes), "{at}");
    }
}

/// Of another release.
#[test]
fn versions() {
    let (codec, converter) = (codec(), DefaultPhysicalProtoConverter {});
    let mut written = Vec::new();
    codec.try_encode(scan(2), &mut written, &converter).unwrap();
    written[3] += 1;
    let context = worker(DeviceTables::of([("t", t(2))])).task_ctx();
    let e = codec
        .try_decode(&written, &[], &context, &converter)
        .unwrap_err();
    let e = e.to_string();
    assert!(
        e.contains("it is of version 2, and this process reads version 1"),
        "{e}"
    );
    assert!(e.contains("run the same release"), "{e}");
}
