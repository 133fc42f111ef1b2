//! What every call goes through, and the calling thread's last error.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::contexts;
use crate::control::version;
use crate::driver::{Driver, driver};
use crate::ffi::*;

thread_local! {
    static LAST_ERROR: Cell<Code> = const { Cell::new(0) };
}

pub(crate) fn last_error() -> Code {
    LAST_ERROR.get()
}

pub(crate) fn take_last_error() -> Code {
    LAST_ERROR.replace(0)
}

/// A call that uses no device.
pub(crate) fn call(body: impl FnOnce(&Driver) -> Outcome) -> Code {
    // Nothing panics across C.
    let result = catch_unwind(AssertUnwindSafe(|| body(driver()?)));
    let code = match result {
        Ok(Ok(())) => 0,
        Ok(Err(code)) => code,
        Err(_) => UNKNOWN,
    };
    // Before HIP 7 each call is the last one, a success too.
    match code {
        NOT_READY => {}
        0 if version() >= 70_000_000 => {}
        code => LAST_ERROR.set(code),
    }
    code
}

/// A call in the primary context of the current device.
pub(crate) fn on_device(body: impl FnOnce(&Driver) -> Outcome) -> Code {
    call(|driver| {
        let context = contexts::primary(driver, contexts::current_device())?;
        contexts::within(driver, context, || body(driver))
    })
}

/// HIP calls that are one call of the driver, in the primary context of the current device. What is
/// passed on may fail instead, with `?`.
macro_rules! forward {
    ($($hip:ident($($arg:ident: $type:ty),* $(,)?) => $cuda:ident($($passed:expr),* $(,)?);)*) => {$(
        #[unsafe(no_mangle)]
        pub(crate) unsafe extern "C" fn $hip($($arg: $type),*) -> Code {
            $crate::call::on_device(|driver| {
                // SAFETY: CUDA requires of these arguments what HIP requires, which the caller
                // guarantees.
                unsafe { driver.$cuda($($passed),*) }
            })
        }
    )*};
}
pub(crate) use forward;
