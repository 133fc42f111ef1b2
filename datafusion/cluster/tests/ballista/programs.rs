//! The example, whose cluster consists of processes.

use std::time::{Duration, Instant};

use tokio::process::Command;

use crate::cluster::*;
use crate::data::{self, QUERIES};
use crate::example;
use crate::nodes;
use crate::processes::Process;

/// A scheduler and two executors, three queries.
#[tokio::test(flavor = "multi_thread")]
async fn the_example_runs_and_leaves_no_process() {
    example::check("ballista", 3, 3).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_arguments_are_explained() {
    for (arguments, words) in [
        (&[][..], &["an engine is missing"][..]),
        (&["spark"], &["spark", "--features"]),
        (&["ballista", "--often"], &["--often"]),
    ] {
        let output = Command::new(example::program())
            .args(arguments)
            .output()
            .await;
        let output = output.unwrap();
        assert_eq!(output.status.code(), Some(2));
        let errors = String::from_utf8(output.stderr).unwrap();
        for word in words {
            assert!(errors.contains(word), "{errors}");
        }
    }
}

/// Killed in the middle of a query of many stages: the other one does its work, or the query fails with an error. With its adaptive
/// planner Ballista may wait forever: 4 of 8 times with its own engine.
#[tokio::test(flavor = "multi_thread")]
async fn a_killed_process() {
    let program = example::program();
    let start = async |name: &str, role: &[&str]| {
        let process = Process::start_program(&program, "ballista", name, role);
        process.await.unwrap()
    };
    let scheduler = start("the scheduler", &["scheduler", "8"]).await;
    let port = scheduler.address();
    let mut first = start("executor 1", &["executor", port, "1"]).await;
    let mut second = start("executor 2", &["executor", port, "2"]).await;
    let client = nodes::client(port.parse().unwrap(), false).await.unwrap();
    data::register(&client, tables()).await.unwrap();
    let (_, sql) = QUERIES[20];
    let wanted = expected(sql).await;

    let running = client.clone();
    // It takes as long as the scheduler needs to notice, which may be several times.
    let work = async move { running.sql(sql).await?.collect().await };
    let task = tokio::spawn(tokio::time::timeout(Duration::from_secs(240), work));
    // It works.
    while second.tasks().await.unwrap().is_empty() && !task.is_finished() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(!task.is_finished(), "too late");
    first.kill().await.unwrap();
    let start = Instant::now();
    match task.await.unwrap().expect("it hangs") {
        Ok(found) => assert_same(&found, &wanted, "of the one that is left"),
        Err(e) => println!("{e}"),
    }
    println!("the query ended {:?} after the executor", start.elapsed());

    let found = query(&client, sql).await.unwrap();
    assert_same(&found, &wanted, "of the one that is left");
    let tasks = second.tasks().await.unwrap();
    assert!(tasks.iter().any(|task| !task.operators.is_empty()));
}
