//! Products of fp32 rows and weights in bfloat16, or in integer codes with scales, by matrix tiles.
//!
//! An fp32 number is the sum of three bfloat16 numbers, its pieces; fast products round it to one. bfloat16 also holds every code of ggml's blocks. The tiles multiply the
//! pieces by the codes of inputs that share a scale, and vectors multiply the sums by the scales. A sum of 32 inputs rounds a few times,
//! where a chain of fused multiply-adds rounds 32 times, so the results are closer to the exact ones.

use std::ops::Range;

use crate::aligned::AlignedVec;
use crate::block_type::BLOCK;
use crate::gemm::{Gemm, Scratch, Tiles};
use crate::ggml;
use crate::simd::{Isa, Kernel, Math, Simd, TILE, TileProducts};
use crate::unsafe_slice::UnsafeSlice;
use crate::weights::{Bf16, Element, FloatPanels};

/// Inputs whose weights are expanded at once: a block of ggml's K types.
const DEPTH: usize = 256;

/// Rows in pieces, \[blocks of 32 inputs\]\[pieces, the last one first\]\[rows of the tile\]\[32\] for each tile, and the sum of each block,
/// \[blocks\]\[rows of the tile\].
#[derive(Debug, Default)]
pub(crate) struct PieceRows {
    pieces: AlignedVec<u16>,
    sums: AlignedVec<f32>,
}

/// A view of the rows. The threads pack them in one phase and multiply them in a later one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SharedPieces<'a> {
    pieces: UnsafeSlice<'a, u16>,
    sums: UnsafeSlice<'a, f32>,
}

impl PieceRows {
    /// Allocates room for `rows` rows of `ins` numbers, if the instruction set has tiles.
    pub(crate) fn reserve(&mut self, isa: Isa, rows: usize, ins: usize) {
        if isa.has_tiles() {
            let blocks = rows * ins.div_ceil(BLOCK);
            self.pieces.reserve(blocks * isa.math().pieces() * BLOCK);
            self.sums.reserve(blocks);
        }
    }

    /// Returns a view for the thread pool.
    pub(crate) fn shared(&mut self) -> SharedPieces<'_> {
        SharedPieces { pieces: self.pieces.shared(), sums: self.sums.shared() }
    }
}

/// Splits a number into bfloat16 numbers that add up to it, the largest first. The upper half of what remains is cut off each time, so that
/// nothing rounds to infinity. Infinite numbers become NaN.
fn pieces(x: f32) -> [u16; 3] {
    let mut rest = x;
    std::array::from_fn(|_| {
        let bits = rest.to_bits() & 0xffff_0000;
        rest -= f32::from_bits(bits);
        (bits >> 16) as u16
    })
}

impl Gemm for SharedPieces<'_> {
    type Weights = FloatPanels;

    unsafe fn pack(self, isa: Isa, tile: Range<usize>, row: usize, numbers: &[f32]) {
        let (blocks, height, count) = (numbers.len() / BLOCK, tile.len(), isa.math().pieces());
        assert!(numbers.len().is_multiple_of(BLOCK) && tile.contains(&row));
        let row = row - tile.start;
        // SAFETY: the caller guarantees it.
        let (pieces_to, sums) = unsafe {
            let size = count * BLOCK;
            (self.pieces.write(tile.start * blocks * size, height * blocks * size), self.sums.write(tile.start * blocks, height * blocks))
        };
        for (b, block) in numbers.as_chunks::<BLOCK>().0.iter().enumerate() {
            let to = |piece: usize| ((b * count + piece) * height + row) * BLOCK;
            let rounded = match isa.math() {
                Math::Exact => {
                    let split = block.map(pieces);
                    for piece in 0..count {
                        pieces_to[to(piece)..][..BLOCK].iter_mut().zip(&split).for_each(|(to, pieces)| *to = pieces[count - 1 - piece]);
                    }
                    *block
                }
                Math::Fast => {
                    let rounded = block.map(Bf16::from_f32);
                    pieces_to[to(0)..][..BLOCK].iter_mut().zip(&rounded).for_each(|(to, x)| *to = x.0);
                    rounded.map(Bf16::to_f32)
                }
            };
            // Shifts multiply the numbers that the codes multiply.
            sums[b * height + row] = rounded.iter().map(|&x| f64::from(x)).sum::<f64>() as f32;
        }
    }

    unsafe fn multiply(
        self,
        isa: Isa,
        weights: &FloatPanels,
        panels: Range<usize>,
        tiles: &Tiles,
        sums: &mut [f32],
        scratch: &mut Scratch,
    ) {
        let (width, rows, ins, group) = (isa.panel(), tiles.rows(), weights.ins(), group_of(weights));
        let groups = DEPTH / group;
        scratch.pairs.reserve(DEPTH / 2 * width);
        scratch.scales.reserve(2 * groups * width);
        scratch.products.reserve(groups * TILE * width);
        for (panel, sums) in panels.zip(sums.chunks_exact_mut(rows.len() * width)) {
            sums.fill(0.0);
            for inputs in (0..ins).step_by(DEPTH).map(|start| start..ins.min(start + DEPTH)) {
                let (groups, blocks) = (inputs.len() / group, inputs.len() / BLOCK);
                let pairs = &mut scratch.pairs[..inputs.len() / 2 * width];
                let (factors, shifts) = scratch.scales[..2 * groups * width].split_at_mut(groups * width);
                let shifted = expand(isa, weights, panel, inputs.clone(), pairs, factors, shifts);
                for tile in tiles.each() {
                    let (height, first) = (tile.len(), tile.start * ins / BLOCK + inputs.start / BLOCK * tile.len());
                    // SAFETY: the caller guarantees it.
                    let (rows_of_tile, row_sums) = unsafe {
                        let size = isa.math().pieces() * BLOCK;
                        (self.pieces.read(first * size, blocks * height * size), self.sums.read(first, blocks * height))
                    };
                    let products = &mut scratch.products[..groups * height * width];
                    TileProducts { height, group, rows: rows_of_tile, weights: pairs, out: products }.run(isa);
                    let sums = &mut sums[(tile.start - rows.start) * width..(tile.end - rows.start) * width];
                    isa.run(Scale { products, factors, shifts: shifted.then_some(&*shifts), row_sums, sums });
                }
            }
        }
    }
}

/// Number of inputs that share a scale.
fn group_of(weights: &FloatPanels) -> usize {
    if let FloatPanels::Blocks(blocks) = weights { blocks.group() } else { BLOCK }
}

/// Writes the codes of `inputs` to `pairs`, \[groups\]\[tiles\]\[pairs of inputs\]\[16 columns\], and the groups' scales and shifts to
/// `factors` and `shifts`, \[groups\]\[columns\]. Returns whether there are shifts.
fn expand(
    isa: Isa,
    weights: &FloatPanels,
    panel: usize,
    inputs: Range<usize>,
    pairs: &mut [u32],
    factors: &mut [f32],
    shifts: &mut [f32],
) -> bool {
    match weights {
        FloatPanels::Blocks(blocks) => ggml::expand_codes(isa, blocks, panel, inputs, pairs, factors, shifts),
        FloatPanels::Bf16(numbers) => {
            let width = numbers.width;
            isa.run(Pair { from: &numbers.panel(panel)[inputs.start * width..inputs.end * width], to: pairs });
            factors.fill(1.0);
            false
        }
        FloatPanels::F32(_) | FloatPanels::F16(_) => unreachable!("vectors multiply weights that are not exact in bfloat16"),
    }
}

/// Puts bfloat16 weights \[inputs\]\[columns\] into pairs, \[groups\]\[tiles\]\[pairs of inputs\]\[16 columns\].
struct Pair<'a> {
    from: &'a [Bf16],
    to: &'a mut [u32],
}

impl Kernel for Pair<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let width = S::VECTORS * S::LANES;
        assert!(self.from.len() == 2 * self.to.len() && self.from.len().is_multiple_of(BLOCK * width));
        for pair in 0..self.to.len() / width {
            for column in (0..width).step_by(S::LANES) {
                let (group, pair_of_group) = (pair / (BLOCK / 2), pair % (BLOCK / 2));
                let at = ((group * (width / TILE) + column / TILE) * (BLOCK / 2) + pair_of_group) * TILE + column % TILE;
                // SAFETY: both slices have whole blocks of the panel's columns, as asserted.
                unsafe {
                    let from = self.from.as_ptr().cast::<u16>().add(2 * pair * width + column);
                    s.store_bf16_pairs(self.to.as_mut_ptr().add(at), s.load_bf16(from), s.load_bf16(from.add(width)));
                }
            }
        }
    }
}

/// Adds scaled products \[groups\]\[tiles\]\[rows\]\[16 columns\] and, if there are `shifts`, the shifts times the rows' sums to `sums`,
/// \[rows\]\[columns\].
struct Scale<'a> {
    products: &'a [f32],
    factors: &'a [f32],
    shifts: Option<&'a [f32]>,
    row_sums: &'a [f32],
    sums: &'a mut [f32],
}

impl Kernel for Scale<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let width = S::VECTORS * S::LANES;
        let (height, groups) = (self.sums.len() / width, self.factors.len() / width);
        assert!(self.products.len() == groups * height * width && self.sums.len() == height * width);
        assert!(self.shifts.is_none_or(|shifts| shifts.len() == groups * width && self.row_sums.len() == groups * height));
        for row in 0..height {
            for column in (0..width).step_by(S::LANES) {
                // SAFETY: the lengths are asserted above.
                unsafe {
                    let to = self.sums.as_mut_ptr().add(row * width + column);
                    let mut sum = s.load(to);
                    for g in 0..groups {
                        let at = ((g * (width / TILE) + column / TILE) * height + row) * TILE + column % TILE;
                        let factor = s.load(self.factors.as_ptr().add(g * width + column));
                        sum = s.fma(factor, s.load(self.products.as_ptr().add(at)), sum);
                        if let Some(shifts) = self.shifts {
                            let x = s.splat(*self.row_sums.as_ptr().add(g * height + row));
                            sum = s.fma(s.load(shifts.as_ptr().add(g * width + column)), x, sum);
                        }
                    }
                    s.store(to, sum);
                }
            }
        }
    }
}
