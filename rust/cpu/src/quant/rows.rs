//! Activations in blocks of 8-bit integers.

use std::ops::Range;

use super::{BLOCK, QuantWeights};
use crate::aligned::AlignedVec;
use crate::gemm::{Gemm, Scratch, Tiles};
use crate::pod::Pod;
use crate::simd::{Int8, Isa, Kernel};
use crate::unsafe_slice::UnsafeSlice;

/// A block whose largest magnitude is not above this number becomes zeros, because the inverse would be close to infinity.
const TINY: f32 = 1e-30;

/// A block of a row of activations.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct Block {
    pub(super) codes: [i8; BLOCK],
    /// NaN if a number of the block is NaN or infinite, so that all results of the block are NaN.
    pub(super) scale: f32,
    /// The scale times the sum of the codes: the factor of a weight's shift.
    pub(super) scaled_sum: f32,
    /// Initial value of an integer sum. It compensates for the offset of the weights.
    pub(super) start: i32,
}

// SAFETY: the fields have 1 and 4 bytes, 44 bytes in total without padding, and every bit pattern is valid.
unsafe impl Pod for Block {}

/// Activations of a step, [blocks][rows of the tile] for each tile.
#[derive(Debug, Default)]
pub(crate) struct QuantRows {
    blocks: AlignedVec<Block>,
    /// The codes again, as 16-bit integers, for instruction sets that multiply 16-bit integers.
    wide: AlignedVec<i16>,
}

/// A view of the rows. The threads pack them in one phase and multiply them in a later one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SharedRows<'a> {
    blocks: UnsafeSlice<'a, Block>,
    wide: UnsafeSlice<'a, i16>,
}

impl QuantRows {
    /// Allocates room for `rows` rows of `ins` numbers.
    pub(crate) fn reserve(&mut self, isa: Isa, rows: usize, ins: usize) {
        let blocks = rows * ins.div_ceil(BLOCK);
        self.blocks.reserve(blocks);
        if is_wide(isa) {
            self.wide.reserve(blocks * BLOCK);
        }
    }

    /// Returns a view for the thread pool.
    pub(crate) fn shared(&mut self) -> SharedRows<'_> {
        SharedRows { blocks: self.blocks.shared(), wide: self.wide.shared() }
    }
}

impl<'a> SharedRows<'a> {
    /// Returns the blocks of the tile with the rows `tile`, and their wide codes if the instruction set uses them.
    ///
    /// # Safety
    ///
    /// The rows are packed, and no thread packs rows of this tile while the slices live.
    pub(super) unsafe fn tile(self, isa: Isa, tile: Range<usize>, blocks: usize) -> (&'a [Block], &'a [i16]) {
        let (start, count) = (tile.start * blocks, tile.len() * blocks);
        // SAFETY: the caller guarantees it.
        unsafe { (self.blocks.read(start, count), if is_wide(isa) { self.wide.read(start * BLOCK, count * BLOCK) } else { &[] }) }
    }
}

impl Gemm for SharedRows<'_> {
    type Weights = QuantWeights;

    unsafe fn pack(self, isa: Isa, tile: Range<usize>, row: usize, numbers: &[f32]) {
        let blocks = numbers.len().div_ceil(BLOCK);
        let (start, count) = (tile.start * blocks, tile.len() * blocks);
        assert!(tile.contains(&row));
        // SAFETY: the caller guarantees it.
        let (to, wide) = unsafe {
            let wide: &mut [i16] = if is_wide(isa) { self.wide.write(start * BLOCK, count * BLOCK) } else { &mut [] };
            (self.blocks.write(start, count), wide)
        };
        isa.run(Pack { numbers, to, wide, row: row - tile.start, rows: tile.len() });
    }

    unsafe fn multiply(self, isa: Isa, weights: &QuantWeights, panels: Range<usize>, tiles: &Tiles, sums: &mut [f32], _: &mut Scratch) {
        let (width, rows) = (isa.panel(), tiles.rows());
        for tile in tiles.each() {
            for (i, panel) in panels.clone().enumerate() {
                let at = (i * rows.len() + tile.start - rows.start) * width;
                let sums = &mut sums[at..at + tile.len() * width];
                // SAFETY: the caller guarantees it.
                unsafe { super::dot::tile(isa, weights, panel, self, tile.clone(), sums) };
            }
        }
    }
}

/// Whether the instruction set uses wide codes.
fn is_wide(isa: Isa) -> bool {
    isa.layout().group == 2
}

/// Packs one of a tile's `rows`.
struct Pack<'a> {
    numbers: &'a [f32],
    to: &'a mut [Block],
    wide: &'a mut [i16],
    row: usize,
    rows: usize,
}

impl Kernel for Pack<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Int8>(self, s: S) {
        let (whole, rest) = self.numbers.as_chunks::<BLOCK>();
        let mut padded = [0.0; BLOCK];
        padded[..rest.len()].copy_from_slice(rest);
        let last = if rest.is_empty() { None } else { Some(&padded) };
        for (b, numbers) in whole.iter().chain(last).enumerate() {
            let at = b * self.rows + self.row;
            let block = &mut self.to[at];
            pack_block(s, numbers, block);
            if S::GROUP == 2 {
                let wide = &mut self.wide[at * BLOCK..(at + 1) * BLOCK];
                wide.iter_mut().zip(block.codes).for_each(|(to, code)| *to = code.into());
            }
        }
    }
}

#[inline(always)]
fn pack_block<S: Int8>(s: S, numbers: &[f32; BLOCK], to: &mut Block) {
    let mut largest = s.splat(0.0);
    let mut odd = s.splat(0.0);
    for at in (0..BLOCK).step_by(S::LANES) {
        // SAFETY: registers have 4, 8 or 16 lanes, so a block is a whole number of registers.
        let x = unsafe { s.load(numbers.as_ptr().add(at)) };
        largest = s.max(s.max(x, s.sub(s.splat(0.0), x)), largest);
        // The product with zero is zero for finite numbers, and NaN for infinities and NaN.
        odd = s.fma(x, s.splat(0.0), odd);
    }
    let (largest, odd) = (s.largest(largest), s.sum(odd));
    let inverse = s.splat(if largest > TINY { 127.0 / largest } else { 0.0 });
    let mut sum = s.splat(0.0);
    for at in (0..BLOCK).step_by(S::LANES) {
        // SAFETY: as above, and there are `BLOCK` codes.
        unsafe {
            let x = s.round(s.mul(s.load(numbers.as_ptr().add(at)), inverse));
            s.store_bytes(to.codes.as_mut_ptr().add(at), x);
            sum = s.add(sum, x);
        }
    }
    let sum = s.sum(sum);
    to.scale = largest / 127.0 + odd;
    to.scaled_sum = to.scale * sum;
    to.start = -S::OFFSET * sum as i32;
}
