//! Products of weights in blocks of 8-bit or 4-bit integers with activations in blocks of 8-bit ones.
//!
//! A block is 32 numbers that follow each other, as integers with a scale: `scale * integer`, of 4-bit weights
//! `scale * integer + shift`. Within a block sums are of integers, and so exact; the blocks' sums are fp32, added in ascending
//! order. So a row's results do not depend on the other rows.

mod dot;
mod rows;
mod weights;

pub(crate) use dot::tile;
pub(crate) use rows::{QuantRows, SharedRows};
use weights::Bits;
pub(crate) use weights::QuantWeights;

use crate::ggml::BLOCK;

#[cfg(test)]
mod tests;
