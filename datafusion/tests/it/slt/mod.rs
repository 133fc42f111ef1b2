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
mod sessions;

use std::sync::atomic::Ordering::Relaxed;

use crate::prelude::*;
use compare::{difference, outcome, replaced};
use exceptions::Exceptions;
use files::Folder;
use sessions::{Devices, KINDS, Kind};

/// What the gate runs: most kinds of statements and plans, and little that takes long.
const PART: &str = "aggregates_simplify case ddl dictionary dml_delete dml_update functional_dependencies insert \
    insert_to_external join_is_not_distinct_from null_aware_anti_join predicates prepare select struct topk union window_topn";

const PLAIN: &str = "plain";

/// How often something came of the statements in a kind of session, or in the plain one. The rows, the schema and the error are `equal`;
/// or they differ, and an exception says why (`excepted`), or the plain session has other rows, too, if they are divided otherwise
/// (`open`), or there is a fault (`different`). Besides, plans have nodes `on devices`.
type Counts = BTreeMap<(&'static str, &'static str), usize>;

#[test]
fn sessions_with_devices_do_what_a_plain_one_does() {
    let wanted = std::env::var("SLT").unwrap_or_else(|_| "part".to_owned());
    let is_wanted = |name: &String| match &*wanted {
        "part" => PART.split(' ').any(|part| *name == format!("{part}.slt")),
        "all" => true,
        some => some.split(',').any(|part| name.contains(part)),
    };
    let run = match &*wanted {
        run @ ("part" | "all") => run,
        _ => "some",
    };
    let start = Instant::now();
    let folder = Folder::new(run);
    let names: Vec<_> = folder.names().into_iter().filter(is_wanted).collect();
    let shared = Arc::new((folder, Exceptions::read(), Devices::new()));
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(4).enable_all().build().unwrap();
    let (count, done) = (names.len(), &AtomicUsize::new(0));
    let all = futures::stream::iter(names.clone()).map(|name| {
        let file = lockstep(name.clone(), shared.clone());
        async move {
            let begin = Instant::now();
            let counts = tokio::spawn(file).await.unwrap();
            let (done, seconds) = (
                done.fetch_add(1, Relaxed) + 1,
                begin.elapsed().as_secs_f32(),
            );
            let statements = counts.get(&(PLAIN, "run")).unwrap_or(&0);
            println!("[{done}/{count}] {name}: {statements} statements, {seconds:.1} s");
            counts
        }
    });
    let counts = runtime.block_on(all.buffer_unordered(2).collect::<Vec<_>>());
    // It may still have a statement that hangs.
    runtime.shutdown_background();
    let mut all = Counts::new();
    for (what, n) in counts.into_iter().flatten() {
        *all.entry(what).or_default() += n;
    }
    for ((kind, what), n) in &all {
        println!("{n:8} {what:12} {kind}");
    }
    println!("{count} files, {:.0} s", start.elapsed().as_secs_f32());
    let unused = shared.1.unused(&names).join("\n");
    assert_eq!(unused, "", "exceptions that match nothing");
    for Kind { name, .. } in KINDS {
        assert_eq!(all.get(&(name, "different")), None, "in {name}");
        assert!(all.contains_key(&(name, "on devices")), "none in {name}");
    }
}

/// Runs a file in all sessions, and says what differs.
async fn lockstep(name: String, shared: Arc<(Folder, Exceptions, Devices)>) -> Counts {
    let (folder, exceptions, devices) = &*shared;
    let plain = devices.session(None);
    let sessions = KINDS.each_ref().map(|kind| devices.session(Some(kind)));
    (0..=KINDS.len()).for_each(|session| folder.make_scratch(session, &name));
    let mut counts = Counts::new();
    let mut count = |kind, what| *counts.entry((kind, what)).or_default() += 1;
    for record in folder.records(&name) {
        let Some(sql) = folder.localized(&record.sql, 0) else {
            count(PLAIN, "without their data");
            continue;
        };
        let expected = outcome(&plain, &sql).await;
        // It needs such data, or functions that this build does not have.
        if expected.is_err() && !record.fails {
            count(PLAIN, "failing here and not in the file");
            continue;
        }
        count(PLAIN, "run");
        for (i, (kind, session)) in (1..).zip(KINDS.iter().zip(&sessions)) {
            let own = folder.localized(&record.sql, i).unwrap();
            let found = outcome(session, &own).await;
            let found = replaced(found, &format!("/scratch{i}/"), "/scratch0/");
            if found.as_ref().is_ok_and(|returned| returned.on_devices) {
                count(kind.name, "on devices");
            }
            let Some(text) = difference(&found, &expected) else {
                count(kind.name, "equal");
                continue;
            };
            if exceptions.have(&name, kind.name, &record.sql, &text) {
                count(kind.name, "excepted");
                continue;
            }
            let open = record.reads() && {
                let divided = outcome(&plain.divided(), &sql).await;
                difference(&divided, &expected).is_some()
            };
            let what = if open { "open" } else { "different" };
            count(kind.name, what);
            println!(
                "{name}:{}, {}, {what}: {}\n{text}\n",
                record.line, kind.name, record.sql
            );
        }
    }
    devices.check();
    counts
}
