//! The end of a process that uses the device while it ends.

use arrow_device::Device;

use crate::exit::ends_well;

/// The thread that ends the process drops what it has left: the device is left to the system.
#[test]
fn after_the_end_has_begun() {
    ends_well("end::after_the_end_has_begun", |device| {
        static LEFT: std::sync::Mutex<Option<Device>> = std::sync::Mutex::new(None);
        extern "C" fn last() {
            let device = LEFT.lock().unwrap().take().unwrap();
            let refused = device.synchronize().unwrap_err().to_string();
            if !refused.contains("the process is ending") {
                // SAFETY: it has no requirement.
                unsafe { libc::_exit(9) };
            }
            drop(device);
        }
        *LEFT.lock().unwrap() = Some(device);
        // SAFETY: the function uses the device, which has to be ready for that.
        assert_eq!(unsafe { libc::atexit(last) }, 0);
        arrow_device::device::parts::exit::watch();
    });
}
