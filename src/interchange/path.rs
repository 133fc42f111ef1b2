//! [`Path`]: where in a foreign struct a check is.

use std::borrow::Cow;

use crate::error::{Error, Result};

/// A place in a foreign struct and its descendants, which is written out only for errors.
pub(super) enum Path<'a> {
    /// The root, under this name.
    Root(&'static str),
    Child(&'a Path<'a>, usize),
    Dictionary(&'a Path<'a>),
}

impl Path<'_> {
    fn text(&self) -> String {
        match self {
            Self::Root(name) => (*name).to_owned(),
            Self::Child(parent, i) => format!("{}.children[{i}]", parent.text()),
            Self::Dictionary(parent) => format!("{}.dictionary", parent.text()),
        }
    }

    /// Returns an error that names a member of the struct, or the struct itself if `member` is
    /// empty.
    pub(super) fn error<T>(
        &self,
        member: &str,
        message: impl Into<Cow<'static, str>>,
    ) -> Result<T> {
        let mut path = self.text();
        if !member.is_empty() {
            path.push('.');
            path.push_str(member);
        }
        Err(Error::invalid(path, message))
    }

    /// Refuses pointers that cannot be followed.
    #[inline]
    pub(super) fn usable<T>(&self, member: &str, pointer: *mut T) -> Result<()> {
        if !pointer.is_null() && pointer.is_aligned() {
            return Ok(());
        }
        self.unusable(member, pointer.cast())
    }

    #[cold]
    fn unusable(&self, member: &str, pointer: *mut u8) -> Result<()> {
        if pointer.is_null() {
            return self.error(member, "is null");
        }
        self.error(member, format!("is misaligned: {pointer:p}"))
    }
}
