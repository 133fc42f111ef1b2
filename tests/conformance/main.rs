//! The conformance suite on every device there is without hardware, and on broken ones, which it
//! must refuse.

use std::sync::{Arc, Condvar, Mutex};

use arrow_device::{Device, Devices};
use arrow_device_conformance::{Hold, Poisoning, Rule, Subject, Verdict, rules, run};

#[cfg(all(target_os = "linux", not(miri)))]
mod broken;
mod pinned;
#[cfg(not(miri))]
mod sample;
#[cfg(all(target_os = "linux", not(miri)))]
mod simulated;
#[cfg(all(target_os = "linux", not(miri)))]
mod wrapped;

use pinned::Fresh;

#[global_allocator]
static ALLOCATOR: Poisoning = Poisoning;

/// Something to wait at until it is opened.
#[derive(Default)]
struct Gate {
    open: Mutex<bool>,
    opened: Condvar,
}

impl Gate {
    fn pass(&self) {
        let open = self.open.lock().unwrap();
        drop(self.opened.wait_while(open, |open| !*open).unwrap());
    }

    /// Opens this gate.
    fn hold(self: Arc<Self>) -> Hold {
        Hold::new(move || {
            *self.open.lock().unwrap() = true;
            self.opened.notify_all();
        })
    }
}

fn rule(name: &str) -> &'static Rule {
    let found = rules().iter().find(|rule| rule.name() == name);
    found.unwrap_or_else(|| panic!("no rule {name}"))
}

#[test]
fn cpu() {
    run(&Subject::new(Devices::cpu()));
}

#[test]
fn pinned() {
    if cfg!(miri) {
        return;
    }
    let (device, accounts) = pinned::device(Fresh::Written);
    let subject = Subject::new(device)
        .with_another(|| pinned::device(Fresh::Written).0)
        .with_hold(pinned::hold)
        .with_balance(move || accounts.balance());
    run(&subject);
}

#[test]
fn memory_that_nobody_has_written_is_noticed() {
    if cfg!(miri) {
        return;
    }
    let (device, _) = pinned::device(Fresh::Unwritten);
    let seen = rule("allocate.initialised").check(&Subject::new(device));
    assert!(seen.unwrap_err().contains("nobody has written"));
}

#[test]
fn rules_are_named_once_and_described() {
    let mut names: Vec<_> = rules().iter().map(Rule::name).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), rules().len());
    assert!(rules().iter().all(|rule| rule.contract().len() > 10));
}

#[test]
fn the_guide_lists_the_rules() {
    let guide = include_str!("../../docs/guide/backends.md");
    let (_, listed) = guide
        .split_once("| rule | contract |\n| --- | --- |\n")
        .unwrap();
    let rows = rules()
        .iter()
        .map(|r| format!("| `{}` | {} |", r.name(), r.contract()));
    let expected: Vec<_> = rows.collect();
    assert_eq!(listed.lines().collect::<Vec<_>>(), expected);
}

#[test]
fn what_does_not_apply_is_skipped() {
    let subject = Subject::new(Devices::cpu());
    let verdict = rule("event.wait").check(&subject);
    assert!(matches!(verdict, Ok(Verdict::Skipped(_))), "{verdict:?}");
    assert_eq!(rule("event.synchronous").check(&subject), Ok(Verdict::Kept));
}

/// That without a hold and a balance, no rule is kept that only these show.
#[cfg(not(miri))]
fn skips_what_it_cannot_see(report: &arrow_device_conformance::Report) {
    for (rule, missing) in [
        ("queue.never-waits", "no hold"),
        ("event.never-waits", "no hold"),
        ("queue.dropped", "no hold"),
        ("event.leaks", "no balance check"),
        ("balance", "no balance check"),
    ] {
        let mut skipped = report.skipped();
        let found = skipped.any(|(name, why)| name.name() == rule && why.contains(missing));
        assert!(found, "{rule}: {report}");
    }
}

/// A device of a backend of this test.
fn wrap(backend: Arc<dyn arrow_device::device::Backend>) -> Device {
    Device::new(backend).unwrap()
}
