//! Allocating, freeing, registering.

use std::ffi::{c_uint, c_void};
use std::sync::Arc;

use arrow_device::device::Backend;

use crate::api::home::Home;
use crate::api::pools;
use crate::call::{FREE, Of, WORK, call};
use crate::engine::{Kind, Lasting};
use crate::ffi::*;
use crate::memory::{Block, What, pointer};
use crate::modes::BlockingFree;
use crate::registry::{Registry, blame, registry};

fn device(dptr: Out<Address>, what: What, bytes: usize) -> Outcome {
    if dptr.is_null() {
        return Err(INVALID_VALUE);
    }
    let mut registry = registry();
    let home = Home::current(&registry)?;
    dptr.put(home.allocate(&mut registry, what, bytes, None)? as Address)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemAlloc_v2(dptr: Out<Address>, bytesize: usize) -> Code {
    call("cuMemAlloc_v2", WORK, Of::Current, || {
        device(dptr, What::Device, bytesize)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemAllocManaged(
    dptr: Out<Address>,
    bytesize: usize,
    flags: c_uint,
) -> Code {
    call("cuMemAllocManaged", WORK, Of::Current, || match flags {
        // GLOBAL, HOST
        1 | 2 => device(dptr, What::Managed, bytesize),
        _ => Err(INVALID_VALUE),
    })
}

fn pinned(pp: Out<*mut c_void>, bytes: usize) -> Outcome {
    if pp.is_null() {
        return Err(INVALID_VALUE);
    }
    let mut registry = registry();
    let home = Home::current(&registry)?;
    let start = home.allocate(&mut registry, What::Pinned, bytes, None)?;
    pp.put(pointer(start).as_ptr())
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemHostAlloc(
    pp: Out<*mut c_void>,
    bytesize: usize,
    flags: c_uint,
) -> Code {
    call("cuMemHostAlloc", WORK, Of::Current, || {
        if flags > 7 {
            return Err(INVALID_VALUE);
        }
        const WRITE_COMBINED: c_uint = 4;
        if flags & WRITE_COMBINED != 0 {
            let engine = registry().current()?.1.engine.clone();
            engine.blame("write-combined memory, which the host reads slowly".into());
        }
        pinned(pp, bytesize)
    })
}

/// Takes a block out of the table; anything else is a violation.
fn take(
    registry: &mut Registry,
    name: &str,
    address: Address,
    which: impl Fn(&Block) -> bool,
) -> Outcome<Block> {
    let engine = registry.memory.engine_at(address);
    let engine = engine.or_else(|| registry.current_engine());
    registry.memory.take(name, address, which).map_err(|why| {
        blame(engine.as_ref(), why);
        INVALID_VALUE
    })
}

/// Begins a free in no stream's order of the memory at an address.
fn blocking(address: Address) -> Option<BlockingFree> {
    let engine = registry().memory.engine_at(address)?;
    engine.begin_free()
}

/// Frees at once. Queued work that still uses the memory fails when it runs.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemFree_v2(dptr: Address) -> Code {
    call("cuMemFree_v2", FREE, Of::Address(dptr), || {
        let _free = blocking(dptr);
        let mut registry = registry();
        registry.current()?;
        let device = |block: &Block| matches!(block.what, What::Device | What::Managed);
        take(&mut registry, "cuMemFree", dptr, device)?.release();
        Ok(())
    })
}

/// Succeeds even if the engine has failed: the memory is the host's.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemFreeHost(p: *mut c_void) -> Code {
    const KIND: Kind = Kind {
        any: true,
        lasting: Lasting::Ignored,
    };
    let address = p.addr() as Address;
    call("cuMemFreeHost", KIND, Of::Address(address), || {
        let _free = blocking(address);
        let mut registry = registry();
        registry.current()?;
        let pinned = |block: &Block| block.what == What::Pinned;
        take(&mut registry, "cuMemFreeHost", address, pinned)?.release();
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemAllocAsync(
    dptr: Out<Address>,
    bytesize: usize,
    hStream: Handle,
) -> Code {
    call("cuMemAllocAsync", WORK, Of::Handle(hStream), || {
        pools::allocate(dptr, bytesize, None, hStream)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemAllocFromPoolAsync(
    dptr: Out<Address>,
    bytesize: usize,
    pool: Handle,
    hStream: Handle,
) -> Code {
    call("cuMemAllocFromPoolAsync", WORK, Of::Handle(hStream), || {
        pools::allocate(dptr, bytesize, Some(pool), hStream)
    })
}

/// Frees in the order of the stream.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemFreeAsync(dptr: Address, hStream: Handle) -> Code {
    call("cuMemFreeAsync", FREE, Of::Handle(hStream), || {
        let mut registry = registry();
        let lane = registry.work_lane(hStream)?;
        pools::check(&lane.engine)?;
        let of_pool = |block: &Block| {
            block.what == What::Device
                && block.pool.is_some()
                && Arc::ptr_eq(&block.engine, &lane.engine)
        };
        let block = take(&mut registry, "cuMemFreeAsync", dptr, of_pool)?;
        // SAFETY: this engine allocated the memory, which was in the table until now, so it is
        // freed once; the caller of the driver function guarantees that work on other streams was
        // waited for.
        let freed = unsafe { lane.queue.free(pointer(block.start), block.bytes) };
        freed.map_err(|error| lane.engine.code_of(&error))
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemHostRegister_v2(
    p: *mut c_void,
    bytesize: usize,
    flags: c_uint,
) -> Code {
    call("cuMemHostRegister_v2", WORK, Of::Current, || {
        let start = p.expose_provenance();
        let mut registry = registry();
        let home = Home::current(&registry)?;
        let end = start.checked_add(bytesize).ok_or(INVALID_VALUE)?;
        if start == 0 || bytesize == 0 || flags > 15 {
            return Err(INVALID_VALUE);
        }
        if !home
            .engine
            .sim
            .copies_directly_from(pointer(start), bytesize)
        {
            home.engine
                .blame(format!("registers device addresses, {start:#x}"));
            return Err(INVALID_VALUE);
        }
        if registry.memory.overlaps(&(start..end)) {
            return Err(ALREADY_REGISTERED);
        }
        registry.memory.insert(Block {
            what: What::Registered,
            start,
            bytes: bytesize,
            engine: home.engine,
            ordinal: home.ordinal,
            context: home.context,
            pool: None,
            reported: None,
        });
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemHostUnregister(p: *mut c_void) -> Code {
    let address = p.addr() as Address;
    call("cuMemHostUnregister", FREE, Of::Address(address), || {
        let _free = blocking(address);
        let mut registry = registry();
        registry.current()?;
        let registered = |block: &Block| block.what == What::Registered;
        let block = take(&mut registry, "cuMemHostUnregister", address, registered);
        block.map_err(|_| NOT_REGISTERED)?.release();
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) -> Code {
    call("cuMemGetInfo_v2", WORK, Of::Current, || {
        let registry = registry();
        let (_, context) = registry.current()?;
        let engine = &context.engine;
        let own = |block: &&Block| block.what == What::Device && Arc::ptr_eq(&block.engine, engine);
        let used: usize = registry.memory.iter().filter(own).map(|b| b.bytes).sum();
        free.put(engine.capacity_bytes.saturating_sub(used))?;
        total.put(engine.capacity_bytes)
    })
}
