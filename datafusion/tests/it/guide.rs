//! The programs of the guide's page on DataFusion: they compile, they run, and they are the page's.

/// The tests of a program, which brings into scope itself what it uses.
macro_rules! program {
    ($file:literal) => {
        #[test]
        fn it_runs() {
            main().unwrap();
        }

        #[test]
        fn it_is_the_guides() {
            let block = format!("```rust\n{}```\n", include_str!($file));
            assert!(super::PAGE.contains(&block), "the page has another program");
        }
    };
}

const PAGE: &str = include_str!("../../../docs/guide/datafusion.md");

mod operator {
    include!("../guide/operator.rs");
    program!("../guide/operator.rs");
}

mod plugin {
    include!("../guide/plugin.rs");
    program!("../guide/plugin.rs");
}

mod table {
    include!("../guide/table.rs");
    program!("../guide/table.rs");
}

/// An operator that does nothing special needs no more than this of its author.
#[test]
fn an_operator_takes_at_most_60_lines() {
    let program = include_str!("../guide/operator.rs");
    let (_, operator) = program
        .split_once("/// Returns the first rows of each batch.")
        .unwrap();
    let (operator, _) = operator.split_once("#[tokio::main]").unwrap();
    let lines = operator.trim().lines().count();
    assert!(lines <= 60, "{lines} lines");
}
