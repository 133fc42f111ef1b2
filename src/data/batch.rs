//! [`DeviceRecordBatch`]: a schema and columns of equal length.

use std::fmt;
use std::sync::Arc;

use arrow_schema::{DataType, Field, Schema, SchemaRef};

use crate::data::array::DeviceArray;
use crate::data::node::Node;
use crate::device::Device;
use crate::error::{Error, Result, bail};

/// A record batch in the memory of a device: a schema, and columns of equal length. Immutable; clones, slices and
/// projections share the memory.
///
/// It is a struct array without nulls, as the C data interface represents record batches, together with its
/// schema. An [`arrow_array::RecordBatch`] never holds a device address; [`to_host`](Self::to_host) copies the
/// rows to host memory if necessary.
///
/// ```
/// use arrow_array::record_batch;
/// use arrow_device::Devices;
/// let batch = record_batch!(("id", Int64, [1, 2, 3]), ("name", Utf8, ["a", "b", "c"]))?;
/// let on_device = Devices::cpu().upload(&batch)?;
/// assert_eq!(on_device.column_by_name("name")?.len(), 3);
/// assert_eq!(on_device.project(&[0])?.slice(1, 2)?.to_host()?, batch.project(&[0])?.slice(1, 2));
/// # Ok::<(), arrow_device::Error>(())
/// ```
#[derive(Clone)]
pub struct DeviceRecordBatch {
    schema: SchemaRef,
    array: DeviceArray,
}

impl DeviceRecordBatch {
    /// `array` must be a struct of the schema's fields without nulls. An offset of the struct is pushed down to its children: that of
    /// a batch is always 0, and its children have exactly its rows.
    pub(crate) fn from_struct(schema: SchemaRef, array: DeviceArray) -> Self {
        let node = array.view().pushed_down();
        let array = array.like(array.device().clone(), node);
        Self { schema, array }
    }

    /// Makes a batch of these columns, which may come from several batches and have events of their own. Nothing
    /// is copied.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if the number, types, lengths or devices of the columns do not fit
    /// together, if a column whose field is not nullable is known to have nulls, or if there is no column (see
    /// [`try_new_with_rows`](Self::try_new_with_rows)).
    pub fn try_new(schema: SchemaRef, columns: &[DeviceArray]) -> Result<Self> {
        let Some(first) = columns.first() else {
            return Err(Error::argument(
                "DeviceRecordBatch::try_new: without columns, device and number of rows are unknown; use \
                 try_new_with_rows",
            ));
        };
        Self::try_new_with_rows(first.device(), schema, columns, first.len())
    }

    /// As [`try_new`](Self::try_new), for a batch of `rows` rows with any number of columns, none included.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use arrow_device::{DeviceRecordBatch, Devices};
    /// use arrow_schema::Schema;
    /// let schema = Arc::new(Schema::empty());
    /// let counted = DeviceRecordBatch::try_new_with_rows(&Devices::cpu(), schema, &[], 7)?;
    /// assert_eq!((counted.num_rows(), counted.num_columns()), (7, 0));
    /// # Ok::<(), arrow_device::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if the number, types, lengths or devices of the columns do not fit to the schema,
    /// to `rows` and to `device`, if a column whose field is not nullable is known to have nulls, or for more than
    /// `i64::MAX` rows.
    pub fn try_new_with_rows(
        device: &Device,
        schema: SchemaRef,
        columns: &[DeviceArray],
        rows: usize,
    ) -> Result<Self> {
        let operation = "DeviceRecordBatch";
        let root = DataType::Struct(schema.fields().clone());
        // SAFETY: a struct has no values of its own, and those of its children are valid already.
        let array = unsafe {
            DeviceArray::assemble(operation, Some(device), root, rows, None, &[], columns)
        }?;
        Ok(Self { schema, array })
    }

    /// Returns the device whose memory holds the batch.
    pub fn device(&self) -> &Device {
        self.array.device()
    }

    /// Returns the schema.
    pub fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }

    /// Returns a reference to the schema.
    pub fn schema_ref(&self) -> &SchemaRef {
        &self.schema
    }

    /// Returns the schema, the columns and the number of rows. Nothing is copied; each column keeps only its own memory
    /// alive, as from [`column`](Self::column).
    pub fn into_parts(self) -> (SchemaRef, Vec<DeviceArray>, usize) {
        let (columns, rows) = (self.columns().collect(), self.num_rows());
        (self.schema, columns, rows)
    }

    /// Returns the number of rows.
    pub fn num_rows(&self) -> usize {
        self.array.len()
    }

    /// Returns the number of columns.
    pub fn num_columns(&self) -> usize {
        self.schema.fields().len()
    }

    /// Returns column `i`. Nothing is copied.
    ///
    /// The column keeps only its own memory alive: the allocations in which its buffers lie, not those of other columns.
    /// What was uploaded or imported together stays together: all columns of an uploaded batch share one allocation.
    /// [`DeviceArray::compact`] copies a column to an allocation of its own.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if there is no such column.
    pub fn column(&self, i: usize) -> Result<DeviceArray> {
        let column = self.array.child(i);
        column.ok_or_else(|| Error::argument(format!("no column {i} of {}", self.num_columns())))
    }

    /// Returns the first column with this name.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if there is no such column.
    pub fn column_by_name(&self, name: &str) -> Result<DeviceArray> {
        match self.schema.fields().iter().position(|f| f.name() == name) {
            Some(i) => self.column(i),
            None => bail!("no column '{name}'"),
        }
    }

    /// Returns all columns.
    pub fn columns(&self) -> impl ExactSizeIterator<Item = DeviceArray> + '_ {
        (0..self.num_columns()).map(|i| self.column(i).expect("i is below the number of columns"))
    }

    /// Returns `length` rows from row `offset` on, without a copy.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if the batch does not have these rows.
    pub fn slice(&self, offset: usize, length: usize) -> Result<Self> {
        let array = self.array.slice(offset, length)?;
        Ok(Self::from_struct(self.schema.clone(), array))
    }

    /// Returns the columns at `indices`, in that order, without a copy.
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`] if there is no such column.
    pub fn project(&self, indices: &[usize]) -> Result<Self> {
        let columns = indices.iter().map(|&i| Ok(self.column(i)?.node().clone()));
        let columns = columns.collect::<Result<_>>()?;
        let schema = self.schema.project(indices)?;
        let node = Node::of_columns(schema.fields().clone(), self.num_rows(), columns);
        Ok(Self {
            schema: Arc::new(schema),
            array: DeviceArray::from_node(self.device().clone(), Arc::new(node)),
        })
    }

    /// Returns whether the batch's memory may be read now. Never waits.
    ///
    /// # Errors
    /// Returns the errors that the device reports.
    pub fn is_ready(&self) -> Result<bool> {
        self.array.is_ready()
    }

    /// Blocks this thread until the batch's memory may be read.
    ///
    /// # Errors
    /// Returns the errors that the device reports.
    pub fn wait(&self) -> Result<()> {
        self.array.wait()
    }

    /// Returns the bytes of device memory that the batch keeps alive, each allocation once; see
    /// [`DeviceArray::get_array_memory_size`].
    pub fn get_array_memory_size(&self) -> usize {
        self.array.get_array_memory_size()
    }

    /// Returns the batch as a struct array.
    pub fn as_struct(&self) -> &DeviceArray {
        &self.array
    }
}

impl TryFrom<DeviceArray> for DeviceRecordBatch {
    type Error = Error;

    /// Makes a batch of a struct array without nulls; the metadata of its field becomes the schema's.
    ///
    /// # Errors
    /// Returns [`Error::InvalidInput`] for any other type, and for a struct that has nulls or whose null count is
    /// not known.
    fn try_from(array: DeviceArray) -> Result<Self> {
        let DataType::Struct(fields) = array.data_type() else {
            return Err(Error::invalid(
                "schema",
                format!("a record batch is a struct, not {}", array.data_type()),
            ));
        };
        check_no_nulls(&array)?;
        let metadata = array.field().map(|field| field.metadata().clone());
        let metadata = metadata.unwrap_or_default();
        let schema = Schema::new_with_metadata(fields.clone(), metadata);
        Ok(Self::from_struct(Arc::new(schema), array))
    }
}

impl From<DeviceRecordBatch> for DeviceArray {
    /// Returns the batch as a struct array without nulls. The schema's metadata becomes that of the array's field, so
    /// that [`TryFrom`] returns the same batch. Nothing is copied.
    fn from(batch: DeviceRecordBatch) -> Self {
        let root = batch.array.data_type().clone();
        let field = Field::new("", root, false).with_metadata(batch.schema.metadata().clone());
        let with_field = batch.array.with_field(Arc::new(field));
        with_field.expect("the field has the array's type")
    }
}

/// Refuses a struct that cannot be a batch because its rows may be null.
pub(crate) fn check_no_nulls(array: &DeviceArray) -> Result<()> {
    let what = match array.null_count() {
        Some(0) => return Ok(()),
        Some(_) => "the rows of a record batch cannot be null; import it as an array",
        None => "is not known yet; call resolve_null_counts first",
    };
    Err(Error::invalid("array.null_count", what))
}

impl fmt::Debug for DeviceRecordBatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceRecordBatch")
            .field("device", &self.device().id())
            .field("num_rows", &self.num_rows())
            .field("schema", &self.schema)
            .finish_non_exhaustive()
    }
}
