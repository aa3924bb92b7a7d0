//! Activations in blocks of 8-bit integers.

use std::ops::Range;

use super::BLOCK;
use crate::aligned::{AlignedVec, Pod};
use crate::simd::{Int8, Isa, Kernel};
use crate::unsafe_slice::UnsafeSlice;

/// Below this, a block's largest number is as good as zero: its inverse would come near infinity.
const TINY: f32 = 1e-30;

/// A block of a row.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub(super) struct Block {
    pub(super) codes: [i8; BLOCK],
    /// Not a number if some number of the block is none or infinite; so all that is computed of it is none either.
    pub(super) scale: f32,
    /// The scale times the sum of the codes: what a weight's shift is multiplied by.
    pub(super) scaled_sum: f32,
    /// What a sum of products begins with, to make up for the offset of the weights.
    pub(super) start: i32,
}

// SAFETY: numbers of 1 and 4 bytes, 44 bytes without padding; all patterns of bits are some.
unsafe impl Pod for Block {}

/// Activations of a step: tile after tile, in each [blocks][rows of the tile].
#[derive(Debug, Default)]
pub(crate) struct QuantRows {
    blocks: AlignedVec<Block>,
    /// The codes once more as 16 bits, where they are multiplied so.
    wide: AlignedVec<i16>,
}

/// Rows that a team packs, and then multiplies.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SharedRows<'a> {
    blocks: UnsafeSlice<'a, Block>,
    wide: UnsafeSlice<'a, i16>,
}

impl QuantRows {
    /// Makes room for `rows` rows of `ins` numbers.
    pub(crate) fn reserve(&mut self, isa: Isa, rows: usize, ins: usize) {
        let blocks = rows * ins.div_ceil(BLOCK);
        self.blocks.reserve(blocks);
        if isa.run(Wide) {
            self.wide.reserve(blocks * BLOCK);
        }
    }

    /// A view for a team.
    pub(crate) fn shared(&mut self) -> SharedRows<'_> {
        SharedRows { blocks: self.blocks.shared(), wide: self.wide.shared() }
    }
}

impl<'a> SharedRows<'a> {
    /// Packs `numbers` as row `row` of the tile that has the rows `tile`.
    ///
    /// # Safety
    ///
    /// Nobody else packs the tile's rows, or reads them, meanwhile.
    pub(crate) unsafe fn pack(self, isa: Isa, tile: Range<usize>, row: usize, numbers: &[f32]) {
        let blocks = numbers.len().div_ceil(BLOCK);
        let (start, count) = (tile.start * blocks, tile.len() * blocks);
        assert!(tile.contains(&row));
        // SAFETY: the caller's promise.
        let (to, wide) = unsafe {
            let wide: &mut [i16] = if isa.run(Wide) { self.wide.write(start * BLOCK, count * BLOCK) } else { &mut [] };
            (self.blocks.write(start, count), wide)
        };
        isa.run(Pack { numbers, to, wide, row: row - tile.start, rows: tile.len() });
    }

    /// The blocks of the tile that has the rows `tile`, and their wide codes if there are such.
    ///
    /// # Safety
    ///
    /// They are packed, and nobody packs others into the tile while the slices live.
    pub(super) unsafe fn tile(self, isa: Isa, tile: Range<usize>, blocks: usize) -> (&'a [Block], &'a [i16]) {
        let (start, count) = (tile.start * blocks, tile.len() * blocks);
        // SAFETY: the caller's promise.
        unsafe { (self.blocks.read(start, count), if isa.run(Wide) { self.wide.read(start * BLOCK, count * BLOCK) } else { &[] }) }
    }
}

/// Whether there are wide codes.
struct Wide;

impl Kernel for Wide {
    type Output = bool;
    #[inline(always)]
    fn run<S: Int8>(self, _: S) -> bool {
        S::GROUP == 2
    }
}

/// Packs a row, one of a tile's `rows`.
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
        // SAFETY: registers have 4, 8 or 16 lanes, and so a block's are whole ones.
        let x = unsafe { s.load(numbers.as_ptr().add(at)) };
        largest = s.max(s.max(x, s.sub(s.splat(0.0), x)), largest);
        // Zero times a number is zero, but not of infinity or of what is no number.
        odd = s.fma(x, s.splat(0.0), odd);
    }
    let (largest, odd) = (s.largest(largest), s.sum(odd));
    let inverse = s.splat(if largest > TINY { 127.0 / largest } else { 0.0 });
    let mut sum = s.splat(0.0);
    for at in (0..BLOCK).step_by(S::LANES) {
        // SAFETY: as above, and there are as many codes.
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
