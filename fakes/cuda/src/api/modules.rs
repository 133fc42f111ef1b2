//! Modules, functions, launches.

use std::ffi::{c_char, c_uint, c_void};

use crate::call::{FREE, Of, WORK, call};
use crate::emulation::{Emulation, Grid};
use crate::ffi::*;
use crate::registry::{Function, Module, registry};

/// Takes the text of PTX. What it does is looked up by the names of its entries.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuModuleLoadData(module: Out<Handle>, image: In<c_void>) -> Code {
    call("cuModuleLoadData", WORK, Of::Current, || {
        if module.is_null() {
            return Err(INVALID_VALUE);
        }
        // Compiled images begin otherwise and need not end with a NUL.
        match image.cast::<u8>().get()? {
            b'/' | b'.' | b' ' | b'\t' | b'\n' | b'\r' => {}
            _ => return Err(INVALID_IMAGE),
        }
        let kernels = entries(&image.cast::<c_char>().text()?);
        if kernels.is_empty() {
            return Err(INVALID_PTX);
        }
        let mut registry = registry();
        let (context, found) = registry.current()?;
        let engine = found.engine.clone();
        let new = Module { context, kernels };
        module.put(registry.insert(|r| &mut r.modules, &engine, new))
    })
}

/// The names of a text's entries: `.entry NAME(`.
fn entries(text: &str) -> Vec<String> {
    let rest = text.split(".entry").skip(1).filter_map(|rest| {
        let rest = rest.strip_prefix([' ', '\t', '\n'])?;
        let (name, _) = rest.split_once('(')?;
        Some(name.trim().to_string())
    });
    rest.collect()
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuModuleUnload(hmod: Handle) -> Code {
    call("cuModuleUnload", FREE, Of::Handle(hmod), || {
        let mut registry = registry();
        registry.remove(|r| &mut r.modules, hmod)?;
        registry
            .functions
            .extract(|_, function| function.module == number(hmod));
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuModuleGetFunction(
    hfunc: Out<Handle>,
    hmod: Handle,
    name: In<c_char>,
) -> Code {
    call("cuModuleGetFunction", WORK, Of::Handle(hmod), || {
        let name = name.text()?;
        let mut registry = registry();
        let (module, found) = registry.find(&registry.modules, hmod)?;
        let context = found.context;
        let emulation = Emulation::of(&name).filter(|_| found.kernels.contains(&name));
        let emulation = emulation.ok_or(NOT_FOUND)?;
        if hfunc.is_null() {
            return Err(INVALID_VALUE);
        }
        let mut functions = registry.functions.iter();
        let same = functions.find(|(_, f)| f.module == module && f.emulation == emulation);
        if let Some((same, _)) = same {
            return hfunc.put(handle(same));
        }
        drop(functions);
        let engine = registry.owner(module).ok_or(INVALID_HANDLE)?;
        let new = Function {
            module,
            context,
            emulation,
        };
        hfunc.put(registry.insert(|r| &mut r.functions, &engine, new))
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuLaunchKernel(
    f: Handle,
    gridDimX: c_uint,
    gridDimY: c_uint,
    gridDimZ: c_uint,
    blockDimX: c_uint,
    blockDimY: c_uint,
    blockDimZ: c_uint,
    _sharedMemBytes: c_uint,
    hStream: Handle,
    kernelParams: In<In<u64>>,
    extra: In<c_void>,
) -> Code {
    call("cuLaunchKernel", WORK, Of::Handle(hStream), || {
        let mut registry = registry();
        let lane = registry.work_lane(hStream)?;
        let (_, function) = registry.find(&registry.functions, f)?;
        if function.context != lane.context {
            lane.engine
                .blame(format!("function {f:p} launched in another context"));
            return Err(INVALID_HANDLE);
        }
        let threads = [blockDimX, blockDimY, blockDimZ];
        let grid = Grid::new([gridDimX, gridDimY, gridDimZ], threads)?;
        if !extra.is_null() {
            return Err(NOT_SUPPORTED);
        }
        let emulation = function.emulation;
        let parameters = kernelParams.list(emulation.parameters())?;
        let parameters: Outcome<Vec<u64>> = parameters.into_iter().map(In::get).collect();
        drop(registry);
        emulation.launch(&lane, &grid, parameters?)
    })
}
