//! How an import is done.

use crate::device::Devices;

/// How much of foreign data is checked.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum Validation {
    /// Everything that can be checked without reading a buffer: pointers, counts, lengths, offsets,
    /// flags, nesting, whose memory it is. Values are trusted.
    #[default]
    Structure,
    /// Values too: offsets, keys, type ids, views, run ends, UTF-8, null counts. All values are checked
    /// that any safe call can reach afterwards, not only those of the array's rows: a list's child, for
    /// one, is checked whole. This waits for the data. Where the host can read the memory it is checked in
    /// place. Elsewhere it is copied to the host first: validity bitmaps, then all buffers. Nodes that name
    /// the same bytes share one copy of them; buffers that overlap otherwise are copied one by one, and
    /// [`Error::OutOfMemory`](crate::Error::OutOfMemory) is returned if there is no memory for them.
    Full,
}

/// How an import is done.
///
/// ```
/// use arrow_device::{Devices, ImportOptions, Validation};
/// let options = ImportOptions::default()
///     .with_devices(Devices::new())
///     .with_validation(Validation::Full);
/// ```
#[derive(Clone, Debug, Default)]
pub struct ImportOptions {
    devices: Option<Devices>,
    pub(super) validation: Validation,
}

impl ImportOptions {
    /// Where the device is looked up; [`Devices::global`] otherwise.
    #[must_use]
    pub fn with_devices(mut self, devices: Devices) -> Self {
        self.devices = Some(devices);
        self
    }

    /// How much is checked; [`Validation::Structure`] otherwise.
    #[must_use]
    pub fn with_validation(mut self, validation: Validation) -> Self {
        self.validation = validation;
        self
    }

    pub(super) fn devices(&self) -> &Devices {
        self.devices.as_ref().unwrap_or(Devices::global())
    }
}
