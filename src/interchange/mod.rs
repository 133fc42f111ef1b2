//! Import and export of the C structs, and the rules of their ownership.

mod c_array;
mod export;
mod foreign;
mod import;
mod options;
pub(crate) mod schema;
pub(crate) mod validate;

#[cfg(feature = "async")]
pub(crate) use export::export;
#[cfg(feature = "async")]
pub(crate) use import::import_async;
pub use options::{ExportOptions, ImportOptions, ReleasePolicy, SyncPolicy, Validation};

use std::borrow::Cow;

use crate::data::layout::Nesting;
use crate::error::{Error, Result};

/// A place in a foreign struct and its descendants, which is written out only for errors.
pub(crate) enum Path<'a> {
    /// The root, under this name.
    Root(&'static str),
    Child(&'a Path<'a>, usize),
    Dictionary(&'a Path<'a>),
}

impl Path<'_> {
    /// The place of child `i`; a dictionary is the only child.
    fn below(&self, nesting: Nesting, i: usize) -> Path<'_> {
        match nesting {
            Nesting::Dictionary => Path::Dictionary(self),
            _ => Path::Child(self, i),
        }
    }

    fn text(&self) -> String {
        match self {
            Self::Root(name) => (*name).to_owned(),
            Self::Child(parent, i) => format!("{}.children[{i}]", parent.text()),
            Self::Dictionary(parent) => format!("{}.dictionary", parent.text()),
        }
    }

    /// Returns an error that names a member of the struct, or the struct itself if `member` is
    /// empty.
    pub(crate) fn invalid(&self, member: &str, message: impl Into<Cow<'static, str>>) -> Error {
        let mut path = self.text();
        if !member.is_empty() {
            path.push('.');
            path.push_str(member);
        }
        Error::invalid(path, message)
    }

    /// As [`invalid`](Self::invalid), as a result.
    fn error<T>(&self, member: &str, message: impl Into<Cow<'static, str>>) -> Result<T> {
        Err(self.invalid(member, message))
    }

    /// Refuses what is not `ok`.
    #[inline]
    pub(crate) fn check(&self, ok: bool, member: &str, why: impl FnOnce() -> String) -> Result<()> {
        match ok {
            true => Ok(()),
            false => self.error(member, why()),
        }
    }

    /// Refuses pointers that cannot be followed.
    #[inline]
    pub(crate) fn usable<T>(&self, member: &str, pointer: *mut T) -> Result<()> {
        let usable = !pointer.is_null() && pointer.is_aligned();
        self.check(usable, member, || {
            format!("is null or misaligned: {pointer:p}")
        })
    }
}
