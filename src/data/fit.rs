//! Whether rows fit a type that was declared for them: by the schema of their stream, or by the first of several arrays.
//!
//! They fit if the columns have the same names in the same order, if types are the same, except for the names of a list's item and
//! of a map's entries, and if nothing may be null that was declared not to be. Metadata does not matter, except two
//! different extension types. Sorted maps fit maps that need not be, and whether a dictionary is ordered does not matter. A field that
//! may be null fits one that may not if its nulls are counted and there are none; nothing is read to find that out.

use std::mem::discriminant;
use std::sync::Arc;

use arrow_schema::{DataType, Field, SchemaRef};

use crate::data::array::DeviceArray;
use crate::data::batch::DeviceRecordBatch;
use crate::data::layout::{Layout, Nesting, child_field, child_type};
use crate::data::node::{Node, View};
use crate::error::{Result, bail};

impl DeviceRecordBatch {
    /// Returns the same rows with another schema, which they must fit: names, their order and types are the same, except for the names
    /// of lists' items and maps' entries, and no column may have nulls that the schema does not allow. Metadata may differ, except two
    /// different extension types. Nothing is copied or read. The streams of this crate do the same with the batches that they pass on.
    ///
    /// ```
    /// use std::sync::Arc;
    /// use arrow_array::record_batch;
    /// use arrow_device::Devices;
    /// let batch = Devices::cpu().upload(&record_batch!(("id", Int64, [1, 2, 3]))?)?;
    /// let metadata = [("source".to_owned(), "sensor".to_owned())].into();
    /// let schema = batch.schema().as_ref().clone().with_metadata(metadata);
    /// let batch = batch.with_schema(Arc::new(schema))?;
    /// assert_eq!(batch.to_host()?.schema_ref().metadata()["source"], "sensor");
    /// # Ok::<(), arrow_device::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns [`Error::InvalidArgument`](crate::Error::InvalidArgument) with the column and the way out if they do not fit.
    pub fn with_schema(self, schema: SchemaRef) -> Result<Self> {
        if Arc::ptr_eq(self.schema_ref(), &schema) {
            return Ok(self);
        }
        let array = self.as_struct();
        if self.schema_ref().fields() == schema.fields() {
            return Ok(Self::from_struct(schema, array.clone()));
        }
        let rows = &format!("the batch on {}", self.device());
        let (got, declared) = (self.num_columns(), schema.fields().len());
        if got != declared {
            bail!(
                "{rows} has {got} columns, the declared schema {declared}: select those of the schema"
            );
        }
        let root = DataType::Struct(schema.fields().clone());
        let fit = Fit(rows, "the declared schema");
        fit.types("", array.view(), [array.data_type(), &root], true)?;
        let node = Arc::new(array.node().retyped(&root));
        let array = DeviceArray::from_node(self.device().clone(), node);
        Ok(Self::from_struct(schema, array))
    }
}

impl Node {
    /// The same rows as a type with the same layout, whose nulls they fit.
    fn retyped(&self, data_type: &DataType) -> Self {
        let children = self.children.iter().enumerate();
        let children = children.map(|(i, child)| match child_type(data_type, i) {
            Some(of) if *of != child.data_type => Arc::new(child.retyped(of)),
            _ => child.clone(),
        });
        Self {
            data_type: data_type.clone(),
            children: children.collect(),
            ..self.clone()
        }
    }
}

/// A comparison of types, with the words for the rows, and for what they have to fit.
pub(crate) struct Fit<'a>(pub(crate) &'a str, pub(crate) &'a str);

impl Fit<'_> {
    /// Refuses rows of the first type, unless they fit the second. Their path is empty for the root of a batch. `names` says whether the
    /// names of a struct's fields matter.
    pub(crate) fn types(
        &self,
        path: &str,
        view: View<'_>,
        [got, declared]: [&DataType; 2],
        names: bool,
    ) -> Result<()> {
        if !are_of_one_kind(got, declared) {
            let is = format!("is {got}");
            return self.refuse(path, is, declared.to_string(), "cast it first");
        }
        let named = names && matches!(declared, DataType::Struct(_) | DataType::Union(_, _));
        let inner_names = !matches!(declared, DataType::Map(_, _));
        for i in 0..Layout::of(declared).n_children() {
            let fields = child_field(got, i).zip(child_field(declared, i));
            let path = match fields {
                Some((got, declared)) if Arc::ptr_eq(got, declared) => continue,
                Some((_, field)) if path.is_empty() => format!("column '{}'", field.name()),
                Some(_) => format!("{path}.children[{i}]"),
                None => format!("{path}.dictionary"),
            };
            let child = view.child(i);
            if let Some((got, declared)) = fields {
                self.field(&path, child, [got, declared], named)?;
            }
            if let Some((got, declared)) = child_type(got, i).zip(child_type(declared, i)) {
                self.types(&path, child, [got, declared], inner_names)?;
            }
        }
        Ok(())
    }

    /// Refuses another name, another extension type, and nulls where there may be none.
    fn field(
        &self,
        path: &str,
        view: View<'_>,
        [got, declared]: [&Field; 2],
        named: bool,
    ) -> Result<()> {
        let (name, its_name) = (declared.name(), got.name());
        if named && name != its_name {
            let is = format!("is called '{its_name}'");
            return self.refuse(path, is, format!("'{name}'"), "rename it first");
        }
        let extensions = (got.extension_type_name()).zip(declared.extension_type_name());
        if let Some((got, declared)) = extensions.filter(|(got, declared)| got != declared) {
            return self.refuse(path, format!("is {got}"), declared.into(), "cast it first");
        }
        if !got.is_nullable() || declared.is_nullable() || is_without_nulls(view) {
            return Ok(());
        }
        let (is, way_out) = match view.null_count() {
            Some(nulls @ 1..) => (format!("has {nulls} nulls"), ""),
            Some(0) => ("may have nulls in its values".to_owned(), ""),
            None => (
                "may have nulls".to_owned(),
                "; if there are none, compact() counts",
            ),
        };
        let way_out = format!("declare it nullable there{way_out}");
        self.refuse(path, is, "is not nullable".to_owned(), &way_out)
    }

    fn refuse(&self, path: &str, is: String, declared: String, way_out: &str) -> Result<()> {
        let Self(rows, of) = self;
        bail!("{path} {is} in {rows}, but {declared} in {of}: {way_out}")
    }
}

/// Whether two types are the same, or differ in their children only, of which they have equally many.
pub(super) fn are_of_one_kind(got: &DataType, declared: &DataType) -> bool {
    use DataType as T;
    let (layout, of) = (Layout::of(got), Layout::of(declared));
    match (got, declared) {
        // What is sorted fits what need not be.
        (T::Map(_, got), T::Map(_, declared)) => *got || !declared,
        (T::Union(a, _), T::Union(b, _)) => {
            layout == of && a.iter().map(|(id, _)| id).eq(b.iter().map(|(id, _)| id))
        }
        (T::Dictionary(a, _), T::Dictionary(b, _)) => a == b,
        _ if layout.n_children() == 0 => got == declared,
        _ => layout == of && discriminant(got) == discriminant(declared),
    }
}

/// Whether it is known that no row is null. Rows without a bitmap, and those of a dictionary, may be null by their children.
fn is_without_nulls(view: View<'_>) -> bool {
    let layout = view.layout();
    let by_children = !layout.has_validity() || layout.nesting == Nesting::Dictionary;
    let mut children = (0..layout.n_children()).map(|i| view.child(i));
    let own = view.null_count() == Some(0);
    view.length == 0 || own && (!by_children || children.all(is_without_nulls))
}
