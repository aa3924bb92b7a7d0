//! Attention within a text: every token attends to all tokens, to earlier ones, or to those near it.

use std::ops::Range;

use crate::aligned::AlignedVec;
use crate::simd::{Kernel, Simd};
use crate::unsafe_slice::UnsafeSlice;

/// Queries that are computed together. A key or value is loaded once for all of them.
const ROWS: usize = 8;
/// A score whose exponential is 0, for tokens that are not attended to and the lanes after the last key.
const UNSEEN: f32 = -1e30;

/// Per-thread scratch memory.
#[derive(Debug, Default)]
pub(super) struct Scratch {
    /// \[head dim\]\[keys, padded\].
    keys: AlignedVec<f32>,
    /// \[keys\]\[head dim, padded\].
    values: AlignedVec<f32>,
    /// \[ROWS\]\[keys, padded\].
    scores: AlignedVec<f32>,
}

/// One head of one text: scaled dot products, softmax, weighted sum of the values.
pub(super) struct Attention<'a> {
    /// Queries, keys and values of the text, \[tokens\]\[width\].
    pub(super) qkv: &'a [f32],
    pub(super) width: usize,
    /// Where the head's query, key and value begin in a token's row.
    pub(super) columns: [usize; 3],
    pub(super) head_dim: usize,
    /// Factor of the dot products.
    pub(super) scale: f32,
    /// How far away a token may be on either side.
    pub(super) window: Option<usize>,
    /// Whether a token attends to no later one.
    pub(super) causal: bool,
    /// What is added to a score by how far the key is after the query, an odd number of entries, the middle one for the distance 0.
    pub(super) distances: Option<&'a [f32]>,
    /// \[tokens of all texts\]\[`out_width`\]. A head's columns are those of its query.
    pub(super) out: UnsafeSlice<'a, f32>,
    pub(super) out_width: usize,
    /// The text's first row in `out`. Only the thread that runs the head uses the head's columns of the text's rows.
    pub(super) first: usize,
}

impl Attention<'_> {
    fn len(&self) -> usize {
        self.qkv.len() / self.width
    }

    /// Query (0), key (1) or value (2) of a token.
    #[inline(always)]
    fn part(&self, token: usize, part: usize) -> &[f32] {
        &self.qkv[token * self.width + self.columns[part]..][..self.head_dim]
    }

    /// The tokens to which `token` attends.
    fn seen(&self, token: usize) -> Range<usize> {
        let window = self.window.unwrap_or(self.len());
        token.saturating_sub(window)..self.len().min(token + 1 + if self.causal { 0 } else { window })
    }

    /// Adds what depends on distances to the scores of `token`, and hides the tokens to which it does not attend. The scores are those of
    /// the keys from `start` on.
    fn adjust(&self, token: usize, start: usize, scores: &mut [f32]) {
        if let Some(distances) = self.distances {
            let added = &distances[distances.len() / 2 + start - token..];
            scores.iter_mut().zip(added).for_each(|(score, x)| *score += x);
        }
        let seen = self.seen(token);
        scores[..seen.start - start].fill(UNSEEN);
        scores[seen.end - start..].fill(UNSEEN);
    }
}

/// The kernel of a head.
pub(super) struct Attend<'a> {
    pub(super) of: &'a Attention<'a>,
    pub(super) scratch: &'a mut Scratch,
}

impl Kernel for Attend<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { of, scratch } = self;
        let (len, dim) = (of.len(), of.head_dim);
        let (keys, dims) = (len.next_multiple_of(S::LANES), dim.next_multiple_of(S::LANES));
        scratch.keys.reserve(dim * keys);
        scratch.values.reserve(len * dims);
        scratch.scores.reserve(ROWS * keys);
        let (keys_by_dim, values) = (&mut scratch.keys[..dim * keys], &mut scratch.values[..len * dims]);
        // The padding may hold numbers of another head.
        keys_by_dim.fill(0.0);
        values.fill(0.0);
        for t in 0..len {
            for (column, &x) in keys_by_dim[t..].iter_mut().step_by(keys).zip(of.part(t, 1)) {
                *column = x;
            }
            values[t * dims..][..dim].copy_from_slice(of.part(t, 2));
        }
        let scores = &mut scratch.scores[..ROWS * keys];
        for first in (0..len).step_by(ROWS) {
            // The keys that one of the rows attends to, in whole registers.
            let start = of.seen(first).start / S::LANES * S::LANES;
            let seen = start..of.seen((first + ROWS).min(len) - 1).end;
            let registers = start..seen.end.next_multiple_of(S::LANES);
            // After the last row it is computed again and dropped.
            let queries = std::array::from_fn(|r| of.part((first + r).min(len - 1), 0));
            score(s, &queries, of.scale, keys_by_dim, keys, registers.clone(), scores);
            let mut scales = [0.0; ROWS];
            for (r, (row, scale)) in scores.chunks_exact_mut(keys).zip(&mut scales).enumerate() {
                let row = &mut row[registers.clone()];
                of.adjust((first + r).min(len - 1), start, row);
                *scale = 1.0 / exponentials(s, row);
            }
            weigh(s, of, first, &scales, scores, keys, seen, values, dims);
        }
    }
}

/// Computes the scaled dot products of queries and keys, \[ROWS\]\[keys\], in the registers that begin in `registers`.
#[inline(always)]
fn score<S: Simd>(
    s: S,
    queries: &[&[f32]; ROWS],
    scale: f32,
    keys_by_dim: &[f32],
    keys: usize,
    registers: Range<usize>,
    scores: &mut [f32],
) {
    let dim = queries[0].len();
    let queries = queries.map(|query| &query[..dim]);
    let scale = s.splat(scale);
    for at in registers.step_by(S::LANES) {
        let mut sums = [s.splat(0.0); ROWS];
        for i in 0..dim {
            // SAFETY: each dimension has `keys` numbers, a multiple of the lanes.
            let key = unsafe { s.load(keys_by_dim[i * keys + at..][..S::LANES].as_ptr()) };
            for (sum, query) in sums.iter_mut().zip(&queries) {
                *sum = s.fma(s.splat(query[i]), key, *sum);
            }
        }
        for (r, sum) in sums.into_iter().enumerate() {
            // SAFETY: each row has `keys` numbers.
            unsafe { s.store(scores[r * keys + at..][..S::LANES].as_mut_ptr(), s.mul(sum, scale)) };
        }
    }
}

/// Replaces scores by the exponentials of their distances from the largest. Returns the sum of these.
#[inline(always)]
fn exponentials<S: Simd>(s: S, row: &mut [f32]) -> f32 {
    let mut largest = s.splat(UNSEEN);
    for x in row.chunks_exact(S::LANES) {
        // SAFETY: the chunk has as many numbers as a register.
        largest = s.max(unsafe { s.load(x.as_ptr()) }, largest);
    }
    let largest = s.splat(s.largest(largest));
    let mut sum = s.splat(0.0);
    for x in row.chunks_exact_mut(S::LANES) {
        // SAFETY: as above.
        unsafe {
            let power = s.exp(s.sub(s.load(x.as_ptr()), largest));
            s.store(x.as_mut_ptr(), power);
            sum = s.add(sum, power);
        }
    }
    s.sum(sum)
}

/// Writes the sums of the values of the tokens in `seen`, weighted by `weights` times `scales`, for the rows from `first` on.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn weigh<S: Simd>(
    s: S,
    of: &Attention<'_>,
    first: usize,
    scales: &[f32; ROWS],
    weights: &[f32],
    keys: usize,
    seen: Range<usize>,
    values: &[f32],
    dims: usize,
) {
    let (len, dim) = (of.len(), of.head_dim);
    let weights: [&[f32]; ROWS] = std::array::from_fn(|r| &weights[r * keys..][..len]);
    for at in (0..dims).step_by(S::LANES) {
        let mut sums = [s.splat(0.0); ROWS];
        for t in seen.clone() {
            // SAFETY: each token has `dims` numbers, a multiple of the lanes.
            let value = unsafe { s.load(values[t * dims + at..][..S::LANES].as_ptr()) };
            for (sum, row) in sums.iter_mut().zip(&weights) {
                *sum = s.fma(s.splat(row[t]), value, *sum);
            }
        }
        let width = S::LANES.min(dim - at);
        for (r, sum) in sums.into_iter().enumerate().take(len - first) {
            let mut row = [0.0; 16];
            assert!(S::LANES <= row.len());
            // SAFETY: the array has room for a register.
            unsafe { s.store(row.as_mut_ptr(), s.mul(sum, s.splat(scales[r]))) };
            // SAFETY: only this head writes these columns of the row (see `Attention::first`).
            let out = unsafe { of.out.write((of.first + first + r) * of.out_width + of.columns[0] + at, width) };
            out.copy_from_slice(&row[..width]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decoder::tests::numbers;
    use crate::simd::Isa;

    const DIM: usize = 6;

    /// The outputs of one head of a text, \[tokens\]\[DIM\].
    fn attend(isa: Isa, qkv: &[f32], window: Option<usize>, causal: bool, distances: Option<&[f32]>) -> Vec<f32> {
        let (width, mut out) = (3 * DIM, vec![0.0; qkv.len() / 3]);
        let columns = [0, DIM, 2 * DIM];
        let (out_width, shared) = (DIM, UnsafeSlice::new(&mut out));
        let of = Attention { qkv, width, columns, head_dim: DIM, scale: 0.4, window, causal, distances, out: shared, out_width, first: 0 };
        isa.run(Attend { of: &of, scratch: &mut Scratch::default() });
        out
    }

    /// Whether a token attends to a key.
    fn sees(token: usize, key: usize, window: Option<usize>, causal: bool) -> bool {
        token.abs_diff(key) <= window.unwrap_or(usize::MAX) && !(causal && key > token)
    }

    #[test]
    fn outputs_are_the_weighted_values_of_the_tokens_that_are_seen() {
        for len in [1, 7, 8, 16, 45] {
            let (qkv, distances) = (numbers(1, len * 3 * DIM), numbers(2, 2 * len + 5));
            for (window, causal) in [(None, false), (None, true), (Some(3), false), (Some(9), true), (Some(100), false)] {
                for distances in [None, Some(distances.as_slice())] {
                    let part = |token: usize, part: usize, d: usize| f64::from(qkv[(token * 3 + part) * DIM + d]);
                    let weight = |token: usize, key: usize| {
                        let product: f64 = (0..DIM).map(|d| part(token, 0, d) * part(key, 1, d)).sum();
                        let added = distances.map_or(0.0, |distances| f64::from(distances[distances.len() / 2 + key - token]));
                        if sees(token, key, window, causal) { (0.4 * product + added).exp() } else { 0.0 }
                    };
                    for isa in Isa::without_digits() {
                        for (token, row) in attend(isa, &qkv, window, causal, distances).chunks(DIM).enumerate() {
                            let sum: f64 = (0..len).map(|key| weight(token, key)).sum();
                            for (d, &x) in row.iter().enumerate() {
                                let expected = (0..len).map(|key| weight(token, key) * part(key, 2, d)).sum::<f64>() / sum;
                                assert!(
                                    (f64::from(x) - expected).abs() < 1e-5,
                                    "{isa:?} {len} {window:?} {causal} {token}: {x}, {expected}"
                                );
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn keys_that_no_token_of_a_group_sees_are_not_computed() {
        for isa in Isa::without_digits() {
            for (window, causal, far, finite) in [(Some(3), false, 0, 32), (None, true, 63, 40)] {
                let mut qkv = numbers(1, 64 * 3 * DIM);
                // 0 times this is not 0.
                qkv[(far * 3 + 2) * DIM..][..DIM].fill(f32::NAN);
                let out = attend(isa, &qkv, window, causal, None);
                assert!(out[finite * DIM..][..DIM].iter().all(|x| x.is_finite()), "{isa:?} {window:?}");
                assert!(out[far * DIM..][..DIM].iter().all(|x| x.is_nan()), "{isa:?} {window:?}");
            }
        }
    }
}
