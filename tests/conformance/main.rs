//! The conformance suite on every device there is without hardware, and on broken ones, which it
//! must refuse.

use std::sync::Arc;
use std::sync::{Condvar, Mutex};

use arrow_device::{Device, Devices};
use arrow_device_conformance::Hold;
use arrow_device_conformance::{Poisoning, Rule, Subject, Verdict, rules, run};

#[cfg(all(target_os = "linux", not(miri)))]
mod broken;
mod sample;
#[cfg(all(target_os = "linux", not(miri)))]
mod simulated;
mod unwritten;
#[cfg(all(target_os = "linux", not(miri)))]
mod wrapped;

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
fn memory_that_nobody_has_written_is_noticed() {
    if cfg!(miri) {
        return;
    }
    let device = wrap(Arc::new(unwritten::Unwritten));
    let seen = rule("allocate.initialised").check(&Subject::new(device));
    assert!(seen.unwrap_err().contains("nobody has written"));
}

#[test]
fn the_readme_lists_the_rules() {
    let readme = include_str!("../../conformance/README.md");
    let (_, listed) = readme
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
