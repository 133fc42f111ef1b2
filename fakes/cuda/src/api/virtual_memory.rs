//! Virtual memory: reserved addresses, allocations that are mapped there, and their descriptors, which are memory files.

use std::ffi::{c_int, c_ulonglong, c_void};
use std::fs::File;
use std::os::fd::{BorrowedFd, IntoRawFd};
use std::sync::Arc;

use arrow_device::device::sim::SimBacking;

use crate::api::device::check;
use crate::api::home::{Home, Location};
use crate::call::{FREE, Of, WORK, call};
use crate::ffi::*;
use crate::memory::{Block, What, pointer};
use crate::pages::{Pages, memory_file};
use crate::registry::{Physical, Registry, Reservation, blame, registry};

/// All sizes are multiples of it, as on most GPUs.
const GRANULARITY: usize = 2 << 20;
const POSIX_FILE_DESCRIPTOR: c_int = 1;
const DEVICE: c_int = 1;

/// The beginning of `CUmemAllocationProp`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Props {
    allocation: c_int,
    handle_types: c_int,
    location: Location,
}

impl Props {
    /// Memory of a device that can be exported, or need not be.
    fn check(self) -> Outcome<Self> {
        let is_known = self.allocation == 1 && self.location.kind == DEVICE;
        match is_known && (0..=POSIX_FILE_DESCRIPTOR).contains(&self.handle_types) {
            true => check(self.location.id).map(|()| self),
            false => Err(INVALID_VALUE),
        }
    }
}

fn is_whole(bytes: usize) -> bool {
    bytes > 0 && bytes % GRANULARITY == 0
}

fn physical(registry: &Registry, handle: u64) -> Outcome<&Physical> {
    let (_, found) = registry.find(&registry.physical, of_number(handle))?;
    Ok(found)
}

fn of_number(number: u64) -> Handle {
    handle(number as usize)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemGetAllocationGranularity(
    granularity: Out<usize>,
    prop: In<Props>,
    _option: c_int,
) -> Code {
    call("cuMemGetAllocationGranularity", WORK, Of::Current, || {
        prop.get()?.check()?;
        granularity.put(GRANULARITY)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemCreate(
    handle: Out<u64>,
    size: usize,
    prop: In<Props>,
    flags: c_ulonglong,
) -> Code {
    call("cuMemCreate", WORK, Of::Current, || {
        let props = prop.get()?.check()?;
        if !is_whole(size) || flags != 0 {
            return Err(INVALID_VALUE);
        }
        let mut registry = registry();
        let home = Home::current(&registry)?;
        let physical = Physical {
            file: Arc::new(memory_file(c"cuda-fake", size).ok_or(OUT_OF_MEMORY)?),
            bytes: size,
            ordinal: props.location.id,
            is_shareable: props.handle_types == POSIX_FILE_DESCRIPTOR,
        };
        handle.put(number(registry.insert(|r| &mut r.physical, &home.engine, physical)) as u64)
    })
}

/// Mapped memory and descriptors keep the memory.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemRelease(handle: u64) -> Code {
    let handle = of_number(handle);
    call("cuMemRelease", FREE, Of::Handle(handle), || {
        registry().remove(|r| &mut r.physical, handle).map(drop)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemExportToShareableHandle(
    shareableHandle: Out<c_int>,
    handle: u64,
    handleType: c_int,
    flags: c_ulonglong,
) -> Code {
    call(
        "cuMemExportToShareableHandle",
        WORK,
        Of::Handle(of_number(handle)),
        || {
            let registry = registry();
            let physical = physical(&registry, handle)?;
            let is_valid = handleType == POSIX_FILE_DESCRIPTOR && flags == 0;
            if !is_valid || !physical.is_shareable || shareableHandle.is_null() {
                return Err(INVALID_VALUE);
            }
            let file = physical.file.try_clone().map_err(|_| OUT_OF_MEMORY)?;
            shareableHandle.put(file.into_raw_fd())
        },
    )
}

/// The caller keeps the descriptor.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemImportFromShareableHandle(
    handle: Out<u64>,
    osHandle: *mut c_void,
    shHandleType: c_int,
) -> Code {
    call("cuMemImportFromShareableHandle", WORK, Of::Current, || {
        let fd = c_int::try_from(osHandle.addr()).map_err(|_| INVALID_VALUE)?;
        if shHandleType != POSIX_FILE_DESCRIPTOR || handle.is_null() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller of the driver function guarantees an open descriptor; one that is not is an error of the system's.
        let file = unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned();
        let file = File::from(file.map_err(|_| INVALID_VALUE)?);
        let bytes = file.metadata().map_or(0, |file| file.len() as usize);
        let mut registry = registry();
        let home = Home::current(&registry)?;
        if !is_whole(bytes) {
            return Err(INVALID_VALUE);
        }
        let physical = Physical {
            file: Arc::new(file),
            bytes,
            ordinal: home.ordinal,
            is_shareable: true,
        };
        handle.put(number(registry.insert(|r| &mut r.physical, &home.engine, physical)) as u64)
    })
}

/// The host memory behind the addresses cannot be used until memory is mapped there and access to it is set: work that does so all the
/// same ends the process.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemAddressReserve(
    ptr: Out<Address>,
    size: usize,
    _alignment: usize,
    addr: Address,
    flags: c_ulonglong,
) -> Code {
    call("cuMemAddressReserve", WORK, Of::Current, || {
        if !is_whole(size) || addr != 0 || flags != 0 || ptr.is_null() {
            return Err(INVALID_VALUE);
        }
        let mut registry = registry();
        let engine = Home::current(&registry)?.engine;
        let pages = Arc::new(Pages::new(size).ok_or(OUT_OF_MEMORY)?);
        // SAFETY: the pages stay as long as `pages` lives. Only queued work uses them, which the callers of the driver's functions
        // order after memory is mapped there, and before it is unmapped; they share it with other processes as they have agreed.
        let backing = unsafe { SimBacking::new(pages.start(), size, pages.clone()) };
        let start = engine.sim.adopt(backing);
        let start = start.map_err(|error| engine.code_of(&error))?.address();
        let reservation = Reservation {
            engine,
            pages,
            bytes: size,
        };
        registry.reserved.insert(start, reservation);
        ptr.put(start as Address)
    })
}

/// Finds what was reserved at exactly this address. Anything else is a violation.
fn reserved(registry: &Registry, call: &str, start: Address) -> Outcome<Reservation> {
    let found = registry.reserved.get(&(start as usize)).cloned();
    found.ok_or_else(|| {
        let text = format!("{call} of {start:#x}: not a reserved address");
        blame(registry.current_engine().as_ref(), text);
        INVALID_VALUE
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemMap(
    ptr: Address,
    size: usize,
    offset: usize,
    handle: u64,
    flags: c_ulonglong,
) -> Code {
    call("cuMemMap", WORK, Of::Handle(of_number(handle)), || {
        let mut registry = registry();
        let physical = physical(&registry, handle)?;
        let (file, bytes, ordinal) = (physical.file.clone(), physical.bytes, physical.ordinal);
        let reservation = reserved(&registry, "cuMemMap", ptr)?;
        // No more than there is, and all of it: nobody needs a part.
        let fits = size == bytes && size <= reservation.bytes;
        if !fits || offset != 0 || flags != 0 || registry.memory.at(ptr).is_some() {
            return Err(INVALID_VALUE);
        }
        reservation
            .pages
            .map(Some(&file), size)
            .ok_or(OUT_OF_MEMORY)?;
        registry.memory.insert(Block {
            what: What::Mapped,
            start: ptr as usize,
            bytes: size,
            engine: reservation.engine,
            ordinal,
            context: 0,
            pool: None,
            // As a driver does, all that was reserved.
            reported: Some(reservation.bytes),
        });
        Ok(())
    })
}

/// `CUmemAccessDesc`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Access {
    location: Location,
    flags: c_int,
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemSetAccess(
    ptr: Address,
    size: usize,
    desc: In<Access>,
    count: usize,
) -> Code {
    call("cuMemSetAccess", WORK, Of::Address(ptr), || {
        let access = desc.get()?;
        let registry = registry();
        let reservation = reserved(&registry, "cuMemSetAccess", ptr)?;
        let block = registry.memory.at(ptr).ok_or(INVALID_VALUE)?;
        let is_own = reservation.engine.ordinals.contains(&access.location.id);
        if count != 1 || size != block.bytes || access.location.kind != DEVICE || !is_own {
            return Err(INVALID_VALUE);
        }
        let protection = match access.flags {
            1 => libc::PROT_READ,
            3 => libc::PROT_READ | libc::PROT_WRITE,
            _ => return Err(INVALID_VALUE),
        };
        reservation.pages.protect(size, protection).ok_or(UNKNOWN)
    })
}

/// Queued work that still uses the memory ends the process when it runs.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemUnmap(ptr: Address, size: usize) -> Code {
    call("cuMemUnmap", FREE, Of::Address(ptr), || {
        let mut registry = registry();
        let reservation = reserved(&registry, "cuMemUnmap", ptr)?;
        let mapped = |block: &Block| block.what == What::Mapped && block.bytes == size;
        let engine = Some(reservation.engine.clone());
        let taken = registry.memory.take("cuMemUnmap", ptr, mapped);
        taken.map_err(|why| {
            blame(engine.as_ref(), why);
            INVALID_VALUE
        })?;
        reservation.pages.map(None, size).ok_or(UNKNOWN)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemAddressFree(ptr: Address, size: usize) -> Code {
    call("cuMemAddressFree", FREE, Of::Current, || {
        let mut registry = registry();
        let reservation = reserved(&registry, "cuMemAddressFree", ptr)?;
        if reservation.bytes != size || registry.memory.at(ptr).is_some() {
            let text = format!("cuMemAddressFree of {ptr:#x}: mapped, or of another length");
            reservation.engine.blame(text);
            return Err(INVALID_VALUE);
        }
        registry.reserved.remove(&(ptr as usize));
        let sim = &reservation.engine.sim;
        // SAFETY: the addresses were adopted once, and were in the table until now. Queued work that uses them is refused.
        let freed = unsafe { sim.free_now(pointer(ptr as usize), size) };
        freed.map_err(|error| reservation.engine.code_of(&error))
    })
}
