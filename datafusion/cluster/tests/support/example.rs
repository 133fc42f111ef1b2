//! The example, whose cluster consists of processes.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tokio::process::Command;

/// How long the example may take, on a slow machine with other work.
const LONG: Duration = Duration::from_secs(480);

/// The example beside a test.
pub(crate) fn program() -> PathBuf {
    let this = std::env::current_exe().unwrap();
    let example = this.ancestors().nth(2).unwrap().join("examples/cluster");
    let build = "cargo build --features ballista,distributed --example cluster";
    assert!(example.exists(), "there is no example yet: {build}");
    example
}

/// Runs it, with so many processes and results, and checks that no process is left.
pub(crate) async fn check(engine: &str, processes: usize, results: usize) {
    let mut command = Command::new(program());
    let output = command.arg(engine).kill_on_drop(true).output();
    let output = tokio::time::timeout(LONG, output).await;
    let output = output.expect("it does not end").unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let errors = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{text}\n{errors}");
    for word in [
        "device sim:1",
        "device sim:2",
        "with device operators",
        "DeviceFilterExec",
        "bytes up",
        "bytes down",
        "one process without devices",
    ] {
        assert!(text.contains(word), "no {word:?} in\n{text}");
    }
    assert_eq!(text.matches("rows, the same").count(), results, "{text}");
    assert!(!text.contains("DIFFERENT"), "{text}");
    let lines = text.lines();
    let ids = lines.filter_map(|line| line.split_once(": process "));
    let ids = ids.filter_map(|(_, rest)| rest.split(',').next());
    let ids: Vec<&str> = ids.collect();
    assert_eq!(ids.len(), processes, "{text}");
    for id in ids {
        let end = Instant::now() + Duration::from_secs(10);
        while Path::new("/proc").join(id).exists() {
            assert!(Instant::now() < end, "process {id} is left");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}
