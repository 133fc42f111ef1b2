//! Tests in processes of their own, which may find other libraries.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The folder with the libraries, in a process that is to find them.
const CHILD: &str = "ARROW_DEVICE_TEST_LIBRARY";

/// Runs tests of this program in a process of their own, whose output contains a text.
pub(crate) fn child(tests: &[&str], passed: &str, set: impl FnOnce(&mut Command)) {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(tests);
    set(&mut command);
    let output = command.output().unwrap();
    let both = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&both);
    assert!(output.status.success() && text.contains(passed), "{text}");
}

/// Runs one test of this program in a process that finds its libraries in a folder.
pub(crate) fn with_libraries(test: &str, folder: &Path) {
    child(&[test, "--exact"], "1 passed", |command| {
        command.env(CHILD, folder).env("LD_LIBRARY_PATH", folder);
    });
}

/// Whether this process is one of those with other libraries; their folder.
pub(crate) fn folder() -> Option<PathBuf> {
    std::env::var_os(CHILD).map(Into::into)
}

/// Builds a library in a folder, under a file's name.
pub(crate) fn build(folder: &Path, file: &str, source: &str, options: &[&str]) {
    let path = folder.join("source.c");
    std::fs::write(&path, source).unwrap();
    let mut compiler = Command::new("cc"); // rustc has it for its linker
    compiler.args(["-shared", "-fPIC", "-w", "-o"]);
    let built = compiler.args([&folder.join(file), &path]).args(options);
    assert!(built.status().unwrap().success());
}
