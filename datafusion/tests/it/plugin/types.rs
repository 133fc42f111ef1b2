//! Every type that the kernels support, against DataFusion's own filter, on random values.

use datafusion::arrow::array::{ArrayData, make_array};
use datafusion::arrow::compute::concat;
use datafusion::arrow::datatypes::{IntervalUnit, TimeUnit};
use datafusion::physical_expr::expressions::{BinaryExpr, Literal, NotExpr, is_not_null, is_null};

use super::kit::*;
use crate::support::r#gen::{Nulls, array};

#[rustfmt::skip]
const ORDERED: [Operator; 6] = [Operator::Eq, Operator::NotEq, Operator::Lt, Operator::LtEq, Operator::Gt, Operator::GtEq];

/// Numbers of each width, and types that have a width and an order of their own; the rest are numbers as well.
fn types() -> Vec<DataType> {
    use DataType::*;
    use TimeUnit::{Microsecond, Millisecond, Nanosecond, Second};
    let numbers = [Int8, Int16, Int32, Int64, UInt8, UInt16, UInt32, UInt64];
    let floats = [Float16, Float32, Float64];
    let texts = [Utf8, LargeUtf8, Utf8View, Binary, LargeBinary, BinaryView];
    let others = [Boolean, FixedSizeBinary(1), FixedSizeBinary(5)];
    #[rustfmt::skip]
    let decimals = [Decimal32(9, 2), Decimal64(18, 2), Decimal128(38, 4), Decimal256(76, 4)];
    #[rustfmt::skip]
    let times = [
        Date32, Date64, Time32(Millisecond), Time64(Nanosecond), Duration(Microsecond),
        Timestamp(Second, None), Timestamp(Millisecond, Some("+01:00".into())), Timestamp(Nanosecond, None),
        Interval(IntervalUnit::YearMonth), Interval(IntervalUnit::DayTime), Interval(IntervalUnit::MonthDayNano),
    ];
    let all = [&numbers[..], &floats, &decimals, &times, &texts, &others];
    all.concat()
}

/// Values of a type: few, each six times; then of numbers the most and the least, and one bit of each byte; then many.
fn column(data_type: &DataType, nulls: Nulls, seed: u64) -> ArrayRef {
    let mut values = vec![array(data_type, ROWS / 12, nulls, seed); 6];
    if let Some(width) = data_type.primitive_width() {
        let (mut bytes, ends) = (vec![0xff; width], [[0, 0x80], [0xff, 0x7f]]);
        for [byte, last] in ends {
            bytes.extend(vec![byte; width - 1]);
            bytes.push(last);
        }
        bytes.extend((0..width * width).map(|i| if i % (width + 1) == 0 { 0x80 } else { 0 }));
        let data = ArrayData::builder(data_type.clone()).len(3 + width);
        let data = data.add_buffer(bytes.into()).align_buffers(true).build();
        values.push(make_array(data.unwrap()));
    }
    values.push(array(data_type, ROWS / 2, nulls, seed + 1));
    let values: Vec<&dyn Array> = values.iter().map(|values| &**values).collect();
    concat(&values).unwrap().slice(0, ROWS)
}

/// How many rows pass. Compares with DataFusion's filter.
async fn check(tables: &Tables, predicate: Arc<dyn PhysicalExpr>) -> usize {
    let filter = async |context: &SessionContext| {
        let scan = plan(context, "SELECT * FROM t").await;
        Arc::new(FilterExec::try_new(predicate.clone(), scan).unwrap())
    };
    let (on_device, state) = (filter(&tables.device).await, tables.device.state());
    let on_device = filters().optimize(on_device, state.config_options());
    let on_device = on_device.unwrap();
    assert_eq!(on_device.children()[0].name(), "DeviceFilterExec");
    let found = rows(&tables.device, on_device).await;
    let expected = rows(&tables.host, filter(&tables.host).await).await;
    let data_type = found[0].column(1).data_type();
    assert_same(&found, &expected, &data_type.to_string());
    row_count(&found)
}

#[tokio::test]
async fn every_type_is_compared_as_datafusion_does() {
    let sim = Sim::new();
    for (seed, data_type) in types().iter().enumerate() {
        let batch = |i: usize| {
            let seed = (100 * seed + 4 * i) as u64;
            let nulls = if i == 1 { Nulls::None } else { Nulls::Some };
            let numbers = Arc::new(Int64Array::from_iter_values(0..ROWS as i64));
            RecordBatch::try_from_iter_with_nullable([
                ("number", numbers as _, false),
                ("c", column(data_type, nulls, seed), true),
                ("d", column(data_type, Nulls::Some, seed + 2), true),
            ])
            .unwrap()
        };
        let whole = numbered(1, 4, batch);
        let (values, schema) = (whole[0][0].column(1), whole[0][0].schema());
        let tables = Tables::of(&sim, &whole, filters());
        let c = col("c", &schema).unwrap();
        let valid = check(&tables, is_not_null(c.clone()).unwrap()).await;
        let all = valid + check(&tables, is_null(c.clone()).unwrap()).await;
        assert_eq!(all, rows_left(4), "{data_type}");
        let (mut some, mut checked) = (0, 0);
        // Of the few values, the least, and of the many.
        for (round, first) in [0, ROWS / 2 + 1, ROWS * 2 / 3].into_iter().enumerate() {
            let row = (first..ROWS).find(|row| values.is_valid(*row)).unwrap();
            let literal = ScalarValue::try_from_array(values, row).unwrap();
            let literal: Arc<dyn PhysicalExpr> = Arc::new(Literal::new(literal));
            for op in ORDERED {
                let (left, right) = match round {
                    0 => (c.clone(), literal.clone()),
                    _ => (literal.clone(), c.clone()),
                };
                let passed = check(&tables, Arc::new(BinaryExpr::new(left, op, right))).await;
                some += usize::from(passed > 0 && passed < all);
                checked += 1;
            }
        }
        assert!(some * 2 > checked, "{data_type}: {some} of {checked}");
        if *data_type == DataType::Boolean {
            let yes = check(&tables, c.clone()).await;
            let no = check(&tables, Arc::new(NotExpr::new(c))).await;
            assert!(yes > 100 && no > 100 && yes + no == valid, "{yes}, {no}");
        }
    }
    sim.assert_done();
}
