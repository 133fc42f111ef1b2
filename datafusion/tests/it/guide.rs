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

mod join {
    include!("../guide/join.rs");
    program!("../guide/join.rs");
}

mod plugin {
    include!("../guide/plugin.rs");
    program!("../guide/plugin.rs");
}

mod table {
    include!("../guide/table.rs");
    program!("../guide/table.rs");
}

mod sum {
    include!("../guide/sum.rs");

    #[test]
    fn it_runs() {
        main().unwrap();
    }

    #[test]
    fn the_guides_excerpts_are_its_own() {
        let unindented = |text: &str| text.lines().map(str::trim).collect::<Vec<_>>().join("\n");
        let program = unindented(include_str!("../guide/sum.rs"));
        let excerpts = super::PAGE.split("```rust,ignore\n").skip(1);
        let excerpts: Vec<_> = excerpts
            .map(|text| text.split("```").next().unwrap())
            .collect();
        assert_eq!(excerpts.len(), 3);
        for excerpt in excerpts {
            assert!(program.contains(unindented(excerpt).trim()), "{excerpt}");
        }
    }
}

/// A plugin with its operator, its kernel, and a query over a table on the host need no more than this.
#[test]
fn the_first_program_takes_at_most_60_lines() {
    let program = include_str!("../guide/operator.rs");
    let (_, program) = program.split_once("use futures::StreamExt;\n").unwrap();
    let lines = program.lines().filter(|line| !line.is_empty()).count();
    assert!(lines <= 60, "{lines} lines");
}
