//! Schemas, conversions and sizes, as `RecordBatch` has them.

use std::collections::HashMap;
use std::sync::Arc;

use arrow_array::{
    Array, ArrayRef, BinaryArray, FixedSizeListArray, Int64Array, RecordBatch, StringArray,
    StructArray, UnionArray, record_batch,
};
use arrow_buffer::Buffer;
use arrow_device::{DeviceArray, DeviceBuffer, DeviceRecordBatch, SyncPolicy, TransferStats};
use arrow_schema::{DataType, Field, Schema, UnionFields, UnionMode};

use crate::arrays::{batch_of, counted, refused, text};
use crate::support::{assert_same, assert_same_batch};
use crate::support_c::sim::{cpu, places};

/// With another schema, as a struct and back, in parts: what `RecordBatch` makes of the same.
#[test]
fn manners_of_record_batches() {
    let host = record_batch!(("a", Int32, [1, 2, 3]), ("b", Utf8, ["x", "y", "z"])).unwrap();
    let inner = StructArray::from(host.clone());
    let nested = Field::new("s", inner.data_type().clone(), false);
    let schema = Arc::new(Schema::new(vec![
        nested,
        Field::new("n", DataType::Int32, false),
    ]));
    let columns: Vec<ArrayRef> = vec![Arc::new(inner), host.column(0).clone()];
    let host = RecordBatch::try_new(schema.clone(), columns).unwrap();
    let metadata = || HashMap::from([("k".to_owned(), "v".to_owned())]);
    let nullable = Field::new("n", DataType::Int32, true);
    let targets = [
        schema.as_ref().clone().with_metadata(metadata()),
        Schema::new(vec![schema.field(0).clone(), nullable.clone()]),
        Schema::new(vec![schema.field(0).clone().with_nullable(true), nullable]),
        // Fewer fields, another name, another type.
        Schema::new(vec![schema.field(0).clone()]),
        Schema::new(vec![
            schema.field(0).clone(),
            schema.field(1).clone().with_name("m"),
        ]),
        Schema::new(vec![
            schema.field(0).clone(),
            Field::new("n", DataType::Int64, false),
        ]),
    ];
    for place in places() {
        let device = &place.device;
        let up = |column: &ArrayRef| device.upload_array(column).unwrap();
        let columns: Vec<_> = host.columns().iter().map(up).collect();
        let separate = DeviceRecordBatch::try_new(host.schema(), &columns).unwrap();
        drop(columns);
        for up in [device.upload(&host).unwrap(), separate] {
            assert_eq!(up.schema_ref(), host.schema_ref());
            for target in &targets {
                let target = Arc::new(target.clone());
                let (up, host) = (up.slice(1, 2).unwrap(), host.slice(1, 2));
                match (
                    up.with_schema(target.clone()),
                    host.with_schema(target.clone()),
                ) {
                    (Ok(up), Ok(host)) => {
                        assert_eq!(up.schema(), target);
                        let root = DataType::Struct(target.fields().clone());
                        assert_eq!(up.as_struct().data_type(), &root);
                        let column = up.column(1).unwrap();
                        assert_eq!(column.field(), Some(&target.fields()[1]));
                        assert_same_batch(&host, &up.to_host().unwrap(), &target);
                        let (c_array, c_schema) = up.export(SyncPolicy::Event).unwrap();
                        // SAFETY: both come from `export`.
                        let again = unsafe {
                            DeviceRecordBatch::import(c_array, &c_schema, &place.options)
                        };
                        assert_same_batch(&host, &again.unwrap().to_host().unwrap(), "again");
                    }
                    (Err(ours), Err(_)) => {
                        refused::<()>(Err(ours), &[&device.to_string(), "the declared schema"])
                    }
                    (ours, theirs) => panic!("{ours:?}, arrow-rs: {theirs:?}"),
                }
            }
            let (schema, columns, rows) = up.clone().into_parts();
            assert_eq!((schema, rows), (host.schema(), 3));
            for (ours, theirs) in columns.iter().zip(host.columns()) {
                assert_same(theirs, &ours.to_host().unwrap(), "part");
            }
            let target = Arc::new(targets[0].clone());
            let up = up.with_schema(target.clone()).unwrap();
            let text = format!("{up:?}");
            assert!(
                text.contains("num_rows: 3") && text.contains(&device.id().to_string()),
                "{text}"
            );
            let array = DeviceArray::from(up);
            let text = format!("{array:?}");
            assert!(text.contains("Struct") && text.contains("len: 3"), "{text}");
            assert_same(
                &StructArray::from(host.clone()),
                &array.to_host().unwrap(),
                "struct",
            );
            let back = DeviceRecordBatch::try_from(array).unwrap();
            assert_eq!(back.schema(), target);
        }
        place.assert_clean();
    }
}

/// arrow-rs lets a schema leave out or reorder the fields of a union. Children are found by position here, so such a
/// schema would give them types that are not theirs.
#[test]
fn fields_of_unions_stay() {
    let fields = |of: &[(i8, DataType)]| {
        let fields = of
            .iter()
            .map(|(id, t)| (*id, Arc::new(Field::new("f", t.clone(), true))));
        fields.collect::<UnionFields>()
    };
    let (text, bytes) = ((0, DataType::Utf8), (1, DataType::Binary));
    let union = |of: &[(i8, DataType)]| DataType::Union(fields(of), UnionMode::Dense);
    let children: Vec<ArrayRef> = vec![
        Arc::new(StringArray::from(vec!["a"])),
        Arc::new(BinaryArray::from(vec![&[0xFFu8, 0xFE][..]])),
    ];
    let ids = vec![0i8, 1].into();
    let offsets = Some(vec![0i32, 0].into());
    let own = fields(&[text.clone(), bytes.clone()]);
    let rows = UnionArray::try_new(own, ids, offsets, children).unwrap();
    let inside = FixedSizeListArray::new(
        Arc::new(Field::new("item", rows.data_type().clone(), true)),
        1,
        Arc::new(rows.clone()),
        None,
    );
    let nested = |of: DataType| DataType::FixedSizeList(Arc::new(Field::new("item", of, true)), 1);
    for place in places() {
        for (column, is_nested) in [(&rows as &dyn Array, false), (&inside, true)] {
            let up = batch_of(&[place.device.upload_array(column).unwrap()]);
            for of in [
                union(&[bytes.clone(), text.clone()]),
                union(std::slice::from_ref(&text)),
                union(&[]),
            ] {
                let of = if is_nested { nested(of) } else { of };
                let field = up.schema_ref().field(0).clone().with_data_type(of);
                let target = Arc::new(Schema::new(vec![field]));
                refused(
                    up.clone().with_schema(target),
                    &["column '", "the declared schema"],
                );
            }
            up.clone().with_schema(up.schema()).unwrap();
        }
        place.assert_clean();
    }
}

/// Batches in batches have the depth of other types.
#[test]
fn depth_of_batches() {
    let cpu = cpu();
    let mut array = cpu.device.upload_array(&Int64Array::from(vec![1])).unwrap();
    let mut depth = 0;
    let error = loop {
        let field = Field::new("f", array.data_type().clone(), true);
        let schema = Arc::new(Schema::new(vec![field]));
        match DeviceRecordBatch::try_new(schema, std::slice::from_ref(&array)) {
            Ok(batch) => array = batch.into(),
            Err(e) => break e,
        }
        depth += 1;
        assert!(depth < 100, "no limit");
    };
    assert!(error.to_string().contains("deep"), "{error}");
}

/// The bytes that arrays of every type hold, and those of their rows.
#[test]
fn sizes_in_bytes() {
    let numbers = Int64Array::from(vec![7; 1000]);
    for place in places() {
        let device = &place.device;
        let up = device.upload_array(&numbers).unwrap();
        assert_eq!(up.get_array_memory_size(), 8000);
        let slice = up.slice(3, 100).unwrap();
        let ((), stats) = counted(|| {
            assert_eq!(slice.get_array_memory_size(), 8000);
        });
        assert_eq!(stats, TransferStats::default());
        // The same allocation twice, and then another one.
        let other = device.upload_array(&numbers.slice(0, 100)).unwrap();
        let batch = batch_of(&[slice.clone(), slice.clone(), other]);
        let second = if place.sim.is_some() { 832 } else { 0 };
        assert_eq!(batch.get_array_memory_size(), 8000 + second);

        let foreign = text(&place);
        let known = foreign.get_array_memory_size();
        foreign.resolve_sizes().unwrap();
        assert_eq!(foreign.get_array_memory_size(), known + 8);
        drop((up, slice, batch, foreign));
        place.assert_clean();
    }
    let buffer = DeviceBuffer::from(Buffer::from_vec(vec![1u8; 100]));
    let overlapping = [buffer.slice(0, 60).unwrap(), buffer.slice(40, 60).unwrap()]
        .map(|b| DeviceArray::from_values(DataType::UInt8, 60, b, None).unwrap());
    assert_eq!(batch_of(&overlapping).get_array_memory_size(), 100);
}
