//! Decodes blocks to weights in bfloat16, for products of matrix tiles.

use std::ops::Range;

use super::BlockPanels;
use super::decode::{ByCodeBits, EIGHT, FIVE, FOUR, GRID, SIX, THREE, TWO, Units, V, by_code_bits};
use super::panels::CodeOrder;
use super::scales::Scales;
use crate::block_type::BLOCK;
use crate::simd::{Int8, Isa, Kernel, prefetch_twice};

/// Bytes from what is read to what is prefetched to the second-level cache.
const FAR: usize = 3072;

/// Inputs in each half of a block. Codes of 6 bits have a scale for each half.
const HALF: usize = BLOCK / 2;

/// Writes a panel's weights for `inputs` to `to`, rounded to bfloat16: pairs of inputs, \[blocks\]\[columns\]\[16\]. `inputs` must start and
/// end at unit boundaries.
pub(crate) fn expand_rounded(isa: Isa, panels: &BlockPanels, panel: usize, inputs: Range<usize>, to: &mut [u32]) {
    assert!(to.len() == inputs.len() / 2 * panels.width);
    each_rounded(isa, panels, panel, inputs, to, &mut ());
}

/// Decodes a panel's weights for `inputs` as [`expand_rounded`] does, and passes each block to `sink`. They go to the memory `to` in
/// turn, which holds two of them at least, or all.
pub(crate) fn each_rounded(
    isa: Isa,
    panels: &BlockPanels,
    panel: usize,
    inputs: Range<usize>,
    to: &mut [u32],
    sink: &mut impl RoundedSink,
) {
    let from = Units::of(isa, panels, panel, &inputs);
    assert!(to.len() >= (2 * HALF).min(inputs.len() / 2) * panels.width && panels.order == CodeOrder::Columns);
    isa.run_bf16(ExpandRounded { from, to, sink });
}

/// Receives a panel's blocks as they are decoded. This is a trait because closures that are not inlined lack the kernel's target features.
pub(crate) trait RoundedSink {
    /// Receives the weights of the next block, pairs of inputs, \[columns\]\[16\].
    fn take(&mut self, weights: &[u32]);
}

/// Ignores the blocks, for those that stay in memory.
impl RoundedSink for () {
    #[inline(always)]
    fn take(&mut self, _: &[u32]) {}
}

struct ExpandRounded<'a, K> {
    from: Units<'a>,
    to: &'a mut [u32],
    sink: &'a mut K,
}

impl<K: RoundedSink> Kernel for ExpandRounded<'_, K> {
    type Output = ();

    #[inline(always)]
    fn run<S: Int8>(self, s: S) {
        by_code_bits(s, self.from.decoding::<S>(), self);
    }
}

impl<K: RoundedSink> ByCodeBits for ExpandRounded<'_, K> {
    #[inline(always)]
    fn expand<S: Int8, const D: u8>(self, s: S) {
        if D == TWO || D == THREE || D == GRID {
            unreachable!("tiles multiply these codes as words");
        }
        let Self { from, to, sink } = self;
        let (width, blocks) = (V * S::LANES, from.kind.block() / BLOCK);
        let mut turns = (0..to.len() / (HALF * width)).map(|turn| turn * HALF * width).cycle();
        let mut last = None;
        let groups = if D == SIX { 2 } else { 1 };
        let values = from.kind.table().unwrap_or_else(|| std::array::from_fn(|code| code as f32 - from.kind.offset()));
        let mut scales = Scales::new();
        for unit in from.bytes.chunks_exact(from.unit.bytes) {
            // SAFETY: a unit has all parts of its layout, and a panel is at most as wide as the arrays.
            unsafe {
                scales.fill::<S, V>(s, from.kind, from.unit, unit, blocks * groups);
                if D == FIVE || D == SIX {
                    scales.subtract(s, ABOVE + from.kind.offset(), blocks * groups * width);
                }
                prefetch_twice::<FAR>(unit.as_ptr(), from.unit.codes);
                for b in 0..blocks {
                    let p = unit.as_ptr().add(from.unit.codes + b * from.unit.block);
                    prefetch_twice::<FAR>(p, from.unit.block);
                    let turn = turns.next().expect("it has no end");
                    let block = to[turn..turn + HALF * width].as_mut_ptr().cast();
                    let at = b * groups * width;
                    let (factors, shifts) = (scales.factors().add(at), scales.shifts().add(at));
                    if D == FOUR {
                        columns_of_four(s, width, p, &values, factors, shifts, block);
                    } else if D == EIGHT {
                        columns_of_eight(s, width, p, factors, shifts, block);
                    } else {
                        columns_of_words::<S, D>(s, width, p, factors, shifts, block);
                    }
                    // By now the last block is in the cache.
                    if let Some(last) = last.replace(turn) {
                        sink.take(&to[last..last + HALF * width]);
                    }
                }
            }
        }
        if let Some(last) = last {
            sink.take(&to[last..last + HALF * width]);
        }
    }
}

/// Rounds 32 numbers, `LANES` in each register, and stores them.
#[inline(always)]
unsafe fn store<S: Int8>(s: S, numbers: [[S::F; 2]; 2], to: *mut f32) {
    let [first, second] = numbers;
    // SAFETY: the caller guarantees that there is room for 32 numbers in bfloat16.
    unsafe {
        if S::LANES == HALF {
            s.store(to, s.round_bf16_pairs(first[0], second[0]));
        } else {
            s.store(to, s.round_bf16_pairs(first[0], first[1]));
            s.store(to.add(S::LANES), s.round_bf16_pairs(second[0], second[1]));
        }
    }
}

/// The number whose bits are set to a code's from bit 17 on, which adds the code to it.
const ABOVE: f32 = 64.0;

/// Looks up codes of 4 bits in a table of a column's 16 weights.
#[inline(always)]
#[allow(clippy::needless_range_loop)] // An iterator's closures would lack the kernel's target features.
unsafe fn columns_of_four<S: Int8>(
    s: S,
    width: usize,
    p: *const u8,
    values: &[f32; 16],
    factors: *const f32,
    shifts: *const f32,
    to: *mut f32,
) {
    // SAFETY: the caller guarantees that the block is valid and that there is room.
    unsafe {
        let (low, high) = (s.load(values.as_ptr()), s.load(values.as_ptr().add(16 - S::LANES)));
        for four in (0..width).step_by(4) {
            let codes = p.add(four / 4 * 2 * BLOCK);
            let codes = [s.words(codes), s.words(codes.add(2 * BLOCK - 4 * S::LANES))];
            for c in 0..4 {
                let (factor, shift) = (s.splat(*factors.add(four + c)), s.splat(*shifts.add(four + c)));
                let table = [s.round_upper_halves(s.fma(low, factor, shift)), s.round_upper_halves(s.fma(high, factor, shift))];
                let to = to.add((four + c) * HALF);
                for part in 0..HALF / S::LANES {
                    s.store(to.add(part * S::LANES), s.pick_bf16(codes[part], 4 * c as i32, table));
                }
            }
        }
    }
}

/// Multiplies codes of 5 or 6 bits.
#[inline(always)]
#[allow(clippy::needless_range_loop)]
unsafe fn columns_of_words<S: Int8, const D: u8>(s: S, width: usize, p: *const u8, factors: *const f32, shifts: *const f32, to: *mut f32) {
    let (sharing, bits) = if D == FIVE { (16, 1) } else { (8, 2) };
    let second = if D == SIX { width } else { 0 };
    // SAFETY: the caller guarantees that the block is valid and that there is room.
    unsafe {
        for first in (0..width).step_by(sharing) {
            // The compiler unrolls this loop, and the shifts become constants.
            for c in 0..sharing {
                let column = first + c;
                let (low, high) = (p.add(first * HALF + c / 4 * 2 * BLOCK), p.add(width * HALF + first / sharing * 2 * BLOCK));
                let from = (bits * c) as i32 - 5;
                let mask = if D == FIVE { 0x0020_0020 } else { 0x0060_0060 };
                let mut numbers = [[s.splat(0.0); 2]; 2];
                for part in 0..HALF / S::LANES {
                    let at = 4 * part * S::LANES;
                    let codes = s.field(s.words(low.add(at)), 4 * (c % 4) as i32 - 1, 0x001e_001e);
                    let codes = s.or(codes, s.field(s.words(high.add(at)), from, mask));
                    for half in 0..2 {
                        let group = column + half * second;
                        let number = s.with_bits(s.field(codes, 16 * half as i32 - 16, 63 << 17), ABOVE.to_bits() as i32);
                        numbers[half][part] = s.fma(number, s.splat(*factors.add(group)), s.splat(*shifts.add(group)));
                    }
                }
                store(s, numbers, to.add(column * HALF));
            }
        }
    }
}

/// Multiplies codes of 8 bits.
#[inline(always)]
#[allow(clippy::needless_range_loop)]
unsafe fn columns_of_eight<S: Int8>(s: S, width: usize, p: *const u8, factors: *const f32, shifts: *const f32, to: *mut f32) {
    // SAFETY: the caller guarantees that the block is valid and that there is room.
    unsafe {
        for column in 0..width {
            let (factor, shift) = (s.splat(*factors.add(column)), s.splat(*shifts.add(column)));
            let mut numbers = [[s.splat(0.0); 2]; 2];
            for half in 0..2 {
                for part in 0..HALF / S::LANES {
                    let codes = s.load_i8(p.add(column * BLOCK + half * HALF + part * S::LANES).cast());
                    numbers[half][part] = s.fma(codes, factor, shift);
                }
            }
            store(s, numbers, to.add(column * HALF));
        }
    }
}
