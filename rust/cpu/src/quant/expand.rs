//! Blocks of a panel as fp32 numbers: what the weights stand for, to the last bit.

use std::ops::Range;

use super::weights::block_bytes;
use super::{BLOCK, Bits, QuantWeights};
use crate::simd::{Int8, Isa, Kernel, Simd};

/// The widest panel.
const WIDTH: usize = 32;

/// Writes some of a panel's blocks to `to` [numbers of the blocks][columns].
pub(crate) fn expand(isa: Isa, weights: &QuantWeights, panel: usize, blocks: Range<usize>, to: &mut [f32]) {
    let (width, bits) = (isa.panel(), weights.bits());
    let size = block_bytes(width, bits);
    let from = &weights.panel(panel)[blocks.start * size..blocks.end * size];
    assert!(width <= WIDTH && to.len() == blocks.len() * BLOCK * width);
    isa.run(Expand { from, to, width, bits });
}

struct Expand<'a> {
    from: &'a [u8],
    to: &'a mut [f32],
    width: usize,
    bits: Bits,
}

impl Kernel for Expand<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Int8>(self, s: S) {
        let Self { from, to, width, bits } = self;
        // With the width known, the compiler makes registers of the columns.
        match (bits, S::GROUP, width) {
            (Bits::Four, _, 16) => four::<S, 16>(s, from, to),
            (Bits::Four, _, 32) => four::<S, 32>(s, from, to),
            (Bits::Eight, 2, 16) => eight::<S, 16, 2>(s, from, to),
            (Bits::Eight, 4, 16) => eight::<S, 16, 4>(s, from, to),
            (Bits::Eight, 4, 32) => eight::<S, 32, 4>(s, from, to),
            _ => unreachable!("panels have 16 or 32 columns"),
        }
    }
}

/// Reads a number in half precision for each column.
#[inline(always)]
fn halves<S: Simd, const W: usize>(s: S, bytes: &[u8]) -> [f32; W] {
    assert!(bytes.len() >= 2 * W && W.is_multiple_of(S::LANES));
    let mut numbers = [0.0; W];
    for at in (0..W).step_by(S::LANES) {
        // SAFETY: asserted above.
        unsafe { s.store(numbers.as_mut_ptr().add(at), s.load_f16(bytes.as_ptr().cast::<u16>().add(at))) }
    }
    numbers
}

#[inline(always)]
fn four<S: Int8, const W: usize>(s: S, from: &[u8], to: &mut [f32]) {
    let size = block_bytes(W, Bits::Four);
    assert!(from.len() / size * BLOCK * W <= to.len() && W.is_multiple_of(S::LANES));
    for (from, to) in from.chunks_exact(size).zip(to.chunks_exact_mut(BLOCK * W)) {
        let (scales, shifts) = (halves::<S, W>(s, from), halves::<S, W>(s, &from[2 * W..]));
        for column in (0..W).step_by(S::LANES) {
            // SAFETY: a block has so many codes, and `to` room for them.
            unsafe {
                let (scale, shift) = (s.load(scales.as_ptr().add(column)), s.load(shifts.as_ptr().add(column)));
                for group in 0..4 {
                    let codes = from.as_ptr().add(4 * (W + group * W + column));
                    for (half, i) in [(0, 0), (0, 1), (0, 2), (0, 3), (1, 0), (1, 1), (1, 2), (1, 3)] {
                        let code = s.fields::<4>(codes, 8 * i + 4 * half, 15, 0);
                        let k = BLOCK / 2 * half as usize + 4 * group + i as usize;
                        // The product is exact, so nothing depends on whether the addition is fused.
                        s.store(to.as_mut_ptr().add(k * W + column), s.fma(code, scale, shift));
                    }
                }
            }
        }
    }
}

#[inline(always)]
fn eight<S: Int8, const W: usize, const G: usize>(s: S, from: &[u8], to: &mut [f32]) {
    let size = block_bytes(W, Bits::Eight);
    assert!(from.len() / size * BLOCK * W <= to.len() && W.is_multiple_of(S::LANES) && G == S::GROUP);
    // Signed codes become unsigned ones, larger by 128, as stored where the offset is so large.
    let flip = if S::OFFSET == 0 { 128 } else { 0 };
    for (from, to) in from.chunks_exact(size).zip(to.chunks_exact_mut(BLOCK * W)) {
        let scales = halves::<S, W>(s, from);
        for column in (0..W).step_by(S::LANES) {
            // SAFETY: a block has so many codes, and `to` room for them.
            unsafe {
                let scale = s.load(scales.as_ptr().add(column));
                for group in 0..BLOCK / G {
                    let codes = from.as_ptr().add(2 * W + G * (group * W + column));
                    for i in 0..G {
                        let code = s.sub(s.fields::<G>(codes, 8 * i as i32, 255, flip), s.splat(128.0));
                        s.store(to.as_mut_ptr().add((G * group + i) * W + column), s.mul(code, scale));
                    }
                }
            }
        }
    }
}
