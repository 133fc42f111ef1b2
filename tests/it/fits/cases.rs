//! Columns as their stream declares them, and as a batch has them.

use super::*;

pub(crate) struct Case {
    pub(crate) name: &'static str,
    /// The column that the stream declares, and the batch's.
    pub(crate) declared: Field,
    pub(crate) got: Vec<Field>,
    pub(crate) nulls: Nulls,
    /// The words of the refusal; none if it fits.
    pub(crate) refused: &'static [&'static str],
}

pub(crate) fn case(name: &'static str, declared: Field, got: Field, nulls: Nulls) -> Case {
    let (got, refused) = (vec![got], &[][..]);
    Case {
        name,
        declared,
        got,
        nulls,
        refused,
    }
}

impl Case {
    pub(crate) fn refused(self, words: &'static [&'static str]) -> Self {
        Self {
            refused: words,
            ..self
        }
    }

    pub(crate) fn schema(&self) -> SchemaRef {
        let metadata = HashMap::from([("of".to_owned(), "the stream".to_owned())]);
        Arc::new(Schema::new_with_metadata(
            vec![self.declared.clone()],
            metadata,
        ))
    }

    /// Rows of the stream's type, or of another if those do not fit.
    pub(crate) fn batch(&self, schema: SchemaRef) -> RecordBatch {
        let column = |field: &Arc<Field>| {
            let to = field.data_type();
            match self.refused.is_empty() {
                true => retyped(
                    &array(self.declared.data_type(), 9, self.nulls, 7).to_data(),
                    to,
                ),
                false => array(to, 9, self.nulls, 7),
            }
        };
        let columns = schema.fields().iter().map(column).collect();
        RecordBatch::try_new(schema, columns).unwrap()
    }
}

/// The same values under a type of the same layout.
pub(crate) fn retyped(data: &ArrayData, to: &DataType) -> ArrayRef {
    use DataType::*;
    let types: Vec<&DataType> = match to {
        List(f) | ListView(f) | LargeListView(f) | Map(f, _) => vec![f.data_type()],
        Struct(fields) => fields.iter().map(|f| f.data_type()).collect(),
        Dictionary(_, values) => vec![values],
        RunEndEncoded(ends, values) => vec![ends.data_type(), values.data_type()],
        _ => vec![],
    };
    let children = data.child_data().iter().zip(types);
    let children = children.map(|(child, to)| retyped(child, to).to_data());
    let data = data.clone().into_builder().data_type(to.clone());
    make_array(data.child_data(children.collect()).build().unwrap())
}

pub(crate) fn a(data_type: DataType) -> Field {
    Field::new("a", data_type, true)
}

pub(crate) fn strict(data_type: DataType) -> Field {
    a(data_type).with_nullable(false)
}

pub(crate) fn noted(of: Field) -> Field {
    of.with_metadata(HashMap::from([(
        "note".to_owned(),
        "of the batch".to_owned(),
    )]))
}

pub(crate) fn list(item: Field) -> DataType {
    DataType::List(Arc::new(item))
}

/// A map whose fields have other names.
pub(crate) fn renamed(key: DataType, value: DataType) -> DataType {
    let entries = [required("k", key), field("v", value)];
    DataType::Map(
        required("pairs", DataType::Struct(entries.into_iter().collect())),
        false,
    )
}

pub(crate) fn cases() -> Vec<Case> {
    use DataType::*;
    let (none, some) = (Nulls::None, Nulls::Some);
    let item = |name: &str, nullable| Field::new(name, Utf8, nullable);
    let deep = |name: &str, inner: Field| list(Field::new(name, Struct(vec![inner].into()), true));
    let views = |name: &str| ListView(Arc::new(item(name, true)));
    let large = |name: &str| LargeListView(Arc::new(item(name, true)));
    let time = |zone: &str| Timestamp(TimeUnit::Second, Some(zone.into()));
    let texts = |key| Dictionary(Box::new(key), Box::new(Utf8));
    let ree = |name: &str| RunEndEncoded(required("ends", Int32), field(name, Utf8));
    let in_dictionary = |name: &str| Dictionary(Box::new(Int8), Box::new(list(item(name, true))));
    let named = |name: &str| {
        let metadata = HashMap::from([("ARROW:extension:name".to_owned(), name.to_owned())]);
        a(Utf8).with_metadata(metadata)
    };
    let two = vec![a(Int32), Field::new("b", Int32, true)];
    vec![
        case("the same", a(Int32), a(Int32), some),
        case("never null", a(Utf8), strict(Utf8), none),
        case("metadata", a(Utf8), noted(a(Utf8)), some),
        case("metadata of the stream", noted(a(Utf8)), a(Utf8), some),
        case(
            "metadata and never null",
            noted(a(Utf8)),
            strict(Utf8),
            none,
        ),
        case(
            "an item",
            a(list(item("item", true))),
            a(list(item("element", true))),
            some,
        ),
        case(
            "an item never null",
            a(list(item("item", true))),
            a(list(item("x", false))),
            none,
        ),
        case(
            "a noted item",
            a(list(item("item", true))),
            a(list(noted(item("i", true)))),
            some,
        ),
        case(
            "items may be null",
            a(list(item("i", false))),
            a(list(item("i", true))),
            none,
        ),
        case("a list view", a(views("item")), a(views("element")), some),
        case(
            "a large list view",
            a(large("item")),
            a(large("element")),
            some,
        ),
        case(
            "below",
            a(deep("item", item("t", true))),
            a(deep("e", item("t", false))),
            none,
        ),
        case(
            "in a dictionary",
            a(in_dictionary("item")),
            a(in_dictionary("e")),
            some,
        ),
        case("runs", a(run_ends(Int32, Utf8)), a(ree("v")), some),
        case(
            "a map",
            a(map(Utf8, Int32, false)),
            a(renamed(Utf8, Int32)),
            some,
        ),
        case(
            "a sorted map",
            a(map(Utf8, Int32, false)),
            a(map(Utf8, Int32, true)),
            some,
        ),
        case("without nulls", strict(Utf8), a(Utf8), none),
        case(
            "runs without nulls",
            strict(run_ends(Int32, Utf8)),
            a(ree("v")),
            none,
        ),
        case(
            "texts without nulls",
            strict(texts(Int8)),
            a(texts(Int8)),
            none,
        ),
        case("with nulls", strict(Int32), a(Int32), some).refused(&[
            "column 'a' has",
            "nulls in",
            "not nullable in",
            "declare it nullable",
        ]),
        case(
            "runs with nulls",
            strict(run_ends(Int32, Utf8)),
            a(ree("v")),
            some,
        )
        .refused(&["column 'a' may have nulls in", "not nullable in"]),
        case(
            "items with nulls",
            a(list(item("i", false))),
            a(list(item("i", true))),
            some,
        )
        .refused(&["column 'a'.children[0] has", "not nullable in"]),
        case("another name", a(Int32), Field::new("A", Int32, true), some).refused(&[
            "column 'a' is called 'A' in",
            "'a' in",
            "rename",
        ]),
        case(
            "another name below",
            a(deep("i", item("t", true))),
            a(deep("i", item("T", true))),
            some,
        )
        .refused(&["column 'a'.children[0].children[0] is called 'T'", "rename"]),
        case("another type", a(Int32), a(Int64), some).refused(&[
            "column 'a' is Int64 in",
            "but Int32 in",
            "cast",
        ]),
        case("another zone", a(time("UTC")), a(time("+01:00")), some).refused(&[
            "column 'a' is Timestamp",
            "UTC",
            "cast",
        ]),
        case(
            "another item",
            a(list(item("i", true))),
            a(list(Field::new("i", Binary, true))),
            some,
        )
        .refused(&["column 'a'.children[0] is Binary in", "Utf8", "cast"]),
        case(
            "another length",
            a(fixed_list(Int8, 2)),
            a(fixed_list(Int8, 3)),
            some,
        )
        .refused(&["column 'a' is FixedSizeList", "cast"]),
        case("other keys", a(texts(Int8)), a(texts(Int16)), some)
            .refused(&["column 'a' is Dictionary", "cast"]),
        case(
            "other values",
            a(texts(Int8)),
            a(Dictionary(Box::new(Int8), Box::new(Binary))),
            some,
        )
        .refused(&["column 'a'.dictionary is Binary in", "Utf8", "cast"]),
        case(
            "not sorted",
            a(map(Utf8, Int32, true)),
            a(map(Utf8, Int32, false)),
            some,
        )
        .refused(&["column 'a' is Map", "cast"]),
        case(
            "more fields",
            a(structure(vec![("x", Int8)])),
            a(Struct(Default::default())),
            some,
        )
        .refused(&["column 'a' is Struct", "cast"]),
        case(
            "another union",
            a(union(UnionMode::Dense, vec![Int8, Utf8])),
            a(union(UnionMode::Sparse, vec![Int8, Utf8])),
            some,
        )
        .refused(&["column 'a' is Union", "cast"]),
        case(
            "another extension",
            named("arrow.x"),
            named("arrow.json"),
            some,
        )
        .refused(&["column 'a' is arrow.json", "arrow.x", "cast"]),
        case("an extension more", a(Utf8), named("arrow.json"), some),
        Case {
            got: two,
            ..case("more columns", a(Int32), a(Int32), some)
        }
        .refused(&["2 columns", "1", "select"]),
    ]
}
