//! A C compiler and this crate agree on every struct and constant of the interface.
//!
//! The C source below is a transcription of the C definitions, kept apart from the Rust ones on
//! purpose. It prints what `sizeof`, `_Alignof`, `offsetof` and the constants are.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io::Write as _;
use std::mem::offset_of;
use std::process::{Command, Stdio};

use arrow_schema::ffi::Flags;

use super::c_data::{CArray, ForeignSchema};
use super::{
    ArrowDeviceType, FFI_ArrowAsyncDeviceStreamHandler, FFI_ArrowAsyncProducer, FFI_ArrowAsyncTask,
    FFI_ArrowDeviceArray, FFI_ArrowDeviceArrayStream,
};

/// Checks the Rust types when the tests are compiled.
macro_rules! layouts {
    ($($name:literal, $bytes:literal bytes: $ty:ty { $($field:ident $(in $outer:ident)? $at:literal),* $(,)? })*) => {
        /// All structs of the interface, with all members in their order.
        const STRUCTS: &[StructLayout] = &[$(StructLayout {
            name: $name,
            size: size_of::<$ty>(),
            align: align_of::<$ty>(),
            fields: &[$((stringify!($field), offset_of!($ty, $($outer.)? $field))),*],
        }),*];

        #[cfg(target_pointer_width = "64")]
        const _: () = {$(
            assert!(size_of::<$ty>() == $bytes && align_of::<$ty>() == 8);
            $(assert!(offset_of!($ty, $($outer.)? $field) == $at);)*
        )*};
    };
}

layouts! {
    "ArrowSchema", 72 bytes: ForeignSchema {
        format 0, name 8, metadata 16, flags 24, n_children 32, children 40, dictionary 48, release 56, private_data 64,
    }
    "ArrowArray", 80 bytes: CArray {
        length 0, null_count 8, offset 16, n_buffers 24, n_children 32, buffers 40, children 48, dictionary 56, release 64,
        private_data 72,
    }
    "ArrowDeviceArray", 128 bytes: FFI_ArrowDeviceArray {
        array 0, device_id 80, device_type 88, sync_event 96, reserved 104,
    }
    "ArrowDeviceArrayStream", 48 bytes: FFI_ArrowDeviceArrayStream {
        device_type 0, get_schema in callbacks 8, get_next in callbacks 16, get_last_error in callbacks 24, release in callbacks 32,
        private_data in callbacks 40,
    }
    "ArrowAsyncTask", 16 bytes: FFI_ArrowAsyncTask { extract_data 0, private_data 8 }
    "ArrowAsyncProducer", 40 bytes: FFI_ArrowAsyncProducer {
        device_type 0, request 8, cancel 16, additional_metadata 24, private_data 32,
    }
    "ArrowAsyncDeviceStreamHandler", 48 bytes: FFI_ArrowAsyncDeviceStreamHandler {
        on_schema 0, on_next_task 8, on_error 16, release 24, producer 32, private_data 40,
    }
}

/// The layout of one struct; sizes, alignments and offsets are in bytes.
struct StructLayout {
    /// The name in `abi.h`.
    name: &'static str,
    size: usize,
    align: usize,
    /// Each member and its `offsetof`.
    fields: &'static [(&'static str, usize)],
}

/// Returns all numeric constants of the interface with their names in `abi.h`.
fn constants() -> Vec<(String, i64)> {
    let flag = |name: &str, flag: Flags| (format!("ARROW_FLAG_{name}"), flag.bits());
    let mut all = vec![
        flag("DICTIONARY_ORDERED", Flags::DICTIONARY_ORDERED),
        flag("NULLABLE", Flags::NULLABLE),
        flag("MAP_KEYS_SORTED", Flags::MAP_KEYS_SORTED),
    ];
    all.extend(ArrowDeviceType::ALL.map(|of| {
        let name = of.name().unwrap_or_default();
        (format!("ARROW_DEVICE_{name}"), of.value().into())
    }));
    all
}

const DEFINITIONS: &str = r#"
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#define ARROW_FLAG_DICTIONARY_ORDERED 1
#define ARROW_FLAG_NULLABLE 2
#define ARROW_FLAG_MAP_KEYS_SORTED 4

struct ArrowSchema {
  const char* format;
  const char* name;
  const char* metadata;
  int64_t flags;
  int64_t n_children;
  struct ArrowSchema** children;
  struct ArrowSchema* dictionary;
  void (*release)(struct ArrowSchema*);
  void* private_data;
};

struct ArrowArray {
  int64_t length;
  int64_t null_count;
  int64_t offset;
  int64_t n_buffers;
  int64_t n_children;
  const void** buffers;
  struct ArrowArray** children;
  struct ArrowArray* dictionary;
  void (*release)(struct ArrowArray*);
  void* private_data;
};

typedef int32_t ArrowDeviceType;

#define ARROW_DEVICE_CPU 1
#define ARROW_DEVICE_CUDA 2
#define ARROW_DEVICE_CUDA_HOST 3
#define ARROW_DEVICE_OPENCL 4
#define ARROW_DEVICE_VULKAN 7
#define ARROW_DEVICE_METAL 8
#define ARROW_DEVICE_VPI 9
#define ARROW_DEVICE_ROCM 10
#define ARROW_DEVICE_ROCM_HOST 11
#define ARROW_DEVICE_EXT_DEV 12
#define ARROW_DEVICE_CUDA_MANAGED 13
#define ARROW_DEVICE_ONEAPI 14
#define ARROW_DEVICE_WEBGPU 15
#define ARROW_DEVICE_HEXAGON 16

struct ArrowDeviceArray {
  struct ArrowArray array;
  int64_t device_id;
  ArrowDeviceType device_type;
  void* sync_event;
  int64_t reserved[3];
};

struct ArrowDeviceArrayStream {
  ArrowDeviceType device_type;
  int (*get_schema)(struct ArrowDeviceArrayStream* self, struct ArrowSchema* out);
  int (*get_next)(struct ArrowDeviceArrayStream* self, struct ArrowDeviceArray* out);
  const char* (*get_last_error)(struct ArrowDeviceArrayStream* self);
  void (*release)(struct ArrowDeviceArrayStream* self);
  void* private_data;
};

struct ArrowAsyncTask {
  int (*extract_data)(struct ArrowAsyncTask* self, struct ArrowDeviceArray* out);
  void* private_data;
};

struct ArrowAsyncProducer {
  ArrowDeviceType device_type;
  void (*request)(struct ArrowAsyncProducer* self, int64_t n);
  void (*cancel)(struct ArrowAsyncProducer* self);
  const char* additional_metadata;
  void* private_data;
};

struct ArrowAsyncDeviceStreamHandler {
  int (*on_schema)(struct ArrowAsyncDeviceStreamHandler* self, struct ArrowSchema* stream_schema);
  int (*on_next_task)(struct ArrowAsyncDeviceStreamHandler* self, struct ArrowAsyncTask* task,
                      const char* metadata);
  void (*on_error)(struct ArrowAsyncDeviceStreamHandler* self, int code, const char* message,
                   const char* metadata);
  void (*release)(struct ArrowAsyncDeviceStreamHandler* self);
  struct ArrowAsyncProducer* producer;
  void* private_data;
};

#define SIZE(s) printf("size %s %zu\n", #s, sizeof(struct s))
#define ALIGN(s) printf("align %s %zu\n", #s, _Alignof(struct s))
#define FIELD(s, f) printf("field %s.%s %zu\n", #s, #f, offsetof(struct s, f))
#define CONSTANT(c) printf("constant %s %lld\n", #c, (long long)(c))
"#;

/// The transcription and a `main` that prints one line for each entry of the crate's tables.
fn source() -> String {
    let mut c = String::from(DEFINITIONS);
    c.push_str("int main(void) {\n");
    for s in STRUCTS {
        writeln!(c, "  SIZE({0}); ALIGN({0});", s.name).unwrap();
        for (field, _) in s.fields {
            writeln!(c, "  FIELD({}, {field});", s.name).unwrap();
        }
    }
    for (name, _) in constants() {
        writeln!(c, "  CONSTANT({name});").unwrap();
    }
    c.push_str("  return 0;\n}\n");
    c
}

/// What Rust has, in the form of the C program's lines.
fn ours() -> BTreeMap<String, i64> {
    let mut all = BTreeMap::new();
    for s in STRUCTS {
        all.insert(format!("size {}", s.name), s.size as i64);
        all.insert(format!("align {}", s.name), s.align as i64);
        for (field, offset) in s.fields {
            all.insert(format!("field {}.{field}", s.name), *offset as i64);
        }
    }
    for (name, value) in constants() {
        all.insert(format!("constant {name}"), value);
    }
    all
}

/// The struct names and the constants that the transcription defines.
fn defined() -> (Vec<&'static str>, Vec<&'static str>) {
    let structs = DEFINITIONS
        .lines()
        .filter_map(|l| l.strip_prefix("struct ")?.strip_suffix(" {"));
    let constants = DEFINITIONS
        .lines()
        .filter_map(|l| l.strip_prefix("#define ARROW_"))
        .map(|l| l.split(' ').next().unwrap());
    (structs.collect(), constants.collect())
}

#[test]
fn tables_name_everything() {
    let (structs, defined) = defined();
    assert_eq!(structs, STRUCTS.iter().map(|s| s.name).collect::<Vec<_>>());
    let names = constants().into_iter().map(|(name, _)| name);
    let defined = defined.iter().map(|name| format!("ARROW_{name}"));
    assert!(names.eq(defined));
    for s in STRUCTS {
        let body = DEFINITIONS
            .split(&format!("struct {} {{\n", s.name))
            .nth(1)
            .and_then(|rest| rest.split("\n};").next())
            .unwrap();
        let members = body.matches(';').count();
        assert_eq!(members, s.fields.len(), "members of {}", s.name);
    }
}

#[test]
fn a_c_compiler_agrees() {
    // Miri starts no other programs.
    if cfg!(miri) {
        return;
    }
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".to_string());
    // CC may carry arguments ("ccache gcc").
    let mut words = compiler.split_whitespace();
    let program = words.next().unwrap_or("cc");
    let found = Command::new(program)
        .arg("--version")
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    if let Err(e) = found {
        assert!(
            std::env::var_os("CI").is_none(),
            "CI needs a C compiler: cannot run {program:?}: {e}"
        );
        // Not `eprintln!`, which the test harness hides.
        writeln!(
            std::io::stderr(),
            "not compared with C: cannot run {program:?}: {e}"
        )
        .unwrap();
        return;
    }

    let dir = tempfile::tempdir().unwrap();
    let (file, exe) = (dir.path().join("abi.c"), dir.path().join("abi"));
    std::fs::write(&file, source()).unwrap();
    let compiled = Command::new(program)
        .args(words)
        .args(["-std=c11", "-Wall", "-Werror", "-o"])
        .args([&exe, &file])
        .output()
        .unwrap();
    assert!(
        compiled.status.success(),
        "{compiler}: {}",
        String::from_utf8_lossy(&compiled.stderr)
    );
    let ran = Command::new(&exe).output().unwrap();
    assert!(ran.status.success(), "{:?}", ran.status);

    let theirs: BTreeMap<String, i64> = String::from_utf8(ran.stdout)
        .unwrap()
        .lines()
        .map(|line| {
            let (key, value) = line.rsplit_once(' ').unwrap();
            (key.to_string(), value.parse().unwrap())
        })
        .collect();
    let ours = ours();
    assert!(ours.len() > 60, "{} entries", ours.len());
    assert_eq!(ours, theirs);
}

/// The numbers of `abi.h`, in its order.
#[test]
fn numbers() {
    let codes = constants().into_iter().map(|(_, value)| value);
    let flags = [1, 2, 4];
    let devices = [1, 2, 3, 4, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16];
    assert!(codes.eq(flags.into_iter().chain(devices)));
}

#[test]
fn names_are_unique_and_fields_ascend() {
    for (i, s) in STRUCTS.iter().enumerate() {
        assert!(STRUCTS[..i].iter().all(|other| other.name != s.name));
        assert!(s.fields.is_sorted_by(|a, b| a.1 < b.1), "{}", s.name);
        assert_eq!(s.size % s.align, 0);
    }
}
