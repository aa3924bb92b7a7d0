//! Rows in bfloat16 pieces for matrix tiles, and their products with weights in bfloat16.
//!
//! An fp32 number is the sum of three bfloat16 numbers, its pieces. Their products with weights in bfloat16 are exact, and the sums of the
//! smaller pieces lose little, so the results are closer to the exact ones than those of fp32 vectors. The sum of two pieces is the number
//! rounded to 16 bits, and a single piece the number rounded to bfloat16.

use std::ops::Range;

use crate::aligned::AlignedVec;
use crate::block_type::BLOCK;
use crate::gemm::{Gemm, Scratch, Tiles, slices};
use crate::ggml::{BlockPanels, RoundedSink, each_rounded};
use crate::simd::{Isa, Kernel, PieceProducts, RegisterProducts, Simd, TILE};
use crate::unsafe_slice::UnsafeSlice;
use crate::weights::TilePanels;

/// Maximum inputs whose weights are expanded at once, in multiples of ggml's largest block. They stay in the first-level cache.
const DEPTH: usize = 256;

/// Blocks of weights that are in memory while they are multiplied: some that are read, and some that are written.
const TURNS: usize = 4;

/// Pairs of a block.
const PAIRS: usize = BLOCK / 2;

/// Rows in `P` pieces, \[blocks of 32 inputs\]\[pieces, the smallest first\]\[16 pairs\]\[rows of the tile\] for each tile.
#[derive(Debug, Default)]
pub(crate) struct PieceRows<const P: usize>(AlignedVec<u32>);

/// A view of the rows. The threads pack them in one phase and multiply them in a later one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SharedPieces<'a, const P: usize>(UnsafeSlice<'a, u32>);

impl<const P: usize> PieceRows<P> {
    /// Allocates room for `rows` rows of `ins` numbers.
    pub(crate) fn reserve(&mut self, rows: usize, ins: usize) {
        self.0.reserve(rows * ins.div_ceil(BLOCK) * P * PAIRS);
    }

    /// Returns a view for the thread pool.
    pub(crate) fn shared(&mut self) -> SharedPieces<'_, P> {
        SharedPieces(self.0.shared())
    }
}

impl<const P: usize> SharedPieces<'_, P> {
    /// Multiplies one or two tiles by a panel, a block at a time. Writes the sums to `scratch`.
    ///
    /// # Safety
    ///
    /// As for [`Gemm::multiply`].
    unsafe fn multiply_fused(self, isa: Isa, weights: &BlockPanels, panel: usize, tiles: &Tiles, scratch: &mut Scratch) {
        let (width, rows, count) = (isa.panel(), tiles.rows(), tiles.range.len());
        let size = weights.ins() / BLOCK * P * PAIRS;
        // SAFETY: the caller guarantees that the rows are packed. Decoding uses no tiles.
        unsafe {
            let packed = self.0.read(rows.start * size, rows.len() * size);
            let sums = &mut scratch.sums[..count * width * TILE];
            let mut products = Fused(RegisterProducts::begin(isa, tiles.each().map(|tile| tile.len()), P, packed, sums));
            each_rounded(isa, weights, panel, 0..weights.ins(), &mut scratch.pairs[..TURNS * PAIRS * width], &mut products);
            products.0.end();
        }
    }
}

impl<const P: usize> Gemm for SharedPieces<'_, P> {
    type Weights = TilePanels;

    unsafe fn pack(self, isa: Isa, tile: Range<usize>, row: usize, numbers: &[f32]) {
        assert!(numbers.len().is_multiple_of(BLOCK) && tile.contains(&row));
        let size = numbers.len() / BLOCK * P * PAIRS;
        // SAFETY: the caller guarantees it.
        let to = unsafe { self.0.write(tile.start * size, tile.len() * size) };
        isa.run_bf16(Pack::<P> { numbers, row: row - tile.start, height: tile.len(), to });
    }

    unsafe fn seal(self, isa: Isa, tile: &Range<usize>, ins: usize) {
        if tile.len() == 1 {
            return;
        }
        let size = ins / BLOCK * P * PAIRS;
        // SAFETY: the caller guarantees it.
        let pairs = unsafe { self.0.write(tile.start * size, tile.len() * size) };
        isa.run(Seal { pairs, height: tile.len() });
    }

    unsafe fn multiply(self, isa: Isa, weights: &TilePanels, panels: Range<usize>, tiles: &Tiles, sums: &mut [f32], scratch: &mut Scratch) {
        let (width, rows, ins) = (isa.panel(), tiles.rows(), weights.ins());
        let tile_sums = width * TILE;
        let panel_sums = tiles.range.len() * tile_sums;
        scratch.pairs.reserve(DEPTH / 2 * width);
        // The sums of one or two tiles stay in registers for all inputs.
        let few = tiles.range.len() <= 2;
        if let (TilePanels::Blocks(weights), true) = (weights, few) {
            scratch.sums.reserve(panel_sums);
            for (panel, sums) in panels.zip(sums.chunks_exact_mut(rows.len() * width)) {
                // SAFETY: the caller guarantees it.
                unsafe { self.multiply_fused(isa, weights, panel, tiles, scratch) };
                transpose(isa, tiles, &scratch.sums, sums);
            }
            return;
        }
        scratch.sums.reserve(panels.len() * panel_sums);
        let (depth, prefetch) = match weights {
            TilePanels::Numbers(_) if few => (ins, true),
            TilePanels::Numbers(_) => (if P == 3 { DEPTH / 2 } else { DEPTH }, true),
            TilePanels::Blocks(_) => (DEPTH, false),
        };
        // All panels use a slice of the rows while it is in the second-level cache.
        for inputs in slices(ins, weights.unit_inputs(), depth) {
            for (panel, sums) in panels.clone().zip(scratch.sums.chunks_exact_mut(panel_sums)) {
                let weights = weights.expand(isa, panel, inputs.clone(), &mut scratch.pairs);
                for (part, height, first) in tiles.of_equal_height() {
                    let (stride, blocks, count) = (ins / BLOCK, inputs.len() / BLOCK, part.len() / height);
                    let size = P * PAIRS * height;
                    let start = part.start * stride * P * PAIRS + inputs.start / BLOCK * size;
                    PieceProducts {
                        height,
                        pieces: P,
                        blocks,
                        stride,
                        weights,
                        // SAFETY: the caller guarantees it.
                        rows: unsafe { self.0.read(start, ((count - 1) * stride + blocks) * size) },
                        sums: &mut sums[first * tile_sums..(first + count) * tile_sums],
                        fresh: inputs.start == 0,
                        prefetch,
                    }
                    .run(isa);
                }
            }
        }
        for (from, to) in scratch.sums.chunks_exact(panel_sums).zip(sums.chunks_exact_mut(rows.len() * width)) {
            transpose(isa, tiles, from, to);
        }
    }
}

/// Multiplies each block of weights as soon as it is decoded.
struct Fused<'a>(RegisterProducts<'a>);

impl RoundedSink for Fused<'_> {
    #[inline(always)]
    fn take(&mut self, weights: &[u32]) {
        // SAFETY: `multiply` uses no other tiles meanwhile.
        unsafe { self.0.add(weights) };
    }
}

/// Writes the sums of tiles, \[tiles\]\[columns\]\[16 rows\], to \[rows\]\[columns\].
fn transpose(isa: Isa, tiles: &Tiles, from: &[f32], to: &mut [f32]) {
    let (width, start) = (isa.panel(), tiles.rows().start);
    for (tile, from) in tiles.each().zip(from.chunks_exact(width * TILE)) {
        isa.run(Transpose { from, to: &mut to[(tile.start - start) * width..(tile.end - start) * width] });
    }
}

/// Packs one of a tile's rows, \[blocks\]\[pieces\]\[rows\]\[16 pairs\].
struct Pack<'a, const P: usize> {
    numbers: &'a [f32],
    row: usize,
    height: usize,
    to: &'a mut [u32],
}

impl<const P: usize> Kernel for Pack<'_, P> {
    type Output = ();

    /// A number is split by cutting off the upper half of what remains, and the rest is rounded to the smallest piece. So no number of
    /// several pieces rounds to infinity, and infinite ones become NaN. All loops are plain: closures would lack the kernel's target
    /// features, and would not become vector instructions.
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { numbers, row, height, to } = self;
        assert!(row < height && to.len() == numbers.len() / 2 * P * height);
        for (b, numbers) in numbers.as_chunks::<BLOCK>().0.iter().enumerate() {
            let place = |piece: usize| ((b * P + piece) * height + row) * PAIRS;
            let mut rest = *numbers;
            for piece in (1..P).rev() {
                let pairs = &mut to[place(piece)..place(piece) + PAIRS];
                for (pair, rest) in pairs.iter_mut().zip(rest.as_chunks_mut::<2>().0) {
                    let bits = rest.map(|x| x.to_bits() & 0xffff_0000);
                    *rest = [rest[0] - f32::from_bits(bits[0]), rest[1] - f32::from_bits(bits[1])];
                    *pair = bits[0] >> 16 | bits[1];
                }
            }
            let to = &mut to[place(0)..place(0) + PAIRS];
            for (rest, pairs) in rest.chunks_exact(2 * S::LANES).zip(to.chunks_exact_mut(S::LANES)) {
                // SAFETY: the slices have two registers' numbers, and one.
                unsafe {
                    let (low, high) = (s.load(rest.as_ptr()), s.load(rest.as_ptr().add(S::LANES)));
                    s.store(pairs.as_mut_ptr().cast(), s.round_bf16_pairs(low, high));
                }
            }
        }
    }
}

/// Turns \[rows\]\[16 pairs\] to \[16 pairs\]\[rows\], for all blocks and pieces of a tile.
struct Seal<'a> {
    pairs: &'a mut [u32],
    height: usize,
}

impl Kernel for Seal<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let (mut from, mut to) = ([0; PAIRS * TILE], [0; PAIRS * TILE]);
        for pairs in self.pairs.chunks_exact_mut(PAIRS * self.height) {
            from[..pairs.len()].copy_from_slice(pairs);
            for row in (0..TILE).step_by(S::LANES) {
                for pair in (0..PAIRS).step_by(S::LANES) {
                    let (from, to) = (&from[row * PAIRS + pair..], &mut to[pair * TILE + row..]);
                    // SAFETY: the square lies within both arrays. The numbers are only moved.
                    unsafe { s.transpose(from.as_ptr().cast(), PAIRS, to.as_mut_ptr().cast(), TILE, S::LANES) };
                }
            }
            // One copy where it is possible: each is a call.
            if pairs.len() == to.len() {
                pairs.copy_from_slice(&to);
                continue;
            }
            for (pairs, to) in pairs.chunks_exact_mut(self.height).zip(to.chunks_exact(TILE)) {
                pairs.copy_from_slice(&to[..pairs.len()]);
            }
        }
    }
}

/// Writes the sums of a tile of rows, \[columns\]\[16 rows\], to \[rows\]\[columns\].
struct Transpose<'a> {
    from: &'a [f32],
    to: &'a mut [f32],
}

impl Kernel for Transpose<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let width = self.from.len() / TILE;
        let height = self.to.len() / width;
        assert!(width.is_multiple_of(S::LANES) && height <= TILE && TILE.is_multiple_of(S::LANES) && self.to.len() == height * width);
        for column in (0..width).step_by(S::LANES) {
            for row in (0..height).step_by(S::LANES) {
                let count = S::LANES.min(height - row);
                // SAFETY: the square lies within `from`, and `count` of its columns within `to`.
                unsafe {
                    let from = self.from.as_ptr().add(column * TILE + row);
                    s.transpose(from, TILE, self.to.as_mut_ptr().add(row * width + column), width, count);
                }
            }
        }
    }
}
