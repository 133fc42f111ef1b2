//! What the program has called and owns, and which call is to fail.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use ash::vk::{self, Handle};

/// What is to become of calls.
#[derive(Debug)]
struct Plan {
    /// `*`: of any function.
    name: &'static str,
    /// How many calls are still let through.
    skip: u64,
    /// How many calls fail then.
    times: u64,
    code: vk::Result,
}

#[derive(Debug)]
struct Account {
    calls: BTreeMap<&'static str, u64>,
    live: BTreeSet<(&'static str, u64)>,
    misuses: Vec<String>,
    plans: Vec<Plan>,
    /// The functions that a plan let fail.
    fired: Vec<&'static str>,
    /// The last value of each semaphore whose signal was submitted, and values that were waited for before.
    signalled: BTreeMap<u64, u64>,
    awaited: BTreeMap<u64, u64>,
}

impl Account {
    fn given(&self, semaphore: u64) -> u64 {
        self.signalled.get(&semaphore).copied().unwrap_or(0)
    }
}

static ACCOUNT: Mutex<Account> = Mutex::new(Account {
    calls: BTreeMap::new(),
    live: BTreeSet::new(),
    misuses: Vec::new(),
    plans: Vec::new(),
    fired: Vec::new(),
    signalled: BTreeMap::new(),
    awaited: BTreeMap::new(),
});

fn account() -> MutexGuard<'static, Account> {
    ACCOUNT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Counts a call. The result is what it returns instead of being made.
pub(crate) fn before(name: &'static str) -> Option<vk::Result> {
    let mut instead = None;
    {
        let mut account = account();
        *account.calls.entry(name).or_default() += 1;
        let Account { plans, fired, .. } = &mut *account;
        for plan in plans
            .iter_mut()
            .filter(|plan| ["*", name].contains(&plan.name))
        {
            if plan.skip > 0 {
                plan.skip -= 1;
            } else if plan.times > 0 {
                plan.times -= 1;
                instead = Some(plan.code);
                fired.push(name);
            }
        }
    }
    if instead == Some(vk::Result::ERROR_DEVICE_LOST) {
        // A lost device uses no memory any more, while the real one still works.
        super::functions::settle(devices());
    }
    instead
}

/// Counts a call that cannot fail.
pub(crate) fn count(name: &'static str) {
    *account().calls.entry(name).or_default() += 1;
}

/// An object was made.
pub(crate) fn made(kind: &'static str, object: impl Handle) {
    let mut account = account();
    if !account.live.insert((kind, object.as_raw())) {
        account.misuses.push(format!("a {kind} was made twice"));
    }
}

/// An object was used.
pub(crate) fn used(kind: &'static str, object: impl Handle) {
    let mut account = account();
    if !account.live.contains(&(kind, object.as_raw())) {
        let text = format!("a {kind} was used that does not exist");
        account.misuses.push(text);
    }
}

/// An object is about to be destroyed. Null objects are legal.
pub(crate) fn gone(kind: &'static str, object: impl Handle) {
    let object = object.as_raw();
    let mut account = account();
    if kind == "semaphore" {
        // Another one may get the handle.
        account.signalled.remove(&object);
        account.awaited.remove(&object);
    }
    if object != 0 && !account.live.remove(&(kind, object)) {
        let text = format!("a {kind} was destroyed that does not exist");
        account.misuses.push(text);
    }
}

/// The live devices.
fn devices() -> Vec<vk::Device> {
    let account = account();
    let devices = account.live.iter().filter(|(kind, _)| *kind == "device");
    devices
        .map(|(_, device)| vk::Device::from_raw(*device))
        .collect()
}

/// Memory that is freed is no longer mapped.
pub(crate) fn unmapped(memory: vk::DeviceMemory) {
    account().live.remove(&("mapped memory", memory.as_raw()));
}

/// Lets the `nth` call from now (the first: 1) of a function fail, once. `*`: of any function.
pub(crate) fn fail(name: &'static str, nth: u64, code: vk::Result) {
    plan(name, nth, 1, code);
}

/// Lets all calls from the `nth` on fail, as those of a lost device do.
pub(crate) fn fail_from(name: &'static str, nth: u64, code: vk::Result) {
    plan(name, nth, u64::MAX, code);
}

fn plan(name: &'static str, nth: u64, times: u64, code: vk::Result) {
    let skip = nth - 1;
    account().plans.push(Plan {
        name,
        skip,
        times,
        code,
    });
}

/// One submission was made: with so many command buffers, and these semaphores with their values. Values that the host signals may be
/// waited for before.
pub(crate) fn submitted(commands: u32, waits: &[(u64, u64)], signals: &[(u64, u64)]) {
    let mut account = account();
    if commands == 0 {
        account
            .misuses
            .push("a submission without a command buffer".into());
    }
    for (semaphore, value) in signals {
        let awaited = account.awaited.remove(semaphore);
        if awaited.is_some_and(|awaited| awaited.min(*value) > account.given(*semaphore)) {
            account
                .misuses
                .push("a value was waited for before its signal was submitted".into());
        }
        account.signalled.insert(*semaphore, *value);
    }
    for (semaphore, value) in waits {
        *account
            .calls
            .entry("semaphore that is waited for")
            .or_default() += 1;
        if *value > account.given(*semaphore) {
            account.awaited.insert(*semaphore, *value);
        }
    }
}

/// Ends all plans. The functions that failed, in their order.
pub(crate) fn clear() -> Vec<&'static str> {
    let mut account = account();
    account.plans.clear();
    std::mem::take(&mut account.fired)
}

/// How many calls of a function were made.
pub(crate) fn calls(name: &str) -> u64 {
    account().calls.get(name).copied().unwrap_or(0)
}

/// How many objects of each kind there are.
pub(crate) fn live() -> BTreeMap<&'static str, usize> {
    let mut kinds = BTreeMap::new();
    for (kind, _) in &account().live {
        *kinds.entry(*kind).or_default() += 1;
    }
    kinds
}

/// What was done to objects that do not exist.
pub(crate) fn misuses() -> Vec<String> {
    account().misuses.clone()
}
