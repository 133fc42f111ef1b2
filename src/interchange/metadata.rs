//! Key-value metadata in the encoding of the C data interface ("ArrowSchema.metadata" in the
//! specification): counts are native `int32_t`, unaligned; neither keys nor values end with a null
//! byte.

use std::borrow::Cow;
use std::collections::HashMap;
use std::ffi::c_char;

#[cfg(feature = "async")]
use crate::error::Error;

/// What a pair takes besides its text.
const PAIR: usize = 128;

/// The most bytes that metadata, or a schema, may become: the encoding does not state its length, and structs may share children,
/// names and metadata, which are built anew for each use, so that a few could stand for any number.
pub(super) const MAX_BYTES: usize = 1 << 27;

/// The message for more.
pub(super) const TOO_LARGE: &str = "more than 2^27 bytes, where each field counts 512 and each pair of metadata 128 besides its text";

/// Decodes metadata; a null pointer means that there is none. If keys repeat, the last one counts. Every byte is taken off `left`
/// before it is read, and 128 more for each pair, including keys that repeat, of which the result has only one.
///
/// # Safety
/// `metadata` is null or points to metadata, with all the bytes that the counts in it announce.
///
/// # Errors
/// A message for negative counts, too many bytes, and text that is not UTF-8.
pub(super) unsafe fn decode_within(
    metadata: *const c_char,
    left: &mut usize,
) -> Decoded<HashMap<String, String>> {
    let mut decoded = HashMap::new();
    if metadata.is_null() {
        return Ok(decoded);
    }
    let mut reader = Reader {
        at: metadata.cast(),
        left,
    };
    // The map grows entry by entry, so that a wrong count does not allocate.
    for _ in 0..reader.count()? {
        reader.spend(PAIR)?;
        let key = reader.text()?;
        decoded.insert(key, reader.text()?);
    }
    Ok(decoded)
}

/// As [`decode_within`], with at most [`MAX_BYTES`].
///
/// # Safety
/// As [`decode_within`].
#[cfg(feature = "async")]
pub(crate) unsafe fn decode_metadata(metadata: *const c_char) -> Decoded<HashMap<String, String>> {
    // SAFETY: the caller guarantees the same.
    unsafe { decode_within(metadata, &mut { MAX_BYTES }) }
}

type Decoded<T> = Result<T, Cow<'static, str>>;

struct Reader<'a> {
    /// Points to what comes next of metadata, as the caller of [`decode_within`] guarantees.
    at: *const u8,
    /// How many more bytes may be taken.
    left: &'a mut usize,
}

impl Reader<'_> {
    fn spend(&mut self, bytes: usize) -> Result<(), &'static str> {
        *self.left = self.left.checked_sub(bytes).ok_or(TOO_LARGE)?;
        Ok(())
    }

    fn bytes(&mut self, n: usize) -> Decoded<&[u8]> {
        self.spend(n)?;
        // SAFETY: the caller of `decode_within` guarantees all the bytes that the counts announce,
        // and `n` is such a count or the size of one.
        unsafe {
            let bytes = std::slice::from_raw_parts(self.at, n);
            self.at = self.at.add(n);
            Ok(bytes)
        }
    }

    fn count(&mut self) -> Decoded<usize> {
        let mut count = [0; 4];
        count.copy_from_slice(self.bytes(4)?);
        usize::try_from(i32::from_ne_bytes(count)).map_err(|_| "a negative count or length".into())
    }

    fn text(&mut self) -> Decoded<String> {
        let n = self.count()?;
        let text = std::str::from_utf8(self.bytes(n)?);
        text.map(str::to_owned)
            .map_err(|e| format!("not UTF-8: {e}").into())
    }
}

/// Encodes metadata in the order of its keys; returns `None` if there is none.
///
/// # Errors
/// [`Error::InvalidArgument`] if it is longer than 2^31 - 1 bytes.
#[cfg(feature = "async")]
pub(crate) fn encode_metadata(
    metadata: &HashMap<String, String>,
) -> Result<Option<Vec<u8>>, Error> {
    if metadata.is_empty() {
        return Ok(None);
    }
    let mut entries: Vec<_> = metadata.iter().collect();
    entries.sort_unstable();
    let bytes = entries
        .iter()
        .map(|(key, value)| 8 + key.len() + value.len());
    if bytes.sum::<usize>() > i32::MAX as usize - 4 {
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

    fn back(encoded: &[u8]) -> Result<HashMap<String, String>, Cow<'static, str>> {
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
        assert!(back(&encoded).unwrap_err().contains("2^27"));
    }
}
