//! Arrays of every type, for tests.

use std::sync::Arc;

use arrow_array::builder::{MapBuilder, StringBuilder, StringRunBuilder};
use arrow_array::types::*;
use arrow_array::*;
use arrow_buffer::{Buffer, NullBuffer, OffsetBuffer, ScalarBuffer};
use arrow_data::ArrayData;
use arrow_schema::{DataType, Field, Fields, IntervalUnit, TimeUnit, UnionFields};
use arrow_select::concat::concat;
use arrow_select::take::take;

/// Values at 0, 2 and 3 that differ from each other, a null at 1.
pub(crate) fn samples() -> Vec<ArrayRef> {
    let nulls = || Some(NullBuffer::from(vec![true, false, true, true]));
    let item = |array: &ArrayRef| Arc::new(Field::new_list_field(array.data_type().clone(), true));
    let mut samples = fixed_width();
    let words = [
        Some("short"),
        None,
        Some("longer than twelve"),
        Some("longer than a dozen"),
    ];
    let bytes = || words.iter().map(|w| w.map(str::as_bytes));
    samples.push(Arc::new(BooleanArray::from(vec![
        Some(true),
        None,
        Some(false),
        Some(true),
    ])));
    samples.push(Arc::new(StringArray::from(words.to_vec())));
    samples.push(Arc::new(LargeStringArray::from(words.to_vec())));
    samples.push(Arc::new(BinaryArray::from_iter(bytes())));
    samples.push(Arc::new(LargeBinaryArray::from_iter(bytes())));
    samples.push(Arc::new(StringViewArray::from(words.to_vec())));
    samples.push(Arc::new(BinaryViewArray::from_iter(bytes())));

    macro_rules! dictionaries {
        ($($key:ident)*) => {
            $(samples.push(Arc::new(DictionaryArray::<$key>::from_iter(words)));)*
        };
    }
    dictionaries!(Int8Type Int16Type Int32Type Int64Type);
    dictionaries!(UInt8Type UInt16Type UInt32Type UInt64Type);
    macro_rules! runs {
        ($($ends:ident)*) => {
            $(
                let mut runs = StringRunBuilder::<$ends>::new();
                runs.extend(words);
                samples.push(Arc::new(runs.finish()));
            )*
        };
    }
    runs!(Int16Type Int32Type Int64Type);

    let mut map = MapBuilder::new(None, StringBuilder::new(), StringBuilder::new());
    for (key, value) in [("a", Some("1")), ("", None), ("b", Some("1")), ("b", None)] {
        if !key.is_empty() {
            map.keys().append_value(key);
            map.values().append_option(value);
        }
        map.append(!key.is_empty()).unwrap();
    }
    samples.push(Arc::new(map.finish()));

    // Children of every kind so far, and then parents of parents.
    let children = samples.clone();
    for child in &children {
        samples.push(Arc::new(ListArray::new(
            item(child),
            OffsetBuffer::from_lengths([2, 0, 1, 1]),
            child.clone(),
            nulls(),
        )));
    }
    let nested = samples[samples.len() - 3..].to_vec();
    for child in nested.iter().chain(&children[children.len() - 6..]) {
        samples.push(Arc::new(LargeListArray::new(
            item(child),
            OffsetBuffer::from_lengths([2, 0, 1, 1]),
            child.clone(),
            nulls(),
        )));
        samples.push(Arc::new(ListViewArray::new(
            item(child),
            ScalarBuffer::from(vec![3, 0, 0, 1]),
            ScalarBuffer::from(vec![1, 0, 2, 2]),
            child.clone(),
            nulls(),
        )));
        samples.push(Arc::new(LargeListViewArray::new(
            item(child),
            ScalarBuffer::from(vec![3, 0, 0, 1]),
            ScalarBuffer::from(vec![1, 0, 2, 2]),
            child.clone(),
            nulls(),
        )));
        let pairs = concat(&[child, child]).unwrap();
        let pairs = take(
            &pairs,
            &UInt32Array::from(vec![0, 1, 1, 1, 2, 0, 3, 0]),
            None,
        )
        .unwrap();
        samples.push(Arc::new(FixedSizeListArray::new(
            item(child),
            2,
            pairs,
            nulls(),
        )));
        let fields = Fields::from(vec![
            Field::new("same", DataType::Int8, false),
            Field::new("child", child.data_type().clone(), true),
        ]);
        let same: ArrayRef = Arc::new(Int8Array::from(vec![7; 4]));
        let columns = vec![same.clone(), child.clone()];
        samples.push(Arc::new(StructArray::new(fields.clone(), columns, nulls())));
        let fields = UnionFields::try_new([3, 5], fields.iter().cloned()).unwrap();
        let sparse = UnionArray::try_new(
            fields.clone(),
            vec![5, 5, 5, 3].into(),
            None,
            vec![same.clone(), child.clone()],
        );
        samples.push(Arc::new(sparse.unwrap()));
        let dense = UnionArray::try_new(
            fields,
            vec![5, 5, 5, 3].into(),
            Some(vec![0, 1, 2, 0].into()),
            vec![same, child.clone()],
        );
        samples.push(Arc::new(dense.unwrap()));
    }
    samples
}

fn fixed_width() -> Vec<ArrayRef> {
    use DataType::*;
    let mut types = vec![
        Int8,
        Int16,
        Int32,
        Int64,
        UInt8,
        UInt16,
        UInt32,
        UInt64,
        Float16,
        Float32,
        Float64,
        Date32,
        Date64,
        FixedSizeBinary(5),
    ];
    types.extend([
        Decimal32(9, 2),
        Decimal64(18, 2),
        Decimal128(38, 2),
        Decimal256(76, -2),
    ]);
    use TimeUnit::*;
    for unit in [Second, Millisecond, Microsecond, Nanosecond] {
        types.extend([
            Timestamp(unit, None),
            Timestamp(unit, Some("+01:00".into())),
            Duration(unit),
        ]);
    }
    types.extend([
        Time32(Second),
        Time32(Millisecond),
        Time64(Microsecond),
        Time64(Nanosecond),
    ]);
    use IntervalUnit::*;
    types.extend([
        Interval(YearMonth),
        Interval(DayTime),
        Interval(MonthDayNano),
    ]);
    let array = |data_type: DataType| {
        let width = data_type.primitive_width().unwrap_or(5);
        // Differ in the last byte of each value only.
        let bytes = (0..4 * width).map(|i| {
            if (i + 1) % width == 0 {
                (i / width) as u8
            } else {
                0
            }
        });
        let data = ArrayData::builder(data_type)
            .len(4)
            .add_buffer(Buffer::from_vec(bytes.collect::<Vec<u8>>()))
            .null_bit_buffer(Some(Buffer::from([0b1101])));
        make_array(data.align_buffers(true).build().unwrap())
    };
    types.into_iter().map(array).collect()
}
