//! A vendor's library, loaded at run time.

use std::error::Error as _;

use libloading::Library;

/// The second type if it is given, else the first.
macro_rules! either {
    ($default:ty) => {
        $default
    };
    ($default:ty, $given:ty) => {
        $given
    };
}
pub(in crate::device) use either;

/// A struct of a library's functions, by their own names. The `optional` ones may be missing. The types
/// are compared with those of `bindings`, in scope where this stands: functions there have this ABI and
/// answer `$their_code`; a parameter's type is theirs, or the one after `as`.
macro_rules! functions {
    (
        $(#[$meta:meta])*
        $vis:vis struct $functions:ident: $abi:tt, $code:ty as $their_code:ty;
        required {
            $($name:ident($($arg:ident: $type:ty $(as $theirs:ty)?),*) $(-> $answer:ty)?;)*
        }
        optional {
            $($maybe:ident($($maybe_arg:ident: $maybe_type:ty $(as $maybe_theirs:ty)?),*);)*
        }
    ) => {
        $(#[$meta])*
        #[allow(non_snake_case)]
        $vis struct $functions {
            $($vis $name: unsafe extern "C" fn($($type),*) -> either!($code $(, $answer)?),)*
            $($vis $maybe: Option<unsafe extern "C" fn($($maybe_type),*) -> $code>,)*
        }

        impl $functions {
            /// An error is the name of a function that is missing.
            ///
            /// # Safety
            /// `library` is the vendor's, and stays loaded for as long as the functions are called.
            unsafe fn find(library: &libloading::Library) -> Result<Self, &'static str> {
                Ok(Self {
                    // SAFETY: the caller's; the types are compared with the bindings' below.
                    $($name: *unsafe { library.get(concat!(stringify!($name), "\0").as_bytes()) }
                        .map_err(|_| stringify!($name))?,)*
                    // SAFETY: as above.
                    $($maybe: unsafe { library.get(concat!(stringify!($maybe), "\0").as_bytes()) }
                        .ok()
                        .map(|function| *function),)*
                })
            }
        }

        const _: () = {
            $(let _: unsafe extern $abi fn($(either!($type $(, $theirs)?)),*)
                -> either!($their_code $(, $answer)?) = bindings::$name;)*
            $(let _: unsafe extern $abi fn($(either!($maybe_type $(, $maybe_theirs)?)),*)
                -> $their_code = bindings::$maybe;)*
        };
    };
}
pub(in crate::device) use functions;

/// The first library that can be opened and passes the check. An error is what the check says against the
/// last that could be opened, or `advice` and why the first one could not.
pub(in crate::device) fn load<T>(
    names: &[&str],
    advice: &str,
    open: impl Fn(&str) -> Result<Library, libloading::Error>,
    check: impl Fn(Library) -> Result<T, String>,
) -> Result<T, String> {
    let mut why = None;
    for name in names {
        match open(name).map(&check) {
            Ok(Ok(loaded)) => return Ok(loaded),
            // A library that is there says more than one that is not.
            Ok(Err(text)) => why = Some(text),
            Err(e) if why.is_none() => {
                // The system's own text stands behind the library's.
                let text = e
                    .source()
                    .map_or_else(|| e.to_string(), ToString::to_string);
                why = Some(format!("{advice} ({text})"));
            }
            Err(_) => {}
        }
    }
    Err(why.unwrap_or_default())
}
