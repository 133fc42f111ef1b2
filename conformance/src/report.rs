//! [`Report`]: what became of each rule.

use std::fmt;

use super::rule::{Rule, Verdict};
use super::rules;
use super::subject::Subject;
use super::watch::Ended;

/// What became of each rule, in order. `Display` writes it as a table.
#[derive(Debug)]
pub struct Report {
    device: String,
    results: Vec<(&'static Rule, Outcome)>,
}

#[derive(PartialEq, Debug)]
enum Outcome {
    Kept,
    Skipped(&'static str),
    Broken(String),
    NotRun,
}

impl Report {
    /// Returns the rules that the device keeps.
    pub fn kept(&self) -> impl Iterator<Item = &'static Rule> {
        self.that_are(|outcome| (*outcome == Outcome::Kept).then_some(""))
            .map(|(rule, _)| rule)
    }

    /// Returns the rules that do not apply, and why.
    pub fn skipped(&self) -> impl Iterator<Item = (&'static Rule, &str)> {
        self.that_are(|outcome| match outcome {
            Outcome::Skipped(why) => Some(*why),
            _ => None,
        })
    }

    /// Returns the rules that the device breaks, and what happened.
    pub fn broken(&self) -> impl Iterator<Item = (&'static Rule, &str)> {
        self.that_are(|outcome| match outcome {
            Outcome::Broken(seen) => Some(seen.as_str()),
            _ => None,
        })
    }

    /// Returns the rules that were not checked, since a rule before them did not return.
    pub fn not_run(&self) -> impl Iterator<Item = &'static Rule> {
        self.that_are(|outcome| (*outcome == Outcome::NotRun).then_some(""))
            .map(|(rule, _)| rule)
    }

    fn that_are<'a>(
        &'a self,
        text: impl Fn(&'a Outcome) -> Option<&'a str>,
    ) -> impl Iterator<Item = (&'static Rule, &'a str)> {
        let results = self.results.iter();
        results.filter_map(move |(rule, outcome)| Some((*rule, text(outcome)?)))
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (kept, skipped) = (self.kept().count(), self.skipped().count());
        let (broken, not_run) = (self.broken().count(), self.not_run().count());
        let device = &self.device;
        write!(
            f,
            "{device}: {kept} rules kept, {skipped} skipped, {broken} broken"
        )?;
        if not_run > 0 {
            write!(f, ", {not_run} not run")?;
        }
        for (rule, outcome) in &self.results {
            let name = rule.name();
            match outcome {
                Outcome::Kept => write!(f, "\nkept     {name}")?,
                Outcome::Skipped(why) => write!(f, "\nskipped  {name}: {why}")?,
                Outcome::NotRun => write!(f, "\nnot run  {name}")?,
                Outcome::Broken(seen) => {
                    let contract = rule.contract();
                    write!(
                        f,
                        "\nBROKEN   {name}: {seen}\n         the contract: {contract}"
                    )?;
                }
            }
        }
        Ok(())
    }
}

/// Checks all rules in order, prints the table of the results, and returns it.
///
/// # Panics
/// Panics with the table if a rule is broken.
pub fn run(subject: &Subject) -> Report {
    let report = check_all(subject);
    let broken = report.broken().count();
    assert!(
        broken == 0,
        "a backend breaks {broken} rules of the contract\n{report}"
    );
    println!("{report}");
    report
}

/// Checks all rules in order. A rule that does not return within the limit is broken, and the last
/// one that is checked: its thread is abandoned.
pub fn check_all(subject: &Subject) -> Report {
    let mut results = Vec::new();
    let (mut stuck, mut broken) = (false, false);
    for rule in rules() {
        let outcome = if stuck {
            Outcome::NotRun
        } else if broken && rule.name() == "balance" {
            Outcome::Skipped("broken rules leave things behind")
        } else {
            match rule.watched(subject) {
                Ended::Returned(Verdict::Kept) => Outcome::Kept,
                Ended::Returned(Verdict::Skipped(why)) => Outcome::Skipped(why),
                Ended::Panicked(seen) => Outcome::Broken(seen),
                Ended::Never(seen) => {
                    stuck = true;
                    Outcome::Broken(seen)
                }
            }
        };
        broken |= matches!(outcome, Outcome::Broken(_));
        results.push((rule, outcome));
    }
    let device = subject.device.to_string();
    Report { device, results }
}
