//! Memory pools.

use std::ffi::{c_int, c_void};

use crate::api::home::{Home, Location};
use crate::call::{FREE, Of, WORK, call};
use crate::engine::{Engine, NO_POOLS};
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
        default: true,
    };
    Ok(registry.insert(|r| &mut r.pools, &engine, pool))
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
        None => default_pool(&mut registry, home.ordinal)?,
    };
    let (pool, found) = registry.find(&registry.pools, pool)?;
    home.pool = Some(pool);
    home.ordinal = found.ordinal;
    if !lane.engine.ordinals.contains(&home.ordinal) {
        return Err(INVALID_VALUE);
    }
    let start = home.allocate(&mut registry, What::Device, bytes, Some(&lane.queue))?;
    dptr.put(start as Address)
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
        let new = Pool {
            ordinal,
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
        let registry = registry();
        registry.find(&registry.pools, pool)?;
        match attr {
            1..=3 => value.cast::<c_int>().get().map(drop),
            // The threshold, of as many bytes.
            4 => value.cast::<u64>().get().map(drop),
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
