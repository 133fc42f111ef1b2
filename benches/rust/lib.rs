//! What `arrow-device` costs, beside its peers in the same run: the Rust side.

pub mod batches;
pub mod cases;

use std::ffi::{CStr, c_char};

use cases::{Input, Result};

fn text(text: *const c_char) -> Result<&'static str> {
    // SAFETY: callers give terminated strings that live long enough.
    Ok(unsafe { CStr::from_ptr(text) }.to_str()?)
}

fn answer<T>(result: Result<T>, otherwise: T) -> T {
    result.unwrap_or_else(|e| {
        eprintln!("{e}");
        otherwise
    })
}

/// A batch of `columns` times `rows`: "mixed" or "integers". Null after an error.
///
/// # Safety
/// `kind` is a terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bench_input(
    kind: *const c_char,
    columns: usize,
    rows: usize,
) -> *const Input {
    let made = text(kind).and_then(|kind| {
        let batch = match kind {
            "mixed" => batches::mixed(columns, rows),
            "integers" => batches::integers(columns, rows),
            _ => return Err(format!("no batches are called {kind}").into()),
        };
        Input::new(batch?)
    });
    answer(
        made.map(|input| Box::into_raw(Box::new(input)).cast_const()),
        std::ptr::null(),
    )
}

/// # Safety
/// `input` is of [`bench_input`], and not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bench_input_free(input: *const Input) {
    // SAFETY: the caller's.
    drop(unsafe { Box::from_raw(input.cast_mut()) });
}

/// Runs a case `n` times: nanoseconds in all, negative after an error.
///
/// # Safety
/// `input` is of [`bench_input`], `case` a terminated string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn bench_run(input: *const Input, case: *const c_char, n: usize) -> i64 {
    let took = text(case).and_then(|name| {
        let case = cases::case(name).ok_or_else(|| format!("no case is called {name}"))?;
        // SAFETY: the caller's.
        case(unsafe { &*input }, n)
    });
    answer(took.map(|took| took.as_nanos() as i64), -1)
}
