//! Decodes blocks for matrix tiles: codes in bfloat16, apart from their scales and shifts.

use std::ops::Range;

use super::BlockPanels;
use super::decode::{EIGHT, FIVE, FOUR, SIX, Scales, Sink, TABLE, Units};
use crate::simd::{Int8, Isa, Kernel, TILE};

/// Writes a panel's codes for `inputs`, as pairs of bfloat16 numbers, to `pairs`, \[groups\]\[tiles\]\[pairs of inputs\]\[16 columns\]. Writes
/// the groups' scales and shifts to `factors` and `shifts`, \[groups\]\[columns\]. Returns whether the type has shifts.
///
/// A weight is `code * scale + shift`. Codes of types with shifts are centred, because codes of one sign would cancel the shifts.
pub(crate) fn expand_codes(
    isa: Isa,
    panels: &BlockPanels,
    panel: usize,
    inputs: Range<usize>,
    pairs: &mut [u32],
    factors: &mut [f32],
    shifts: &mut [f32],
) -> bool {
    let (from, groups) = (Units::of(isa, panels, panel, &inputs), inputs.len() / panels.group());
    assert!(pairs.len() == inputs.len() / 2 * panels.width && factors.len() == groups * panels.width && shifts.len() == factors.len());
    let centre = panels.kind.centre();
    isa.run(ExpandCodes { from, group: panels.group(), pairs, factors, shifts });
    centre > 0.0
}

struct ExpandCodes<'a> {
    from: Units<'a>,
    group: usize,
    pairs: &'a mut [u32],
    factors: &'a mut [f32],
    shifts: &'a mut [f32],
}

impl Kernel for ExpandCodes<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Int8>(self, s: S) {
        // Without the oracle, only AVX-512 has tiles beside it.
        if S::LANES < TILE && cfg!(not(test)) {
            unreachable!("this instruction set has no tiles");
        }
        macro_rules! by_decoding {
            ($($d:ident)*) => {
                match (self.from.decoding::<S>(), S::VECTORS) {
                    $(($d, 2) => self.expand::<S, $d, 2>(s),
                      ($d, 4) => if S::VECTORS == 4 { self.expand::<S, $d, 4>(s) },)*
                    _ => unreachable!("panels are 2 or 4 registers wide"),
                }
            };
        }
        by_decoding!(TABLE FOUR FIVE SIX EIGHT);
    }
}

impl ExpandCodes<'_> {
    #[inline(always)]
    fn expand<S: Int8, const D: u8, const V: usize>(self, s: S) {
        if D == FOUR && S::LOOKUP {
            return;
        }
        let Self { from, group, pairs, factors, shifts } = self;
        let centre = from.kind.centre();
        let mut sink = Codes::<S, V> { pairs: pairs.as_mut_ptr(), group, low: [s.splat(0.0); V], factors, shifts, centre, scales_taken: 0 };
        // SAFETY: the function `expand_codes` has checked that there is room for the codes and scales of all units.
        unsafe { from.each::<S, D, V, _>(s, &mut sink) }
    }
}

/// Writes codes and scales in the layouts of [`expand_codes`].
struct Codes<'a, S: Int8, const V: usize> {
    pairs: *mut u32,
    group: usize,
    /// The codes of the last even input.
    low: [S::F; V],
    factors: &'a mut [f32],
    shifts: &'a mut [f32],
    centre: f32,
    scales_taken: usize,
}

impl<S: Int8, const V: usize> Sink<S, V> for Codes<'_, S, V> {
    const CODES: bool = true;

    #[inline(always)]
    unsafe fn take_scales(&mut self, s: S, scales: &mut Scales, count: usize) {
        for at in (0..count).step_by(S::LANES) {
            let to = self.scales_taken + at;
            assert!(to + S::LANES <= self.factors.len() && to + S::LANES <= self.shifts.len());
            // SAFETY: asserted above for the slices, and `count` is at most the size of the arrays.
            unsafe {
                let (factors, shifts) = (scales.factors.as_mut_ptr().add(at), scales.shifts.as_mut_ptr().add(at));
                let factor = s.load(factors);
                s.store(self.factors.as_mut_ptr().add(to), factor);
                s.store(self.shifts.as_mut_ptr().add(to), s.fma(factor, s.splat(self.centre), s.load(shifts)));
                // With these, the codes come out as they are.
                s.store(factors, s.splat(1.0));
                s.store(shifts, s.splat(-0.0));
            }
        }
        self.scales_taken += count;
    }

    #[inline(always)]
    #[allow(clippy::needless_range_loop)]
    unsafe fn take(&mut self, s: S, k: usize, weights: [S::F; V]) {
        if k.is_multiple_of(2) {
            self.low = weights;
            return;
        }
        let (width, pairs) = (V * S::LANES, self.group / 2);
        for v in 0..V {
            let column = v * S::LANES;
            let at = ((k / self.group * (width / TILE) + column / TILE) * pairs + k % self.group / 2) * TILE + column % TILE;
            // SAFETY: the caller guarantees that there is room.
            unsafe { s.store_bf16_pairs(self.pairs.add(at), self.low[v], weights[v]) }
        }
    }
}
