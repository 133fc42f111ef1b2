//! [`DeviceOptions`]: options of a session.

use std::fmt;
use std::str::FromStr;

use arrow_device::Device;
use datafusion_common::config::ConfigExtension;
use datafusion_common::{DataFusionError, Result, config_field, extensions_options};
use datafusion_execution::TaskContext;

use super::metrics::to_datafusion;
use super::spec::DeviceSpec;

extensions_options! {
    /// Options of a session for device nodes, with the prefix `device`. A session without them uses the defaults.
    ///
    /// ```
    /// use arrow_device_datafusion::DeviceOptions;
    /// use datafusion::prelude::{SessionConfig, SessionContext};
    /// # #[tokio::main]
    /// # async fn main() -> datafusion::error::Result<()> {
    /// let config = SessionConfig::new().with_option_extension(DeviceOptions::default());
    /// let context = SessionContext::new_with_config(config);
    /// context.sql("SET device.upload_rows = 1000000").await?;
    /// # let context = context.task_ctx();
    /// # let options = context.session_config().options().extensions.get::<DeviceOptions>();
    /// # assert_eq!(options.map(|options| options.upload_rows), Some(1_000_000));
    /// # Ok(())
    /// # }
    /// ```
    pub struct DeviceOptions {
        /// Whether operators run on devices that can run on the host ([`DeviceOperator::runs_on_host`](crate::DeviceOperator::runs_on_host)). Tables on devices
        /// are read there in any case.
        pub enable: bool, default = true
        /// The names of operators, with commas between, that run on the host.
        pub disable: String, default = String::new()
        /// Whether operators that can run on the host do so if their device cannot be opened or has too little memory for a first batch. By
        /// default, the query fails.
        pub fallback: bool, default = false
        /// The number of rows to which a [`HostToDeviceExec`](crate::HostToDeviceExec) joins small host batches before it uploads
        /// them, which is the most rows of a joined batch. 0 uploads all batches as they are.
        pub upload_rows: usize, default = 131_072
        /// The number of bytes to which small host batches are joined, if they have that many before they have `upload_rows`
        /// rows. It is the most bytes of a joined batch, as far as arrow-rs counts those of its parts exactly; at most 1 GiB.
        pub upload_bytes: usize, default = 16 << 20
        /// The bytes that may be reserved on each device at once: a number for all, or one for each, as in `cuda:0=16000000000,sim=16777216`.
        /// Without one, there is no limit.
        pub memory: DeviceMemory, default = DeviceMemory::default()
        /// How many queries at once may use a device whose memory has a limit; the others wait. 0: any number, at the risk that they
        /// have too little memory together.
        pub queries: usize, default = 1
        /// After how many milliseconds in which none of its streams is polled a query is no longer waited for.
        pub idle_ms: u64, default = 1000
        /// How many milliseconds rows wait for more to be joined with.
        pub upload_wait_ms: u64, default = 100
    }
}

impl ConfigExtension for DeviceOptions {
    const PREFIX: &'static str = "device";
}

/// How many bytes may be reserved on each device. `"1000000"` is a limit for each device, and `"cuda:0=2000000,cuda=1000000"` has one of its
/// own for a device: the first that fits it holds.
#[derive(Clone, PartialEq, Default, Debug)]
pub struct DeviceMemory(Vec<(Option<DeviceSpec>, usize)>);

impl DeviceMemory {
    pub(super) fn of(&self, device: &Device) -> Option<usize> {
        let fits = |spec: &Option<DeviceSpec>| spec.as_ref().is_none_or(|spec| spec.fits(device));
        let mut limits = self.0.iter();
        limits.find_map(|(spec, bytes)| fits(spec).then_some(*bytes))
    }
}

impl FromStr for DeviceMemory {
    type Err = DataFusionError;

    fn from_str(text: &str) -> Result<Self> {
        let limit = |part: &str| {
            let (spec, bytes) = match part.split_once('=') {
                Some((spec, bytes)) => (Some(spec.trim().parse().map_err(to_datafusion)?), bytes),
                None => (None, part),
            };
            let bytes = bytes.trim().parse().map_err(|e| {
                DataFusionError::Configuration(format!("device.memory: {bytes:?} bytes: {e}"))
            })?;
            Ok((spec, bytes))
        };
        let parts = text
            .split(',')
            .map(str::trim)
            .filter(|part| !part.is_empty());
        parts.map(limit).collect::<Result<_>>().map(Self)
    }
}

impl fmt::Display for DeviceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = self.0.iter().map(|(spec, bytes)| match spec {
            Some(spec) => format!("{spec}={bytes}"),
            None => bytes.to_string(),
        });
        f.write_str(&parts.collect::<Vec<_>>().join(","))
    }
}

config_field!(DeviceMemory);

impl DeviceOptions {
    /// The options of a task's session, or the defaults.
    pub(super) fn of_task(context: &TaskContext) -> Self {
        let extensions = &context.session_config().options().extensions;
        extensions.get().cloned().unwrap_or_default()
    }
}
