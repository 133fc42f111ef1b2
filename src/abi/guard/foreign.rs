//! Where foreign exceptions stop: a frame of its own, which `catch_unwind` of stable Rust has not.
//!
//! The frame is a few instructions with unwind information that names [`personality`]. The unwinder
//! asks that function about each exception that comes by: Rust panics pass, to the `catch_unwind`
//! outside, and so does a thread's forced end (`pthread_exit`, `pthread_cancel`); any other exception
//! is caught, which makes the frame return its address. Whoever threw it then destroys it.
//!
//! Rust frames between the throw and the frame are unwound as in a panic: their drops run.

mod cpp;

use std::borrow::Cow;
use std::ffi::{c_int, c_void};

/// `struct _Unwind_Exception`, as far as it is read here.
#[repr(C)]
struct Exception {
    /// Who threw it: vendor and language, four bytes each, the first the most significant.
    class: u64,
    /// Destroys it; a function of the runtime that threw it.
    cleanup: Option<unsafe extern "C" fn(c_int, *mut Exception)>,
}

/// `struct _Unwind_Context`.
type Context = c_void;

const SEARCH_PHASE: c_int = 1;
const FORCED: c_int = 8;

const CATCH_HERE: c_int = 6;
const GO_TO_LANDING: c_int = 7;
const CONTINUE: c_int = 8;

/// Register of the landing's argument, in DWARF's numbers.
const RAX: c_int = 0;

/// The class of panics; the standard library writes it in the order of memory.
const RUST: u64 = u64::from_ne_bytes(*b"MOZ\0RUST");

// The unwinder, which the standard library links.
unsafe extern "C" {
    fn _Unwind_SetGR(context: *mut Context, register: c_int, value: usize);
    fn _Unwind_SetIP(context: *mut Context, address: usize);
    fn _Unwind_GetLanguageSpecificData(context: *mut Context) -> usize;
}

unsafe extern "C-unwind" {
    fn _Unwind_DeleteException(exception: *mut Exception);

    /// Calls `run(data)`. Null once it has returned, else the foreign exception that left it.
    #[link_name = concat!(
        "arrow_device_", env!("CARGO_PKG_VERSION_MAJOR"), "_", env!("CARGO_PKG_VERSION_MINOR"), "_",
        env!("CARGO_PKG_VERSION_PATCH"), "_catch_foreign"
    )]
    fn catch_foreign(
        run: unsafe extern "C-unwind" fn(*mut c_void),
        data: *mut c_void,
    ) -> *mut Exception;
}

// The name is this version's, and weak and defined once, so that versions and copies of the crate
// can be linked into one program. The call is the only place that can throw; its landing is where
// "language-specific data" points.
std::arch::global_asm!(
    ".ifndef {catch}",
    ".pushsection .data.rel.ro,\"aw\",@progbits",
    ".p2align 3",
    ".L{catch}_personality:",
    ".quad {personality}",
    ".popsection",
    ".pushsection .text.{catch},\"ax\",@progbits",
    ".weak {catch}",
    ".hidden {catch}",
    ".type {catch},@function",
    ".p2align 4",
    "{catch}:",
    ".cfi_startproc",
    ".cfi_personality 0x9b, .L{catch}_personality", // indirect, relative, 4 bytes
    ".cfi_lsda 0x1b, .L{catch}_landing",            // relative, 4 bytes
    "endbr64",
    "push rbp",
    ".cfi_def_cfa_offset 16",
    ".cfi_offset rbp, -16",
    "mov rbp, rsp",
    ".cfi_def_cfa_register rbp",
    "mov rax, rdi",
    "mov rdi, rsi",
    "call rax",
    "xor eax, eax",
    "pop rbp",
    ".cfi_remember_state",
    ".cfi_def_cfa rsp, 8",
    "ret",
    ".cfi_restore_state",
    ".L{catch}_landing:",
    "endbr64",
    "pop rbp",
    ".cfi_def_cfa rsp, 8",
    "ret",
    ".cfi_endproc",
    ".size {catch}, . - {catch}",
    ".popsection",
    ".endif",
    catch = sym catch_foreign,
    personality = sym personality,
);

/// What the unwinder asks about an exception that has reached [`catch_foreign`]'s frame.
///
/// # Safety
/// Called by the unwinder, for that frame.
unsafe extern "C" fn personality(
    _version: c_int,
    actions: c_int,
    class: u64,
    exception: *mut Exception,
    context: *mut Context,
) -> c_int {
    if class == RUST || actions & FORCED != 0 {
        return CONTINUE;
    }
    if actions & SEARCH_PHASE != 0 {
        return CATCH_HERE;
    }
    // SAFETY: the unwinder's context, whose frame is `catch_foreign`'s: at its landing it returns rax.
    unsafe {
        _Unwind_SetGR(context, RAX, exception.expose_provenance());
        _Unwind_SetIP(context, _Unwind_GetLanguageSpecificData(context));
    }
    GO_TO_LANDING
}

/// Calls `f`; a foreign exception becomes a text about it. Panics pass.
pub(super) fn call<R>(f: impl FnOnce() -> R) -> Result<R, Cow<'static, str>> {
    attempt(f).map_err(|exception| {
        // SAFETY: caught just now, and ended nowhere else.
        attempt(|| unsafe { end(exception) }).unwrap_or_else(|another| {
            // What ends an exception is foreign too. A third one would leak.
            // SAFETY: as above.
            let _ = attempt(|| unsafe { end(another) });
            "a foreign exception whose destructor threw another".into()
        })
    })
}

/// Ends a caught exception, and says what it was.
///
/// # Safety
/// `exception` was caught and is used by nobody else; it is gone afterwards, even if this unwinds.
unsafe fn end(exception: *mut Exception) -> Cow<'static, str> {
    // SAFETY: a live exception has its header.
    let Exception { class, cleanup } = unsafe { &*exception };
    let class = class.to_be_bytes();
    let text = if class.starts_with(b"GNUCC++") || class.starts_with(b"CLNGC++") {
        // SAFETY: the class says so; else the caller's.
        if let Some(name) = cleanup.and_then(|of| unsafe { cpp::end(exception, of as *const _) }) {
            return format!("a C++ exception ({name})").into();
        }
        "a C++ exception".into()
    } else {
        format!("a foreign exception (class {})", class.escape_ascii()).into()
    };
    // SAFETY: the caller's.
    unsafe { _Unwind_DeleteException(exception) };
    text
}

fn attempt<R, F: FnOnce() -> R>(f: F) -> Result<R, *mut Exception> {
    struct Call<R, F> {
        f: Option<F>,
        result: Option<R>,
    }
    /// # Safety
    /// `call` is a `Call<R, F>` that nobody else uses.
    unsafe extern "C-unwind" fn run<R, F: FnOnce() -> R>(call: *mut c_void) {
        // SAFETY: the caller's.
        let call = unsafe { &mut *call.cast::<Call<R, F>>() };
        call.result = call.f.take().map(|f| f());
    }
    let mut call = Call {
        f: Some(f),
        result: None,
    };
    let exception = enter(run::<R, F>, (&raw mut call).cast());
    call.result.ok_or(exception)
}

/// No generic code names the symbol: it is hidden, and generic code may end up in another library.
#[inline(never)]
fn enter(run: unsafe extern "C-unwind" fn(*mut c_void), data: *mut c_void) -> *mut Exception {
    // SAFETY: `attempt` gives a function and its argument; the assembly keeps to the C calling
    // convention and hands panics on.
    unsafe { catch_foreign(run, data) }
}
