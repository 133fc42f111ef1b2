//! Key-value metadata in the encoding of the C data interface ("ArrowSchema.metadata" in the
//! specification): counts are native `int32_t`, unaligned; neither keys nor values end with a null
//! byte.

use std::borrow::Cow;
use std::collections::HashMap;
use std::ffi::c_char;

#[cfg(feature = "async")]
use crate::error::{Error, Result};

/// The longest encoded metadata, in bytes. The encoding does not state its length.
#[cfg(feature = "async")]
const MAX_METADATA: usize = i32::MAX as usize;

/// What a pair takes besides its text.
const PAIR: usize = 128;

/// How many more bytes may be taken.
pub(super) struct Budget {
    left: usize,
    /// The message if there are more.
    exceeded: &'static str,
}

impl Budget {
    pub(super) const fn new(bytes: usize, exceeded: &'static str) -> Self {
        Self {
            left: bytes,
            exceeded,
        }
    }

    pub(super) fn spend(&mut self, bytes: usize) -> std::result::Result<(), &'static str> {
        self.left = self.left.checked_sub(bytes).ok_or(self.exceeded)?;
        Ok(())
    }
}

/// Decodes metadata; a null pointer means that there is none. If keys repeat, the last one counts.
///
/// # Safety
/// `metadata` is null or points to metadata, with all the bytes that the counts in it announce.
///
/// # Errors
/// A message for negative counts, too many bytes, and text that is not UTF-8.
#[cfg(feature = "async")]
pub(crate) unsafe fn decode_metadata(
    metadata: *const c_char,
) -> std::result::Result<HashMap<String, String>, Cow<'static, str>> {
    let mut budget = Budget::new(
        MAX_METADATA,
        "more than 2^31 - 1 bytes, where each pair counts 128 besides its text",
    );
    // SAFETY: the caller guarantees what `decode_within` requires, which is the same.
    unsafe { decode_within(metadata, &mut budget) }
}

/// As `decode_metadata`, for at most the bytes of `budget`. Every byte is charged before it is
/// read, and each pair with [`PAIR`] more, including keys that repeat, of which the result has only one.
///
/// # Safety
/// `metadata` is null or points to metadata, with all the bytes that the counts in it announce.
pub(super) unsafe fn decode_within(
    metadata: *const c_char,
    budget: &mut Budget,
) -> std::result::Result<HashMap<String, String>, Cow<'static, str>> {
    let mut decoded = HashMap::new();
    if metadata.is_null() {
        return Ok(decoded);
    }
    let mut reader = Reader {
        start: metadata.cast(),
        read: 0,
        budget,
    };
    // The map grows entry by entry, so that a wrong count does not allocate.
    for _ in 0..reader.count()? {
        reader.budget.spend(PAIR)?;
        let key = reader.text()?;
        decoded.insert(key, reader.text()?);
    }
    Ok(decoded)
}

struct Reader<'a> {
    /// Points to metadata, as the caller of `decode_within` guarantees.
    start: *const u8,
    /// The bytes read so far.
    read: usize,
    budget: &'a mut Budget,
}

impl Reader<'_> {
    fn bytes(&mut self, n: usize) -> std::result::Result<&[u8], Cow<'static, str>> {
        self.budget.spend(n)?;
        // SAFETY: the caller of `decode_within` guarantees all the bytes that the counts announce,
        // and `n` is such a count or the size of one. No sum overflows, because the budget is
        // smaller than `isize::MAX`.
        let bytes = unsafe { std::slice::from_raw_parts(self.start.add(self.read), n) };
        self.read += n;
        Ok(bytes)
    }

    fn count(&mut self) -> std::result::Result<usize, Cow<'static, str>> {
        let mut count = [0; 4];
        count.copy_from_slice(self.bytes(4)?);
        usize::try_from(i32::from_ne_bytes(count)).map_err(|_| "a negative count or length".into())
    }

    fn text(&mut self) -> std::result::Result<String, Cow<'static, str>> {
        let n = self.count()?;
        match std::str::from_utf8(self.bytes(n)?) {
            Ok(text) => Ok(text.to_owned()),
            Err(e) => Err(format!("not UTF-8: {e}").into()),
        }
    }
}

/// Encodes metadata in the order of its keys; returns `None` if there is none.
///
/// # Errors
/// [`Error::InvalidArgument`] if it is longer than 2^31 - 1 bytes.
#[cfg(feature = "async")]
pub(crate) fn encode_metadata(metadata: &HashMap<String, String>) -> Result<Option<Vec<u8>>> {
    if metadata.is_empty() {
        return Ok(None);
    }
    let mut entries: Vec<_> = metadata.iter().collect();
    entries.sort_unstable();
    let bytes = entries
        .iter()
        .map(|(key, value)| 8 + key.len() + value.len());
    if bytes.sum::<usize>() > MAX_METADATA - 4 {
        return Err(Error::argument("metadata is longer than 2^31 - 1 bytes"));
    }
    // No count or length exceeds the sum.
    let mut encoded = (entries.len() as i32).to_ne_bytes().to_vec();
    for (key, value) in entries {
        for text in [key, value] {
            encoded.extend_from_slice(&(text.len() as i32).to_ne_bytes());
            encoded.extend_from_slice(text.as_bytes());
        }
    }
    Ok(Some(encoded))
}

#[cfg(all(test, feature = "async"))]
mod tests {
    use super::*;

    fn back(encoded: &[u8]) -> std::result::Result<HashMap<String, String>, Cow<'static, str>> {
        // SAFETY: every test passes all the bytes that its counts announce before the first fault.
        unsafe { decode_metadata(encoded.as_ptr().cast()) }
    }

    #[test]
    fn encoded_metadata_reads_back() {
        let entries = [("a", "1"), ("", ""), ("\u{e9}", "\0")];
        let metadata = HashMap::from(entries.map(|(k, v)| (k.to_owned(), v.to_owned())));
        let encoded = encode_metadata(&metadata).unwrap().unwrap();
        assert_eq!(back(&encoded).unwrap(), metadata);
        assert_eq!(encode_metadata(&HashMap::new()).unwrap(), None);
        // SAFETY: null means that there is no metadata.
        let none = unsafe { decode_metadata(std::ptr::null()) };
        assert!(none.unwrap().is_empty());
    }

    #[test]
    fn wrong_metadata_is_refused() {
        assert!(back(&(-1i32).to_ne_bytes()).is_err());
        let mut encoded = Vec::new();
        for n in [1i32, 1] {
            encoded.extend_from_slice(&n.to_ne_bytes());
        }
        encoded.push(0xff);
        assert!(back(&encoded).unwrap_err().contains("not UTF-8"));
        let mut encoded = 1i32.to_ne_bytes().to_vec();
        encoded.extend_from_slice(&i32::MAX.to_ne_bytes());
        assert!(back(&encoded).unwrap_err().contains("2^31"));
    }
}
