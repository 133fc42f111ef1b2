//! The operator of the README: it compiles, it works, and it is the README's.

/// The README's text, and nothing beside it: whatever it uses it brings into scope itself.
mod readme {
    include!("readme/operator.rs");

    mod tests {
        use arrow_device::Devices;
        use arrow_device_datafusion::DeviceTransitions;
        use datafusion::physical_optimizer::PhysicalOptimizerRule;
        use datafusion::physical_plan::{collect, displayable};
        use datafusion::prelude::SessionContext;

        use super::head;

        #[test]
        fn it_is_the_readmes() {
            let own = include_str!("readme/operator.rs");
            let readme = include_str!("../../README.md");
            let block = format!("A whole operator:\n\n```rust,ignore\n{own}```\n");
            assert!(readme.contains(&block), "the README has another text");
            let lines = own.lines().filter(|line| !line.trim().is_empty()).count();
            assert!(lines < 60, "{lines} lines");
        }

        #[tokio::test]
        async fn it_runs() {
            let context = SessionContext::new();
            let sql = "SELECT a, a * 2 AS b FROM (VALUES (1), (2), (NULL), (4)) AS t(a)";
            let plan = context.sql(sql).await.unwrap();
            let plan = plan.create_physical_plan().await.unwrap();
            let expected = collect(plan.clone(), context.task_ctx()).await.unwrap();
            let plan = head(plan, Devices::simulated().unwrap(), 3);
            let state = context.state();
            let plan = DeviceTransitions
                .optimize(plan, state.config_options())
                .unwrap();
            let text = displayable(&*plan).indent(false).to_string();
            let order = ["DeviceToHostExec", "HeadExec", "HostToDeviceExec"];
            let places = order.map(|name| text.find(name).expect(name));
            assert!(places.is_sorted(), "{text}");
            let result = collect(plan, context.task_ctx()).await.unwrap();
            assert_eq!(result, [expected[0].slice(0, 3)]);
        }
    }
}
