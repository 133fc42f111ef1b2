//! The program of the guide's page on DataFusion: it compiles, it runs, and it is the page's.

/// The program, and nothing else: it brings into scope what it uses.
mod program {
    include!("guide/operator.rs");

    #[test]
    fn it_runs() {
        main().unwrap();
    }
}

#[test]
fn it_is_the_guides() {
    let own = include_str!("guide/operator.rs");
    let page = include_str!("../../docs/guide/datafusion.md");
    let block = format!("```rust\n{own}```\n");
    assert!(page.contains(&block), "the page has another program");
}
