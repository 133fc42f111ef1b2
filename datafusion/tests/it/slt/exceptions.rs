//! The list of what differs.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

/// An entry of `exceptions.toml`: its keys, and whether anything has matched it.
struct Exception {
    keys: HashMap<String, String>,
    used: AtomicBool,
}

impl Exception {
    /// What a key says; nothing matches everything.
    fn get(&self, key: &str) -> &str {
        self.keys.get(key).map_or("", String::as_str)
    }

    fn is_of(&self, name: &str) -> bool {
        self.get("file") == "*" || self.get("file") == name
    }

    fn matches(&self, name: &str, session: &str, sql: &str, difference: &str) -> bool {
        let sessions = self.get("sessions");
        self.is_of(name)
            && (sessions == "*" || sessions.split("; ").any(|own| own == session))
            && sql.contains(self.get("sql"))
            && difference.contains(self.get("found"))
    }
}

pub(super) struct Exceptions(Vec<Exception>);

impl Exceptions {
    /// Reads the part of TOML that the file needs.
    pub(super) fn read() -> Self {
        let mut found: Vec<Exception> = Vec::new();
        for line in include_str!("exceptions.toml").lines() {
            if line == "[[exception]]" {
                let (keys, used) = (HashMap::new(), AtomicBool::new(false));
                found.push(Exception { keys, used });
            } else if let Some((key, value)) = line.split_once(" = ") {
                let value = value.trim_matches('"').replace("\\\"", "\"");
                let keys = &mut found.last_mut().unwrap().keys;
                assert!(
                    [
                        "file",
                        "sessions",
                        "sql",
                        "found",
                        "root",
                        "right",
                        "sometimes"
                    ]
                    .contains(&key),
                    "{line}"
                );
                assert_eq!(keys.insert(key.to_owned(), value), None, "{line}");
            } else {
                assert!(line.is_empty() || line.starts_with('#'), "{line}");
            }
        }
        for entry in &found {
            for key in ["file", "sessions", "root", "right"] {
                assert_ne!(entry.get(key), "", "{key} of {:?}", entry.keys);
            }
        }
        Self(found)
    }

    /// Whether an entry names this difference.
    pub(super) fn have(&self, name: &str, session: &str, sql: &str, difference: &str) -> bool {
        let mut matching = self
            .0
            .iter()
            .filter(|e| e.matches(name, session, sql, difference));
        matching.next().is_some_and(|e| {
            e.used.store(true, Relaxed);
            true
        })
    }

    /// The entries that have matched nothing although their files were run.
    pub(super) fn unused(&self, names: &[String]) -> Vec<String> {
        let required = self.0.iter().filter(|e| e.get("sometimes").is_empty());
        let unused = required.filter(|e| !e.used.load(Relaxed));
        let ran = unused.filter(|e| match e.get("file") {
            "*" => names.len() > 200,
            _ => names.iter().any(|name| e.is_of(name)),
        });
        ran.map(|e| format!("{:?}", e.keys)).collect()
    }
}
