//! Multiplication of weights in blocks of 8-bit or 4-bit integers by activations in blocks of 8-bit integers.
//!
//! A block is 32 consecutive numbers, stored as integers with a scale: `scale * integer`, or `scale * integer + shift` for 4-bit weights.
//! Within a block the sums are integers, and so exact. The blocks' sums are fp32 and are added in ascending order. So a row's results do
//! not depend on the other rows.

mod dot;
mod rows;
mod weights;

pub(crate) use rows::{QuantRows, SharedRows};
use weights::Bits;
pub(crate) use weights::QuantWeights;

use crate::block_type::BLOCK;

#[cfg(test)]
mod tests;
