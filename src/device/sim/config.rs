//! How a simulated device behaves.

/// When queued work runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum SimMode {
    /// Soon, on a worker thread that starts with the first work.
    #[default]
    Async,
    /// When a thread waits for it, on that thread: waiting for an event runs exactly what the event
    /// needs, synchronizing runs everything. Queries and notifications run nothing: a task that
    /// waits for an event continues only once a thread has waited.
    Deferred,
}

/// How a [`SimDevice`](super::SimDevice) behaves.
///
/// ```
/// use arrow_device::device::sim::{SimConfig, SimMode};
/// // Nothing runs before it is waited for, so a missing wait fails every time.
/// let config = SimConfig::default().with_mode(SimMode::Deferred).with_capacity_bytes(16 << 20);
/// ```
#[derive(Clone, Debug)]
pub struct SimConfig {
    pub(super) mode: SimMode,
    pub(super) capacity_bytes: usize,
    pub(super) fill: bool,
    pub(super) bytes_per_second: Option<u64>,
    pub(super) peer_access: bool,
}

impl Default for SimConfig {
    /// [`SimMode::Async`], 4 GiB of addresses (256 MiB where they are 32 bits), memory filled when fresh, copies at full speed,
    /// no peer access.
    fn default() -> Self {
        Self {
            mode: SimMode::default(),
            capacity_bytes: usize::try_from(4u64 << 30).unwrap_or(256 << 20),
            fill: true,
            bytes_per_second: None,
            peer_access: false,
        }
    }
}

impl SimConfig {
    /// Sets when queued work runs.
    #[must_use]
    pub fn with_mode(mut self, mode: SimMode) -> Self {
        self.mode = mode;
        self
    }

    /// Sets how many bytes the device has. They are reserved addresses, and take up memory only
    /// once allocated.
    #[must_use]
    pub fn with_capacity_bytes(mut self, bytes: usize) -> Self {
        self.capacity_bytes = bytes;
        self
    }

    /// Sets whether fresh memory is filled, which shows reads of it and costs as much time as a copy. For measurements, switch it
    /// off: the memory is zero then.
    #[must_use]
    pub fn with_fill(mut self, fill: bool) -> Self {
        self.fill = fill;
        self
    }

    /// Sets how fast a queue copies, in bytes per second, for tests of overlap. The copies of
    /// different queues overlap, and time passes from when they are queued. Has an effect only in
    /// [`SimMode::Async`]; 0 means full speed.
    #[must_use]
    pub fn with_bytes_per_second(mut self, bytes: u64) -> Self {
        self.bytes_per_second = (bytes > 0).then_some(bytes);
        self
    }

    /// Sets whether the device copies straight out of other simulated devices' memory.
    #[must_use]
    pub fn with_peer_access(mut self, peer_access: bool) -> Self {
        self.peer_access = peer_access;
        self
    }
}
