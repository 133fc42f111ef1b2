//! Compiles the C interface over SYCL, if SYCL's headers are there. The library that this makes is part of the crate's own code
//! (`src/library.rs` says how it is loaded), so that a program finds it wherever it runs.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};

fn main() {
    println!("cargo:rerun-if-changed=cpp");
    println!("cargo:rustc-check-cfg=cfg(sycl)");
    for (name, _) in PLACES {
        println!("cargo:rerun-if-env-changed={name}");
    }
    let target = |name: &str| env::var(name).unwrap_or_default();
    if target("CARGO_CFG_TARGET_OS") != "linux" || target("CARGO_CFG_TARGET_POINTER_WIDTH") != "64"
    {
        return;
    }
    let Some(root) = roots().into_iter().find(|root| headers(root).exists()) else {
        return;
    };
    println!("cargo:rerun-if-changed={}", headers(&root).display());
    match compile(&root) {
        Ok(soname) => {
            println!("cargo:rustc-cfg=sycl");
            println!("cargo:rustc-env=ARROW_DEVICE_SYCL_SONAME={soname}");
        }
        Err(why) => {
            let root = root.display();
            eprintln!("{why}");
            eprintln!(
                "Set ARROW_DEVICE_SYCL to another installation of SYCL than {root}, or to nothing to build without SYCL."
            );
            std::process::exit(1);
        }
    }
}

include!("src/places.rs");

fn headers(root: &Path) -> PathBuf {
    root.join("include/sycl/version.hpp")
}

/// Returns the name under which programs load SYCL's library.
fn compile(root: &Path) -> Result<String, String> {
    let version = fs::read_to_string(headers(root)).map_err(|e| e.to_string())?;
    let major = version
        .lines()
        .find_map(|line| line.strip_prefix("#define __LIBSYCL_MAJOR_VERSION "));
    let major = major.ok_or(
        "sycl/version.hpp has no __LIBSYCL_MAJOR_VERSION: the SYCL of Intel or LLVM is needed",
    )?;
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("no OUT_DIR")?);

    let mut build = cc::Build::new();
    build
        .cpp(true)
        .std("c++17")
        .pic(true)
        .opt_level_str("2")
        .debug(false)
        .cargo_metadata(false);
    build
        .flag("-isystem")
        .flag(root.join("include"))
        .flag("-fvisibility=hidden");
    let compiler = build.try_get_compiler().map_err(|e| e.to_string())?;
    let mut command = compiler.to_command();
    command
        .arg("-shared")
        .arg("-o")
        .arg(out.join("shim.so"))
        .arg("cpp/shim.cpp");
    command
        .arg("-L")
        .arg(root.join("lib"))
        .args(["-lsycl", "-ldl", "-Wl,-s"]);
    match command.status() {
        Ok(status) if status.success() => Ok(format!("libsycl.so.{}", major.trim())),
        Ok(status) => Err(format!("{command:?} failed: {status}")),
        Err(e) => Err(format!("{command:?}: {e}")),
    }
}
