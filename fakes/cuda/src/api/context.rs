//! Contexts and the stack of them that each thread has.

use std::ffi::{c_int, c_uint};

use crate::api::device;
use crate::call::{FREE, Of, QUERY, QUIET, WORK, call};
use crate::ffi::*;
use crate::registry::{Registry, blame, registry};
use crate::stack;

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDevicePrimaryCtxRetain(pctx: Out<Handle>, dev: c_int) -> Code {
    call("cuDevicePrimaryCtxRetain", WORK, Of::Opening(dev), || {
        if pctx.is_null() {
            return Err(INVALID_VALUE);
        }
        let mut registry = registry();
        let engine = registry.open_engine(dev)?;
        if let Some(existing) = registry.primary.get(&dev).copied() {
            Registry::change(&mut registry.contexts, existing, |context| {
                context.retained = context.retained.map(|times| times + 1);
            });
            return pctx.put(handle(existing));
        }
        let context = registry.new_context(&engine, dev, Some(1));
        registry.primary.insert(dev, number(context));
        pctx.put(context)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDevicePrimaryCtxRelease_v2(dev: c_int) -> Code {
    call(
        "cuDevicePrimaryCtxRelease_v2",
        QUERY,
        Of::Device(dev),
        || {
            device::check(dev)?;
            let mut registry = registry();
            let Some(context) = registry.primary.get(&dev).copied() else {
                let engine = registry.engine(dev);
                let text = format!("primary context of ordinal {dev} released, but not retained");
                blame(engine.as_ref(), text);
                return Err(INVALID_CONTEXT);
            };
            let mut left = 0;
            Registry::change(&mut registry.contexts, context, |context| {
                left = context.retained.map_or(0, |times| times.saturating_sub(1));
                context.retained = Some(left);
            });
            if left == 0 {
                registry.end_context(context);
            }
            Ok(())
        },
    )
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuCtxCreate_v2(
    pctx: Out<Handle>,
    _flags: c_uint,
    dev: c_int,
) -> Code {
    call("cuCtxCreate_v2", WORK, Of::Opening(dev), || {
        if pctx.is_null() {
            return Err(INVALID_VALUE);
        }
        let mut registry = registry();
        let engine = registry.open_engine(dev)?;
        let context = registry.new_context(&engine, dev, None);
        stack::with_stack(|stack| stack.push(number(context)));
        pctx.put(context)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuCtxDestroy_v2(ctx: Handle) -> Code {
    call("cuCtxDestroy_v2", FREE, Of::Handle(ctx), || {
        let mut registry = registry();
        let (found, context) = registry.find(&registry.contexts, ctx)?;
        if context.retained.is_some() {
            let text = format!("primary context {found:#x} destroyed instead of released");
            context.engine.blame(text);
            return Err(INVALID_CONTEXT);
        }
        registry.end_context(found);
        stack::with_stack(|stack| {
            if stack.last() == Some(&found) {
                stack.pop();
            }
        });
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuCtxPushCurrent_v2(ctx: Handle) -> Code {
    call("cuCtxPushCurrent_v2", QUIET, Of::Handle(ctx), || {
        let registry = registry();
        let (found, _) = registry.find(&registry.contexts, ctx)?;
        stack::with_stack(|stack| stack.push(found)).ok_or(INVALID_CONTEXT)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuCtxPopCurrent_v2(pctx: Out<Handle>) -> Code {
    call("cuCtxPopCurrent_v2", QUIET, Of::Current, || {
        let popped = stack::with_stack(Vec::pop).flatten();
        pctx.put_if(handle(popped.ok_or(INVALID_CONTEXT)?));
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuCtxSetCurrent(ctx: Handle) -> Code {
    call("cuCtxSetCurrent", QUIET, Of::Handle(ctx), || {
        let registry = registry();
        let new = match number(ctx) {
            0 => None,
            _ => Some(registry.find(&registry.contexts, ctx)?.0),
        };
        let set = stack::with_stack(|stack| {
            stack.pop();
            stack.extend(new);
        });
        set.ok_or(INVALID_CONTEXT)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuCtxGetCurrent(pctx: Out<Handle>) -> Code {
    call("cuCtxGetCurrent", QUIET, Of::Current, || {
        pctx.put(handle(stack::current().unwrap_or(0)))
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuCtxGetDevice(device: Out<c_int>) -> Code {
    call("cuCtxGetDevice", QUIET, Of::Current, || {
        let registry = registry();
        device.put(registry.current()?.1.ordinal)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuCtxSynchronize() -> Code {
    call("cuCtxSynchronize", WORK, Of::Current, || {
        let mut marks = Vec::new();
        let engine;
        {
            let registry = registry();
            let (found, context) = registry.current()?;
            engine = context.engine.clone();
            for queue in registry.busy_queues(found) {
                marks.push(engine.record(&queue)?);
            }
        }
        marks.iter().try_for_each(|mark| mark.wait())?;
        // Nothing was busy any more, either, if the engine failed just before.
        engine.lasting().map_or(Ok(()), Err)
    })
}
