use crate::error::Result;
pub(crate) fn validate_full(data: &arrow_data::ArrayData, _path: &str) -> Result<()> {
    Ok(data.validate_full()?)
}
