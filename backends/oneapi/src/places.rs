// Where SYCL may be installed, for the build script too, which includes this file.

/// Environment variables, and where an installation is under the folder that each names.
const PLACES: [(&str, &str); 6] = [
    ("ARROW_DEVICE_SYCL", ""),
    ("SYCL_HOME", ""),
    ("CMPLR_ROOT", ""),
    ("ONEAPI_ROOT", "compiler/latest"),
    // The wheels' files are beside Python's own.
    ("VIRTUAL_ENV", ""),
    ("CONDA_PREFIX", ""),
];

/// Returns the folders in which SYCL's `include` and `lib` may be, the first choice first. `ARROW_DEVICE_SYCL` is the only one if
/// it is set; if it is empty there is none.
pub(crate) fn roots() -> Vec<PathBuf> {
    let [(chosen, _), others @ ..] = PLACES;
    match env::var_os(chosen) {
        Some(root) if root.is_empty() => return Vec::new(),
        Some(root) => return vec![root.into()],
        None => {}
    }
    let named = others.into_iter().filter_map(|(name, below)| {
        let root = env::var_os(name).filter(|root| !root.is_empty())?;
        Some(Path::new(&root).join(below))
    });
    named.chain([PathBuf::from("/opt/intel/oneapi/compiler/latest")]).collect()
}
