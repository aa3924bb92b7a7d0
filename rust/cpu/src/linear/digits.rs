//! Products of fp32 rows and weights in integer codes with scales: products of bytes for few rows, and of matrix tiles for many.

use std::ops::Range;

use crate::aligned::AlignedVec;
use crate::block_type::BLOCK;
use crate::gemm::{Gemm, Scratch, Tiles, slices};
use crate::ggml::{BlockPanels, Digits, TileDigits, expand_codes, multiply_digits};
use crate::simd::{Int8, Isa, Kernel, ScaledProducts};
use crate::unsafe_slice::UnsafeSlice;

/// Rows from which matrix tiles are faster than products of bytes.
const MIN_ROWS: usize = 14;

/// Maximum inputs whose weights are expanded at once for several tiles: a block of ggml's K types. They stay in the processor's first-level
/// cache.
const DEPTH: usize = 256;

/// Pairs of a block.
const PAIRS: usize = BLOCK / 2;

/// Rows in `N` digits: 3, or 2 for activations of 16 bits.
#[derive(Debug, Default)]
pub(crate) struct DigitRows<const N: usize> {
    /// \[blocks of 32 inputs\]\[rows of the tile\] for each tile.
    digits: AlignedVec<Digits<N>>,
    /// For matrix tiles, instead of `digits`: \[blocks\]\[digits\]\[rows of the tile\]\[16 pairs\] for each tile.
    pairs: AlignedVec<u32>,
    /// The sum of each block, \[blocks\]\[rows of the tile\] for each tile, and those of its halves, \[blocks\]\[2\]\[rows\].
    sums: AlignedVec<f32>,
    halves: AlignedVec<f32>,
}

/// A view of the rows. The threads pack them in one phase and multiply them in a later one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SharedDigits<'a, const N: usize> {
    digits: UnsafeSlice<'a, Digits<N>>,
    pairs: UnsafeSlice<'a, u32>,
    sums: UnsafeSlice<'a, f32>,
    halves: UnsafeSlice<'a, f32>,
    /// Whether the digits are in bfloat16, for tiles.
    in_tiles: bool,
}

impl<const N: usize> DigitRows<N> {
    /// Allocates room for `rows` rows of `ins` numbers, of which about `together` are multiplied by one matrix.
    pub(crate) fn reserve(&mut self, isa: Isa, rows: usize, together: usize, ins: usize) {
        let blocks = rows * ins.div_ceil(BLOCK);
        if in_tiles(isa, together) {
            self.pairs.reserve(blocks * N * PAIRS);
            self.sums.reserve(blocks);
            self.halves.reserve(2 * blocks);
        } else {
            self.digits.reserve(blocks);
        }
    }

    /// Returns a view for the thread pool, for a call in which about `together` rows are multiplied by one matrix.
    pub(crate) fn shared(&mut self, isa: Isa, together: usize) -> SharedDigits<'_, N> {
        let Self { digits, pairs, sums, halves } = self;
        let in_tiles = in_tiles(isa, together);
        SharedDigits { digits: digits.shared(), pairs: pairs.shared(), sums: sums.shared(), halves: halves.shared(), in_tiles }
    }
}

fn in_tiles(isa: Isa, together: usize) -> bool {
    isa.has_tiles() && together >= MIN_ROWS
}

impl<const N: usize> SharedDigits<'_, N> {
    /// Multiplies tiles by panels of weights whose codes are expanded, with matrix tiles.
    ///
    /// # Safety
    ///
    /// As for [`Gemm::multiply`].
    unsafe fn multiply_tiles(
        self,
        isa: Isa,
        weights: &BlockPanels,
        panels: Range<usize>,
        tiles: &Tiles,
        sums: &mut [f32],
        scratch: &mut Scratch,
    ) {
        let (width, rows, group, stride) = (isa.panel(), tiles.rows(), weights.group(), weights.ins() / BLOCK);
        // The fewer rows, the more the start and the end of the products count.
        let depth = if tiles.range.len() == 1 { 4 * DEPTH } else { DEPTH };
        let row_sums = if group == BLOCK { self.sums } else { self.halves };
        scratch.pairs.reserve(depth / 2 * width);
        scratch.scales.reserve(2 * depth / group * width);
        // All panels use a slice of the rows while it is in the second-level cache.
        for inputs in slices(weights.ins(), weights.unit_inputs(), depth) {
            let pairs = &mut scratch.pairs[..inputs.len() / 2 * width];
            let scales = &mut scratch.scales[..2 * inputs.len() / group * width];
            for (panel, sums) in panels.clone().zip(sums.chunks_exact_mut(rows.len() * width)) {
                if inputs.start == 0 {
                    sums.fill(0.0);
                }
                expand_codes(isa, weights, panel, inputs.clone(), pairs, scales);
                let ahead = weights.after(&panels, panel, &inputs);
                for (part, height, _) in tiles.of_equal_height() {
                    let first = part.start * stride + inputs.start / BLOCK * height;
                    let blocks = (part.len() - height) * stride + inputs.len() / BLOCK * height;
                    let groups = |blocks: usize| blocks * BLOCK / group;
                    // SAFETY: the caller guarantees it.
                    let (rows_of_tiles, shifted) = unsafe {
                        let size = N * PAIRS;
                        (self.pairs.read(first * size, blocks * size), row_sums.read(groups(first), groups(blocks)))
                    };
                    let sums = &mut sums[(part.start - rows.start) * width..(part.end - rows.start) * width];
                    let (weights, ahead) = (&*pairs, ahead.clone());
                    ScaledProducts { height, digits: N, stride, group, rows: rows_of_tiles, weights, scales, shifted, sums, ahead }
                        .run(isa);
                }
            }
        }
    }
}

impl<const N: usize> Gemm for SharedDigits<'_, N> {
    type Weights = BlockPanels;

    unsafe fn pack(self, isa: Isa, tile: Range<usize>, row: usize, numbers: &[f32]) {
        let (blocks, height, start) = (numbers.len() / BLOCK, tile.len(), tile.start * numbers.len() / BLOCK);
        assert!(numbers.len().is_multiple_of(BLOCK) && tile.contains(&row));
        let row = row - tile.start;
        // SAFETY: the caller guarantees it.
        unsafe {
            if self.in_tiles {
                let size = N * PAIRS;
                let pairs = self.pairs.write(start * size, height * blocks * size);
                let (sums, halves) = (self.sums.write(start, height * blocks), self.halves.write(2 * start, 2 * height * blocks));
                isa.run(PackTiles::<N> { numbers, pairs, sums, halves, row, height });
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
        if self.in_tiles {
            // SAFETY: the caller guarantees it.
            return unsafe { self.multiply_tiles(isa, weights, panels, tiles, sums, scratch) };
        }
        let (width, rows, ins) = (isa.panel(), tiles.rows(), weights.ins());
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
struct Pack<'a, const N: usize> {
    numbers: &'a [f32],
    to: &'a mut [Digits<N>],
    row: usize,
    height: usize,
}

impl<const N: usize> Kernel for Pack<'_, N> {
    type Output = ();

    #[inline(always)]
    fn run<S: Int8>(self, s: S) {
        let Self { numbers, to, row, height } = self;
        for (to, numbers) in to[row..].iter_mut().step_by(height).zip(numbers.as_chunks::<BLOCK>().0) {
            *to = Digits::new(s, numbers);
        }
    }
}

/// Packs one of a tile's rows for matrix tiles.
struct PackTiles<'a, const N: usize> {
    numbers: &'a [f32],
    pairs: &'a mut [u32],
    sums: &'a mut [f32],
    halves: &'a mut [f32],
    row: usize,
    height: usize,
}

impl<const N: usize> Kernel for PackTiles<'_, N> {
    type Output = ();

    #[inline(always)]
    fn run<S: Int8>(self, s: S) {
        let Self { numbers, pairs, sums, halves, row, height } = self;
        for (b, numbers) in numbers.as_chunks::<BLOCK>().0.iter().enumerate() {
            let digits = TileDigits::<N>::new(s, numbers);
            sums[b * height + row] = digits.sum;
            for half in 0..2 {
                halves[(2 * b + half) * height + row] = digits.halves[half];
            }
            for (digit, from) in digits.pairs.iter().enumerate() {
                let start = ((b * N + digit) * height + row) * PAIRS;
                pairs[start..start + PAIRS].copy_from_slice(from);
            }
        }
    }
}
