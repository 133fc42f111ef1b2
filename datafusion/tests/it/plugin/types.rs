//! Every type that the kernels support, against DataFusion's own filter, on random values.

use std::sync::Arc;

use arrow_device::{Device, DeviceRecordBatch};
use arrow_device_datafusion::DeviceTable;
use datafusion::arrow::array::{
    Array, ArrayData, ArrayRef, BinaryArray, FixedSizeBinaryArray, Int64Array, NullArray,
    RecordBatch, StringArray, make_array,
};
use datafusion::arrow::buffer::{BooleanBuffer, Buffer, NullBuffer};
use datafusion::arrow::compute::cast;
use datafusion::arrow::datatypes::{DataType, Field, IntervalUnit, Schema, TimeUnit};
use datafusion::common::ScalarValue;
use datafusion::datasource::MemTable;
use datafusion::logical_expr::Operator;
use datafusion::physical_expr::PhysicalExpr;
use datafusion::physical_expr::expressions::{
    BinaryExpr, Column, IsNotNullExpr, IsNullExpr, Literal, NotExpr,
};
use datafusion::physical_optimizer::PhysicalOptimizerRule;
use datafusion::physical_plan::filter::FilterExec;
use datafusion::prelude::SessionContext;

use super::kit::*;

const ROWS: usize = 300;
const ORDERED: [Operator; 6] = [
    Operator::Eq,
    Operator::NotEq,
    Operator::Lt,
    Operator::LtEq,
    Operator::Gt,
    Operator::GtEq,
];

/// Numbers that look random, the same each time.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    fn nulls(&mut self) -> Option<NullBuffer> {
        match self.below(4) {
            0 => None,
            n => Some((0..ROWS).map(|_| self.below(2 + n) != 0).collect()),
        }
    }

    /// Values of `width` bytes: the extremes of signed and unsigned numbers and of each of their words, special floats, few
    /// different small ones, and any.
    fn bytes(&mut self, width: usize) -> Vec<u8> {
        let special: &[u64] = match width {
            2 => &[0, 0x8000, 0x7c00, 0xfc00, 0x7e01, 0xfe01, 1, 0x8001],
            4 => &[
                0,
                1 << 31,
                0x7f80_0000,
                0xff80_0000,
                0x7fc0_0001,
                0xffc0_0001,
                1,
            ],
            _ => &[
                0,
                1 << 63,
                f64::INFINITY.to_bits(),
                f64::NEG_INFINITY.to_bits(),
                0x7ff8_0000_0000_0001,
                0xfff8_0000_0000_0001,
                0x7ff0_0000_0000_0001,
                1,
            ],
        };
        let mut value = vec![0; width];
        match self.below(6) {
            0 => value.fill(0xff),
            1 => value[width - 1] = 0x80,
            2 => {
                value.fill(0xff);
                value[width - 1] = 0x7f;
            }
            3 => {
                let special = special[self.below(special.len() as u64) as usize].to_le_bytes();
                let n = width.min(8);
                value[..n].copy_from_slice(&special[..n]);
            }
            4 => value[0] = self.below(8) as u8,
            _ => {
                let word = self.below(width as u64) as usize;
                value[word] = self.below(256) as u8;
            }
        }
        value
    }

    fn fixed(&mut self, data_type: &DataType, width: usize) -> ArrayRef {
        let values: Vec<u8> = (0..ROWS).flat_map(|_| self.bytes(width)).collect();
        let data = ArrayData::builder(data_type.clone()).len(ROWS);
        let data = data.nulls(self.nulls()).add_buffer(Buffer::from(values));
        make_array(data.align_buffers(true).build().unwrap())
    }

    fn text(&mut self, data_type: &DataType) -> ArrayRef {
        let texts = [
            "",
            "a",
            "b",
            "twelve bytes",
            "thirteen byte",
            "thirteen bytf",
            "ß",
            "a längerer text, which is too long for a view",
        ];
        let mut text = || texts[self.below(texts.len() as u64) as usize];
        let texts: Vec<_> = (0..ROWS).map(|_| text()).collect();
        let nulls = self.nulls();
        let valid = |i: usize| nulls.as_ref().is_none_or(|nulls| nulls.is_valid(i));
        let texts = texts.into_iter().enumerate();
        let texts = texts.map(|(i, text)| valid(i).then_some(text));
        let array: ArrayRef = match data_type {
            DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => {
                Arc::new(StringArray::from_iter(texts))
            }
            _ => Arc::new(BinaryArray::from_iter(
                texts.map(|text| text.map(str::as_bytes)),
            )),
        };
        cast(&array, data_type).unwrap()
    }

    fn column(&mut self, data_type: &DataType) -> ArrayRef {
        use DataType::*;
        match data_type {
            Boolean => {
                let values: BooleanBuffer = (0..ROWS).map(|_| self.below(2) == 0).collect();
                let nulls = self.nulls();
                Arc::new(datafusion::arrow::array::BooleanArray::new(values, nulls))
            }
            FixedSizeBinary(width) => {
                let values: Vec<u8> = (0..ROWS)
                    .flat_map(|_| self.bytes(*width as usize))
                    .collect();
                let values = Buffer::from(values);
                let nulls = self.nulls();
                Arc::new(FixedSizeBinaryArray::new(*width, values, nulls))
            }
            Utf8 | LargeUtf8 | Utf8View | Binary | LargeBinary | BinaryView => self.text(data_type),
            other => self.fixed(other, other.primitive_width().unwrap()),
        }
    }
}

/// Numbers of each width, and types that have a width and an order of their own; the rest are numbers as well.
fn types() -> Vec<DataType> {
    use DataType::*;
    let numbers = [Int8, Int16, Int32, Int64, UInt8, UInt16, UInt32, UInt64];
    let floats = [Float16, Float32, Float64];
    let decimals = [
        Decimal32(9, 2),
        Decimal64(18, 2),
        Decimal128(38, 4),
        Decimal256(76, 4),
    ];
    let times = [
        Date32,
        Date64,
        Time32(TimeUnit::Millisecond),
        Time64(TimeUnit::Nanosecond),
        Timestamp(TimeUnit::Second, None),
        Timestamp(TimeUnit::Millisecond, Some("+01:00".into())),
        Timestamp(TimeUnit::Nanosecond, None),
        Duration(TimeUnit::Microsecond),
        Interval(IntervalUnit::YearMonth),
        Interval(IntervalUnit::DayTime),
        Interval(IntervalUnit::MonthDayNano),
    ];
    let texts = [Utf8, LargeUtf8, Utf8View, Binary, LargeBinary, BinaryView];
    let others = [Boolean, FixedSizeBinary(1), FixedSizeBinary(5)];
    let all = [&numbers[..], &floats, &decimals, &times, &texts, &others];
    all.concat()
}

/// Batches of a type, some of them cut, in a table on a device and in one on the host.
struct Both {
    host: SessionContext,
    device: SessionContext,
    batches: Vec<RecordBatch>,
}

impl Both {
    fn new(device: &Device, random: &mut Random, data_type: &DataType) -> Self {
        let fields = vec![
            Field::new("number", DataType::Int64, false),
            Field::new("c", data_type.clone(), true),
            Field::new("d", data_type.clone(), true),
        ];
        let schema = Arc::new(Schema::new(fields));
        let batch = |i: usize| {
            let numbers = (i * ROWS) as i64..((i + 1) * ROWS) as i64;
            let columns: Vec<ArrayRef> = vec![
                Arc::new(Int64Array::from_iter_values(numbers)),
                random.column(data_type),
                random.column(data_type),
            ];
            RecordBatch::try_new(schema.clone(), columns).unwrap()
        };
        let whole: Vec<_> = (0..4).map(batch).collect();
        let up = |(i, batch): (usize, &RecordBatch)| {
            let up = device.upload(batch).unwrap();
            let slice = |batch: &DeviceRecordBatch, at, rows| batch.slice(at, rows).unwrap();
            cut(i as i64, up, slice)
        };
        let on_device = whole.iter().enumerate().map(up).collect();
        let on_host = whole.iter().enumerate();
        let on_host = on_host.map(|(i, batch)| cut(i as i64, batch.clone(), RecordBatch::slice));
        let table = DeviceTable::from_batches(schema.clone(), device.clone(), vec![on_device]);
        let memory = MemTable::try_new(schema, vec![on_host.collect()]).unwrap();
        Self {
            host: session(Arc::new(memory), 1, false),
            device: session(Arc::new(table.unwrap()), 1, true),
            batches: whole,
        }
    }

    /// How many rows pass. Compares with DataFusion's filter.
    async fn check(&self, predicate: Arc<dyn PhysicalExpr>) -> usize {
        let filter = async |context: &SessionContext| {
            let scan = plan(context, "SELECT * FROM t").await;
            Arc::new(FilterExec::try_new(predicate.clone(), scan).unwrap())
        };
        let state = self.device.state();
        let options = state.config_options();
        let on_device = filter(&self.device).await;
        let on_device = filters().optimize(on_device, options);
        let on_device = on_device.unwrap();
        // DataFusion cannot show a date beyond the calendar.
        assert_eq!(on_device.children()[0].name(), "DeviceFilterExec");
        let found = rows(&self.device, on_device).await;
        let expected = rows(&self.host, filter(&self.host).await).await;
        let data_type = self.batches[0].column(1).data_type();
        assert!(
            same(&found[0], &expected[0]),
            "{data_type}\n{found:?}\n{expected:?}"
        );
        let (found, expected) = (found[0].column(1), expected[0].column(1));
        // `==` of arrays is for values; these are the bits, of NaNs too.
        let bits = |column: &ArrayRef| {
            let data = column.to_data();
            let width = data.data_type().primitive_width()?;
            let bytes = &data.buffers()[0][data.offset() * width..][..data.len() * width];
            let valid = bytes.chunks_exact(width).enumerate();
            let valid = valid.filter(|(row, _)| column.is_valid(*row));
            Some(valid.map(|(_, v)| v.to_vec()).collect::<Vec<_>>())
        };
        assert_eq!(bits(found), bits(expected), "{data_type}");
        found.len()
    }
}

#[tokio::test]
async fn every_type_is_compared_as_datafusion_does() {
    let sim = Sim::new();
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    for data_type in types() {
        let both = Both::new(&sim, &mut random, &data_type);
        let all = both.check(Arc::new(IsNotNullExpr::new(c()))).await
            + both.check(Arc::new(IsNullExpr::new(c()))).await;
        assert_eq!(all, ROWS + 201 + 1, "{data_type}: whole, cut, cut");
        let (mut some, mut checked) = (0, 0);
        for round in 0..2 {
            let column = both.batches[0].column(1);
            let row = loop {
                let row = random.below(ROWS as u64) as usize;
                if column.is_valid(row) {
                    break row;
                }
            };
            let literal = ScalarValue::try_from_array(column, row).unwrap();
            let literal: Arc<dyn PhysicalExpr> = Arc::new(Literal::new(literal));
            for op in ORDERED {
                let (left, right) = match round % 2 {
                    0 => (c(), literal.clone()),
                    _ => (literal.clone(), c()),
                };
                let passed = both.check(Arc::new(BinaryExpr::new(left, op, right))).await;
                some += usize::from(passed > 0 && passed < all);
                checked += 1;
            }
        }
        assert!(some * 2 > checked, "{data_type}: {some} of {checked}");
        if data_type == DataType::Boolean {
            let yes = both.check(c()).await;
            let no = both.check(Arc::new(NotExpr::new(c()))).await;
            assert!(yes > 100 && no > 100 && yes + no <= all, "{yes}, {no}");
        }
    }
    sim.assert_done();
}

fn c() -> Arc<dyn PhysicalExpr> {
    Arc::new(Column::new("c", 1))
}

/// Text that no row has, an empty one, and conjunctions of tests of several columns.
#[tokio::test]
async fn text_in_conjunctions() {
    let sim = Sim::new();
    let mut random = Random(77);
    for data_type in [DataType::Utf8, DataType::LargeUtf8, DataType::Utf8View] {
        let both = Both::new(&sim, &mut random, &data_type);
        for (predicate, some) in [
            ("c = 'no such text, neither here nor there'", false),
            ("c <> 'no such text, neither here nor there'", true),
            ("c = ''", true),
            ("c <> ''", true),
            ("c IS NOT NULL AND d = 'thirteen byte'", true),
            ("c > '' AND c <= 'twelve byte' AND d > 'a'", true),
            ("c > 'ß'", false),
            ("number < 300 AND c = 'ß'", true),
        ] {
            let sql = format!("SELECT d, number, c FROM t WHERE {predicate}");
            let on_device = plan(&both.device, &sql).await;
            assert!(is_on_device(&on_device), "{sql}");
            let found = rows(&both.device, on_device).await;
            let expected = rows(&both.host, plan(&both.host, &sql).await).await;
            assert_eq!(found, expected, "{sql}");
            assert_eq!(row_count(&found) > 0, some, "{sql}");
        }
    }
}

/// Columns of types that the kernels do not support stay with DataFusion, and so do filters whose results have them.
#[tokio::test]
async fn other_types_stay() {
    let sim = Sim::new();
    let numbers: ArrayRef = Arc::new(Int64Array::from_iter_values(0..10));
    let words = StringArray::from_iter_values((0..10).map(|i| format!("word {}", i % 3)));
    let dictionary = DataType::Dictionary(Box::new(DataType::Int32), Box::new(DataType::Utf8));
    let list = DataType::new_list(DataType::Int64, true);
    let batch = RecordBatch::try_from_iter_with_nullable([
        ("number", numbers.clone(), false),
        ("dictionary", cast(&words, &dictionary).unwrap(), true),
        ("list", cast(&numbers, &list).unwrap(), true),
        ("nothing", Arc::new(NullArray::new(10)) as _, true),
    ]);
    let batch = batch.unwrap();
    let schema = batch.schema();
    let up = vec![vec![sim.upload(&batch).unwrap()]];
    let table = DeviceTable::from_batches(schema.clone(), sim.device.clone(), up).unwrap();
    let context = session(Arc::new(table), 1, true);
    for (sql, moved) in [
        ("SELECT number FROM t WHERE number > 3", true),
        ("SELECT dictionary FROM t WHERE number > 3", false),
        ("SELECT list FROM t WHERE number > 3", false),
        ("SELECT nothing FROM t WHERE number > 3", false),
        ("SELECT number FROM t WHERE dictionary IS NOT NULL", false),
        ("SELECT number FROM t WHERE list IS NOT NULL", false),
    ] {
        assert_eq!(is_on_device(&plan(&context, sql).await), moved, "{sql}");
    }
}
