//! Workers that are processes of their own.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use arrow_device::Device;
use arrow_device::device::sim::{SimConfig, SimDevice};
use arrow_device_datafusion::DeviceResolver;
use url::Url;

use crate::cluster::Worker;
use crate::data;
use crate::example;
use crate::nodes::{Parts, Urls, Way, coordinator, start_worker};
use crate::support::{assert_same, error, expected, query, tables};

const SQL: &str = "SELECT count(*), sum(l_quantity) FROM lineitem WHERE l_quantity < 24 AND l_shipdate > DATE '1995-01-01'";
/// Which makes this program a worker.
const WAY: &str = "DISTRIBUTED_TEST_WAY";

/// The worker of another process. Ends with its standard input.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn role() {
    let way = match std::env::var(WAY).as_deref() {
        Ok("workers") => Way::Workers,
        Ok("coordinator") => Way::Coordinator,
        _ => return,
    };
    // So slow that a query takes a while.
    let config = SimConfig {
        bytes_per_second: Some(200 << 10),
        ..SimConfig::default()
    };
    let device = Device::new(SimDevice::new(config).unwrap()).unwrap();
    let parts = Parts::new(way, DeviceResolver::of([device]));
    let url = start_worker(parts).await.unwrap();
    println!("\nready {url}");
    std::io::stdout().flush().unwrap();
    let end = || std::io::stdin().lines().for_each(drop);
    tokio::task::spawn_blocking(end).await.unwrap();
}

/// Ends with what has started it.
struct Process(Child);

impl Process {
    fn start(way: Way) -> (Self, Url) {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "processes::role", "--nocapture"]);
        let way = match way {
            Way::Workers => "workers",
            Way::Coordinator => "coordinator",
        };
        command
            .env(WAY, way)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut lines = lines.map_while(Result::ok);
        let url = lines.find_map(|line| Url::parse(line.strip_prefix("ready ")?).ok());
        (Self(child), url.unwrap())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

/// The query fails soon, the survivor keeps nothing, and the next query runs without the one that is gone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn that_are_killed() {
    expected(SQL).await;
    for way in [Way::Workers, Way::Coordinator] {
        let (mut process, gone) = Process::start(way);
        let survivor = Worker::new(way);
        let stays = start_worker(survivor.parts.clone()).await.unwrap();
        let both = coordinator(way, Urls(vec![gone, stays.clone()]), |builder| builder).unwrap();
        data::register(&both, tables()).await.unwrap();
        let session = both.clone();
        let running = tokio::spawn(async move { error(&session, SQL).await });
        tokio::time::sleep(Duration::from_millis(1500)).await;
        assert!(!running.is_finished(), "it was not slow enough");
        process.0.kill().unwrap();
        let killed = Instant::now();
        let e = running.await.unwrap();
        println!("{way:?}: after {:?}: {e}", killed.elapsed());
        assert!(killed.elapsed() < Duration::from_secs(20), "{e}");
        survivor.assert_clean();
        // It is still asked.
        let again = Instant::now();
        let e = error(&both, SQL).await;
        println!("{way:?}: after {:?}: {e}", again.elapsed());
        assert!(again.elapsed() < Duration::from_secs(20), "{e}");
        survivor.assert_clean();
        // In a cluster of one worker, the engine would run it in the coordinator.
        let another = Worker::new(way);
        let joins = start_worker(another.parts.clone()).await.unwrap();
        let rest = coordinator(way, Urls(vec![stays, joins]), |builder| builder).unwrap();
        data::register(&rest, tables()).await.unwrap();
        let found = query(&rest, SQL).await.unwrap();
        assert_same(
            &found,
            &expected(SQL).await,
            "without the worker that is gone",
        );
        survivor.assert_clean();
    }
}

/// Both ways, with two workers each.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_the_example() {
    example::check("distributed", 4, 6).await;
}
