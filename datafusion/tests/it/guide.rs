//! The programs of the guide's page on DataFusion. Those that stand on it as a whole are compiled and run as its documentation tests.

const PAGE: &str = include_str!("../../../docs/guide/datafusion.md");

/// The texts of the page's blocks of a kind.
fn blocks(kind: &str) -> Vec<&'static str> {
    let blocks = PAGE.split(kind).skip(1);
    blocks
        .map(|text| text.split("```").next().unwrap())
        .collect()
}

/// A plugin with its operator, its kernel, and a query over a table on the host need no more than this.
#[test]
fn the_first_program_takes_at_most_60_lines() {
    let (_, program) = blocks("```rust\n")[0]
        .split_once("use futures::StreamExt;\n")
        .unwrap();
    let lines = program.lines().filter(|line| !line.is_empty()).count();
    assert!(lines <= 60, "{lines} lines");
}

/// The cluster's tests compile it, too.
#[test]
fn the_plugin_is_the_pages() {
    let program = include_str!("../../examples/guide/plugin.rs");
    assert!(
        blocks("```rust\n").contains(&program),
        "the page has another program"
    );
}

/// The program of which the page has excerpts.
mod sum {
    include!("../../examples/guide/sum.rs");

    #[test]
    fn it_runs() {
        main().unwrap();
    }

    #[test]
    fn the_guides_excerpts_are_its_own() {
        let unindented = |text: &str| text.lines().map(str::trim).collect::<Vec<_>>().join("\n");
        let program = unindented(include_str!("../../examples/guide/sum.rs"));
        let excerpts = super::blocks("```rust,ignore\n");
        assert_eq!(excerpts.len(), 3);
        for excerpt in excerpts {
            assert!(program.contains(unindented(excerpt).trim()), "{excerpt}");
        }
    }
}
