//! The query with the kernels of arrow-rs.

use arrow_arith::aggregate::sum;
use arrow_arith::boolean::and;
use arrow_arith::numeric::mul;
use arrow_array::cast::AsArray;
use arrow_array::types::Decimal128Type;
use arrow_array::{
    Array, ArrayRef, BooleanArray, Date32Array, Decimal128Array, RecordBatch, Scalar,
};
use arrow_ord::cmp::{gt_eq, lt, lt_eq};
use arrow_schema::ArrowError;
use arrow_select::filter::filter;

use crate::Result;
use crate::query::{self, DISCOUNTS, QUANTITY, YEAR};

/// Sums the revenue of the rows that the query selects.
pub(crate) fn query(batches: &[RecordBatch]) -> Result<RecordBatch> {
    let (mut revenue, mut rows) = (None, 0);
    for batch in batches {
        let [shipped, discount, quantity, price] = query::columns(batch);
        let selected = select(shipped, discount, quantity)?;
        let products = mul(&filter(price, &selected)?, &filter(discount, &selected)?)?;
        let products = products.as_primitive::<Decimal128Type>();
        rows += products.len() - products.null_count();
        if let Some(sum) = sum(products) {
            revenue = Some(sum.wrapping_add(revenue.unwrap_or(0)));
        }
    }
    Ok(query::result(revenue, rows as i64)?)
}

fn select(
    shipped: &ArrayRef,
    discount: &ArrayRef,
    quantity: &ArrayRef,
) -> std::result::Result<BooleanArray, ArrowError> {
    let date = |days| Scalar::new(Date32Array::from(vec![days]));
    let decimal = |value| {
        let value = Decimal128Array::from(vec![i128::from(value)]);
        value.with_precision_and_scale(15, 2).map(Scalar::new)
    };
    let in_year = and(
        &gt_eq(shipped, &date(YEAR.start))?,
        &lt(shipped, &date(YEAR.end))?,
    )?;
    let discounted = and(
        &gt_eq(discount, &decimal(*DISCOUNTS.start())?)?,
        &lt_eq(discount, &decimal(*DISCOUNTS.end())?)?,
    )?;
    and(
        &and(&in_year, &discounted)?,
        &lt(quantity, &decimal(QUANTITY)?)?,
    )
}
