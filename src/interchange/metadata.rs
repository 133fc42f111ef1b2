//! Key-value metadata in the encoding of the C data interface ("ArrowSchema.metadata" in the
//! specification): counts are native `int32_t`, unaligned; neither keys nor values end with a null
//! byte.

use std::collections::HashMap;
use std::ffi::c_char;

use crate::abi::ForeignSchema;
use crate::error::Error;
use crate::interchange::schema::text_of;

/// Decodes metadata; a null pointer means that there is none. If keys repeat, the last one counts.
///
/// # Safety
/// `metadata` is null or points to metadata, with all the bytes that the counts in it announce.
///
/// # Errors
/// A message for negative counts, and text that is not UTF-8.
pub(crate) unsafe fn decode_metadata(
    metadata: *const c_char,
) -> Result<HashMap<String, String>, String> {
    // arrow-rs decodes it as that of a schema, which the caller's guarantee makes right.
    let schema = ForeignSchema {
        metadata,
        ..ForeignSchema::empty()
    };
    schema.as_ref().metadata().map_err(text_of)
}

/// Encodes metadata in the order of its keys; returns `None` if there is none.
///
/// # Errors
/// [`Error::InvalidArgument`] if it is longer than 2^31 - 1 bytes.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn back(encoded: &[u8]) -> Result<HashMap<String, String>, String> {
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
        assert!(back(&encoded).unwrap_err().contains("utf-8"));
    }
}
