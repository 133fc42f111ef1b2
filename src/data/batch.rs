//! [`DeviceRecordBatch`].

use std::fmt;
use std::sync::Arc;

use arrow_schema::{DataType, FieldRef, Schema, SchemaRef};

use crate::data::array::DeviceArray;
use crate::data::build::struct_tree;
use crate::data::layout::check_rows;
use crate::device::{Device, SyncEvent};
use crate::error::{Error, Result};

/// A record batch in the memory of a device: a schema, and columns of equal length. Immutable;
/// clones, slices and projections share the memory.
///
/// It is a struct array without nulls ("Record batches" of the specification) with the schema beside
/// it. No [`arrow_array::RecordBatch`] ever holds a device address; [`to_host`](Self::to_host) makes
/// one from it.
#[derive(Clone)]
pub struct DeviceRecordBatch {
    schema: SchemaRef,
    array: DeviceArray,
}

impl DeviceRecordBatch {
    /// `array` is a struct of the schema's fields without nulls: its makers see to it.
    pub(crate) fn from_struct(schema: SchemaRef, array: DeviceArray) -> Self {
        Self { schema, array }
    }

    /// A batch of these columns, which may come from several batches and carry events of their own.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if number, types, lengths or devices of the columns do not fit, if
    /// a column that cannot be null is known to hold nulls, or if there is no column (see
    /// [`try_new_empty`](Self::try_new_empty)).
    pub fn try_new(schema: SchemaRef, columns: &[DeviceArray]) -> Result<Self> {
        let Some(first) = columns.first() else {
            return Err(Error::argument(
                "a batch without columns does not tell its device; use try_new_empty",
            ));
        };
        if schema.fields().len() != columns.len() {
            return Err(Error::argument(format!(
                "{} columns for {} fields",
                columns.len(),
                schema.fields().len()
            )));
        }
        for (field, column) in schema.fields().iter().zip(columns) {
            let wrong = |what: String| {
                Err(Error::argument(format!(
                    "column '{}': {what}",
                    field.name()
                )))
            };
            if field.data_type() != column.data_type() {
                return wrong(format!(
                    "is of type {}, the schema says {}",
                    column.data_type(),
                    field.data_type()
                ));
            }
            if column.len() != first.len() {
                return wrong(format!("has {} rows, not {}", column.len(), first.len()));
            }
            if !field.is_nullable() && column.null_count().is_some_and(|n| n > 0) {
                return wrong("holds nulls, which its field forbids".into());
            }
        }
        let root = DataType::Struct(schema.fields().clone());
        let tree = struct_tree(first.device().clone(), root, first.len(), columns)?;
        Ok(Self {
            schema,
            array: DeviceArray::from_tree(Arc::new(tree)),
        })
    }

    /// A batch of `rows` rows and no columns.
    pub fn try_new_empty(device: &Device, metadata: Schema, rows: usize) -> Result<Self> {
        if !metadata.fields().is_empty() {
            return Err(Error::argument(
                "the schema of an empty batch has no fields",
            ));
        }
        check_rows(rows)?;
        let root = DataType::Struct(metadata.fields().clone());
        let tree = struct_tree(device.clone(), root, rows, &[])?;
        Ok(Self {
            schema: Arc::new(metadata),
            array: DeviceArray::from_tree(Arc::new(tree)),
        })
    }

    /// The device whose memory the batch is in.
    pub fn device(&self) -> &Device {
        self.array.device()
    }

    /// The schema.
    pub fn schema(&self) -> &SchemaRef {
        &self.schema
    }

    /// How many rows.
    pub fn num_rows(&self) -> usize {
        self.array.len()
    }

    /// How many columns.
    pub fn num_columns(&self) -> usize {
        self.schema.fields().len()
    }

    /// Column `i`.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if there is no such column.
    pub fn column(&self, i: usize) -> Result<DeviceArray> {
        self.array
            .child(i)
            .ok_or_else(|| Error::argument(format!("no column {i} of {}", self.num_columns())))
    }

    /// The first column of this name.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if there is no such column.
    pub fn column_by_name(&self, name: &str) -> Result<DeviceArray> {
        let found = self.schema.fields().iter().position(|f| f.name() == name);
        match found {
            Some(i) => self.column(i),
            None => Err(Error::argument(format!("no column '{name}'"))),
        }
    }

    /// All columns.
    pub fn columns(&self) -> impl ExactSizeIterator<Item = DeviceArray> + '_ {
        (0..self.num_columns()).map(|i| self.column(i).expect("i is below the number of columns"))
    }

    /// `length` rows from `offset`, without a copy.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if they do not lie inside.
    pub fn slice(&self, offset: usize, length: usize) -> Result<Self> {
        Ok(Self {
            schema: self.schema.clone(),
            array: self.array.slice(offset, length)?,
        })
    }

    /// The columns at `indices`, in that order, without a copy.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if there is no such column.
    pub fn project(&self, indices: &[usize]) -> Result<Self> {
        let columns: Vec<_> = indices
            .iter()
            .map(|&i| self.column(i))
            .collect::<Result<_>>()?;
        let fields: Vec<FieldRef> = indices
            .iter()
            .map(|&i| self.schema.fields()[i].clone())
            .collect();
        let schema = Schema::new_with_metadata(fields, self.schema.metadata().clone());
        if columns.is_empty() {
            return Self::try_new_empty(self.device(), schema, self.num_rows());
        }
        Self::try_new(Arc::new(schema), &columns)
    }

    /// Whether the batch's memory may be read now. Never waits.
    pub fn is_ready(&self) -> Result<bool> {
        self.array.is_ready()
    }

    /// Makes this thread wait until the batch's memory may be read.
    pub fn wait(&self) -> Result<()> {
        self.array.wait()
    }

    /// An event after which the batch's memory may be read; see [`DeviceArray::ready_event`].
    pub fn ready_event(&self) -> Result<Option<SyncEvent>> {
        self.array.ready_event()
    }

    /// The batch as a struct array.
    pub fn as_struct(&self) -> &DeviceArray {
        &self.array
    }
}

impl TryFrom<DeviceArray> for DeviceRecordBatch {
    type Error = Error;

    /// A struct array without nulls as a batch; its field's metadata becomes the schema's.
    ///
    /// # Errors
    /// [`Error::InvalidInput`] for another type, and for structs that hold or may hold nulls.
    fn try_from(array: DeviceArray) -> Result<Self> {
        let DataType::Struct(fields) = array.data_type() else {
            return Err(Error::invalid(
                "schema",
                format!("a record batch is a struct, not {}", array.data_type()),
            ));
        };
        if array.null_count().is_none() {
            return Err(Error::invalid(
                "array.null_count",
                "is not known yet; call resolve_null_counts first",
            ));
        }
        if array.null_count() != Some(0) {
            return Err(Error::invalid(
                "array.null_count",
                "the rows of a record batch cannot be null; import it as an array",
            ));
        }
        let metadata = array
            .field()
            .map(|f| f.metadata().clone())
            .unwrap_or_default();
        let schema = Schema::new_with_metadata(fields.clone(), metadata);
        Ok(Self {
            schema: Arc::new(schema),
            array,
        })
    }
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
