//! ggml's quantised block types, computed with as they are.
//!
//! A GGUF file stores a matrix row as blocks of 32 or 256 weights: integer codes of 4, 5, 6 or 8 bits, and scales. [`BlockType`] takes
//! a block of any type apart into one form, [`Unpacked`]; [`BlockPanels`] packs that form for the processor's registers, without
//! loss and in about as many bytes; the kernels of `decode` make fp32 weights of it in registers:
//! `weight = value(code) * scale + shift`, equal to what the gguf package dequantises.

mod decode;
mod panels;
mod types;

pub(crate) use decode::{expand, fused_rows, multiply};
pub(crate) use panels::BlockPanels;
pub(crate) use types::{BlockType, Unpacked};

/// Weights of the smallest block.
pub(crate) const BLOCK: usize = 32;

#[cfg(test)]
pub(crate) mod tests;
