//! Clusters of Ballista on this machine: a scheduler and executors with simulated devices, in one process. What a cluster returns
//! is what one process without devices returns.
#![cfg(feature = "ballista")]

mod cluster;
#[allow(dead_code)]
#[path = "../../examples/cluster/data.rs"]
mod data;
#[allow(dead_code, unused_imports)]
#[path = "../../../examples/sql/device_filter/mod.rs"]
mod device_filter;
#[path = "../support/example.rs"]
mod example;
mod failures;
mod mixed;
#[path = "../../examples/cluster/ballista/nodes.rs"]
mod nodes;
mod plugins;
#[allow(dead_code)]
#[path = "../../examples/cluster/processes.rs"]
mod processes;
mod programs;
#[allow(dead_code)]
#[path = "../../examples/cluster/report.rs"]
mod report;
#[allow(dead_code)]
#[path = "../support/mod.rs"]
mod support;
mod tpch;
mod windows;
