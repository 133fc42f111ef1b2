//! Schemas.

use std::collections::HashMap;

use arrow_device::python::{schema_from_python, schema_to_python};
use arrow_schema::SchemaRef;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

/// The names and types of columns. Any library takes it: `pyarrow.schema(batch.schema)`.
///
/// Args:
///     data: an object with `__arrow_c_schema__`: another library's schema.
///
/// Raises:
///     TypeError: for any other object.
///     ValueError: for an invalid schema, with the path of the field, and for a type that is none of batches.
#[pyclass(frozen, eq, module = "arrow_device")]
#[derive(PartialEq)]
pub(crate) struct Schema(pub(crate) SchemaRef);

#[pymethods]
impl Schema {
    #[new]
    fn new(data: &Bound<'_, PyAny>) -> PyResult<Self> {
        schema_from_python(data).map(Self)
    }

    /// The columns' names.
    #[getter]
    fn names(&self) -> Vec<&str> {
        self.0.fields().iter().map(|f| f.name().as_str()).collect()
    }

    /// The columns' types, as arrow-rs writes them: "Int64", "Utf8".
    #[getter]
    fn types(&self) -> Vec<String> {
        let types = self.0.fields().iter().map(|f| f.data_type().to_string());
        types.collect()
    }

    /// The schema's metadata, without that of the columns.
    #[getter]
    fn metadata(&self) -> HashMap<String, String> {
        self.0.metadata().clone()
    }

    fn __len__(&self) -> usize {
        self.0.fields().len()
    }

    fn __arrow_c_schema__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyCapsule>> {
        schema_to_python(py, self.0.as_ref())
    }

    fn __repr__(&self) -> String {
        format!("<Schema: {}>", summary(&self.0))
    }
}

/// The first columns with their types.
pub(crate) fn summary(schema: &arrow_schema::Schema) -> String {
    const SHOWN: usize = 12;
    let fields = schema.fields().iter().take(SHOWN);
    let mut columns: Vec<_> = fields
        .map(|f| format!("{}: {}", f.name(), f.data_type()))
        .collect();
    if schema.fields().len() > SHOWN {
        columns.push(format!("and {} more", schema.fields().len() - SHOWN));
    }
    columns.join(", ")
}
