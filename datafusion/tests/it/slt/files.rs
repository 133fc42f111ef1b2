//! The files, their records, and what their statements read and write.

use std::fs;
use std::path::Path;

use datafusion::DATAFUSION_VERSION;

use crate::prelude::*;

/// A statement or query of a file.
pub(super) struct Record {
    pub(super) line: usize,
    pub(super) sql: String,
    /// Whether the file says that it fails.
    pub(super) fails: bool,
}

impl Record {
    /// Whether it is a query, which changes nothing.
    pub(super) fn reads(&self) -> bool {
        let mut words = self.sql.split(|c: char| !c.is_alphabetic());
        let first = words.find(|word| !word.is_empty()).unwrap_or("");
        ["select", "values", "with"].contains(&first.to_lowercase().as_str())
    }
}

/// The folder of the crate's source, and one for what the statements read and write.
pub(super) struct Folder {
    source: PathBuf,
    own: PathBuf,
}

impl Folder {
    pub(super) fn new(run: &str) -> Self {
        let own = Path::new(env!("CARGO_TARGET_TMPDIR")).join("slt").join(run);
        let _ = fs::remove_dir_all(&own);
        fs::create_dir_all(own.join("data")).unwrap();
        stand_ins(&own.join("data"));
        Self {
            source: source(),
            own,
        }
    }

    /// All files but those of functions that need another crate, by their paths, the largest first.
    pub(super) fn names(&self) -> Vec<String> {
        let (root, mut names) = (self.source.join("test_files"), Vec::new());
        let mut folders = vec![root.clone()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                let name = path.strip_prefix(&root).unwrap().to_str().unwrap();
                if path.is_dir() && name != "spark" {
                    folders.push(path);
                } else if name.ends_with(".slt") {
                    names.push((path.metadata().unwrap().len(), name.to_owned()));
                }
            }
        }
        names.sort();
        names.into_iter().rev().map(|(_, name)| name).collect()
    }

    pub(super) fn records(&self, name: &str) -> Vec<Record> {
        let mut records = Vec::new();
        parse(&self.source.join("test_files").join(name), &mut records);
        records
    }

    /// Where a session's statements write, which differs in one character.
    pub(super) fn scratch(&self, session: usize) -> String {
        format!("{}/scratch{session}/", self.own.display())
    }

    pub(super) fn make_scratch(&self, session: usize, name: &str) {
        let stem = Path::new(name).file_stem().unwrap();
        fs::create_dir_all(Path::new(&self.scratch(session)).join(stem)).unwrap();
    }

    /// The statement with the paths of this machine, for one of the sessions. `None` if there is no such data.
    pub(super) fn localized(&self, sql: &str, session: usize) -> Option<String> {
        let source = format!("'{}/", self.source.display());
        let data = format!("'{}/data/", self.own.display());
        let arrow = format!("{source}../datafusion-datasource-arrow-{DATAFUSION_VERSION}/");
        let mut sql = sql.replace("test_files/scratch/", &self.scratch(session));
        for (path, own) in [
            ("'test_files/", &format!("{source}test_files/")),
            ("'data/", &format!("{source}data/")),
            ("'../datasource-arrow/", &arrow),
            ("'../../testing/data/csv/", &data),
            ("'../core/tests/data/", &data),
        ] {
            sql = sql.replace(path, own);
        }
        let mut read = sql.split('\'').skip(1).step_by(2);
        let exists = |path: &str| {
            let elsewhere = path.starts_with("../") || path.starts_with(&data[1..]);
            !elsewhere || Path::new(path).exists()
        };
        read.all(exists).then(|| sql.clone())
    }
}

/// The folder of the crate with the files, which cargo unpacks when it is asked about the crate.
fn source() -> PathBuf {
    let cargo_home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let cargo_home = cargo_home.unwrap_or_else(|| std::env::home_dir().unwrap().join(".cargo"));
    let name = format!("datafusion-sqllogictest-{DATAFUSION_VERSION}");
    let find = || {
        let registries = fs::read_dir(cargo_home.join("registry/src")).ok()?;
        let mut folders = registries.map(|registry| registry.unwrap().path().join(&name));
        folders.find(|folder| folder.join("test_files").exists())
    };
    find().unwrap_or_else(|| {
        let name = name.replace("sqllogictest-", "sqllogictest@");
        let info = Command::new(env!("CARGO"))
            .args(["info", "--quiet", &name])
            .output()
            .unwrap();
        let error = String::from_utf8_lossy(&info.stderr);
        find().unwrap_or_else(|| {
            panic!("cargo info {name} has not brought the SQL logic tests: {error}")
        })
    })
}

/// The records of a file and of those that it includes. What a file expects of results is left out.
fn parse(path: &Path, records: &mut Vec<Record>) {
    let text = fs::read_to_string(path).unwrap();
    let mut lines = text.lines().enumerate();
    let mut skipped = false;
    while let Some((i, line)) = lines.next() {
        let words: Vec<_> = line.split_whitespace().collect();
        match words[..] {
            ["onlyif", engine, ..] => skipped |= engine != "Datafusion",
            ["skipif", engine, ..] => skipped |= engine == "Datafusion",
            ["halt", ..] => return,
            // Those with a pattern for a name read data that the crate does not have.
            ["include", other, ..] if !other.contains('*') => {
                parse(&path.parent().unwrap().join(other), records);
            }
            ["statement" | "query", what, ..] => {
                let sql = lines.by_ref().map(|(_, line)| line);
                let sql: Vec<_> = sql.take_while(|line| !line.trim().is_empty()).collect();
                let end = sql.iter().position(|line| *line == "----");
                let record = Record {
                    line: i + 1,
                    sql: sql[..end.unwrap_or(sql.len())].join("\n"),
                    fails: what == "error",
                };
                if !std::mem::take(&mut skipped) {
                    records.push(record);
                }
            }
            _ => {}
        }
    }
}

/// Other data in place of what the files read and the crate does not have: of the same columns and orders. The sessions are
/// compared with each other, so any rows will do.
fn stand_ins(folder: &Path) {
    let columns = |n| {
        (1..=n)
            .map(|i| format!("c{i}"))
            .collect::<Vec<_>>()
            .join(",")
            + "\n"
    };
    let (mut hundred, mut dates, mut simple) = (columns(13), columns(15), columns(3));
    let mut ordered = "a0,a,b,c,d\n".to_owned();
    let mut seed = 1u64;
    let mut next = || {
        seed = seed.wrapping_mul(6364136223846793005);
        seed = seed.wrapping_add(1442695040888963407);
        seed ^ (seed >> 29)
    };
    let fraction = |n: u64| (n >> 11) as f64 / (1u64 << 53) as f64;
    for i in 0..100 {
        let mut row = String::from(char::from(b'a' + (next() % 5) as u8));
        row += &format!(",{},{},{}", next() % 5 + 1, next() as i8, next() as i16);
        row += &format!(",{},{},{}", next() as i32, next() as i64, next() as u8);
        row += &format!(",{},{},{}", next() as u16, next() as u32, next());
        row += &format!(",{},{}", fraction(next()) as f32, fraction(next()));
        row += &format!(",{:016x}", next());
        let date = format!("2023-{:02}-{:02}", next() % 12 + 1, next() % 28 + 1);
        hundred += &format!("{row}\n");
        dates += &format!("{row},{date},{date}T{:02}:00:00\n", next() % 24);
        ordered += &format!("1,{},{},{i},{}\n", i / 50, i / 25, next() % 5);
    }
    for i in 1..=15 {
        let n = f64::from(i).sqrt() as u32;
        simple += &format!("{n}e-5,{n}e-12,{}\n", i % 2 == 0);
    }
    let write = |name, text| fs::write(folder.join(name), text).unwrap();
    write("aggregate_test_100.csv", hundred);
    write("aggregate_test_100_with_dates.csv", dates);
    write("window_2.csv", ordered);
    write("aggregate_simple.csv", simple);
}
