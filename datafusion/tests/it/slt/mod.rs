//! DataFusion's own SQL logic tests, statement by statement on a plain session and on sessions with devices: errors and
//! successes, schemas, rows, and their order where the query has one, are those of the plain session.
//!
//! The files are those of the crate `datafusion-sqllogictest` of DataFusion's version, which cargo fetches and nobody builds.
//! `exceptions.toml` names what differs, and why. The gate runs some of the files:
//!
//! ```text
//! cargo members --test datafusion slt::                                       # these
//! SLT=all cargo members --test datafusion slt:: -- --nocapture                # all: the stage sqllogictest of .ci/deep
//! SLT=joins,array/ cargo members --test datafusion slt:: -- --nocapture       # those with such names
//! ```

mod compare;
mod exceptions;
mod files;
mod lockstep;
mod sessions;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

use futures::StreamExt;

use exceptions::Exceptions;
use files::Folder;
use lockstep::{Counts, ON_DEVICES, lockstep};
use sessions::{Devices, KINDS};

/// What the gate runs: most kinds of statements and plans, and little that takes long.
const PART: &str = "aggregates_simplify case ddl dictionary dml_delete dml_update functional_dependencies insert \
    insert_to_external join_is_not_distinct_from null_aware_anti_join predicates prepare select struct topk union window_topn";

#[test]
fn sessions_with_devices_do_what_a_plain_one_does() {
    match std::env::var("SLT").as_deref() {
        Err(_) => run("part", |name| {
            PART.split(' ').any(|part| name == format!("{part}.slt"))
        }),
        Ok("all") => run("all", |_| true),
        Ok(some) => run("some", |name| {
            some.split(',').any(|part| name.contains(part))
        }),
    }
}

fn run(run: &str, wanted: impl Fn(&str) -> bool) {
    let start = Instant::now();
    let folder = Arc::new(Folder::new(run));
    let mut names = folder.names();
    names.retain(|name| wanted(name));
    let exceptions = Arc::new(Exceptions::read());
    let devices = Arc::new(Devices::new());
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(4).enable_all().build().unwrap();
    let (count, done) = (names.len(), AtomicUsize::new(0));
    let all = futures::stream::iter(names.clone()).map(|name| {
        let (folder, exceptions, devices) = (folder.clone(), exceptions.clone(), devices.clone());
        let file = lockstep(name.clone(), folder, exceptions, devices);
        let done = &done;
        async move {
            let begin = Instant::now();
            let counts = tokio::spawn(file).await.unwrap();
            let (done, seconds) = (done.fetch_add(1, Relaxed) + 1, begin.elapsed().as_secs_f32());
            let (statements, different) = (counts.statements, counts.different());
            println!("[{done}/{count}] {name}: {statements} statements, {different} different, {seconds:.1} s");
            counts
        }
    });
    let counts = runtime.block_on(all.buffer_unordered(2).collect::<Vec<_>>());
    // It may still have a statement that hangs.
    runtime.shutdown_background();
    let counts = counts.into_iter().fold(Counts::default(), Counts::and);
    let Counts {
        statements,
        no_data,
        failing,
        sessions,
    } = &counts;
    println!(
        "{statements} statements in {count} files, {:.0} s",
        start.elapsed().as_secs_f32()
    );
    println!(
        "left out: {no_data} read data that the crate does not have, {failing} fail in the plain session and not in the file"
    );
    println!(
        "{:24}       equal    excepted   different        open  on devices",
        "session"
    );
    for (kind, counts) in KINDS.iter().zip(sessions) {
        let counts = counts.map(|count| format!("{count:12}")).concat();
        println!("{:24}{counts}", kind.name);
    }
    let unused = exceptions.unused(&names);
    assert!(
        unused.is_empty(),
        "exceptions that match nothing:\n{}",
        unused.join("\n")
    );
    assert_eq!(counts.different(), 0, "sessions differ");
    assert!(
        sessions.iter().all(|counts| counts[ON_DEVICES] > 0),
        "no plan had a device node"
    );
}
