//! ggml's quantised block types, used without conversion.
//!
//! A GGUF file stores a matrix row as blocks of 32 or 256 weights: integer codes of 2 to 6 or of 8 bits, and scales. [`BlockType`](crate::block_type::BlockType) unpacks a
//! block of any type to one common format, [`Unpacked`](crate::block_type::Unpacked). [`BlockPanels`] packs that format for the processor's registers, without loss and
//! in about the same number of bytes. The kernels in `decode` compute fp32 weights in registers: `weight = value(code) * scale + shift`.
//! The weights equal those that the `gguf` package dequantises.

mod codes;
mod decode;
mod digits;
mod grid;
mod panels;
mod rounded;
mod scales;

pub(crate) use codes::expand_codes;
pub(crate) use decode::{expand, fused_rows, multiply};
pub(crate) use digits::{Digits, TileDigits, multiply_digits};
pub(crate) use panels::{BlockPanels, CodeOrder, WordOrder};
pub(crate) use rounded::{RoundedSink, each_rounded, expand_rounded};

#[cfg(test)]
pub(crate) mod tests;
