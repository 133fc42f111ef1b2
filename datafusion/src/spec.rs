//! [`DeviceSpec`]: which device a node of a plan uses; and [`DeviceResolver`], which opens it.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::str::FromStr;
use std::sync::Arc;

use arrow_device::device::WeakDevice;
use arrow_device::{ArrowDeviceType, Device, DeviceId, Devices, Error, Result};
use datafusion_execution::TaskContext;

use super::metrics::to_datafusion;

/// A description of the device that the batches of a plan's node are on. A plan holds descriptions and no devices: whoever plans
/// needs no device, and a plan may run in another process. A [`DeviceResolver`](super::DeviceResolver) opens the device where
/// the node runs.
///
/// | made of | means | text |
/// | --- | --- | --- |
/// | [`DeviceSpec::any`] | a device of this type: which one for which partition, the resolver decides | `cuda` |
/// | a [`DeviceId`] | the device of this type and id, where the node runs | `cuda:1` |
/// | a [`Device`] | this very device, as long as the program keeps it; elsewhere, the device of its id | `cuda:1` |
///
/// Nodes whose descriptions are equal pass batches to each other; between others, [`DeviceRule`](super::DeviceRule)
/// inserts a transition. Descriptions of two devices differ even if the devices have the same id.
///
/// ```
/// use arrow_device::{ArrowDeviceType, DeviceId, Devices};
/// use arrow_device_datafusion::DeviceSpec;
/// assert_eq!("cuda".parse::<DeviceSpec>()?, DeviceSpec::any(ArrowDeviceType::CUDA));
/// assert_eq!("cuda:1".parse::<DeviceSpec>()?, DeviceId::new(ArrowDeviceType::CUDA, 1).into());
/// assert_eq!(DeviceSpec::from(&Devices::cpu()), DeviceSpec::any(ArrowDeviceType::CPU));
/// # Ok::<(), arrow_device::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct DeviceSpec {
    device_type: ArrowDeviceType,
    /// `None`: any device of the type. Always `None` for the CPU, of which there is one.
    id: Option<i64>,
    /// The device that the description was made of.
    device: Option<WeakDevice>,
}

impl DeviceSpec {
    /// Describes any device of a type.
    pub const fn any(device_type: ArrowDeviceType) -> Self {
        Self {
            device_type,
            id: None,
            device: None,
        }
    }

    /// Returns the type of the device.
    pub fn device_type(&self) -> ArrowDeviceType {
        self.device_type
    }

    /// Returns the id, or `None` if any device of the type will do.
    pub fn id(&self) -> Option<i64> {
        self.id
    }

    /// Returns whether the description fits a device.
    pub fn fits(&self, device: &Device) -> bool {
        let id = device.id();
        match self.device() {
            Some(own) => own == *device,
            None => self.device_type == id.device_type && self.id.is_none_or(|n| n == id.id),
        }
    }

    /// The device that the description was made of, if the program still has it.
    pub(super) fn device(&self) -> Option<Device> {
        self.device.as_ref()?.upgrade()
    }
}

impl From<DeviceId> for DeviceSpec {
    fn from(id: DeviceId) -> Self {
        Self {
            id: (id.device_type != ArrowDeviceType::CPU).then_some(id.id),
            ..Self::any(id.device_type)
        }
    }
}

impl From<&Device> for DeviceSpec {
    fn from(device: &Device) -> Self {
        let spec = Self::from(device.id());
        Self {
            device: spec.id.map(|_| device.downgrade()),
            ..spec
        }
    }
}

impl From<Device> for DeviceSpec {
    fn from(device: Device) -> Self {
        Self::from(&device)
    }
}

impl FromStr for DeviceSpec {
    type Err = Error;

    /// Reads `cuda` (any device of the type) or `cuda:1`.
    fn from_str(text: &str) -> Result<Self> {
        let id: DeviceId = text.parse()?;
        Ok(match text.contains(':') {
            true => id.into(),
            false => Self::any(id.device_type),
        })
    }
}

impl Hash for DeviceSpec {
    fn hash<H: Hasher>(&self, state: &mut H) {
        (self.device_type, self.id).hash(state);
    }
}

impl fmt::Display for DeviceSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.id, self.device_type.short_name()) {
            (Some(id), _) => DeviceId::new(self.device_type, id).fmt(f),
            (None, Some(name)) => f.write_str(name),
            (None, None) => self.device_type.fmt(f),
        }
    }
}

impl fmt::Debug for DeviceSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DeviceSpec({self})")
    }
}

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
            let fitting: Vec<_> = devices.iter().filter(|one| spec.fits(one)).collect();
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
