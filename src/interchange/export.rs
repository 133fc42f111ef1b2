//! [`DeviceArray`] and [`DeviceRecordBatch`] out: as `ArrowDeviceArray`.
//!
//! Ownership: the consumer owns what it is given and releases it, once, on any thread. The memory
//! stays alive until then, and where children were moved out until the last of them is released.
//! Release never waits.

use std::ffi::c_void;
use std::sync::Arc;

use arrow_schema::Field;
use arrow_schema::ffi::FFI_ArrowSchema;

use crate::abi::FFI_ArrowDeviceArray;
use crate::data::{DeviceArray, DeviceRecordBatch};
use crate::device::{Device, SyncEvent};
use crate::error::Result;
use crate::interchange::arena::{self, EventKeeper, Nulls};
use crate::interchange::schema::{export_field, export_schema};
use crate::memory::Owner;
use crate::transfer::{Realigning, is_misaligned};

/// What happens to the events that guard exported memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum SyncPolicy {
    /// The consumer gets an event to wait for; nothing waits here. One event that guards everything
    /// is handed on as it is; several become one.
    Event,
    /// This thread waits until the memory is ready; the consumer gets no event.
    Wait,
}

/// What is done with null counts that nobody has counted yet.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum NullCounts {
    /// They are counted: the masks are read back together, with one host wait. Some consumers (cuDF)
    /// take -1 for "no nulls".
    #[default]
    Exact,
    /// They go out as -1.
    AllowUnknown,
}

/// What a consumer's release may rely on.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum ReleasePolicy {
    /// A consumer that releases says that its device work on the memory is done, or ordered before
    /// this crate's.
    #[default]
    Ordered,
    /// For consumers that do not keep to this: a thread of the device waits for all its work first.
    /// The release itself still returns at once.
    Synchronize,
}

impl ReleasePolicy {
    /// Lets go of memory that a consumer has released. Never waits, and never unwinds: what the
    /// owner's drop throws is kept.
    pub(crate) fn let_go(self, owner: Arc<Owner>) {
        if self.waits_for(owner.device()) {
            let device = owner.device().clone();
            device.parking("release", || self.let_go_after(&device, owner));
        } else if let Some(owner) = Arc::into_inner(owner) {
            // Nothing happens while somebody else holds it.
            let device = owner.device().clone();
            device.parking("release", || drop(owner));
        }
    }

    /// Lets go of what work of `device` may still read. Never waits.
    pub(super) fn let_go_after<T: Send + 'static>(self, device: &Device, kept: T) {
        if !self.waits_for(device) {
            return drop(kept);
        }
        let settled = device.clone();
        device.reaper().later(move || {
            settled.settle();
            drop(kept);
        });
    }

    /// Work of a synchronous device has completed already.
    fn waits_for(self, device: &Device) -> bool {
        self == Self::Synchronize && !device.is_synchronous()
    }
}

/// How an export is done.
///
/// ```
/// use arrow_device::{ExportOptions, NullCounts, SyncPolicy};
/// let options = ExportOptions::new(SyncPolicy::Event).with_null_counts(NullCounts::AllowUnknown);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct ExportOptions {
    pub(super) sync: SyncPolicy,
    pub(super) null_counts: NullCounts,
    pub(super) release: ReleasePolicy,
}

impl ExportOptions {
    /// With this policy for events; exact null counts, ordered release.
    pub const fn new(sync: SyncPolicy) -> Self {
        Self {
            sync,
            null_counts: NullCounts::Exact,
            release: ReleasePolicy::Ordered,
        }
    }

    /// What is done with unknown null counts.
    #[must_use]
    pub const fn with_null_counts(mut self, null_counts: NullCounts) -> Self {
        self.null_counts = null_counts;
        self
    }

    pub(super) fn nulls(&self) -> Nulls {
        match self.null_counts {
            NullCounts::Exact => Nulls::Count,
            NullCounts::AllowUnknown => Nulls::AllowUnknown,
        }
    }

    /// What release relies on.
    #[must_use]
    pub const fn with_release(mut self, release: ReleasePolicy) -> Self {
        self.release = release;
        self
    }
}

impl DeviceArray {
    /// The array and its type as C structs, without a copy, except of validity bitmaps whose rows start at
    /// another bit of a byte than those of the values.
    ///
    /// The C data interface has one offset for all buffers. An array with a [`Validity`](crate::Validity) of
    /// other rows than its values have (a result that shares the bitmap of a slice, say) is exported as it is if
    /// a whole number of bytes lies between both starts. Otherwise its bitmap is copied, one bit for each of the
    /// array's rows, each time that it is exported: all such bitmaps come to the host with one read and one host
    /// wait, together with those that must be counted, and go to one fresh allocation on the device. Copies
    /// are counted ([`TransferStats`](crate::TransferStats)), and so are the nulls in them.
    /// [`compact`](Self::compact) makes an array that needs none.
    ///
    /// ```
    /// # use arrow_array::Int32Array;
    /// # use arrow_device::{DeviceArray, Devices, SyncPolicy};
    /// let array = Devices::cpu().upload_array(&Int32Array::from(vec![1, 2, 3]))?;
    /// let (c_array, c_schema) = array.export(SyncPolicy::Event)?;
    /// // SAFETY: both come from `export`.
    /// let again = unsafe { DeviceArray::import(c_array, &c_schema) }?;
    /// assert_eq!(again.len(), 3);
    /// # Ok::<(), arrow_device::Error>(())
    /// ```
    ///
    /// # Errors
    /// What the device reports while events are merged or nulls counted; names or metadata that C
    /// strings cannot hold.
    pub fn export(&self, sync: SyncPolicy) -> Result<(FFI_ArrowDeviceArray, FFI_ArrowSchema)> {
        let schema = match self.field() {
            Some(field) => export_field(field)?,
            None => export_field(&Field::new("", self.data_type().clone(), true))?,
        };
        Ok((self.export_array(&ExportOptions::new(sync))?, schema))
    }

    /// The array alone, for consumers that know its type.
    ///
    /// # Errors
    /// As [`export`](Self::export).
    pub fn export_array(&self, options: &ExportOptions) -> Result<FFI_ArrowDeviceArray> {
        export(self, options, false, options.nulls())
    }
}

impl DeviceRecordBatch {
    /// The batch and its schema as C structs, without a copy: a struct array at offset 0 without a
    /// mask. The schema's metadata goes along.
    ///
    /// # Errors
    /// As [`DeviceArray::export`].
    pub fn export(&self, sync: SyncPolicy) -> Result<(FFI_ArrowDeviceArray, FFI_ArrowSchema)> {
        let schema = export_schema(self.schema())?;
        Ok((self.export_array(&ExportOptions::new(sync))?, schema))
    }

    /// The batch alone, for consumers that know its schema: at most two heap allocations, whatever
    /// the number of columns.
    ///
    /// # Errors
    /// As [`DeviceArray::export`].
    pub fn export_array(&self, options: &ExportOptions) -> Result<FFI_ArrowDeviceArray> {
        export(self.as_struct(), options, true, options.nulls())
    }
}

/// `as_batch`: the root goes out at offset 0 and without a mask; its rows are its children's.
pub(super) fn export(
    array: &DeviceArray,
    options: &ExportOptions,
    as_batch: bool,
    nulls: Nulls,
) -> Result<FFI_ArrowDeviceArray> {
    let moved;
    let array = match is_misaligned(array, as_batch) {
        false => array,
        true => {
            let count = options.null_counts == NullCounts::Exact;
            moved = Realigning::start(array, as_batch, count)?.finish(array)?;
            &moved
        }
    };
    let event = Handover::of(array, options.sync)?;
    let id = array.device().id();
    let sync_event = event.pointer();
    Ok(FFI_ArrowDeviceArray {
        array: arena::build(array, as_batch, nulls, event.keeper(), options.release)?,
        device_id: id.id,
        device_type: id.device_type,
        sync_event,
        reserved: [0; 3],
    })
}

/// The event that goes out.
enum Handover {
    None,
    /// An owner's own, which lives as long as the owner.
    Existing(Arc<Owner>),
    /// A new one; the arena holds it.
    Merged(SyncEvent),
}

impl Handover {
    fn of(array: &DeviceArray, sync: SyncPolicy) -> Result<Self> {
        if let [only] = array.tree().owners.as_slice() {
            if only.ready().is_none() {
                return Ok(Self::None);
            }
        }
        let owners = array.owners();
        if sync == SyncPolicy::Wait {
            array.wait()?;
            return Ok(Self::None);
        }
        let guarded = || owners.iter().filter(|owner| owner.ready().is_some());
        let Some(first) = guarded().next() else {
            return Ok(Self::None);
        };
        let device = array.device();
        let own = |owner: &Arc<Owner>| owner.ready().is_some_and(|event| event.device() == device);
        if own(first) && guarded().all(|owner| event_of(owner) == event_of(first)) {
            return Ok(Self::Existing(first.clone()));
        }
        let mut pending = Vec::new();
        for owner in guarded() {
            if let Some(event) = owner.ready() {
                if !event.is_complete()? {
                    pending.push(owner);
                }
            }
        }
        match pending.as_slice() {
            [] => Ok(Self::None),
            [one] if own(one) => Ok(Self::Existing(Arc::clone(one))),
            many => {
                // An event of another device is waited for, by the queue or else here.
                let queue = device.default_queue();
                for owner in many {
                    owner.wait_on(&queue)?;
                }
                Ok(queue.record()?.map_or(Self::None, Self::Merged))
            }
        }
    }

    fn pointer(&self) -> *mut c_void {
        match self {
            Self::None => std::ptr::null_mut(),
            Self::Existing(owner) => event_of(owner),
            Self::Merged(event) => event.as_ptr().as_ptr(),
        }
    }

    fn keeper(self) -> Option<EventKeeper> {
        match self {
            Self::None => None,
            Self::Existing(owner) => Some(match owner.own_event() {
                Some(event) => EventKeeper::Own(event.clone()),
                None => EventKeeper::Owner(owner),
            }),
            Self::Merged(event) => Some(EventKeeper::Own(event)),
        }
    }
}

fn event_of(owner: &Owner) -> *mut c_void {
    let event = owner.ready();
    event.map_or(std::ptr::null_mut(), |event| event.ptr().as_ptr())
}
