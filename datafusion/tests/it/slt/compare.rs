//! What a statement does in a session, and whether that is the same in two.

use std::collections::HashMap;

use datafusion::error::Result;
use datafusion::logical_expr::{Expr, LogicalPlan};

use super::sessions::Session;
use crate::prelude::*;

/// How long a statement may take in a session.
const LIMIT: Duration = Duration::from_secs(60);

type Row = Vec<String>;

/// What a statement returns.
pub(super) struct Returned {
    schema: SchemaRef,
    rows: Vec<Row>,
    /// The columns by which the rows are ordered, as far as they are known. `None`: they have no order.
    order: Option<Vec<usize>>,
    /// Its rows tell about the session, not of data.
    explains: bool,
    pub(super) on_devices: bool,
}

/// What a statement does, or the text of its error.
pub(super) type Outcome = Result<Returned, String>;

/// Runs a statement to its end, if it has one.
pub(super) async fn outcome(session: &Session, sql: &str) -> Outcome {
    let (ctx, sql) = (session.ctx.clone(), sql.to_owned());
    let mut task = tokio::spawn(async move { run(&ctx, &sql).await });
    let result = match tokio::time::timeout(LIMIT, &mut task).await {
        Ok(Ok(Ok(returned))) => session.move_tables().await.map(|()| returned),
        Ok(Ok(Err(e))) => Err(e),
        Ok(Err(panic)) => return Err(format!("it panicked: {panic}")),
        Err(_) => {
            task.abort();
            return Err(format!("it did not end within {LIMIT:?}"));
        }
    };
    result.map_err(|e| e.strip_backtrace())
}

async fn run(ctx: &SessionContext, sql: &str) -> Result<Returned> {
    let frame = ctx.sql(sql).await?;
    let (context, logical) = (frame.task_ctx(), frame.logical_plan().clone());
    let plan = frame.create_physical_plan().await?;
    let mut rows = Vec::new();
    for batch in collect(plan.clone(), context.into()).await? {
        texts(&batch, &mut rows)?;
    }
    Ok(Returned {
        schema: plan.schema(),
        rows,
        order: order(&logical),
        explains: matches!(logical, LogicalPlan::Explain(_) | LogicalPlan::Analyze(_)),
        on_devices: plan.exists(|node| Ok(DeviceExec::of(node).is_some()))?,
    })
}

/// Adds a batch's rows as texts: of floats fewer digits, since the last ones differ if they are added in another order.
fn texts(batch: &RecordBatch, rows: &mut Vec<Row>) -> Result<()> {
    let options = FormatOptions::new().with_null("NULL").with_types_info(true);
    let first = rows.len();
    rows.resize(first + batch.num_rows(), Row::new());
    for column in batch.columns() {
        let formatter = ArrayFormatter::try_new(column, &options)?;
        let digits = match column.data_type() {
            DataType::Float32 => Some(4),
            DataType::Float64 => Some(9),
            _ => None,
        };
        for (i, row) in rows[first..].iter_mut().enumerate() {
            let text = formatter.value(i).try_to_string()?;
            row.push(match (digits, text.parse::<f64>()) {
                (Some(digits), Ok(value)) => format!("{value:.digits$e}"),
                _ => text,
            });
        }
    }
    Ok(())
}

/// The columns of the result by which it is ordered, up to the first that is not in it.
fn order(plan: &LogicalPlan) -> Option<Vec<usize>> {
    let mut node = plan;
    let sort = loop {
        node = match node {
            LogicalPlan::Sort(sort) => break sort,
            LogicalPlan::Projection(projection) => &projection.input,
            LogicalPlan::SubqueryAlias(alias) => &alias.input,
            LogicalPlan::Limit(limit) => &limit.input,
            _ => return None,
        }
    };
    let found = sort.expr.iter().map_while(|sort| match &sort.expr {
        Expr::Column(column) => plan.schema().maybe_index_of_column(column),
        _ => None,
    });
    Some(found.collect())
}

/// The same with one text for another.
pub(super) fn replaced(mut outcome: Outcome, from: &str, to: &str) -> Outcome {
    let replace = |text: &mut String| *text = text.replace(from, to);
    match &mut outcome {
        Ok(returned) => returned.rows.iter_mut().flatten().for_each(replace),
        Err(text) => replace(text),
    }
    outcome
}

/// What differs from the outcome of a plain session.
pub(super) fn difference(found: &Outcome, plain: &Outcome) -> Option<String> {
    let (found, expected) = match (found, plain) {
        (Ok(found), Ok(expected)) => (found, expected),
        (Err(found), Err(expected)) => {
            let same = found.contains(own_text(expected));
            return (!same).then(|| format!("another error: {found}\nnot: {expected}"));
        }
        (Err(found), _) => return Some(format!("an error: {found}")),
        (_, Err(expected)) => return Some(format!("no error: {expected}")),
    };
    if found.schema != expected.schema {
        let (found, expected) = (&found.schema, &expected.schema);
        return Some(format!("another schema: {found}\nnot: {expected}"));
    }
    if expected.explains {
        return None;
    }
    let mut counts = HashMap::<&Row, i32>::new();
    let counted = |n| move |row| (row, n);
    let rows = found.rows.iter().map(counted(1));
    for (row, n) in rows.chain(expected.rows.iter().map(counted(-1))) {
        *counts.entry(row).or_default() += n;
    }
    let others = counts.iter().filter(|(_, n)| **n != 0);
    let others = others.map(|(row, n)| format!("{n:+} {}", row.join(" | ")));
    let others: Vec<_> = others.take(10).collect();
    if !others.is_empty() {
        return Some(format!("other rows:\n  {}", others.join("\n  ")));
    }
    let by = expected.order.as_ref()?;
    let keys = |row: &Row| by.iter().map(|&i| row[i].clone()).collect::<Row>();
    let expected = expected.rows.iter().map(keys);
    let same = found.rows.iter().map(keys).eq(expected);
    (!same).then(|| "another order".to_owned())
}

/// An error's own text, without what contexts have put before it, and without who has how much memory.
fn own_text(error: &str) -> &str {
    let line = error.lines().next().unwrap_or("");
    match "Resources exhausted" {
        memory if line.starts_with(memory) => memory,
        _ => line.rsplit(": ").next().unwrap_or(line),
    }
}
