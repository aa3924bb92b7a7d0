//! Decodes blocks for matrix tiles: codes in bfloat16, apart from their scales and shifts.

use std::ops::Range;

use super::BlockPanels;
use super::decode::{ByCodeBits, EIGHT, FOUR, GRID, SIX, Units, V, by_code_bits, plane, scales_of};
use super::digits::codes;
use super::grid::GridCodes;
use super::scales::Scales;
use crate::block_type::BLOCK;
use crate::simd::{Int8, Isa, Kernel, pair_place, prefetch_ahead};

/// Writes a panel's codes for `inputs`, as pairs of bfloat16 numbers, to `pairs`, \[groups\]\[tiles\]\[pairs of inputs\]\[16 columns\]. Writes
/// the groups' scales and shifts to `scales`, \[groups\]\[2\]\[columns\]. They are those of the products of bytes.
pub(crate) fn expand_codes(isa: Isa, panels: &BlockPanels, panel: usize, inputs: Range<usize>, pairs: &mut [u32], scales: &mut [f32]) {
    let (from, groups) = (Units::of(isa, panels, panel, &inputs), inputs.len() / panels.group());
    assert!(pairs.len() == inputs.len() / 2 * panels.width && scales.len() == groups * 2 * panels.width);
    isa.run(ExpandCodes { from, values: &panels.halves, pairs, scales });
}

struct ExpandCodes<'a> {
    from: Units<'a>,
    values: &'a [u16; 64],
    pairs: &'a mut [u32],
    scales: &'a mut [f32],
}

impl Kernel for ExpandCodes<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Int8>(self, s: S) {
        by_code_bits(s, self.from.decoding::<S>(), self);
    }
}

impl ByCodeBits for ExpandCodes<'_> {
    #[inline(always)]
    fn expand<S: Int8, const D: u8>(self, s: S) {
        let Self { from, values, pairs, scales: scales_to } = self;
        let (width, blocks) = (V * S::LANES, from.kind.block() / BLOCK);
        let groups = scales_of(D);
        let (mut scales, mut grid) = (Scales::new(), GridCodes::new());
        for (u, unit) in from.bytes.chunks_exact(from.unit.bytes).enumerate() {
            // SAFETY: `expand_codes` has checked that there is room for the codes and scales of all units. A unit has all parts of its
            // layout.
            unsafe {
                scales.fill::<S, V>(s, from.kind, from.unit, unit, blocks * groups);
                scales.subtract(s, from.kind.byte_offset(), blocks * groups * width);
                prefetch_ahead(unit.as_ptr(), from.unit.codes);
                let scales_to = scales_to.as_mut_ptr().add(u * blocks * groups * 2 * width);
                for at in (0..blocks * groups * width).step_by(S::LANES) {
                    let to = scales_to.add(at / width * 2 * width + at % width);
                    s.store(to, s.load(scales.factors().add(at)));
                    s.store(to.add(width), s.load(scales.shifts().add(at)));
                }
                let (start, block) = from.codes::<S, V>(s, unit, &mut grid);
                for b in 0..blocks {
                    prefetch_ahead(unit.as_ptr().add(from.unit.codes + b * from.unit.block), from.unit.block);
                    let p = start.add(b * block);
                    let to = pairs.as_mut_ptr().add((u * blocks + b) * BLOCK / 2 * width);
                    if D == FOUR {
                        expand_words::<S>(s, p, values, to);
                    } else {
                        expand_bytes::<S, D>(s, p, values, to);
                    }
                }
            }
        }
    }
}

/// The place of a pair of inputs of a block, in words.
#[inline(always)]
fn place<S: Int8, const D: u8>(pair: usize, column: usize) -> usize {
    pair_place(V * S::LANES, BLOCK / 2 / scales_of(D), pair, column)
}

/// Expands codes of 4 bits.
#[inline(always)]
#[allow(clippy::needless_range_loop)] // An iterator's closures would lack the kernel's target features.
unsafe fn expand_words<S: Int8>(s: S, p: *const u8, values: &[u16; 64], to: *mut u32) {
    for word in 0..4 {
        // SAFETY: the caller guarantees that the codes are valid and that there is room.
        unsafe {
            let words = plane::<S, V>(s, p, word);
            for v in 0..V {
                for at in 0..4 {
                    let to = to.add(place::<S, FOUR>(4 * word + at, v * S::LANES)).cast();
                    s.store(to, s.lookup_halves(words[v], 4 * at as i32, values, false));
                }
            }
        }
    }
}

/// Expands codes of other sizes.
#[inline(always)]
#[allow(clippy::needless_range_loop)]
unsafe fn expand_bytes<S: Int8, const D: u8>(s: S, p: *const u8, values: &[u16; 64], to: *mut u32) {
    // SAFETY: the caller guarantees that the codes are valid and that there is room.
    unsafe {
        let codes = codes::<S, D>(s, p, &[0; 16]);
        for g in 0..8 {
            for v in 0..V {
                for second in 0..2 {
                    let shift = 8 * second as i32;
                    let to = to.add(place::<S, D>(g / 2 * 4 + 2 * second + g % 2, v * S::LANES));
                    if D == EIGHT || D == GRID {
                        let (low, high) = (s.field(codes[g][v], shift, 255), s.field(codes[g][v], 16 + shift, 255));
                        s.store_bf16_pairs(to, s.to_f32(low), s.to_f32(high));
                    } else {
                        s.store(to.cast(), s.lookup_halves(codes[g][v], shift, values, D == SIX));
                    }
                }
            }
        }
    }
}
