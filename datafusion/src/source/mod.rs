//! Tables whose batches are on a device.

pub(super) mod batches;
pub(super) mod contract;
pub(super) mod declared;
pub(super) mod insert;
pub(super) mod scan;
pub(super) mod streams;
pub(super) mod table;
