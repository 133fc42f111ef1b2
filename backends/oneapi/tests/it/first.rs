//! The device under test.

use arrow_device::Device;
use arrow_device_oneapi::{OneApiConfig, device_count};

/// The number of the first device with unified shared memory, or `None`, with a line that says why, where there is none and none is
/// required.
pub(crate) fn number() -> Option<usize> {
    let found = device_count().and_then(|count| {
        let mut why = None;
        for number in 0..count {
            match OneApiConfig::new(number).open() {
                Ok(_) => return Ok(number),
                Err(e) => why = Some(e),
            }
        }
        Err(why.expect("SYCL lists no devices"))
    });
    match found {
        Ok(number) => Some(number),
        Err(e) if std::env::var_os("ARROW_DEVICE_ONEAPI_REQUIRED").is_some() => panic!("{e}"),
        Err(e) => {
            eprintln!("skipped: {e}");
            None
        }
    }
}

/// A configuration of that device.
pub(crate) fn config() -> Option<OneApiConfig> {
    number().map(OneApiConfig::new)
}

#[allow(dead_code)]
pub(crate) fn device() -> Option<Device> {
    config().map(|config| config.open().unwrap())
}
