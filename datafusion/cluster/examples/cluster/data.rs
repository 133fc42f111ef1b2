//! The tables and queries of TPC-H: Parquet files that all processes of a cluster read.

use std::fs::{File, create_dir_all};
use std::path::Path;

use datafusion::arrow::array::RecordBatchReader;
use datafusion::error::{DataFusionError, Result};
use datafusion::parquet::arrow::ArrowWriter;
use datafusion::parquet::file::properties::WriterProperties;
use datafusion::prelude::{ParquetReadOptions, SessionContext};
use tpchgen::generators as tpch;
use tpchgen_arrow as arrow_tables;

/// At this one every query finds something; at 0.01, 17 does not. `q11.sql` depends on it.
pub(crate) const SCALE: f64 = 0.05;
/// How many files a large table has.
const FILES: i32 = 4;
/// How many rows a group of rows of a file has, at most.
const ROWS: usize = 8192;

macro_rules! queries {
    ($($name:literal)*) => {
        /// Their names and texts.
        pub(crate) const QUERIES: [(&str, &str); 22] = [
            $(($name, include_str!(concat!("../../../tests/queries/", $name, ".sql"))),)*
        ];
    };
}

queries! {
    "q01" "q02" "q03" "q04" "q05" "q06" "q07" "q08" "q09" "q10" "q11" "q12" "q13" "q14" "q15" "q16" "q17" "q18" "q19" "q20"
    "q21" "q22"
}

const TABLES: [&str; 8] = [
    "region", "nation", "supplier", "customer", "part", "partsupp", "orders", "lineitem",
];

/// Writes the tables into a folder, several at once.
pub(crate) fn write(dir: &Path) -> Result<()> {
    macro_rules! table {
        ($name:literal, $files:expr, $arrow:ident, $generator:ident) => {
            |dir: &Path| {
                (1..=$files).try_for_each(|part| {
                    let rows = tpch::$generator::new(SCALE, part, $files);
                    file(dir, $name, part, arrow_tables::$arrow::new(rows))
                })
            }
        };
    }
    type Write = fn(&Path) -> Result<()>;
    let tables: [Write; 8] = [
        table!("lineitem", FILES, LineItemArrow, LineItemGenerator),
        table!("orders", FILES, OrderArrow, OrderGenerator),
        table!("partsupp", FILES, PartSuppArrow, PartSuppGenerator),
        table!("part", FILES, PartArrow, PartGenerator),
        table!("customer", FILES, CustomerArrow, CustomerGenerator),
        table!("supplier", 1, SupplierArrow, SupplierGenerator),
        table!("nation", 1, NationArrow, NationGenerator),
        table!("region", 1, RegionArrow, RegionGenerator),
    ];
    std::thread::scope(|scope| {
        let writes = tables.map(|write| scope.spawn(move || write(dir)));
        let mut written = writes.into_iter().map(|write| {
            let panicked = |_| DataFusionError::Execution("writing a table panicked".to_owned());
            write.join().map_err(panicked)?
        });
        written.try_for_each(|written| written)
    })
}

fn file(dir: &Path, table: &str, part: i32, rows: impl RecordBatchReader) -> Result<()> {
    let dir = dir.join(table);
    create_dir_all(&dir)?;
    let file = File::create(dir.join(format!("{part}.parquet")))?;
    // So that every worker finds some in its part of the bytes of a file.
    let groups = WriterProperties::builder().set_max_row_group_row_count(Some(ROWS));
    let mut writer = ArrowWriter::try_new(file, rows.schema(), Some(groups.build()))?;
    for batch in rows {
        writer.write(&batch?)?;
    }
    writer.close()?;
    Ok(())
}

/// Registers the tables of a folder.
pub(crate) async fn register(context: &SessionContext, dir: &Path) -> Result<()> {
    for table in TABLES {
        let path = format!("{}/", dir.join(table).display());
        let options = ParquetReadOptions::default();
        context.register_parquet(table, path, options).await?;
    }
    Ok(())
}
