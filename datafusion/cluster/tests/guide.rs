//! The programs of the guide's page on clusters: they compile, and they are the page's. The example `cluster` runs such programs.
#![allow(dead_code, reason = "nothing runs them")]
#![cfg(all(feature = "ballista", feature = "distributed"))]

const PAGE: &str = include_str!("../../../docs/guide/cluster.md");

/// The plugin of the page on DataFusion.
mod plugin {
    include!("../../examples/guide/plugin.rs");
}

mod executor {
    include!("guide/executor.rs");
}

mod worker {
    include!("guide/worker.rs");
}

#[test]
fn the_page_has_these_programs_and_no_others() {
    let programs = [
        include_str!("guide/executor.rs"),
        include_str!("guide/worker.rs"),
    ];
    for program in programs {
        let block = format!("```rust\n{program}```\n");
        assert!(PAGE.contains(&block), "the page has another program");
    }
    assert_eq!(PAGE.matches("```rust").count(), programs.len());
}
