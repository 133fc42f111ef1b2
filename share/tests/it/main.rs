//! The crate's tests, most of them with two real processes: this program starts itself as the other one.
#![cfg(all(target_os = "linux", not(miri)))]

mod deaths;
mod devices;
mod dictionaries;
mod hostile;
mod leases;
mod order;
mod raw;
mod round_trips;
mod stalls;
mod two;
mod users;

/// What the core's tests use, too.
#[allow(dead_code, unused_imports)]
#[path = "../../../tests/it/support"]
mod support {
    pub(crate) mod cases;
    pub(crate) mod compare;
    pub(crate) mod fork_kit;
    pub(crate) mod r#gen;
    mod rng;
    pub(crate) mod types;
    mod values;
    pub(crate) mod variants;

    pub(crate) use rng::Rng;
}
