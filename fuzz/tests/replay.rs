//! Kept inputs and those that once found a defect, on stable Rust without libFuzzer.

use std::path::Path;

use arrow_device_fuzz::{TARGETS, run};

fn replay(folder: &str) {
    for (target, _) in TARGETS {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join(folder)
            .join(target);
        let files = std::fs::read_dir(&folder).into_iter().flatten().flatten();
        let mut files: Vec<_> = files.map(|file| file.path()).collect();
        files.sort();
        for file in &files {
            // Named where a run ends here.
            println!("{}", file.display());
            run(target, &std::fs::read(file).expect("the input is readable"));
        }
    }
}

#[test]
fn regressions() {
    replay("regressions");
}

#[test]
fn corpus() {
    replay("corpus");
}
