//! Rows in bfloat16 pieces for matrix tiles, and their products with weights in bfloat16.
//!
//! An fp32 number is the sum of three bfloat16 numbers, its pieces. Their products with weights in bfloat16 are exact, and the sums of the
//! smaller pieces lose little, so the results are closer to the exact ones than those of fp32 vectors.

use std::ops::Range;

use crate::aligned::AlignedVec;
use crate::block_type::BLOCK;
use crate::gemm::{Gemm, Scratch, Tiles, slices};
use crate::simd::{Isa, Kernel, PIECES, ScaledProducts, Simd};
use crate::unsafe_slice::UnsafeSlice;
use crate::weights::PairPanels;

/// Maximum inputs whose weights are expanded at once: a block of ggml's K types. They stay in the processor's first-level cache.
pub(super) const DEPTH: usize = 256;

/// Bytes from a weight in bfloat16 that is read to one that is prefetched.
const AHEAD: usize = 8192;

/// Pairs of a block.
pub(super) const PAIRS: usize = BLOCK / 2;

/// Rows in pieces, \[blocks of 32 inputs\]\[pieces, the smallest first\]\[rows of the tile\]\[16 pairs\] for each tile, with the inputs in
/// [`PAIR_ORDER`](crate::ggml::PAIR_ORDER).
#[derive(Debug, Default)]
pub(crate) struct PieceRows(AlignedVec<u32>);

/// A view of the rows. The threads pack them in one phase and multiply them in a later one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SharedPieces<'a>(UnsafeSlice<'a, u32>);

impl PieceRows {
    /// Allocates room for `rows` rows of `ins` numbers, if the instruction set has tiles.
    pub(crate) fn reserve(&mut self, isa: Isa, rows: usize, ins: usize) {
        if isa.has_tiles() {
            self.0.reserve(rows * ins.div_ceil(BLOCK) * PIECES * PAIRS);
        }
    }

    /// Returns a view for the thread pool.
    pub(crate) fn shared(&mut self) -> SharedPieces<'_> {
        SharedPieces(self.0.shared())
    }
}

/// How weights become pairs of bfloat16 numbers, some inputs at a time.
pub(super) struct Expansion<'a, E> {
    pub(super) ins: usize,
    /// Inputs that share a scale.
    pub(super) group: usize,
    /// Inputs are expanded in multiples of this number, but for the last ones, and at most `depth` at a time.
    pub(super) unit: usize,
    pub(super) depth: usize,
    /// Sums of the rows' groups, \[groups\]\[rows of the tile\] for each tile, if the weights have shifts.
    pub(super) row_sums: Option<UnsafeSlice<'a, f32>>,
    /// Writes the scales and shifts of some inputs of a panel, as [`ScaledProducts`] reads them, and the pairs, or returns those as they are
    /// stored. Also returns the memory to prefetch.
    pub(super) expand: E,
}

impl SharedPieces<'_> {
    /// The pieces of the tile with the rows `tile`.
    ///
    /// # Safety
    ///
    /// As for [`Gemm::pack`].
    #[allow(clippy::mut_from_ref)]
    pub(super) unsafe fn write(&self, tile: &Range<usize>, blocks: usize) -> &mut [u32] {
        let size = blocks * PIECES * PAIRS;
        // SAFETY: the caller guarantees it.
        unsafe { self.0.write(tile.start * size, tile.len() * size) }
    }

    /// Multiplies tiles by panels of weights that are expanded.
    ///
    /// # Safety
    ///
    /// As for [`Gemm::multiply`].
    pub(super) unsafe fn multiply_expanded<'a, E>(
        self,
        isa: Isa,
        weights: &Expansion<'_, E>,
        panels: Range<usize>,
        tiles: &Tiles,
        sums: &mut [f32],
        scratch: &mut Scratch,
    ) where
        E: Fn(usize, Range<usize>, &mut [u32], &mut [f32]) -> (Option<&'a [u32]>, Range<*const u8>),
    {
        let (width, rows, stride) = (isa.panel(), tiles.rows(), weights.ins / BLOCK);
        scratch.pairs.reserve(weights.depth / 2 * width);
        scratch.scales.reserve(2 * weights.depth.div_ceil(weights.group) * width);
        for (panel, sums) in panels.zip(sums.chunks_exact_mut(rows.len() * width)) {
            sums.fill(0.0);
            let whole = weights.ins / weights.unit * weights.unit;
            let rest = (whole < weights.ins).then_some(whole..weights.ins);
            for inputs in slices(whole, weights.unit, weights.depth).chain(rest) {
                let group = weights.group.min(inputs.len());
                let pairs = &mut scratch.pairs[..inputs.len() / 2 * width];
                let scales = &mut scratch.scales[..2 * inputs.len() / group * width];
                let (as_they_are, ahead) = (weights.expand)(panel, inputs.clone(), pairs, scales);
                let pairs = as_they_are.unwrap_or(pairs);
                for (part, height) in tiles.of_equal_height() {
                    let first = part.start * stride + inputs.start / BLOCK * height;
                    let blocks = (part.len() - height) * stride + inputs.len() / BLOCK * height;
                    // SAFETY: the caller guarantees it.
                    let (rows_of_tiles, shifted) = unsafe {
                        let groups = |blocks: usize| blocks * BLOCK / group;
                        let of_groups = weights.row_sums.map(|sums| sums.read(groups(first), groups(blocks)));
                        (self.0.read(first * PIECES * PAIRS, blocks * PIECES * PAIRS), of_groups)
                    };
                    let sums = &mut sums[(part.start - rows.start) * width..(part.end - rows.start) * width];
                    ScaledProducts {
                        height,
                        stride,
                        group,
                        rows: rows_of_tiles,
                        weights: pairs,
                        scales,
                        shifted,
                        sums,
                        ahead: ahead.clone(),
                    }
                    .run(isa);
                }
            }
        }
    }
}

impl Gemm for SharedPieces<'_> {
    type Weights = PairPanels;

    unsafe fn pack(self, isa: Isa, tile: Range<usize>, row: usize, numbers: &[f32]) {
        assert!(numbers.len().is_multiple_of(BLOCK) && tile.contains(&row));
        // SAFETY: the caller guarantees it.
        let to = unsafe { self.write(&tile, numbers.len() / BLOCK) };
        isa.run(Pack { numbers, row: row - tile.start, height: tile.len(), to });
    }

    unsafe fn multiply(self, isa: Isa, weights: &PairPanels, panels: Range<usize>, tiles: &Tiles, sums: &mut [f32], scratch: &mut Scratch) {
        let expand = |panel, inputs: Range<usize>, _: &mut [u32], scales: &mut [f32]| {
            scales.fill(1.0);
            let pairs = weights.pairs(panel, &inputs);
            let ahead = pairs.as_ptr().wrapping_byte_add(AHEAD);
            (Some(pairs), ahead.cast()..ahead.wrapping_add(pairs.len()).cast())
        };
        let weights = Expansion { ins: weights.ins, group: DEPTH, unit: DEPTH, depth: 8 * DEPTH, row_sums: None, expand };
        // SAFETY: the caller guarantees it.
        unsafe { self.multiply_expanded(isa, &weights, panels, tiles, sums, scratch) }
    }
}

/// Packs one of a tile's rows.
struct Pack<'a> {
    numbers: &'a [f32],
    row: usize,
    height: usize,
    to: &'a mut [u32],
}

impl Kernel for Pack<'_> {
    type Output = ();

    /// A number is split by cutting off the upper half of what remains, so that nothing rounds to infinity. Infinite numbers become NaN. All
    /// loops are plain: closures would lack the kernel's target features, and would not become vector instructions.
    #[inline(always)]
    fn run<S: Simd>(self, _: S) {
        let Self { numbers, row, height, to } = self;
        for (b, numbers) in numbers.as_chunks::<BLOCK>().0.iter().enumerate() {
            for (half, numbers) in numbers.as_chunks::<PAIRS>().0.iter().enumerate() {
                let mut rest = *numbers;
                for piece in (0..PIECES).rev() {
                    let start = ((b * PIECES + piece) * height + row) * PAIRS + half * PAIRS / 2;
                    let to = &mut to[start..start + PAIRS / 2];
                    for at in 0..PAIRS / 2 {
                        let bits = [rest[at].to_bits() & 0xffff_0000, rest[at + PAIRS / 2].to_bits() & 0xffff_0000];
                        rest[at] -= f32::from_bits(bits[0]);
                        rest[at + PAIRS / 2] -= f32::from_bits(bits[1]);
                        to[at] = bits[0] >> 16 | bits[1];
                    }
                }
            }
        }
    }
}
