//! The library is found as the loader is: by its SONAME, once it is loaded.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libOpenCL.so.1");
}
