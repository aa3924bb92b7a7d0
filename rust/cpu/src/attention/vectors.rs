//! Attention in vector registers: dot products, exponentials and weighted sums of a few rows and a tile of tokens.

use std::ops::Range;

use super::TILE;
use crate::cache::Cell;
use crate::simd::Simd;

/// Maximum rows of a micro-tile. Each row accumulates in [`VECTORS`] registers.
pub(super) const MICRO: usize = 6;
pub(super) const VECTORS: usize = 4;

/// Maximum rows of a micro-tile with these registers. The kernels for more rows are not compiled.
#[inline(always)]
pub(super) const fn most_rows<S: Simd>() -> usize {
    S::VECTORS * S::ROWS / VECTORS
}

/// Dot products of `R` queries with the keys in [`VECTORS`] registers, whose cells are `step` apart. Row by row they go to `scores`.
#[inline(always)]
#[allow(clippy::needless_range_loop)] // An iterator's closures would lack the kernel's target features.
pub(super) unsafe fn products<S: Simd, C: Cell, const R: usize>(
    s: S,
    query: *const f32,
    head_dim: usize,
    keys: [*const C; VECTORS],
    step: usize,
    scores: [*mut f32; MICRO],
) {
    let mut sums = [[s.splat(0.0); VECTORS]; R];
    for d in 0..head_dim / C::NUMBERS {
        // SAFETY: the key pointers are valid for so many steps, and there are `R` queries.
        unsafe {
            let mut numbers = [s.splat(0.0); R];
            for r in 0..R {
                numbers[r] = s.splat(*query.add(r * head_dim + d));
            }
            for v in 0..VECTORS {
                let key = C::load(s, keys[v].add(d * step));
                for r in 0..R {
                    sums[r][v] = C::multiply(s, numbers[r], key, sums[r][v]);
                }
            }
        }
    }
    for (scores, sums) in scores.into_iter().zip(sums) {
        for (v, sum) in sums.into_iter().enumerate() {
            // SAFETY: the caller guarantees room for the scores.
            unsafe { s.store(scores.add(v * S::LANES), sum) };
        }
    }
}

/// Multiplies a row's numbers by the tokens' numbers in `by`.
#[inline(always)]
pub(super) fn multiply<S: Simd>(s: S, row: &mut [f32; TILE], by: &[f32; TILE], vectors: Range<usize>) {
    let lanes = vectors.start * S::LANES..vectors.end * S::LANES;
    for (x, y) in row[lanes.clone()].chunks_exact_mut(S::LANES).zip(by[lanes].chunks_exact(S::LANES)) {
        // SAFETY: the chunks have `S::LANES` numbers.
        unsafe { s.store(x.as_mut_ptr(), s.mul(s.load(x.as_ptr()), s.load(y.as_ptr()))) };
    }
}

/// How far a score may be above the number that is subtracted before the exponential. Few tiles exceed it, so that the sums are rarely
/// rescaled, as in `FlashAttention` 4.
const SLACK: f32 = 4.0;

/// Replaces a row's scores by their exponentials relative to `base`, as factors of the values' cells, and adds them to the weights. If a
/// score is too far above the base, the largest one becomes the base. Returns the factor that then rescales older sums.
#[inline(always)]
pub(super) unsafe fn powers<S: Simd, C: Cell>(
    s: S,
    scores: &mut [f32; TILE],
    vectors: Range<usize>,
    base: &mut f32,
    weights: *mut f32,
) -> Option<S::F> {
    // SAFETY: the caller guarantees it.
    unsafe {
        let mut most = s.load(scores.as_ptr().add(vectors.start * S::LANES));
        for v in vectors.start + 1..vectors.end {
            most = s.max(most, s.load(scores.as_ptr().add(v * S::LANES)));
        }
        let mut sum = s.load(weights);
        let mut factor = None;
        if s.any_above(most, s.splat(*base + SLACK)) {
            let before = std::mem::replace(base, s.largest(most));
            let rescale = s.exp(s.sub(s.splat(before), s.splat(*base)));
            sum = s.mul(sum, rescale);
            factor = Some(rescale);
        }
        // The row has no visible token yet. Its scores are all minus infinity, and their exponentials must be 0.
        let base = s.splat(if *base == f32::NEG_INFINITY { 0.0 } else { *base });
        for v in vectors.step_by(C::NUMBERS) {
            let p = scores.as_mut_ptr().add(v * S::LANES);
            let first = C::exp(s, s.load(p), base);
            sum = s.add(sum, first);
            if C::NUMBERS == 2 {
                let second = C::exp(s, s.load(p.add(S::LANES)), base);
                sum = s.add(sum, second);
                s.store(scores.as_mut_ptr().add(v / 2 * S::LANES), s.round_bf16_pairs(first, second));
            } else {
                s.store(p, first);
            }
        }
        s.store(weights, sum);
        factor
    }
}

/// Weighted sums of the values, to which a tile's values are added.
pub(super) struct Weighted<'a, C> {
    /// Factors of the cells.
    pub(super) weights: &'a [[f32; TILE]; MICRO],
    /// The cells of the visible tokens: one for each token, or for each pair.
    pub(super) cells: Range<usize>,
    pub(super) values: &'a [*const C; TILE],
    /// Factor that rescales each row's sums, in all lanes of a register.
    pub(super) factors: &'a [[f32; 16]; MICRO],
    pub(super) sums: *mut f32,
    /// Size of a row's sums.
    pub(super) padded: usize,
}

impl<C: Cell> Weighted<'_, C> {
    /// Adds to the sums of `R` rows, in the `V` registers of dimensions that start at `d`.
    #[inline(always)]
    #[allow(clippy::needless_range_loop)]
    pub(super) unsafe fn add<S: Simd, const R: usize, const V: usize>(&self, s: S, d: usize) {
        // SAFETY: the caller guarantees it.
        unsafe {
            let at = |r: usize, v: usize| self.sums.add(r * self.padded + d + v * S::LANES);
            let mut sums = [[s.splat(0.0); R]; V];
            for v in 0..V {
                for r in 0..R {
                    sums[v][r] = s.mul(s.load(at(r, v)), s.load(self.factors[r].as_ptr()));
                }
            }
            for cell in self.cells.clone() {
                let value = *self.values.get_unchecked(cell);
                let mut weights = [s.splat(0.0); R];
                for r in 0..R {
                    weights[r] = s.splat(*self.weights[r].get_unchecked(cell));
                }
                for v in 0..V {
                    let value = C::load(s, value.add(d + v * S::LANES));
                    for r in 0..R {
                        sums[v][r] = C::multiply(s, weights[r], value, sums[v][r]);
                    }
                }
            }
            for (v, sums) in sums.into_iter().enumerate() {
                for (r, sum) in sums.into_iter().enumerate() {
                    s.store(at(r, v), sum);
                }
            }
        }
    }
}
