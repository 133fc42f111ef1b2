//! What is known about addresses.

use std::ffi::{c_int, c_uint, c_void};

use crate::call::{Of, POINTER, call};
use crate::ffi::*;
use crate::memory::{Block, What};
use crate::registry::registry;

const CONTEXT: c_int = 1;
const MEMORY_TYPE: c_int = 2;
const DEVICE_POINTER: c_int = 3;
const HOST_POINTER: c_int = 4;
const IS_MANAGED: c_int = 8;
const DEVICE_ORDINAL: c_int = 9;
const IS_LEGACY_CUDA_IPC_CAPABLE: c_int = 10;
const RANGE_START_ADDR: c_int = 11;
const RANGE_SIZE: c_int = 12;
const MAPPED: c_int = 13;
const MEMPOOL_HANDLE: c_int = 17;

/// Writes one attribute. Truth values are `int`s, as most callers read them.
fn answer(data: Out<c_void>, attribute: c_int, address: Address, block: Option<&Block>) -> Outcome {
    let is = |what| block.is_some_and(|block: &Block| block.what == what);
    let number = |value: Option<usize>| data.cast::<usize>().put(value.unwrap_or(0));
    match attribute {
        // Memory of a pool belongs to no context.
        CONTEXT => number(block.filter(|b| b.pool.is_none()).map(|b| b.context)),
        MEMORY_TYPE => data
            .cast::<c_uint>()
            .put(match block.map(|block| block.what) {
                None => 0,
                Some(What::Pinned | What::Registered) => 1,
                Some(What::Device | What::Managed | What::Mapped) => 2,
            }),
        DEVICE_POINTER => number(block.map(|_| address as usize)),
        HOST_POINTER => number(
            block
                .filter(|_| !is(What::Device) && !is(What::Mapped))
                .map(|_| address as usize),
        ),
        IS_MANAGED => data.cast::<c_int>().put(i32::from(is(What::Managed))),
        DEVICE_ORDINAL => data.cast::<c_int>().put(block.map_or(-2, |b| b.ordinal)),
        RANGE_START_ADDR => number(block.map(|b| b.start)),
        RANGE_SIZE => number(block.map(|b| b.reported.unwrap_or(b.bytes))),
        IS_LEGACY_CUDA_IPC_CAPABLE => {
            data.cast::<c_int>().put(i32::from(block.is_some_and(|b| {
                b.what == What::Device && b.pool.is_none() && b.reported.is_none()
            })))
        }
        MAPPED => data.cast::<c_int>().put(i32::from(block.is_some())),
        MEMPOOL_HANDLE => number(block.and_then(|b| b.pool)),
        _ => Err(INVALID_VALUE),
    }
}

/// Of unknown addresses everything is 0 or null, and the ordinal -2.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuPointerGetAttributes(
    numAttributes: c_uint,
    attributes: In<c_int>,
    data: In<Out<c_void>>,
    ptr: Address,
) -> Code {
    call("cuPointerGetAttributes", POINTER, Of::Address(ptr), || {
        let count = numAttributes as usize;
        let wanted = attributes.list(count)?.into_iter().zip(data.list(count)?);
        let registry = registry();
        let block = registry.memory.at(ptr);
        wanted
            .into_iter()
            .try_for_each(|(attribute, data)| answer(data, attribute, ptr, block))
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemGetAddressRange_v2(
    base: Out<Address>,
    size: Out<usize>,
    dptr: Address,
) -> Code {
    call(
        "cuMemGetAddressRange_v2",
        POINTER,
        Of::Address(dptr),
        || {
            let registry = registry();
            registry.current()?;
            let block = registry.memory.at(dptr).ok_or(NOT_FOUND)?;
            base.put_if(block.start as Address);
            size.put_if(block.reported.unwrap_or(block.bytes));
            Ok(())
        },
    )
}
