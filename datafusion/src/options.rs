//! [`DeviceOptions`]: options of a session.

use datafusion_common::config::ConfigExtension;
use datafusion_common::extensions_options;
use datafusion_execution::TaskContext;

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
        /// The number of rows to which a [`HostToDeviceExec`](crate::HostToDeviceExec) joins small host batches before it uploads
        /// them, which is the most rows of a joined batch. 0 uploads all batches as they are.
        pub upload_rows: usize, default = 131_072
        /// The number of bytes to which small host batches are joined, if they have that many before they have `upload_rows`
        /// rows. It is the most bytes of a joined batch, as far as arrow-rs counts those of its parts exactly; at most 1 GiB.
        pub upload_bytes: usize, default = 16 << 20
        /// How many milliseconds rows wait for more to be joined with.
        pub upload_wait_ms: u64, default = 100
    }
}

impl ConfigExtension for DeviceOptions {
    const PREFIX: &'static str = "device";
}

impl DeviceOptions {
    /// The options of a task's session, or the defaults.
    pub(super) fn of_task(context: &TaskContext) -> Self {
        let extensions = &context.session_config().options().extensions;
        extensions.get().cloned().unwrap_or_default()
    }
}
