//! Parts for backends: what most implementations of [`Backend`](super::Backend) and [`RawQueue`](super::RawQueue) need, and
//! would otherwise each write again. Programs that only use devices do not need them.
//!
//! | part | what it is for | who uses it |
//! | --- | --- | --- |
//! | [`Pool`] | reusing device memory in the order of queues | backends of runtimes that allocate slowly, or whose free waits |
//! | [`Ranges`] | finding the allocation of an address | `classify`, and copies of memory that has a handle |
//! | [`Reserved`] | addresses for memory that has a handle and no address | backends whose runtime has no device addresses |
//! | [`Failure`] | remembering that the device has failed | backends of runtimes that forget it, or end the process |
//! | [`Worker`] | a thread for calls that may block, and for polling | backends of runtimes whose frees wait, or that cannot notify |
//! | [`Process`] | refusing work in a forked child | backends of all runtimes with threads of their own |
//! | [`exit`] | leaving the runtime alone while the process ends | backends of runtimes whose libraries are unloaded then |
//!
//! CUDA and ROCm use all but `Reserved` and `exit`. The simulated device keeps its own table of allocations, which it changes in place
//! while they are freed.
//!
//! All may be used on any thread, wait for nothing unless they say so, and call no runtime by themselves. A queue is named by a
//! [`queue_number`] that it gets when it is made.
//!
//! # Allocating and freeing
//!
//! The core of a backend, with the calls of its runtime as comments:
//!
//! ```
//! use arrow_device::device::parts::{Block, Failure, Pool, Ranges, Worker};
//! use arrow_device::device::{AddressClass, DeviceId, DevicePtr, PointerInfo};
//! use arrow_device::{Error, Result};
//!
//! # fn allocate_by_runtime(bytes: usize) -> Option<DevicePtr> {
//! #     Some(DevicePtr::new(std::ptr::without_provenance_mut(bytes.next_multiple_of(4096))))
//! # }
//! # fn free_by_runtime(_base: DevicePtr) {}
//! # fn record_by_runtime() -> Result<Event> { Ok(Event) }
//! /// An event of the runtime, which its drop releases.
//! struct Event;
//!
//! impl Event {
//!     fn is_done(&self) -> bool {
//!         true // the runtime's query
//!     }
//! }
//!
//! /// What a device and its queues share.
//! struct Shared {
//!     id: DeviceId,
//!     failure: Failure,
//!     live: Ranges<()>,
//!     pool: Pool<Event>,
//!     frees: Worker,
//! }
//!
//! impl Shared {
//!     /// `RawQueue::allocate`, with the queue's number.
//!     fn allocate(&self, queue: u64, bytes: usize) -> Result<DevicePtr> {
//!         self.failure.check()?;
//!         let out_of_memory = || Error::OutOfMemory { device: self.id, operation: "malloc", bytes };
//!         let bytes = Pool::<Event>::rounded(bytes).ok_or_else(out_of_memory)?;
//!         let (base, bytes) = match self.pool.take(queue, bytes, Event::is_done) {
//!             Some(block) => (block.base, block.bytes), // the event is released here
//!             None => {
//!                 self.free_idle(false);
//!                 let again = || {
//!                     self.free_idle(true);
//!                     while self.frees.pending() > 0 {
//!                         std::thread::yield_now();
//!                     }
//!                     allocate_by_runtime(bytes)
//!                 };
//!                 let base = allocate_by_runtime(bytes).or_else(again);
//!                 (base.ok_or_else(out_of_memory)?, bytes)
//!             }
//!         };
//!         self.live.insert(base, bytes, ());
//!         Ok(base)
//!     }
//!
//!     /// `RawQueue::free`: the queue may use the block again at once, and others after the event.
//!     fn free(&self, queue: u64, base: DevicePtr) -> Result<()> {
//!         let after = record_by_runtime()?;
//!         if let Some((bytes, ())) = self.live.remove(base) {
//!             self.pool.give(Block { base, bytes, queue, after });
//!         }
//!         Ok(())
//!     }
//!
//!     /// Frees memory that nothing uses any more: what is over the limits, or `all`, as `Backend::trim` does.
//!     fn free_idle(&self, all: bool) {
//!         for block in self.pool.take_done(all, Event::is_done) {
//!             self.frees.push(move || free_by_runtime(block.base)); // which may block
//!         }
//!     }
//!
//!     /// `Backend::classify`.
//!     fn classify(&self, address: DevicePtr, bytes: usize) -> PointerInfo {
//!         let ours = self.live.classify(address, bytes, AddressClass::Device);
//!         // Or what the runtime says.
//!         ours.unwrap_or_else(|| PointerInfo::new(AddressClass::Unknown, address.range(bytes)))
//!     }
//! }
//!
//! # let id = DeviceId::new(arrow_device::abi::ArrowDeviceType::OPENCL, 0);
//! # let (failure, live, pool) = (Failure::default(), Ranges::new(), Pool::default());
//! # let shared = Shared { id, failure, live, pool, frees: Worker::new("arrow-device example") };
//! # let queue = arrow_device::device::parts::queue_number();
//! # let base = shared.allocate(queue, 100)?;
//! # assert_eq!(shared.classify(base, 256).class, AddressClass::Device);
//! # shared.free(queue, base)?;
//! # assert_eq!(shared.classify(base, 256).class, AddressClass::Unknown);
//! # assert_eq!(shared.allocate(queue, 100)?, base);
//! # shared.free(queue, base)?;
//! # shared.free_idle(true);
//! # assert!(shared.pool.is_empty());
//! # Ok::<(), Error>(())
//! ```
//!
//! At the end of a device the backend waits for its work, and frees what [`Pool::take_all`] returns.

pub mod exit;
mod failure;
mod pool;
mod ranges;
mod reserved;
mod worker;

pub(crate) use failure::FORKED;
pub use failure::{Failure, Process};
pub use pool::{Block, Pool, queue_number};
pub use ranges::{Found, Ranges};
pub use reserved::Reserved;
pub use worker::Worker;
