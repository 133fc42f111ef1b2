//! Rows that are selected, by a filter or as the first ones of their groups, are counted, and then copied to memory of just that size.
//!
//! Nothing here blocks. Only counts come to the host, once for several batches.

use std::ops::Range;
use std::sync::Arc;

use arrow_device::{
    DeviceArray, DeviceBuffer, DeviceBufferMut, DeviceRecordBatch, Error, Result, Validity,
};
use datafusion::arrow::array::cast::AsArray;
use datafusion::arrow::datatypes::{DataType, SchemaRef, UInt64Type};
use futures::{Stream, StreamExt};

use super::column::{Format, Input, Layout};
use super::held::Held;
use super::kernels::{Launcher, to, word};

/// How many rows a block selects from, about.
const TILE_ROWS: u64 = 2048;

/// Selects rows of these columns.
#[derive(Clone)]
pub(crate) struct Selector {
    pub(crate) launcher: Launcher,
    pub(crate) schema: SchemaRef,
}

/// Which rows of a batch, which is not empty, are to be selected.
pub(crate) struct Choice {
    pub(crate) columns: Vec<Arc<Input>>,
    /// A byte for each row, which is 1 if it is selected, else 0.
    pub(crate) passing: DeviceBufferMut,
}

/// Rows that are selected, and still in their batch's memory.
pub(crate) struct Selected {
    columns: Vec<Arc<Input>>,
    picked: DeviceBufferMut,
    /// For each column of text or binary, where the bytes of a row begin.
    starts: Vec<Option<DeviceBufferMut>>,
    /// How many rows; then for each column, how many of these are null, and how many bytes they have.
    counts: Vec<usize>,
    held: Held,
}

impl Selected {
    /// How many rows are selected.
    pub(crate) fn rows(&self) -> usize {
        self.counts[0]
    }
}

impl Selector {
    /// The most bytes that a row needs while it is selected: whether it is, its number, and where its bytes begin in each column of text.
    pub(crate) fn bytes_of_row(&self) -> usize {
        let fields = self.schema.fields().iter();
        let texts =
            fields.filter(|field| Format::of(field.data_type()).is_some_and(Format::is_text));
        1 + size_of::<u64>() * (1 + texts.count())
    }

    /// The selected rows of a stream of choices, those of two chunks ahead. The task waits for their numbers without blocking its thread.
    pub(crate) fn counted<S: Stream<Item = Result<Vec<(Choice, Held)>>> + Send>(
        &self,
        choices: S,
    ) -> impl Stream<Item = Result<Vec<Selected>>> + Send + use<S> {
        let this = self.clone();
        choices
            .map(move |chunk| chunk.and_then(|chunk| this.select(chunk)))
            .map(|selected| async { selected?.await })
            .buffered(2)
    }

    /// Queues the kernels that find and measure rows of several batches. Returns them once their counts have been copied to the host.
    pub(crate) fn select(
        &self,
        chunk: Vec<(Choice, Held)>,
    ) -> Result<impl Future<Output = Result<Vec<Selected>>> + Send + use<>> {
        let numbers = 1 + 2 * self.schema.fields().len();
        let all = chunk.len() * numbers;
        let mut counts = self.launcher.zeros(all * size_of::<u64>())?;
        let mut at = to(&mut counts);
        let mut found = Vec::new();
        for (choice, held) in chunk {
            found.push(self.find(choice, held, at)?);
            at += (numbers * size_of::<u64>()) as u64;
        }
        let counts = DeviceArray::from_values(DataType::UInt64, all, counts.freeze()?, None)?;
        let counts = counts.start_to_host(&self.launcher.queue)?;
        Ok(async move {
            let counts = counts.await?;
            let counts = counts.as_primitive::<UInt64Type>().values();
            for (one, counts) in found.iter_mut().zip(counts.chunks(numbers)) {
                one.counts = counts.iter().map(|n| *n as usize).collect();
                // The kernels have run, so what else the batch has is no longer in use.
                let columns: Vec<_> = one.columns.iter().map(|c| c.array.clone()).collect();
                let kept = columns.iter().map(DeviceArray::get_array_memory_size);
                let starts = one.starts.iter().flatten().map(DeviceBufferMut::len);
                let bytes = kept.chain(starts).sum::<usize>() + one.picked.len();
                one.held.keep(columns, bytes);
            }
            let (found, empty): (Vec<_>, Vec<_>) =
                found.into_iter().partition(|one| one.rows() > 0);
            Held::end(empty.into_iter().map(|one| one.held));
            Ok(found)
        })
    }

    /// Queues the kernels for a batch, which write the counts from an address on.
    fn find(&self, mut choice: Choice, held: Held, counts: u64) -> Result<Selected> {
        let (launcher, queue) = (&self.launcher, &self.launcher.queue);
        let (rows, passing) = (choice.passing.len() as u64, to(&mut choice.passing));
        let tiles = rows.div_ceil(TILE_ROWS).max(1);
        let mut picked = DeviceBufferMut::for_values::<u64>(queue, (rows + tiles) as usize)?;
        let (first, at) = (to(&mut picked), to(&mut picked) + 8 * rows);
        // The first counts the rows of each tile that pass, the second turns the counts into places, and the third writes the numbers of
        // the rows there.
        // SAFETY: these are the kernels' parameters. They read a byte for each row, and write a number for each tile behind `picked`, one
        // of the counts, and at most a number for each row to `picked`; all of them have room and are not frozen.
        unsafe {
            launcher.launch("count_passing", rows, &[passing, rows, tiles, at])?;
            launcher.launch("scan_u64", tiles, &[at, tiles, counts])?;
            let words = [passing, rows, tiles, at, first];
            launcher.launch("select", rows, &words)?;
        }
        let mut starts = Vec::new();
        for (i, input) in choice.columns.iter().enumerate() {
            let c = input.column;
            let (nulls, bytes) = (counts + 8 + 16 * i as u64, counts + 16 + 16 * i as u64);
            if c.bits != 0 {
                let words = [passing, c.bits, c.bit, rows, nulls];
                // SAFETY: these are the kernel's parameters. It reads `rows` bytes and lent bits, and writes one of the counts.
                unsafe { launcher.launch("count_nulls", rows, &words) }?;
            }
            let numbers = || DeviceBufferMut::for_values::<u64>(queue, rows as usize);
            let mut of = input.format.is_text().then(numbers);
            if let Some(Ok(of)) = &mut of {
                let at = to(of);
                let words = [c.layout, c.values, c.data, c.bits, c.bit, rows, passing, at];
                // SAFETY: these are the kernels' parameters. They read rows of a valid column, which is lent, and write a number for each
                // row to memory that has room for them, and one of the counts.
                unsafe {
                    launcher.launch("measure", rows, &words)?;
                    launcher.launch("scan_u64", rows, &[at, rows, bytes])?;
                }
            }
            starts.push(of.transpose()?);
        }
        Ok(Selected {
            columns: choice.columns,
            picked,
            starts,
            counts: Vec::new(),
            held,
        })
    }

    /// Queues the kernels that copy the selected rows of some batches, at least one, to one batch. Its memory is one allocation, with one
    /// event, and has the size of these rows, rounded up to 64 bytes for each buffer.
    pub(crate) fn gather(&self, batches: Vec<Selected>) -> Result<DeviceRecordBatch> {
        let (launcher, queue) = (&self.launcher, &self.launcher.queue);
        let rows = batches.iter().map(Selected::rows).sum();
        let (fields, mut bytes) = (self.schema.fields(), 0);
        let places = (0..fields.len()).map(|i| self.place(&batches, i, rows, &mut bytes));
        let places: Vec<_> = places.collect::<Result<_>>()?;
        let mut memory = match places.iter().any(Place::has_bits) {
            true => launcher.zeros(bytes)?,
            false => DeviceBufferMut::allocate(queue, bytes)?,
        };
        let at = to(&mut memory);
        for (i, place) in places.iter().enumerate() {
            self.fill(&batches, i, place, at)?;
        }
        Held::end(batches.into_iter().map(|one| one.held));
        let memory = memory.freeze()?;
        let columns = places
            .into_iter()
            .zip(fields)
            .map(|(place, of)| place.column(&memory, of.data_type(), rows));
        let columns: Vec<_> = columns.collect::<Result<_>>()?;
        DeviceRecordBatch::try_new_with_rows(queue.device(), self.schema.clone(), &columns, rows)
    }

    /// Where the buffers of a column lie in memory that ends at `end` so far.
    fn place(&self, batches: &[Selected], i: usize, rows: usize, end: &mut usize) -> Result<Place> {
        let data_type = self.schema.field(i).data_type();
        let format = batches[0].columns[i].format;
        let nulls = batches.iter().map(|batch| batch.counts[1 + 2 * i]).sum();
        let bytes: usize = batches.iter().map(|batch| batch.counts[2 + 2 * i]).sum();
        if bytes > i32::MAX as usize && format.layout != Layout::Offsets64 {
            let what = format!(
                "{bytes} bytes of {data_type} in a result of {rows} rows on {}; smaller batches are needed",
                self.launcher.queue.device()
            );
            return Err(Error::InvalidArgument(what.into()));
        }
        let values = match format.layout {
            Layout::Bits => rows.div_ceil(8),
            Layout::Fixed | Layout::Views => rows * format.width,
            _ => (rows + 1) * format.width,
        };
        let validity = if nulls > 0 { rows.div_ceil(8) } else { 0 };
        let buffers = [validity, values, bytes].map(|bytes| {
            let start = *end;
            *end += bytes.next_multiple_of(64);
            start..start + bytes
        });
        Ok(Place {
            format,
            nulls,
            buffers,
        })
    }

    /// Queues the kernels for a column of a result, whose memory begins at an address.
    fn fill(&self, batches: &[Selected], i: usize, place: &Place, memory: u64) -> Result<()> {
        let (launcher, format) = (&self.launcher, place.format);
        let at = |buffer: &Range<usize>| memory + buffer.start as u64;
        let [validity, out, out_data] = place.buffers.each_ref().map(at);
        let (mut row, mut byte) = (0, 0);
        for batch in batches {
            let c = batch.columns[i].column;
            let (picked, n) = (word(batch.picked.address()), batch.rows() as u64);
            let bits = |at, bit, out| {
                let words = [at, bit, picked, n, out, row];
                // SAFETY: these are the kernel's parameters. It reads lent bits at the numbers that `select` has written, and writes the
                // words of as many bits of memory that is not frozen, has room for them, and is padded.
                unsafe { launcher.launch("gather_bits", n.div_ceil(32) + 1, &words) }
            };
            if place.nulls > 0 {
                bits(c.bits, c.bit, validity)?;
            }
            let to = out + row * c.width;
            let (kernel, words) = match (format.layout, &batch.starts[i]) {
                (Layout::Bits, _) => {
                    bits(c.values, c.first_bit, out)?;
                    row += n;
                    continue;
                }
                (_, None) => {
                    let words = [format.unit as u64, c.width, c.values, picked, n, to];
                    ("gather", words.to_vec())
                }
                (_, Some(starts)) => {
                    let of = [c.layout, c.values, c.data, c.bits, c.bit, picked];
                    let written = [word(starts.address()), n, byte, to, out_data];
                    ("gather_bytes", [&of[..], &written].concat())
                }
            };
            // SAFETY: these are the kernel's parameters. It reads rows of a valid column, which is lent, at the numbers that `select` has
            // written. It writes as many values, or views, or offsets and one more, and as many bytes as `measure` has counted, to
            // memory that is not frozen and has room for them.
            unsafe { launcher.launch(kernel, n, &words) }?;
            row += n;
            byte += batch.counts[2 + 2 * i] as u64;
        }
        Ok(())
    }
}

/// The buffers of a column in the memory of a result, each from a multiple of 64 bytes on, so that none shares a word with another.
struct Place {
    format: Format,
    nulls: usize,
    /// Validity, if there are nulls, then values, offsets or views, then the bytes of text.
    buffers: [Range<usize>; 3],
}

impl Place {
    /// Whether there are bits, which kernels set in memory of zeros.
    fn has_bits(&self) -> bool {
        self.nulls > 0 || self.format.layout == Layout::Bits
    }

    /// The column, once its kernels are queued.
    fn column(self, memory: &DeviceBuffer, of: &DataType, rows: usize) -> Result<DeviceArray> {
        let [validity, values, data] = self.buffers;
        let slice = |buffer: Range<usize>| memory.slice(buffer.start, buffer.len());
        let mut buffers = vec![Some(slice(values)?)];
        if self.format.is_text() && (!data.is_empty() || self.format.layout != Layout::Views) {
            buffers.push(Some(slice(data)?));
        }
        let validity = (self.nulls > 0).then(|| Validity::new(slice(validity)?, 0, rows));
        let validity = validity.transpose()?;
        // SAFETY: the rows are copies of rows of a valid column, nulls as empty text; `gather_bytes` makes offsets that ascend
        // to the size of the data, and views into the only data buffer; `count_nulls` has counted the unset bits that
        // `gather_bits` copies. All batches have a column of this type, since they are of this schema.
        unsafe {
            let validity = validity.map(|bits| bits.with_null_count(self.nulls));
            DeviceArray::from_parts(memory.device(), of.clone(), rows, validity, &buffers, &[])
        }
    }
}
