//! Uploads, downloads and moves in plans.

pub(super) mod below;
pub(super) mod to_device;
pub(super) mod to_host;
