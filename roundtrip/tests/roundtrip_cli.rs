//! Runs `roundtrip` over files of every kind and checks exit status, standard error
//! and the JSON line.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;

use arrow_array::types::Int32Type;
use arrow_array::{
    ArrayRef, DictionaryArray, Float64Array, Int32Array, Int64Array, ListArray, RecordBatch,
    RecordBatchOptions, StringArray, StringViewArray,
};
use arrow_ipc::writer::{FileWriter, IpcWriteOptions, StreamWriter};
use arrow_ipc::{CompressionType, MetadataVersion};
use arrow_schema::Schema;
use serde_json::Value;
use tempfile::TempDir;

fn roundtrip(arguments: &[&OsStr]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_roundtrip"));
    command.args(arguments).stdin(Stdio::null());
    command.output().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

/// Runs over one file all three ways and checks that all is identical. Gives the JSON of each.
fn accept(file: &Path, rows: u64, batches: u64, options: &[&str]) -> [Value; 3] {
    ["array", "stream", "async"].map(|via| {
        let mut arguments = vec![OsStr::new("--json"), "--via".as_ref(), via.as_ref()];
        arguments.extend(options.iter().map(OsStr::new));
        arguments.push(file.as_ref());
        let output = roundtrip(&arguments);
        let errors = stderr(&output);
        let context = format!("{} via {via}: {errors}", file.display());
        assert_eq!(output.status.code(), Some(0), "{context}");
        assert_eq!(errors, "", "{context}");
        let json = json(&output);
        assert_eq!(json["files"], 1, "{context}");
        assert_eq!(json["rows"], rows, "{context}");
        assert_eq!(json["batches"], batches, "{context}");
        assert_eq!(json["mismatches"], 0, "{context}");
        assert_eq!(json["device"], "sim", "{context}");
        assert_eq!(json["via"], via, "{context}");
        assert_eq!(json["status"], 0, "{context}");
        assert!(json["error"].is_null(), "{context}");
        assert!(json["seconds"].as_f64().unwrap() > 0.0, "{context}");
        for number in [
            "allocations",
            "copies",
            "bytes_up",
            "bytes_down",
            "events",
            "queue_waits",
            "host_waits",
        ] {
            assert!(json[number].is_u64(), "{number}, {context}");
        }
        if rows > 0 {
            assert!(json["bytes_up"].as_u64().unwrap() > 0, "{context}");
        }
        json
    })
}

fn json(output: &Output) -> Value {
    let text = String::from_utf8(output.stdout.clone()).unwrap();
    let last = text.lines().last().expect("no output");
    serde_json::from_str(last).unwrap_or_else(|e| panic!("{e}: {last}"))
}

/// Checks that the arguments are refused with `status` and one line that contains `part`.
fn refuse(arguments: &[&OsStr], status: i32, part: &str) {
    let output = roundtrip(arguments);
    let errors = stderr(&output);
    let context = format!("{arguments:?}: {errors}");
    assert_eq!(output.status.code(), Some(status), "{context}");
    assert!(errors.starts_with("roundtrip: "), "{context}");
    assert!(errors.ends_with('\n'), "{context}");
    assert_eq!(errors.lines().count(), 1, "{context}");
    assert!(errors.contains(part), "no '{part}' in {context}");
}

fn refuse_file(file: &Path, part: &str) {
    refuse(&[file.as_ref()], 2, part);
    // The error of a reader must not get lost in a stream either.
    refuse(&["--via=stream".as_ref(), file.as_ref()], 2, part);
}

/// Rows `start..start + rows` of a table with flat, nested, view and dictionary columns.
fn batch(start: usize, rows: usize) -> RecordBatch {
    let range = || start..start + rows;
    let maybe = |i: usize| (i % 3 != 1).then_some(i);
    let text = |i: usize| "x".repeat(i % 20);
    // An IPC file has one dictionary for all batches.
    let keys = Int32Array::from_iter(range().map(|i| maybe(i).map(|i| i as i32 % 2)));
    let words = DictionaryArray::new(keys, Arc::new(StringArray::from(vec!["a", "b"])));
    let lists = ListArray::from_iter_primitive::<Int32Type, _, _>(
        range().map(|i| maybe(i).map(|i| (0..i as i32 % 4).map(Some))),
    );
    RecordBatch::try_from_iter_with_nullable([
        (
            "integer",
            Arc::new(
                range()
                    .map(|i| maybe(i).map(|i| i as i64))
                    .collect::<Int64Array>(),
            ) as ArrayRef,
            true,
        ),
        (
            "float",
            Arc::new(Float64Array::from_iter_values(
                range().map(|i| i as f64 / 3.0),
            )),
            false,
        ),
        (
            "text",
            Arc::new(StringArray::from_iter(range().map(|i| maybe(i).map(text)))),
            true,
        ),
        (
            "view",
            Arc::new(StringViewArray::from_iter_values(range().map(text))),
            true,
        ),
        ("word", Arc::new(words), true),
        ("list", Arc::new(lists), true),
    ])
    .unwrap()
}

fn batches() -> [RecordBatch; 3] {
    [batch(0, 100), batch(100, 0), batch(100, 50)]
}

struct Files(TempDir);

impl Files {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn write(&self, name: &str, content: &[u8]) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, content).unwrap();
        path
    }

    fn stream(&self, name: &str, schema: &Schema, batches: &[RecordBatch]) -> PathBuf {
        self.stream_with(name, schema, batches, IpcWriteOptions::default())
    }

    fn stream_with(
        &self,
        name: &str,
        schema: &Schema,
        batches: &[RecordBatch],
        options: IpcWriteOptions,
    ) -> PathBuf {
        let file = File::create(self.path(name)).unwrap();
        let mut writer = StreamWriter::try_new_with_options(file, schema, options).unwrap();
        for batch in batches {
            writer.write(batch).unwrap();
        }
        writer.finish().unwrap();
        self.path(name)
    }

    fn file(&self, name: &str, batches: &[RecordBatch], options: IpcWriteOptions) -> PathBuf {
        let file = File::create(self.path(name)).unwrap();
        let schema = batches[0].schema();
        let mut writer = FileWriter::try_new_with_options(file, &schema, options).unwrap();
        for batch in batches {
            writer.write(batch).unwrap();
        }
        writer.finish().unwrap();
        self.path(name)
    }
}

fn compressed(with: CompressionType) -> IpcWriteOptions {
    IpcWriteOptions::default()
        .try_with_compression(Some(with))
        .unwrap()
}

#[test]
fn ipc_is_recognised_by_content() {
    let files = Files::new();
    let (batches, schema) = (batches(), batch(0, 0).schema());
    for (name, options) in [
        ("plain", IpcWriteOptions::default()),
        ("lz4.csv", compressed(CompressionType::LZ4_FRAME)),
        ("zstd.parquet", compressed(CompressionType::ZSTD)),
    ] {
        let file = files.file(name, &batches, options.clone());
        accept(&file, 150, 3, &[]);
        let stream = files.stream_with(name, &schema, &batches, options);
        accept(&stream, 150, 3, &[]);
    }
    // As written before Arrow 0.15: no continuation marker.
    let legacy = IpcWriteOptions::try_new(8, true, MetadataVersion::V4).unwrap();
    let legacy = files.stream_with("legacy", &schema, &batches, legacy);
    assert_ne!(fs::read(&legacy).unwrap()[..4], [0xff; 4]);
    accept(&legacy, 150, 3, &[]);
}

/// Arrow 0.14 wrote files whose footer has no version, which then reads as the oldest one; their
/// messages have one.
#[test]
fn files_whose_footer_has_no_version() {
    let files = Files::new();
    let options = IpcWriteOptions::try_new(8, true, MetadataVersion::V4).unwrap();
    let path = files.file("old.arrow", &batches(), options);
    let mut content = fs::read(&path).unwrap();
    // At the end: the footer, its length (4 bytes), the magic (6 bytes).
    let end = content.len() - 10;
    let number = |content: &[u8], at: usize| {
        i32::from_le_bytes(content[at..at + 4].try_into().unwrap()) as usize
    };
    let start = end - number(&content, end);
    let table = start + number(&content, start);
    let fields = table.wrapping_sub(number(&content, table)) + 4;
    let version = |content: &[u8]| {
        arrow_ipc::root_as_footer(&content[start..end])
            .unwrap()
            .version()
    };
    assert_eq!(version(&content), MetadataVersion::V4);
    // The version is the first field: its place in the table becomes "not there".
    content[fields..fields + 2].fill(0);
    assert_eq!(version(&content), MetadataVersion::V1);
    accept(&files.write("old.arrow", &content), 150, 3, &[]);
    refuse_file(&files.write("cut.arrow", &content[..end]), "truncated");
}

#[test]
fn large_batches_are_cut() {
    let files = Files::new();
    let file = files.file("a.arrow", &batches(), IpcWriteOptions::default());
    // 100 rows are 15 batches of at most 7, 50 rows are 8, and the empty one stays.
    accept(&file, 150, 15 + 1 + 8, &["--batch-rows", "7"]);
    accept(&file, 150, 150 + 1, &["--batch-rows=1"]);
}

#[test]
fn no_batches_no_rows_no_columns() {
    let files = Files::new();
    let schema = batch(0, 0).schema();
    accept(&files.stream("none", &schema, &[]), 0, 0, &[]);
    accept(&files.stream("empty", &schema, &[batch(0, 0)]), 0, 1, &[]);
    let schema = Arc::new(Schema::empty());
    let options = RecordBatchOptions::new().with_row_count(Some(10));
    let columns = RecordBatch::try_new_with_options(schema.clone(), vec![], &options).unwrap();
    let file = files.stream("columns", &schema, &[columns]);
    for via in ["array", "stream", "async"] {
        let arguments = [
            "--batch-rows=3".as_ref(),
            "--via".as_ref(),
            via.as_ref(),
            file.as_ref(),
        ];
        let output = roundtrip(&arguments);
        assert_eq!(output.status.code(), Some(0), "{via}: {}", stderr(&output));
    }
}

#[test]
fn parquet() {
    let files = Files::new();
    let path = files.path("data");
    let file = File::create(&path).unwrap();
    let batch = batch(0, 150);
    let mut writer = parquet::arrow::ArrowWriter::try_new(file, batch.schema(), None).unwrap();
    writer.write(&batch).unwrap();
    writer.close().unwrap();
    accept(&path, 150, 1, &[]);
    accept(&path, 150, 3, &["--batch-rows", "60"]);
    let content = fs::read(&path).unwrap();
    refuse_file(
        &files.write("cut.parquet", &content[..content.len() / 2]),
        "cut.parquet",
    );
}

#[test]
fn csv() {
    let files = Files::new();
    let content = "number,text,day,empty\n1,a,2024-01-01,\n2.5,\"b,\"\"c\",2024-01-02,\n,,,\n";
    accept(&files.write("a.csv", content.as_bytes()), 3, 1, &[]);
    accept(
        &files.write("b.CSV", content.as_bytes()),
        3,
        2,
        &["--batch-rows=2"],
    );
    accept(&files.write("tabs.tsv", b"a\tb\n1\t2\n"), 1, 1, &[]);
    accept(&files.write("header.csv", b"a,b\n"), 0, 0, &[]);
    refuse_file(
        &files.write("ragged.csv", b"a,b\n1,2\n1,2,3\n"),
        "ragged.csv",
    );
    refuse_file(
        &files.write("binary.csv", b"a,b\n\xff\xfe,2\n"),
        "binary.csv",
    );
}

/// A stream with the schema `number: int32` of a big-endian producer.
fn big_endian_stream() -> Vec<u8> {
    use arrow_ipc::*;
    // Gives a builder without naming its crate.
    let mut builder = convert::IpcSchemaEncoder::new().schema_to_fb(&arrow_schema::Schema::empty());
    builder.reset();
    let name = builder.create_string("number");
    let mut int = IntBuilder::new(&mut builder);
    int.add_bitWidth(32);
    int.add_is_signed(true);
    let int = int.finish();
    let mut field = FieldBuilder::new(&mut builder);
    field.add_name(name);
    field.add_type_type(Type::Int);
    field.add_type_(int.as_union_value());
    let field = field.finish();
    let fields = builder.create_vector(&[field]);
    let mut schema = SchemaBuilder::new(&mut builder);
    schema.add_endianness(Endianness::Big);
    schema.add_fields(fields);
    let schema = schema.finish();
    let mut message = MessageBuilder::new(&mut builder);
    message.add_version(MetadataVersion::V5);
    message.add_header_type(MessageHeader::Schema);
    message.add_header(schema.as_union_value());
    let message = message.finish();
    builder.finish(message, None);
    let metadata = builder.finished_data();
    let padded = metadata.len().next_multiple_of(8);
    let mut stream = vec![0xff; 4];
    stream.extend((padded as u32).to_le_bytes());
    stream.extend(metadata);
    stream.resize(8 + padded, 0);
    stream.extend([0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0]);
    stream
}

#[test]
fn big_endian_is_refused() {
    let files = Files::new();
    let file = files.write("big.stream", &big_endian_stream());
    refuse_file(&file, "big-endian");
}

#[test]
fn damaged_files_are_refused() {
    let files = Files::new();
    let schema = batch(0, 0).schema();
    let lz4 = compressed(CompressionType::LZ4_FRAME);
    let stream = fs::read(files.stream_with("a", &schema, &batches(), lz4)).unwrap();
    let file = fs::read(files.file("b", &batches(), IpcWriteOptions::default())).unwrap();
    for cut in [1, 5, 9, 100] {
        let stream = files.write("cut.stream", &stream[..stream.len() - 8 - cut]);
        refuse_file(&stream, "truncated");
        let file = files.write("cut.arrow", &file[..file.len() - cut]);
        refuse_file(&file, "truncated");
    }
    refuse_file(&files.write("start.arrow", b"ARROW1"), "truncated");
    refuse_file(&files.write("start.stream", &[0xff; 4]), "truncated");
    refuse_file(
        &files.write("end.stream", &[255, 255, 255, 255, 0, 0, 0, 0]),
        "schema",
    );
    // Whatever is broken, the answer is a status and a line, never a crash.
    for (name, content) in [("bits.stream", &stream), ("bits.arrow", &file)] {
        for at in (0..content.len()).step_by(content.len() / 60) {
            let mut content = content.clone();
            content[at] ^= 0x94;
            let path = files.write(name, &content);
            let output = roundtrip(&[path.as_ref()]);
            let code = output.status.code();
            let lines = stderr(&output).lines().count();
            let right = code == Some(0) && lines == 0 || code == Some(2) && lines == 1;
            assert!(right, "byte {at} of {name}: {code:?}, {}", stderr(&output));
        }
    }
}

/// Memory for lengths like these cannot be had, and an allocation that fails aborts.
#[test]
fn absurd_lengths_are_refused() {
    const ABSURD: [u8; 8] = (1i64 << 46).to_le_bytes();
    let files = Files::new();
    let lz4 = compressed(CompressionType::LZ4_FRAME);
    let schema = batch(0, 0).schema();
    let stream = files.stream_with("a.stream", &schema, &batches(), lz4.clone());
    let file = files.file("a.arrow", &batches(), lz4);
    for (name, path) in [("b.stream", stream), ("b.arrow", file)] {
        let content = fs::read(path).unwrap();
        // A compressed buffer: the length to which it expands, and the magic of a frame.
        let mut expands = content.clone();
        let frames: Vec<_> = (8..content.len() - 4)
            .filter(|at| content[*at..].starts_with(&[0x04, 0x22, 0x4d, 0x18]))
            .collect();
        assert!(!frames.is_empty());
        for at in frames {
            expands[at - 8..at].copy_from_slice(&ABSURD);
        }
        refuse_file(
            &files.write(name, &expands),
            "claims a length of 70368744177664",
        );
        // A message's metadata starts behind the continuation marker and its own length. The first
        // one with a body is a dictionary's. In a file, a block of the footer repeats the body's
        // length.
        let body = (0..content.len() - 8)
            .filter(|at| content[*at..].starts_with(&[0xff; 4]))
            .filter_map(|at| arrow_ipc::root_as_message(&content[at + 8..]).ok())
            .map(|message| message.bodyLength())
            .find(|length| *length > 0)
            .unwrap();
        let mut long = content.clone();
        for at in 0..content.len() - 8 {
            if content[at..at + 8] == body.to_le_bytes() {
                long[at..at + 8].copy_from_slice(&ABSURD);
            }
        }
        assert_ne!(long, content);
        refuse_file(&files.write(name, &long), "truncated or damaged");
    }
}

#[test]
fn a_person_can_read_it() {
    let files = Files::new();
    let file = files.file("a.arrow", &batches(), IpcWriteOptions::default());
    for (via, rates) in [
        ("array", "upload GB/s  download GB/s"),
        ("stream", "there and back GB/s"),
        ("async", "there and back GB/s"),
    ] {
        let output = roundtrip(&["--via".as_ref(), via.as_ref(), file.as_ref()]);
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(text.contains("to the device sim and back"), "{text}");
        assert!(text.contains(rates), "{text}");
        let verdict = "\n150 rows in 3 batches came back identical.\n";
        assert!(text.contains(verdict), "{text}");
        assert!(text.contains("say nothing about a GPU"), "{text}");
    }
    let output = roundtrip(&["--device=cpu".as_ref(), file.as_ref()]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(!text.contains("GPU"), "{text}");
}

#[test]
fn other_inputs_are_refused() {
    let files = Files::new();
    refuse_file(&files.write("empty.arrow", b""), "is empty");
    refuse_file(&files.write("empty.csv", b""), "is empty");
    refuse_file(&files.write("data.xyz", b"some text"), "data.xyz");
    refuse_file(&files.write("none", b"a,b\n1,2\n"), "none");
    refuse_file(&files.write("text.parquet", b"some text"), "not a Parquet");
    refuse_file(&files.write("a.csv.gz", &[0x1f, 0x8b, 8, 0]), "gzip");
    refuse_file(&files.path("missing.arrow"), "missing.arrow");
    refuse_file(files.0.path(), "directory");
    refuse_file(
        &files.write("two\nlines.xyz", b"some text"),
        "two lines.xyz",
    );
    // A good file before a bad one does not change that.
    let good = files.write("good.csv", b"a\n1\n");
    let missing = files.path("missing");
    refuse(&[good.as_ref(), missing.as_ref()], 2, "missing");
}

#[test]
fn bad_usage_and_absent_devices() {
    let files = Files::new();
    let good = files.write("good.csv", b"a\n1\n");
    for (argument, part) in [
        ("--nonsense", "--nonsense"),
        ("--via=tape", "--via"),
        ("--batch-rows=0", "--batch-rows"),
        ("--scale=-1", "--scale"),
        ("--device=abacus", "abacus"),
        ("--device=cuda:many", "many"),
        ("--device=cuda:99", "cuda:99"),
        ("--device=hexagon", "hexagon"),
    ] {
        refuse(&[argument.as_ref(), good.as_ref()], 2, part);
    }
    refuse(&["--device".as_ref()], 2, "--device");
    let arguments = ["--device=cuda:99", "--json"].map(OsStr::new);
    let json = json(&roundtrip(&arguments));
    assert_eq!(json["status"], 2);
    assert_eq!(json["device"], "cuda:99");
    assert!(json["error"].as_str().unwrap().contains("cuda:99"));
}

#[test]
fn help_and_the_cpu() {
    let help = roundtrip(&["--help".as_ref()]);
    assert_eq!(help.status.code(), Some(0));
    assert!(String::from_utf8_lossy(&help.stdout).contains("--batch-rows"));
    let files = Files::new();
    let file = files.file("a.arrow", &batches(), IpcWriteOptions::default());
    for via in ["--via=array", "--via=stream", "--via=async"] {
        let output = roundtrip(&["--device=cpu".as_ref(), via.as_ref(), file.as_ref()]);
        assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    }
}

#[test]
fn several_files_are_summed_up() {
    let files = Files::new();
    let one = files.file("a.arrow", &batches(), IpcWriteOptions::default());
    let two = files.write("b.csv", b"a\n1\n2\n");
    let output = roundtrip(&["--json".as_ref(), one.as_ref(), two.as_ref()]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let json = json(&output);
    assert_eq!((&json["files"], &json["rows"]), (&2.into(), &152.into()));
    assert_eq!(json["inputs"][1]["rows"], 2);
}

#[test]
fn without_files_tables_are_generated() {
    let output = roundtrip(&["--json".as_ref(), "--scale=0.001".as_ref()]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    let json = json(&output);
    assert_eq!(json["files"], 8);
    assert!(json["rows"].as_u64().unwrap() > 8000);
    assert!(output.stdout.starts_with(b"Generating the TPC-H tables"));
}

#[test]
fn a_reader_that_goes_away_is_no_error() {
    let files = Files::new();
    let file = files.write("a.csv", b"a\n1\n");
    let mut command = Command::new(env!("CARGO_BIN_EXE_roundtrip"));
    command
        .arg(&file)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(stderr(&output), "");
}

/// The Arrow project's own files, where there are any: all but unsupported ones come back.
#[test]
fn files_of_the_arrow_project() {
    let Some(data) = std::env::var_os("ARROW_TEST_DATA") else {
        eprintln!("skipped: ARROW_TEST_DATA is not set");
        return;
    };
    let root = Path::new(&data)
        .join("arrow-ipc-stream")
        .join("integration");
    for (folder, big_endian) in [
        ("1.0.0-littleendian", false),
        ("1.0.0-bigendian", true),
        ("0.17.1", false),
        ("0.14.1", false),
    ] {
        let Ok(entries) = fs::read_dir(root.join(folder)) else {
            continue;
        };
        for entry in entries {
            let path = entry.unwrap().path();
            let extension = path.extension().and_then(OsStr::to_str);
            if !matches!(extension, Some("stream" | "arrow_file")) {
                continue;
            }
            if big_endian {
                refuse_file(&path, "big-endian");
                continue;
            }
            for via in ["--via=array", "--via=stream", "--via=async"] {
                let output = roundtrip(&[via.as_ref(), "--batch-rows=5".as_ref(), path.as_ref()]);
                let context = format!("{} {via}: {}", path.display(), stderr(&output));
                assert_eq!(output.status.code(), Some(0), "{context}");
            }
        }
    }
}
