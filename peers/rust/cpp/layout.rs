//! The C structs and constants as this crate has them, as text, for comparing with a header.

use std::ffi::{CString, c_char};
use std::fmt::Write;
use std::sync::OnceLock;

use arrow_device::abi::layout::{STRUCTS, constants};

/// One line for each struct (`struct NAME SIZE ALIGN`), member (`member STRUCT.NAME OFFSET`) and constant
/// (`constant NAME VALUE`); sizes and offsets in bytes. Members are in their order.
#[unsafe(no_mangle)]
pub(super) extern "C" fn peers_cpp_abi() -> *const c_char {
    static TEXT: OnceLock<CString> = OnceLock::new();
    TEXT.get_or_init(|| super::name(text())).as_ptr()
}

fn text() -> String {
    let mut text = String::new();
    for s in STRUCTS {
        let _ = writeln!(text, "struct {} {} {}", s.name, s.size, s.align);
        for (field, offset) in s.fields {
            let _ = writeln!(text, "member {}.{field} {offset}", s.name);
        }
    }
    for (constant, value) in constants() {
        let _ = writeln!(text, "constant {constant} {value}");
    }
    text
}
