//! [`DeviceResolver`]: opens the devices that plans describe.

use std::fmt;
use std::sync::Arc;

use arrow_device::{ArrowDeviceType, Device, DeviceId, Devices, Error, Result};
use datafusion_execution::TaskContext;

use super::metrics::to_datafusion;
use super::spec::DeviceSpec;

type Open = dyn Fn(&DeviceSpec, usize) -> Result<Device> + Send + Sync;

/// Opens the device of a [`DeviceSpec`] where a plan's partition runs. A session brings its own as an extension of its
/// configuration; the other sessions use [`DeviceResolver::default`], the process's devices.
///
/// ```
/// # use std::sync::Arc;
/// # use arrow_device::Devices;
/// use arrow_device_datafusion::DeviceResolver;
/// use datafusion::prelude::{SessionConfig, SessionContext};
/// # fn main() -> arrow_device::Result<()> {
/// let devices = DeviceResolver::of([Devices::simulated()?, Devices::open("sim:1")?]);
/// let config = SessionConfig::new().with_extension(Arc::new(devices));
/// let context = SessionContext::new_with_config(config);
/// # let _ = context;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct DeviceResolver(Arc<Open>);

impl Default for DeviceResolver {
    /// Opens devices of [`Devices::global`]. If any device of a type will do, the device 0 is opened, for all partitions.
    fn default() -> Self {
        Self::new(|spec, _| {
            let id = DeviceId::new(spec.device_type(), spec.id().unwrap_or(0));
            match id {
                _ if id.device_type == ArrowDeviceType::CPU => Ok(Devices::cpu()),
                _ if id == DeviceId::new(ArrowDeviceType::EXT_DEV, 0) => Devices::simulated(),
                id => Devices::global().get(id),
            }
        })
    }
}

impl DeviceResolver {
    /// Makes a resolver of a function from a description and the number of a partition. It is called each time that a partition
    /// of a node starts, on a thread of the runtime, so it should not take long; and it must return a device of the
    /// described type, which is checked.
    pub fn new(
        open: impl Fn(&DeviceSpec, usize) -> Result<Device> + Send + Sync + 'static,
    ) -> Self {
        Self(Arc::new(open))
    }

    /// Makes a resolver that knows these devices and the CPU, and no others. For a node that wants any device
    /// of a type, of which there are `n`, partition `p` uses number `p % n`.
    pub fn of(devices: impl IntoIterator<Item = Device>) -> Self {
        let devices: Vec<Device> = devices.into_iter().collect();
        Self::new(move |spec, partition| {
            if spec.device_type() == ArrowDeviceType::CPU {
                return Ok(Devices::cpu());
            }
            let fits = |device: &&Device| {
                let id = device.id();
                id.device_type == spec.device_type() && spec.id().is_none_or(|n| n == id.id)
            };
            let fitting: Vec<_> = devices.iter().filter(fits).collect();
            if let Some(n) = partition.checked_rem(fitting.len()) {
                return Ok(fitting[n].clone());
            }
            let names: Vec<_> = devices.iter().map(|d| d.id().to_string()).collect();
            let names = names.join(", ");
            Err(absent(spec, format!("the session offers [{names}]")))
        })
    }

    /// Returns the resolver of a task's session, or the process's devices.
    pub fn of_task(context: &TaskContext) -> Self {
        let own = context.session_config().get_extension::<Self>();
        own.map_or_else(Self::default, |own| Self::clone(&own))
    }

    /// Opens the device for a partition. A description that was made of a device that the program still has means that device.
    ///
    /// # Errors
    /// Returns [`Error::DeviceNotAvailable`] if there is none, and if the resolver's function returns a device of another
    /// type; otherwise the function's error.
    pub fn open(&self, spec: &DeviceSpec, partition: usize) -> Result<Device> {
        if let Some(device) = spec.device() {
            return Ok(device);
        }
        let device = (self.0)(spec, partition)?;
        match device.id().device_type == spec.device_type() {
            true => Ok(device),
            false => Err(absent(
                spec,
                format!("the session's resolver returned {device}"),
            )),
        }
    }
}

/// Opens the device for a partition of a node with the session's resolver. The error names the node.
pub(super) fn open_for(
    node: &str,
    spec: &DeviceSpec,
    partition: usize,
    context: &TaskContext,
) -> datafusion_common::Result<Device> {
    let device = DeviceResolver::of_task(context).open(spec, partition);
    device.map_err(|e| {
        let what = format!("{node}, partition {partition}, needs a device");
        to_datafusion(e).context(what)
    })
}

fn absent(spec: &DeviceSpec, reason: String) -> Error {
    Error::DeviceNotAvailable {
        device: DeviceId::new(spec.device_type(), spec.id().unwrap_or(0)),
        reason: reason.into(),
    }
}

impl fmt::Debug for DeviceResolver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DeviceResolver")
    }
}
