//! Products of fp32 rows and weights in integer codes with scales: products of bytes for few rows, and of matrix tiles for many.

use std::ops::Range;

use super::pieces::{DEPTH, Expansion, PAIRS, PieceRows, SharedPieces};
use crate::aligned::AlignedVec;
use crate::block_type::BLOCK;
use crate::gemm::{Gemm, Scratch, Tiles};
use crate::ggml::{BlockPanels, Digits, TileDigits, expand_codes, multiply_digits};
use crate::simd::{Int8, Isa, Kernel, PIECES};
use crate::unsafe_slice::UnsafeSlice;

/// Rows from which matrix tiles are faster than products of bytes.
const LEAST_ROWS: usize = 14;

/// Rows in digits.
#[derive(Debug, Default)]
pub(crate) struct DigitRows {
    /// \[blocks of 32 inputs\]\[rows of the tile\] for each tile.
    digits: AlignedVec<Digits>,
    /// For matrix tiles, instead of `digits`.
    pieces: PieceRows,
    /// The sum of each block, \[blocks\]\[rows of the tile\] for each tile, and those of its halves, \[blocks\]\[2\]\[rows\].
    sums: AlignedVec<f32>,
    halves: AlignedVec<f32>,
    has_tiles: bool,
}

/// A view of the rows. The threads pack them in one phase and multiply them in a later one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SharedDigits<'a> {
    digits: UnsafeSlice<'a, Digits>,
    pieces: SharedPieces<'a>,
    sums: UnsafeSlice<'a, f32>,
    halves: UnsafeSlice<'a, f32>,
    /// Whether the rows are in pieces, and not in digits.
    in_pieces: bool,
}

impl DigitRows {
    /// Allocates room for `rows` rows of `ins` numbers, if the instruction set multiplies bytes.
    pub(crate) fn reserve(&mut self, isa: Isa, rows: usize, ins: usize) {
        let blocks = rows * ins.div_ceil(BLOCK);
        self.has_tiles = isa.has_tiles();
        if self.in_pieces(rows) {
            self.pieces.reserve(isa, rows, ins);
            self.sums.reserve(blocks);
            self.halves.reserve(2 * blocks);
        } else if isa.has_digits() {
            self.digits.reserve(blocks);
        }
    }

    fn in_pieces(&self, rows: usize) -> bool {
        self.has_tiles && rows >= LEAST_ROWS
    }

    /// Returns a view for the thread pool, for a call with `rows` rows.
    pub(crate) fn shared(&mut self, rows: usize) -> SharedDigits<'_> {
        let in_pieces = self.in_pieces(rows);
        let Self { digits, pieces, sums, halves, .. } = self;
        SharedDigits { digits: digits.shared(), pieces: pieces.shared(), sums: sums.shared(), halves: halves.shared(), in_pieces }
    }
}

impl Gemm for SharedDigits<'_> {
    type Weights = BlockPanels;

    unsafe fn pack(self, isa: Isa, tile: Range<usize>, row: usize, numbers: &[f32]) {
        let (blocks, height, start) = (numbers.len() / BLOCK, tile.len(), tile.start * numbers.len() / BLOCK);
        assert!(numbers.len().is_multiple_of(BLOCK) && tile.contains(&row));
        let row = row - tile.start;
        // SAFETY: the caller guarantees it.
        unsafe {
            if self.in_pieces {
                let pieces = self.pieces.write(&tile, blocks);
                let (sums, halves) = (self.sums.write(start, height * blocks), self.halves.write(2 * start, 2 * height * blocks));
                isa.run(PackTiles { numbers, pieces, sums, halves, row, height });
            } else {
                isa.run(Pack { numbers, to: self.digits.write(start, height * blocks), row, height });
            }
        }
    }

    unsafe fn multiply(
        self,
        isa: Isa,
        weights: &BlockPanels,
        panels: Range<usize>,
        tiles: &Tiles,
        sums: &mut [f32],
        scratch: &mut Scratch,
    ) {
        let (width, rows, ins, group) = (isa.panel(), tiles.rows(), weights.ins(), weights.group());
        if self.in_pieces {
            let expand = |panel, inputs: Range<usize>, pairs: &mut [u32], scales: &mut [f32]| {
                expand_codes(isa, weights, panel, inputs.clone(), pairs, scales);
                (None, weights.after(panel, &inputs))
            };
            // The fewer rows, the more the start and the end of the products count.
            let depth = if tiles.range.len() == 1 { 4 * DEPTH } else { DEPTH };
            let row_sums = Some(if group == BLOCK { self.sums } else { self.halves });
            let weights = Expansion { ins, group, unit: weights.unit_inputs(), depth, row_sums, expand };
            // SAFETY: the caller guarantees it.
            return unsafe { self.pieces.multiply_expanded(isa, &weights, panels, tiles, sums, scratch) };
        }
        for (panel, sums) in panels.zip(sums.chunks_exact_mut(rows.len() * width)) {
            for tile in tiles.each() {
                let sums = &mut sums[(tile.start - rows.start) * width..(tile.end - rows.start) * width];
                // SAFETY: the caller guarantees it.
                let packed = unsafe { self.digits.read(tile.start * ins / BLOCK, tile.len() * ins / BLOCK) };
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

/// Packs one of a tile's rows for matrix tiles.
struct PackTiles<'a> {
    numbers: &'a [f32],
    pieces: &'a mut [u32],
    sums: &'a mut [f32],
    halves: &'a mut [f32],
    row: usize,
    height: usize,
}

impl Kernel for PackTiles<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Int8>(self, _: S) {
        let Self { numbers, pieces, sums, halves, row, height } = self;
        for (b, numbers) in numbers.as_chunks::<BLOCK>().0.iter().enumerate() {
            let digits = TileDigits::new(numbers);
            sums[b * height + row] = digits.sum;
            for half in 0..2 {
                halves[(2 * b + half) * height + row] = digits.halves[half];
            }
            for (piece, pairs) in digits.pairs.iter().enumerate() {
                let start = ((b * PIECES + piece) * height + row) * PAIRS;
                pieces[start..start + PAIRS].copy_from_slice(pairs);
            }
        }
    }
}
