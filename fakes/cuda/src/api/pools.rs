//! Memory pools.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use crate::api::device;
use crate::api::home::{Home, Location};
use crate::call::{FREE, Of, WORK, call};
use crate::engine::{Engine, NO_POOLS, POOL_CREATION_FAILS};
use crate::ffi::*;
use crate::memory::What;
use crate::registry::{Pool, Registry, registry};

/// Refuses on engines without pools.
pub(crate) fn check(engine: &Engine) -> Outcome {
    if engine.has(NO_POOLS) {
        Err(NOT_SUPPORTED)
    } else {
        Ok(())
    }
}

/// The default pool of an ordinal.
fn default_pool(registry: &mut Registry, ordinal: i32) -> Outcome<Handle> {
    let engine = registry.open_engine(ordinal)?;
    check(&engine)?;
    let mut pools = registry.pools.iter();
    let found = pools.find(|(_, pool)| pool.default && pool.ordinal == ordinal);
    if let Some((found, _)) = found {
        return Ok(handle(found));
    }
    drop(pools);
    let pool = Pool {
        ordinal,
        attributes: ATTRIBUTES,
        default: true,
    };
    Ok(registry.insert(|r| &mut r.pools, &engine, pool))
}

/// Reuse is allowed in all three ways, and nothing is kept.
const ATTRIBUTES: [u64; 9] = [0, 1, 1, 1, 0, 0, 0, 0, 0];

/// The pool that `cuMemAllocAsync` takes from.
fn current_pool(registry: &mut Registry, ordinal: i32) -> Outcome<Handle> {
    let set = registry.current_pool.get(&ordinal).copied();
    match set.filter(|pool| registry.pools.peek(*pool).is_some()) {
        Some(pool) => Ok(handle(pool)),
        None => default_pool(registry, ordinal),
    }
}

/// Allocates in the order of a stream.
pub(crate) fn allocate(
    dptr: Out<Address>,
    bytes: usize,
    pool: Option<Handle>,
    stream: Handle,
) -> Outcome {
    if dptr.is_null() {
        return Err(INVALID_VALUE);
    }
    let mut registry = registry();
    let lane = registry.work_lane(stream)?;
    check(&lane.engine)?;
    let mut home = Home::current(&registry)?;
    let pool = match pool {
        Some(pool) => pool,
        None => current_pool(&mut registry, home.ordinal)?,
    };
    let (pool, found) = registry.find(&registry.pools, pool)?;
    home.pool = Some(pool);
    home.ordinal = found.ordinal;
    if !lane.engine.ordinals.contains(&home.ordinal) {
        return Err(INVALID_VALUE);
    }
    let start = home.allocate(&mut registry, What::Device, bytes, Some(&lane.queue))?;
    let (_, used) = used(&registry, pool);
    Registry::change(&mut registry.pools, pool, |pool| {
        for high in [6, 8] {
            pool.attributes[high] = pool.attributes[high].max(used);
        }
    });
    dptr.put(start as Address)
}

/// The engine of a pool, and how many of its bytes are in use.
fn used(registry: &Registry, pool: usize) -> (Option<Arc<Engine>>, u64) {
    let blocks = registry.memory.iter();
    let blocks = blocks.filter(|block| block.pool == Some(pool));
    let bytes = blocks.map(|block| block.bytes as u64).sum();
    (registry.owner(pool), bytes)
}

/// The beginning of `CUmemPoolProps`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct PoolProps {
    allocation: c_int,
    handle_types: c_int,
    location: Location,
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemPoolCreate(pool: Out<Handle>, props: In<PoolProps>) -> Code {
    let ordinal = props.get().map_or(-1, |props| props.location.id);
    call("cuMemPoolCreate", WORK, Of::Device(ordinal), || {
        let props = props.get()?;
        // Pinned to a device is all that there is.
        if props.allocation != 1 || props.location.kind != 1 || pool.is_null() {
            return Err(INVALID_VALUE);
        }
        let mut registry = registry();
        let engine = registry.open_engine(ordinal)?;
        check(&engine)?;
        if engine.has(POOL_CREATION_FAILS) {
            return Err(NOT_SUPPORTED);
        }
        let new = Pool {
            ordinal,
            attributes: ATTRIBUTES,
            default: false,
        };
        pool.put(registry.insert(|r| &mut r.pools, &engine, new))
    })
}

/// Memory from it stays valid until it is freed.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemPoolDestroy(pool: Handle) -> Code {
    call("cuMemPoolDestroy", FREE, Of::Handle(pool), || {
        let mut registry = registry();
        if registry.find(&registry.pools, pool)?.1.default {
            return Err(INVALID_VALUE);
        }
        registry.remove(|r| &mut r.pools, pool).map(drop)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemPoolSetAttribute(
    pool: Handle,
    attr: c_int,
    value: In<c_void>,
) -> Code {
    call("cuMemPoolSetAttribute", WORK, Of::Handle(pool), || {
        let mut registry = registry();
        let (found, _) = registry.find(&registry.pools, pool)?;
        let new = match attr {
            1..=3 => u64::from(value.cast::<c_int>().get()? != 0),
            4 => value.cast::<u64>().get()?,
            // High watermarks may only be reset.
            6 | 8 if value.cast::<u64>().get()? == 0 => 0,
            _ => return Err(INVALID_VALUE),
        };
        Registry::change(&mut registry.pools, found, |pool| {
            pool.attributes[attr as usize] = new;
        });
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemPoolGetAttribute(
    pool: Handle,
    attr: c_int,
    value: Out<c_void>,
) -> Code {
    call("cuMemPoolGetAttribute", WORK, Of::Handle(pool), || {
        let registry = registry();
        let (found, pool) = registry.find(&registry.pools, pool)?;
        match attr {
            1..=3 => value
                .cast::<c_int>()
                .put(pool.attributes[attr as usize] as c_int),
            4 | 6 | 8 => value.cast::<u64>().put(pool.attributes[attr as usize]),
            5 | 7 => value.cast::<u64>().put(used(&registry, found).1),
            _ => Err(INVALID_VALUE),
        }
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemPoolTrimTo(pool: Handle, _minBytesToKeep: usize) -> Code {
    call("cuMemPoolTrimTo", WORK, Of::Handle(pool), || {
        let registry = registry();
        registry.find(&registry.pools, pool).map(drop)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceGetDefaultMemPool(pool: Out<Handle>, dev: c_int) -> Code {
    call("cuDeviceGetDefaultMemPool", WORK, Of::Device(dev), || {
        device::check(dev)?;
        pool.put(default_pool(&mut registry(), dev)?)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceGetMemPool(pool: Out<Handle>, dev: c_int) -> Code {
    call("cuDeviceGetMemPool", WORK, Of::Device(dev), || {
        device::check(dev)?;
        pool.put(current_pool(&mut registry(), dev)?)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceSetMemPool(dev: c_int, pool: Handle) -> Code {
    call("cuDeviceSetMemPool", WORK, Of::Device(dev), || {
        device::check(dev)?;
        let mut registry = registry();
        let (found, of) = registry.find(&registry.pools, pool)?;
        if of.ordinal != dev {
            return Err(INVALID_VALUE);
        }
        registry.current_pool.insert(dev, found);
        Ok(())
    })
}
