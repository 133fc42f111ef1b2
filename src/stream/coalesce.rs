//! Small host batches as fewer large ones.

use std::collections::VecDeque;

use arrow_array::{RecordBatch, RecordBatchOptions, RecordBatchReader, make_array};
use arrow_data::ArrayData;
use arrow_data::transform::MutableArrayData;
use arrow_schema::{ArrowError, DataType, SchemaRef};

use crate::data::layout::child_type;

/// A [`RecordBatchReader`] that joins small batches of another one before they go to a device, which
/// takes many times as long for a hundred batches of 100 rows as for one of 10,000. The price is one copy
/// on the host, and the wait for the rows: for batches that come slowly, or are large already, it does not
/// pay, and nothing does it unasked.
///
/// Batches of fewer than `rows` rows are joined in their order until there are as many; none is cut, and
/// larger ones pass as they are, without a copy. What was joined so far comes before such a batch, before
/// an error, after which it ends, and at the end. Batches without rows are left out. Types with a dictionary in them, whose
/// values would have to be joined as well, pass as they are, and so does what would not fit in one array
/// (more than 2 GiB of text with 32 bit offsets).
///
/// ```
/// # use arrow_array::{RecordBatchIterator, record_batch};
/// # use arrow_device::{CoalescingReader, Devices, UploadingReader};
/// let batch = record_batch!(("id", Int64, [1, 2, 3]))?;
/// let reader = RecordBatchIterator::new((0..1000).map(|_| Ok(batch.clone())), batch.schema());
/// let reader = UploadingReader::new(CoalescingReader::new(reader, 1024), &Devices::cpu());
/// let rows: Vec<_> = reader.map(|b| Ok(b?.num_rows())).collect::<Result<_, arrow_device::Error>>()?;
/// assert_eq!(rows, [1026, 1026, 948]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct CoalescingReader<R> {
    reader: R,
    schema: SchemaRef,
    rows: usize,
    /// Whether its types can be joined.
    joins: bool,
    /// Batches that are to be joined, and the rows in them.
    parts: Vec<RecordBatch>,
    collected: usize,
    /// What is to be given out, oldest first.
    ready: VecDeque<Result<RecordBatch, ArrowError>>,
    /// The reader is not asked any more.
    ended: bool,
}

impl<R: RecordBatchReader> CoalescingReader<R> {
    /// Joins batches of fewer than `rows` rows.
    pub fn new(reader: R, rows: usize) -> Self {
        let schema = reader.schema();
        Self {
            reader,
            rows,
            joins: schema.fields().iter().all(|f| can_join(f.data_type())),
            schema,
            parts: Vec::new(),
            collected: 0,
            ready: VecDeque::new(),
            ended: false,
        }
    }

    fn take(&mut self, batch: RecordBatch) {
        let rows = batch.num_rows();
        let small = self.joins && rows < self.rows;
        // arrow-rs lets the types of columns differ from the schema's in nested names and nullability.
        let mut columns = self.schema.fields().iter().zip(batch.columns());
        let same = batch.schema_ref().fields() == self.schema.fields()
            && columns.all(|(field, column)| field.data_type() == column.data_type());
        if !small || !same {
            self.flush();
            self.ready.push_back(Ok(batch));
        } else if rows > 0 {
            self.parts.push(batch);
            self.collected += rows;
            if self.collected >= self.rows {
                self.flush();
            }
        }
    }

    /// Joins what there is.
    fn flush(&mut self) {
        let parts = std::mem::take(&mut self.parts);
        let rows = std::mem::take(&mut self.collected);
        match parts.len() {
            0 | 1 => self.ready.extend(parts.into_iter().map(Ok)),
            _ => match join(&self.schema, &parts, rows) {
                Ok(batch) => self.ready.push_back(Ok(batch)),
                Err(_) => self.ready.extend(parts.into_iter().map(Ok)),
            },
        }
    }
}

/// Whether arrays of a type are joined by copying rows: arrow-rs panics where keys run out.
fn can_join(data_type: &DataType) -> bool {
    let mut children = (0..).map_while(|i| child_type(data_type, i));
    !matches!(data_type, DataType::Dictionary(_, _)) && children.all(can_join)
}

/// One batch of all rows.
fn join(schema: &SchemaRef, parts: &[RecordBatch], rows: usize) -> Result<RecordBatch, ArrowError> {
    let column = |i: usize| {
        let data: Vec<ArrayData> = parts.iter().map(|part| part.column(i).to_data()).collect();
        let mut joined = MutableArrayData::new(data.iter().collect(), false, rows);
        for (k, part) in data.iter().enumerate() {
            joined.try_extend(k, 0, part.len())?;
        }
        Ok(make_array(joined.freeze()))
    };
    let columns = (0..schema.fields().len()).map(column);
    let columns = columns.collect::<Result<_, ArrowError>>()?;
    let options = RecordBatchOptions::new().with_row_count(Some(rows));
    RecordBatch::try_new_with_options(schema.clone(), columns, &options)
}

impl<R: RecordBatchReader> Iterator for CoalescingReader<R> {
    type Item = Result<RecordBatch, ArrowError>;

    fn next(&mut self) -> Option<Self::Item> {
        while self.ready.is_empty() && !self.ended {
            match self.reader.next() {
                Some(Ok(batch)) => self.take(batch),
                Some(Err(e)) => {
                    self.flush();
                    self.ready.push_back(Err(e));
                    self.ended = true;
                }
                None => {
                    self.flush();
                    self.ended = true;
                }
            }
        }
        self.ready.pop_front()
    }
}

impl<R: RecordBatchReader> RecordBatchReader for CoalescingReader<R> {
    fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }
}
