//! The example, whose cluster consists of processes.

use std::time::{Duration, Instant};

use tokio::process::Command;

use crate::cluster::*;
use crate::data;
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

/// Killed while both executors filter: the other one does its work, or the query fails with an error.
#[tokio::test(flavor = "multi_thread")]
async fn a_killed_process() {
    const SQL: &str = "SELECT count(*), sum(l_quantity) FROM lineitem WHERE l_quantity < 24";
    const BYTES_PER_SECOND: &str = "1000000";
    let program = example::program();
    let start = async |name: &str, role: &[&str]| {
        let process = Process::start_program(&program, "ballista", name, role);
        process.await.unwrap()
    };
    let wanted = expected(SQL).await;
    for adaptive in [true, false] {
        let scheduler = start("the scheduler", &["scheduler", "8"]).await;
        let port = scheduler.address();
        let role = ["slow executor", port, BYTES_PER_SECOND];
        let mut first = start("executor 1", &role).await;
        let mut second = start("executor 2", &role).await;
        let client = nodes::client(port.parse().unwrap(), adaptive).await;
        let client = client.unwrap();
        data::register(&client, tables()).await.unwrap();

        let running = client.clone();
        let task = tokio::spawn(async move { query(&running, SQL).await });
        tokio::time::sleep(Duration::from_millis(1500)).await;
        assert!(!task.is_finished(), "too late");
        first.kill().await.unwrap();
        let start = Instant::now();
        match task.await.unwrap() {
            Ok(found) => assert_same(&found, &wanted, "of the one that is left"),
            Err(e) => assert!(!e.to_string().contains("no end after"), "{e}"),
        }
        println!("the query ended {:?} after the executor", start.elapsed());

        let found = query(&client, SQL).await.unwrap();
        assert_same(&found, &wanted, "of the one that is left");
        let tasks = second.tasks().await.unwrap();
        assert!(tasks.iter().any(|task| !task.operators.is_empty()));
    }
}
