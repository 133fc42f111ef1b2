//! The library is found as HIP's is: by its SONAME, once it is loaded.

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libamdhip64.so.7");
}
