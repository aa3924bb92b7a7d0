//! Attention within a text: every token attends to all tokens, to earlier ones, or to those near it.

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

    /// Adds what depends on distances to the scores of `token`, and hides the tokens to which it does not attend.
    fn adjust(&self, token: usize, scores: &mut [f32]) {
        let len = scores.len();
        if let Some(distances) = self.distances {
            let added = &distances[distances.len() / 2 - token..][..len];
            scores.iter_mut().zip(added).for_each(|(score, x)| *score += x);
        }
        let first = self.window.map_or(0, |window| token.saturating_sub(window));
        let after = if self.causal { 0 } else { self.window.unwrap_or(len) };
        scores[..first].fill(UNSEEN);
        scores[len.min(token + after + 1)..].fill(UNSEEN);
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
            // After the last row it is computed again and dropped.
            let queries = std::array::from_fn(|r| of.part((first + r).min(len - 1), 0));
            score(s, &queries, of.scale, keys_by_dim, keys, scores);
            let mut scales = [0.0; ROWS];
            for (r, (row, scale)) in scores.chunks_exact_mut(keys).zip(&mut scales).enumerate() {
                row[len..].fill(UNSEEN);
                of.adjust((first + r).min(len - 1), &mut row[..len]);
                *scale = 1.0 / exponentials(s, row);
            }
            weigh(s, of, first, &scales, scores, keys, values, dims);
        }
    }
}

/// Computes the scaled dot products of queries and keys, \[ROWS\]\[keys\].
#[inline(always)]
fn score<S: Simd>(s: S, queries: &[&[f32]; ROWS], scale: f32, keys_by_dim: &[f32], keys: usize, scores: &mut [f32]) {
    let dim = queries[0].len();
    let queries = queries.map(|query| &query[..dim]);
    let scale = s.splat(scale);
    for at in (0..keys).step_by(S::LANES) {
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

/// Writes the sums of the values, weighted by `weights` times `scales`, for the rows from `first` on.
#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn weigh<S: Simd>(s: S, of: &Attention<'_>, first: usize, scales: &[f32; ROWS], weights: &[f32], keys: usize, values: &[f32], dims: usize) {
    let (len, dim) = (of.len(), of.head_dim);
    let weights: [&[f32]; ROWS] = std::array::from_fn(|r| &weights[r * keys..][..len]);
    for at in (0..dims).step_by(S::LANES) {
        let mut sums = [s.splat(0.0); ROWS];
        for t in 0..len {
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
