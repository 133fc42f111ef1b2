//! Ends C++ exceptions by the runtime that threw them, as `catch (...) {}` does.
//!
//! The unwinder can destroy them too, but then `std::uncaught_exceptions` counts them for ever. A process
//! may hold several C++ runtimes, each with counts of its own: only functions of the very library that
//! threw will do, and where it does not show them (a hidden static runtime) the unwinder is left.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::{MaybeUninit, transmute};
use std::ptr;

use super::Exception;

/// `std::type_info`.
#[repr(C)]
struct TypeInfo {
    vtable: *const c_void,
    /// Mangled; an asterisk in front says that equal names need not be equal types.
    name: *const c_char,
}

type Begin = unsafe extern "C-unwind" fn(*mut Exception) -> *mut c_void;
type End = unsafe extern "C-unwind" fn();
type CurrentType = unsafe extern "C" fn() -> *const TypeInfo;
type Demangle =
    unsafe extern "C" fn(*const c_char, *mut c_char, *mut usize, *mut c_int) -> *mut c_char;

/// Ends `exception` and gives the name of its type. `None` if the runtime was not found; the exception
/// is untouched then.
///
/// # Safety
/// `exception` is a C++ exception that was caught and is used by nobody else; `cleanup` is a function
/// of the runtime that threw it.
pub(super) unsafe fn end(exception: *mut Exception, cleanup: *const c_void) -> Option<String> {
    let runtime = Library::of(cleanup)?;
    // SAFETY: the types are those of the C++ ABI, which both runtimes keep to; null becomes `None`.
    let (begin, end, current_type, demangle) = unsafe {
        (
            transmute::<*mut c_void, Option<Begin>>(runtime.find(c"__cxa_begin_catch"))?,
            transmute::<*mut c_void, Option<End>>(runtime.find(c"__cxa_end_catch"))?,
            transmute::<*mut c_void, Option<CurrentType>>(
                runtime.find(c"__cxa_current_exception_type"),
            )?,
            transmute::<*mut c_void, Option<Demangle>>(runtime.find(c"__cxa_demangle")),
        )
    };
    // SAFETY: each catch that begins ends; the type lives as long as the exception, and its name is
    // read before that ends. The caller vouches for the exception.
    unsafe {
        begin(exception);
        let name = current_type()
            .as_ref()
            .map(|of| type_name(of, demangle))
            .unwrap_or_default();
        end();
        Some(name)
    }
}

/// # Safety
/// `of` is a live `std::type_info`, `demangle` the C++ ABI's function.
unsafe fn type_name(of: &TypeInfo, demangle: Option<Demangle>) -> String {
    // SAFETY: names are terminated strings; what `demangle` gives was allocated for its caller.
    unsafe {
        let mangled = of.name.add(usize::from(*of.name == b'*' as c_char));
        let plain = demangle.map_or(ptr::null_mut(), |f| {
            f(mangled, ptr::null_mut(), ptr::null_mut(), ptr::null_mut())
        });
        let name = if plain.is_null() { mangled } else { plain };
        let name = CStr::from_ptr(name).to_string_lossy().into_owned();
        libc::free(plain.cast());
        name
    }
}

/// A loaded library or the program itself.
struct Library {
    /// Null for the program, and for what the loader does not find again: then every library is searched.
    handle: *mut c_void,
    base: *mut c_void,
}

impl Library {
    /// The one that holds `address`.
    fn of(address: *const c_void) -> Option<Self> {
        let info = locate(address)?;
        let flags = libc::RTLD_LAZY | libc::RTLD_NOLOAD;
        // SAFETY: the loader's own name for the library, which is loaded.
        let handle = unsafe { libc::dlopen(info.dli_fname, flags) };
        Some(Self {
            handle,
            base: info.dli_fbase,
        })
    }

    /// Null if the library has no such symbol itself.
    fn find(&self, name: &CStr) -> *mut c_void {
        // SAFETY: a handle of `dlopen`, or null, which is `RTLD_DEFAULT`.
        let found = unsafe { libc::dlsym(self.handle, name.as_ptr()) };
        match locate(found) {
            Some(info) if info.dli_fbase == self.base => found,
            _ => ptr::null_mut(),
        }
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        if !self.handle.is_null() {
            // SAFETY: our own handle, closed once.
            unsafe { libc::dlclose(self.handle) };
        }
    }
}

fn locate(address: *const c_void) -> Option<libc::Dl_info> {
    let mut info = MaybeUninit::uninit();
    // SAFETY: any address may be asked for; all is written unless 0 is answered.
    unsafe { (libc::dladdr(address, info.as_mut_ptr()) != 0).then(|| info.assume_init()) }
}
