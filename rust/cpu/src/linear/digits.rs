//! Products of fp32 rows and weights in integer codes with scales, by products of bytes.

use std::ops::Range;

use crate::aligned::AlignedVec;
use crate::block_type::BLOCK;
use crate::gemm::{Gemm, Scratch, Tiles};
use crate::ggml::{BlockPanels, Digits, multiply_digits};
use crate::simd::{Int8, Isa, Kernel};
use crate::unsafe_slice::UnsafeSlice;

/// Rows in digits, \[blocks of 32 inputs\]\[rows of the tile\] for each tile.
#[derive(Debug, Default)]
pub(crate) struct DigitRows(AlignedVec<Digits>);

/// A view of the rows. The threads pack them in one phase and multiply them in a later one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SharedDigits<'a>(UnsafeSlice<'a, Digits>);

impl DigitRows {
    /// Allocates room for `rows` rows of `ins` numbers, if the instruction set multiplies bytes.
    pub(crate) fn reserve(&mut self, isa: Isa, rows: usize, ins: usize) {
        if isa.has_digits() {
            self.0.reserve(rows * ins.div_ceil(BLOCK));
        }
    }

    /// Returns a view for the thread pool.
    pub(crate) fn shared(&mut self) -> SharedDigits<'_> {
        SharedDigits(self.0.shared())
    }
}

impl Gemm for SharedDigits<'_> {
    type Weights = BlockPanels;

    unsafe fn pack(self, isa: Isa, tile: Range<usize>, row: usize, numbers: &[f32]) {
        let (blocks, height) = (numbers.len() / BLOCK, tile.len());
        assert!(numbers.len().is_multiple_of(BLOCK) && tile.contains(&row));
        // SAFETY: the caller guarantees it.
        let to = unsafe { self.0.write(tile.start * blocks, height * blocks) };
        isa.run(Pack { numbers, to, row: row - tile.start, height });
    }

    unsafe fn multiply(self, isa: Isa, weights: &BlockPanels, panels: Range<usize>, tiles: &Tiles, sums: &mut [f32], _: &mut Scratch) {
        let (width, rows, blocks) = (isa.panel(), tiles.rows(), weights.ins() / BLOCK);
        for (panel, sums) in panels.zip(sums.chunks_exact_mut(rows.len() * width)) {
            for tile in tiles.each() {
                let sums = &mut sums[(tile.start - rows.start) * width..(tile.end - rows.start) * width];
                // SAFETY: the caller guarantees it.
                let packed = unsafe { self.0.read(tile.start * blocks, tile.len() * blocks) };
                multiply_digits(isa, weights, panel, packed, sums);
            }
        }
    }
}

/// Packs one of a tile's rows.
struct Pack<'a> {
    numbers: &'a [f32],
    to: &'a mut [Digits],
    row: usize,
    height: usize,
}

impl Kernel for Pack<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Int8>(self, _: S) {
        let Self { numbers, to, row, height } = self;
        for (to, numbers) in to[row..].iter_mut().step_by(height).zip(numbers.as_chunks::<BLOCK>().0) {
            *to = Digits::new(numbers);
        }
    }
}
