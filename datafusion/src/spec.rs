//! [`DeviceSpec`]: which device a node of a plan uses.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::str::FromStr;

use arrow_device::device::WeakDevice;
use arrow_device::{ArrowDeviceType, Device, DeviceId, Error, Result};

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
        match &self.device {
            Some(own) => own.upgrade().as_ref() == Some(device),
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
