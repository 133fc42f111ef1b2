//! The list of what differs.

use crate::prelude::*;
use std::sync::atomic::Ordering::Relaxed;

const KEYS: [&str; 7] = [
    "file",
    "sessions",
    "sql",
    "found",
    "root",
    "right",
    "sometimes",
];

/// An entry of `exceptions.toml`: the values of [`KEYS`], and whether anything has matched it.
struct Exception([String; KEYS.len()], AtomicBool);

pub(super) struct Exceptions(Vec<Exception>);

impl Exceptions {
    /// Reads the part of TOML that the file needs.
    pub(super) fn read() -> Self {
        let entries = include_str!("exceptions.toml").split("[[exception]]\n");
        let entry = |text: &str| {
            let mut values = <[String; KEYS.len()]>::default();
            let lines = text
                .lines()
                .filter(|l| !l.is_empty() && !l.starts_with('#'));
            for line in lines {
                let (key, value) = line.split_once(" = ").expect(line);
                let i = KEYS.iter().position(|known| *known == key).expect(line);
                assert_eq!(values[i], "", "twice: {line}");
                values[i] = value.trim_matches('"').replace("\\\"", "\"");
            }
            let [file, sessions, _, _, root, right, _] = &values;
            let is_empty = [file, sessions, root, right].map(String::is_empty);
            assert_eq!(is_empty, [false; 4], "{text}");
            Exception(values, AtomicBool::new(false))
        };
        Self(entries.skip(1).map(entry).collect())
    }

    /// Whether an entry names this difference.
    pub(super) fn have(&self, name: &str, session: &str, sql: &str, difference: &str) -> bool {
        let found = self.0.iter().find(|Exception(values, _)| {
            let [file, sessions, of_sql, found, ..] = values;
            (file == "*" || file == name)
                && (sessions == "*" || sessions.split("; ").any(|own| own == session))
                && sql.contains(of_sql)
                && difference.contains(found)
        });
        found.is_some_and(|Exception(_, used)| {
            used.store(true, Relaxed);
            true
        })
    }

    /// The entries that have matched nothing although their files were run.
    pub(super) fn unused(&self, names: &[String]) -> Vec<String> {
        let unused = self.0.iter().filter(|Exception(values, used)| {
            let [file, .., sometimes] = values;
            let ran = match &**file {
                "*" => names.len() > 200,
                file => names.iter().any(|name| name == file),
            };
            ran && sometimes.is_empty() && !used.load(Relaxed)
        });
        unused
            .map(|Exception(values, _)| values.join("; "))
            .collect()
    }
}
