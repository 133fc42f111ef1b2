//! What a statement does in a session, and whether that is the same in two.

use std::collections::HashMap;
use std::time::Duration;

use arrow_device_datafusion::DeviceExec;
use datafusion::arrow::array::{Array, RecordBatch};
use datafusion::arrow::datatypes::{DataType, SchemaRef};
use datafusion::arrow::util::display::{ArrayFormatter, FormatOptions};
use datafusion::error::Result;
use datafusion::logical_expr::{Expr, LogicalPlan};
use datafusion::physical_plan::collect;
use datafusion::prelude::SessionContext;

use super::sessions::Session;
use crate::kit::Plan;

/// How long a statement may take in a session.
const LIMIT: Duration = Duration::from_secs(60);

type Row = Vec<String>;

/// What a statement returns.
struct Returned {
    schema: SchemaRef,
    rows: Vec<Row>,
    /// The columns by which the rows are ordered, as far as they are known. `None`: they have no order.
    order: Option<Vec<usize>>,
    /// Its rows tell about the session, not of data.
    explains: bool,
    on_devices: bool,
}

/// What a statement does.
pub(super) struct Outcome(Result<Returned, String>);

/// Runs a statement to its end, if it has one.
pub(super) async fn outcome(session: &Session, sql: &str) -> Outcome {
    let (ctx, sql) = (session.ctx.clone(), sql.to_owned());
    let mut task = tokio::spawn(async move { run(&ctx, &sql).await });
    let result = match tokio::time::timeout(LIMIT, &mut task).await {
        Ok(Ok(Ok(returned))) => match session.move_tables().await {
            Ok(()) => Ok(returned),
            Err(e) => Err(e.strip_backtrace()),
        },
        Ok(Ok(Err(e))) => Err(e.strip_backtrace()),
        Ok(Err(panic)) => Err(format!("it panicked: {panic}")),
        Err(_) => {
            task.abort();
            Err(format!("it did not end within {LIMIT:?}"))
        }
    };
    Outcome(result)
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
        on_devices: has_device_node(&plan),
    })
}

fn has_device_node(plan: &Plan) -> bool {
    DeviceExec::of(plan).is_some() || plan.children().into_iter().any(has_device_node)
}

/// Adds a batch's rows as texts: of floats fewer digits, since the last ones differ if they are added in another order.
fn texts(batch: &RecordBatch, rows: &mut Vec<Row>) -> Result<()> {
    let options = FormatOptions::new().with_null("NULL").with_types_info(true);
    let formatters = batch.columns().iter().map(|column| {
        let digits = match column.data_type() {
            DataType::Float32 => Some(4),
            DataType::Float64 => Some(9),
            _ => None,
        };
        Ok((ArrayFormatter::try_new(column, &options)?, digits))
    });
    let formatters = formatters.collect::<Result<Vec<_>>>()?;
    for i in 0..batch.num_rows() {
        let texts = formatters.iter().map(|(formatter, digits)| {
            let text = formatter.value(i).try_to_string()?;
            Ok(match (digits, text.parse::<f64>()) {
                (Some(digits), Ok(value)) => format!("{value:.digits$e}"),
                _ => text,
            })
        });
        rows.push(texts.collect::<Result<_>>()?);
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

impl Outcome {
    pub(super) fn is_error(&self) -> bool {
        self.0.is_err()
    }

    pub(super) fn is_on_devices(&self) -> bool {
        self.0.as_ref().is_ok_and(|returned| returned.on_devices)
    }

    /// The same with one text for another.
    pub(super) fn replace(mut self, from: &str, to: &str) -> Self {
        let texts: Vec<&mut String> = match &mut self.0 {
            Ok(returned) => returned.rows.iter_mut().flatten().collect(),
            Err(text) => vec![text],
        };
        for text in texts {
            if text.contains(from) {
                *text = text.replace(from, to);
            }
        }
        self
    }

    /// What differs from the outcome of a plain session.
    pub(super) fn difference(&self, plain: &Self) -> Option<String> {
        let (found, expected) = match (&self.0, &plain.0) {
            (Ok(found), Ok(expected)) => (found, expected),
            (Err(found), Err(expected)) if found.contains(own_text(expected)) => return None,
            (Err(found), Err(expected)) => {
                return Some(format!("another error: {found}\nnot: {expected}"));
            }
            (Err(found), _) => return Some(format!("an error: {found}")),
            (_, Err(expected)) => return Some(format!("no error: {expected}")),
        };
        if found.schema != expected.schema {
            return Some(format!(
                "another schema: {}\nnot: {}",
                found.schema, expected.schema
            ));
        }
        if expected.explains {
            return None;
        }
        let (missing, more) = (
            without(&expected.rows, &found.rows),
            without(&found.rows, &expected.rows),
        );
        if missing.len() + more.len() > 0 {
            return Some(format!(
                "other rows: missing {}more {}",
                some(&missing),
                some(&more)
            ));
        }
        let by = expected.order.as_ref()?;
        let keys = |row: &Row| by.iter().map(|&i| row[i].clone()).collect::<Row>();
        let same = found
            .rows
            .iter()
            .map(keys)
            .eq(expected.rows.iter().map(keys));
        (!same).then(|| "another order".to_owned())
    }
}

/// An error's own text, without what contexts have put before it, and without who has how much memory.
fn own_text(error: &str) -> &str {
    let line = error.lines().next().unwrap_or("");
    match "Resources exhausted" {
        memory if line.starts_with(memory) => memory,
        _ => line.rsplit(": ").next().unwrap_or(line),
    }
}

/// The rows of `all` beyond those of `others`.
fn without<'a>(all: &'a [Row], others: &[Row]) -> Vec<&'a Row> {
    let mut counts = HashMap::<&Row, i32>::new();
    others
        .iter()
        .for_each(|row| *counts.entry(row).or_default() += 1);
    let beyond = all.iter().filter(|row| {
        let count = counts.entry(row).or_default();
        *count -= 1;
        *count < 0
    });
    beyond.collect()
}

fn some(rows: &[&Row]) -> String {
    let lines = rows
        .iter()
        .take(5)
        .map(|row| format!("  {}\n", row.join(" | ")));
    format!("{}:\n{}", rows.len(), lines.collect::<String>())
}
