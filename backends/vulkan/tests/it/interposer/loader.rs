//! Takes the place of Vulkan's loader (`loader.c`) before anything looks for it, so that `open` meets the interposer, too.

use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;

use ash::vk::PFN_vkGetInstanceProcAddr;
use libloading::Library;

use super::functions::get_instance_proc_addr;
use crate::rigs::is_required;

/// Where the real loader may be: by its name, ours would be found.
const PATHS: [&str; 4] = [
    "/usr/lib/x86_64-linux-gnu/libvulkan.so.1",
    "/usr/lib/aarch64-linux-gnu/libvulkan.so.1",
    "/usr/lib64/libvulkan.so.1",
    "/usr/lib/libvulkan.so.1",
];

static REAL: OnceLock<Option<PFN_vkGetInstanceProcAddr>> = OnceLock::new();

/// Takes the loader's place. Returns whether there is a loader; says why a test is skipped, or fails if it must not be.
pub(crate) fn replace() -> bool {
    let is_there = REAL.get_or_init(load).is_some();
    assert!(is_there || !is_required(), "none of {PATHS:?}");
    if !is_there {
        eprintln!("skipped: none of {PATHS:?}");
    }
    is_there
}

/// The real loader's function.
pub(crate) fn real() -> PFN_vkGetInstanceProcAddr {
    let found = REAL.get().copied().flatten();
    found.expect("only functions that `replace` has put in place ask for it")
}

/// `None` if there is no Vulkan.
fn load() -> Option<PFN_vkGetInstanceProcAddr> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/interposer/loader.c");
    let name = format!("loader-{}.so", std::process::id());
    let built = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let output = Command::new(&compiler)
        .args(["-std=c11", "-Wall", "-Werror", "-shared", "-fPIC"])
        .args(["-Wl,-soname,libvulkan.so.1", "-o"])
        .args([&built, &source])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{compiler}: {text}");
    // SAFETY: the library has no initialisers.
    let ours = unsafe { Library::new(&built) }.unwrap();
    std::fs::remove_file(&built).unwrap();
    // SAFETY: Vulkan's loader may be loaded on any thread.
    let load = |path| unsafe { Library::new(path) }.ok();
    let theirs = PATHS.into_iter().find_map(load)?;
    // SAFETY: the functions have these types.
    let real = unsafe {
        let set = ours.get::<unsafe extern "C" fn(PFN_vkGetInstanceProcAddr)>(b"loader_set\0");
        set.unwrap()(get_instance_proc_addr);
        *theirs.get(b"vkGetInstanceProcAddr\0").unwrap()
    };
    // They stay as long as the process.
    std::mem::forget([ours, theirs]);
    Some(real)
}
