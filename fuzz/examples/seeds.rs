//! Writes the first inputs of each target: arrays of Arrow's integration files, and arrays of all types.
//!
//! ```sh
//! ARROW_TEST_DATA=.../arrow-testing/data cargo run --example seeds --features seeds -- FOLDER
//! ```

use std::path::PathBuf;

fn main() {
    let folder = PathBuf::from(std::env::args_os().nth(1).expect("the folder to write to"));
    let data = PathBuf::from(std::env::var_os("ARROW_TEST_DATA").expect("ARROW_TEST_DATA is set"));
    let seeds = arrow_device_fuzz::seeds::all(&data);
    let mut bytes = 0;
    for (i, (target, seed)) in seeds.iter().enumerate() {
        let folder = folder.join(target);
        std::fs::create_dir_all(&folder).expect("the folder can be made");
        std::fs::write(folder.join(format!("seed-{i:05}")), seed).expect("the file can be written");
        bytes += seed.len();
    }
    println!("{} inputs, {bytes} bytes", seeds.len());
}
