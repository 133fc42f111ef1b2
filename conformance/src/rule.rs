//! [`Rule`]: one line of the contract, and its check.

use super::subject::Subject;
use super::watch::{Ended, watch};

/// The result of a rule that is not broken.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// The device keeps the rule.
    Kept,
    /// The rule does not apply, for this reason.
    Skipped(&'static str),
}

/// One line of the contract, and its check.
#[derive(Debug)]
pub struct Rule {
    pub(super) name: &'static str,
    pub(super) contract: &'static str,
    pub(super) check: fn(&Subject) -> Verdict,
}

impl Rule {
    /// Returns a short name, such as `event.wait`.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// Returns the line of the contract.
    pub fn contract(&self) -> &'static str {
        self.contract
    }

    /// Checks the rule, on a thread of its own. After an error the device may be in any state, what
    /// the check has allocated stays allocated, and the thread still runs if the check did not
    /// return within the subject's limit.
    ///
    /// # Errors
    /// Returns a description of what happened instead.
    pub fn check(&'static self, subject: &Subject) -> Result<Verdict, String> {
        match self.watched(subject) {
            Ended::Returned(verdict) => Ok(verdict),
            Ended::Panicked(seen) | Ended::Never(seen) => Err(seen),
        }
    }

    pub(super) fn watched(&'static self, subject: &Subject) -> Ended<Verdict> {
        let subject = subject.clone();
        let limit = subject.limit();
        watch(self.name, limit, move || (self.check)(&subject))
    }
}
