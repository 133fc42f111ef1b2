//! A file in all sessions.

use std::sync::Arc;

use super::compare::{Outcome, outcome};
use super::exceptions::Exceptions;
use super::files::{Folder, Record};
use super::sessions::{Devices, KINDS, Session};

pub(super) const EQUAL: usize = 0;
/// It differs, and an exception names it.
pub(super) const EXCEPTED: usize = 1;
pub(super) const DIFFERENT: usize = 2;
/// The plain session returns other rows, too, if they are divided otherwise.
pub(super) const OPEN: usize = 3;
/// Its plan has device nodes.
pub(super) const ON_DEVICES: usize = 4;

#[derive(Default)]
pub(super) struct Counts {
    pub(super) statements: usize,
    /// Data of theirs are not in the crate.
    pub(super) no_data: usize,
    /// They fail in the plain session and not in the file: they need such data, or functions that this build does not have.
    pub(super) failing: usize,
    /// What came of the statements in each kind of session.
    pub(super) sessions: [[usize; 5]; KINDS.len()],
}

impl Counts {
    pub(super) fn and(mut self, other: Self) -> Self {
        self.statements += other.statements;
        self.no_data += other.no_data;
        self.failing += other.failing;
        let all = self.sessions.iter_mut().flatten();
        all.zip(other.sessions.iter().flatten())
            .for_each(|(own, other)| *own += other);
        self
    }

    pub(super) fn different(&self) -> usize {
        self.sessions.iter().map(|session| session[DIFFERENT]).sum()
    }
}

/// Runs a file and says what differs.
pub(super) async fn lockstep(
    name: String,
    folder: Arc<Folder>,
    exceptions: Arc<Exceptions>,
    devices: Arc<Devices>,
) -> Counts {
    let plain = devices.session(None);
    let sessions = KINDS.each_ref().map(|kind| devices.session(Some(kind)));
    (0..=KINDS.len()).for_each(|session| folder.make_scratch(session, &name));
    let mut counts = Counts::default();
    for record in folder.records(&name) {
        let Some(sql) = folder.localized(&record.sql, 0) else {
            counts.no_data += 1;
            continue;
        };
        let expected = outcome(&plain, &sql).await;
        if expected.is_error() && !record.fails {
            counts.failing += 1;
            continue;
        }
        counts.statements += 1;
        for (i, (kind, session)) in KINDS.iter().zip(&sessions).enumerate() {
            let own = folder.localized(&record.sql, i + 1).unwrap();
            let found = outcome(session, &own).await;
            let found = found.replace(&format!("/scratch{}/", i + 1), "/scratch0/");
            let count = &mut counts.sessions[i];
            count[ON_DEVICES] += usize::from(found.is_on_devices());
            let Some(text) = found.difference(&expected) else {
                count[EQUAL] += 1;
                continue;
            };
            let outcome = match exceptions.have(&name, kind.name, &record.sql, &text) {
                true => EXCEPTED,
                false if is_open(&record, &plain, &sql, &expected).await => OPEN,
                false => DIFFERENT,
            };
            count[outcome] += 1;
            if outcome != EXCEPTED {
                let open = if outcome == OPEN { " (open)" } else { "" };
                println!(
                    "{name}:{}, {}{open}: {}\n{text}\n",
                    record.line, kind.name, record.sql
                );
            }
        }
    }
    devices.check();
    counts
}

async fn is_open(record: &Record, plain: &Session, sql: &str, expected: &Outcome) -> bool {
    record.reads()
        && outcome(&plain.divided(), sql)
            .await
            .difference(expected)
            .is_some()
}
