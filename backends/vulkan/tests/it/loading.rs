//! What is said of a loader that is too old, in a process of its own, which finds that one.

use std::path::Path;
use std::process::Command;

use arrow_device_conformance::assert_error;
use arrow_device_vulkan::{VulkanConfig, devices};

/// A loader of Vulkan 1.1, which lists devices, but whose instances lack functions of 1.2.
const OLD: &str = r#"
#include <string.h>
static int version(unsigned* out) { *out = 1u << 22 | 1u << 12; return 0; }
void* vkGetInstanceProcAddr(void* instance, const char* name) {
  return strcmp(name, "vkEnumerateInstanceVersion") ? 0 : (void*)version;
}
"#;

#[test]
#[cfg(target_os = "linux")]
fn a_loader_that_is_too_old() {
    const FINDS: &str = "ARROW_DEVICE_TEST_FINDS";
    if std::env::var_os(FINDS).is_some() {
        let expected = "Vulkan's loader is older than Vulkan 1.2; update it";
        assert_error(devices(), expected);
        return assert_error(VulkanConfig::new(0).open(), expected);
    }
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("old-loader");
    std::fs::create_dir_all(&folder).unwrap();
    let (source, library) = (folder.join("old.c"), folder.join("libvulkan.so.1"));
    std::fs::write(&source, OLD).unwrap();
    let mut compiler = Command::new(std::env::var("CC").unwrap_or_else(|_| "cc".into()));
    let compiler = compiler.args(["-shared", "-fPIC", "-o"]);
    let compiled = compiler.args([&library, &source]).status();
    assert!(compiled.unwrap().success());
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["loading::a_loader_that_is_too_old", "--exact"]);
    let output = child
        .env("LD_LIBRARY_PATH", folder)
        .env(FINDS, "1")
        .output();
    let output = output.unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let passed = output.status.success() && text.contains("1 passed");
    assert!(passed, "{text}");
}
