//! Clusters of datafusion-distributed on this machine: a coordinator without a device and workers with simulated devices. What a cluster
//! returns is what one process without devices returns, whoever inserts the device operators.
#![cfg(feature = "distributed")]

mod cluster;
#[path = "../../examples/cluster/codec.rs"]
mod codec;
#[allow(dead_code)]
#[path = "../../examples/cluster/data.rs"]
mod data;
#[allow(dead_code, unused_imports)]
#[path = "../../../examples/sql/device_filter/mod.rs"]
mod device_filter;
#[path = "../support/example.rs"]
mod example;
mod explain;
mod failures;
mod mixed;
#[path = "../../examples/cluster/distributed/nodes.rs"]
mod nodes;
mod processes;
mod stages;
#[path = "../support/mod.rs"]
mod support;
mod tables;
mod tpch;
