//! The recurrence of a head: its state is multiplied by a decay, changed by each token, and read by the token's query.

use std::ops::Range;

use super::{Heads, Offsets, Rule};
use crate::simd::{Isa, Kernel, Simd};
use crate::unsafe_slice::UnsafeSlice;

/// Tokens whose keys and queries are prepared at once.
const BLOCK: usize = 64;

/// Sums of a register of outputs, which are added at the end. With one sum each addition would wait for the one before.
const SUMS: usize = 4;

/// Per-thread scratch memory.
#[derive(Debug, Default)]
pub(crate) struct Scratch {
    /// \[tokens\]\[key size\].
    keys: Vec<f32>,
    queries: Vec<f32>,
    /// For each token, the factor of the state, and that of what is added to it.
    factors: Vec<[f32; 2]>,
}

/// Computes the outputs of a head for consecutive tokens, in place of their values, and the state after them.
///
/// `rows` are the projections of a step's tokens, [`Offsets::width`] numbers each, and `state` is \[key size\]\[value size\].
///
/// # Safety
///
/// No other thread writes the tokens' keys, queries, steps and betas, or uses the values of this head.
#[allow(clippy::too_many_arguments)]
pub(crate) unsafe fn advance(
    isa: Isa,
    heads: &Heads,
    head: usize,
    rows: UnsafeSlice<'_, f32>,
    tokens: Range<usize>,
    state: &mut [f32],
    scratch: &mut Scratch,
) {
    let Offsets { values, width, .. } = heads.offsets();
    let skip = if let Rule::Space { skip, .. } = &heads.rule { skip[head] } else { 0.0 };
    for start in tokens.clone().step_by(BLOCK) {
        let block = start..tokens.end.min(start + BLOCK);
        scratch.clear();
        for token in block.clone() {
            // SAFETY: no thread writes these parts of a row now.
            unsafe { scratch.push(isa, heads, head, rows, token * width) };
        }
        let first = values + head * heads.value_size;
        let Scratch { keys, queries, factors } = &*scratch;
        let delta = matches!(heads.rule, Rule::Delta);
        let size = heads.value_size;
        isa.run(Advance { keys, queries, factors, delta, skip, size, rows, first: first + block.start * width, stride: width, state });
    }
}

impl Scratch {
    fn clear(&mut self) {
        self.keys.clear();
        self.queries.clear();
        self.factors.clear();
    }

    /// Adds the key, the query and the factors of the token whose row begins at `row`.
    ///
    /// # Safety
    ///
    /// As for [`advance`].
    unsafe fn push(&mut self, isa: Isa, heads: &Heads, head: usize, rows: UnsafeSlice<'_, f32>, row: usize) {
        let offsets = heads.offsets();
        let (size, group) = (heads.key_size, heads.group_of(head));
        // SAFETY: the caller guarantees it.
        let read = |place: usize, len: usize| unsafe { rows.read(row + place, len) };
        let (key, query) = (read(offsets.keys + group * size, size), read(offsets.queries + group * size, size));
        let step = softplus(read(offsets.steps + head, 1)[0] + heads.step_bias[head]);
        let start = self.keys.len();
        self.keys.extend_from_slice(key);
        self.queries.extend_from_slice(query);
        let factors = match &heads.rule {
            Rule::Delta => {
                isa.run(UnitLength { x: &mut self.keys[start..], factor: 1.0 });
                isa.run(UnitLength { x: &mut self.queries[start..], factor: 1.0 / (size as f32).sqrt() });
                [(heads.rates[head] * step).exp(), 1.0 / (1.0 + (-read(offsets.betas + head, 1)[0]).exp())]
            }
            Rule::Space { steps: (least, most), .. } => {
                let step = step.max(*least).min(*most);
                [(heads.rates[head] * step).exp(), step]
            }
        };
        self.factors.push(factors);
    }
}

/// ln(1 + e^x), which is x itself from 20 on.
fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}

/// Scales a vector to length 1, and multiplies it by `factor`.
struct UnitLength<'a> {
    x: &'a mut [f32],
    factor: f32,
}

impl Kernel for UnitLength<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { x, factor } = self;
        assert!(x.len().is_multiple_of(S::LANES));
        let mut squares = s.splat(0.0);
        for at in (0..x.len()).step_by(S::LANES) {
            // SAFETY: the slice has whole registers.
            let x = unsafe { s.load(x.as_ptr().add(at)) };
            squares = s.fma(x, x, squares);
        }
        let scale = factor / (s.sum(squares) + 1e-6).sqrt();
        for x in x {
            *x *= scale;
        }
    }
}

/// The recurrence of a block of tokens.
struct Advance<'a> {
    keys: &'a [f32],
    queries: &'a [f32],
    factors: &'a [[f32; 2]],
    /// Whether the rule is the delta rule.
    delta: bool,
    /// Factor of the value in the output.
    skip: f32,
    /// Size of a value.
    size: usize,
    /// The values of token t are at `first + t * stride`.
    rows: UnsafeSlice<'a, f32>,
    first: usize,
    stride: usize,
    state: &'a mut [f32],
}

impl Kernel for Advance<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        // A part of the state this wide stays in the first-level cache for all tokens.
        let wide = self.size / (2 * S::LANES) * 2 * S::LANES;
        for column in (0..wide).step_by(2 * S::LANES) {
            self.columns::<S, 2>(s, column);
        }
        for column in (wide..self.size).step_by(S::LANES) {
            self.columns::<S, 1>(s, column);
        }
    }
}

impl Advance<'_> {
    /// The recurrence of `N` registers of each value, and of these columns of the state.
    #[inline(always)]
    fn columns<S: Simd, const N: usize>(&mut self, s: S, column: usize) {
        let Self { keys, queries, factors, delta, skip, size, rows, first, stride, ref mut state } = *self;
        let key_size = keys.len() / factors.len();
        assert!(key_size.is_multiple_of(SUMS) && queries.len() == keys.len() && keys.len() == factors.len() * key_size);
        assert!(state.len() == key_size * size && column + N * S::LANES <= size);
        let zeros = [[s.splat(0.0); N]; SUMS];
        let total = |sums: [[S::F; N]; SUMS]| -> [S::F; N] {
            std::array::from_fn(|n| s.add(s.add(sums[0][n], sums[1][n]), s.add(sums[2][n], sums[3][n])))
        };
        for (token, &[decay, factor]) in factors.iter().enumerate() {
            let place = rows.pointer(first + token * stride + column, N * S::LANES);
            let (keys, queries) = (&keys[token * key_size..][..key_size], &queries[token * key_size..][..key_size]);
            let (decay, factor) = (s.splat(decay), s.splat(factor));
            // SAFETY: the caller of `advance` gives these numbers of the row to one thread, and `pointer` checks that they exist. The columns
            // are within the state, which is asserted above.
            unsafe {
                let values: [S::F; N] = std::array::from_fn(|n| s.load(place.add(n * S::LANES)));
                let added: [S::F; N] = if delta {
                    let mut sums = zeros;
                    for row in (0..key_size).step_by(SUMS) {
                        for (i, sums) in sums.iter_mut().enumerate() {
                            let (numbers, key) = (state.as_ptr().add((row + i) * size + column), s.splat(*keys.get_unchecked(row + i)));
                            for (n, sum) in sums.iter_mut().enumerate() {
                                *sum = s.fma(s.load(numbers.add(n * S::LANES)), key, *sum);
                            }
                        }
                    }
                    let found = total(sums);
                    std::array::from_fn(|n| s.mul(factor, s.sub(values[n], s.mul(decay, found[n]))))
                } else {
                    values.map(|value| s.mul(factor, value))
                };
                let mut sums = zeros;
                for row in (0..key_size).step_by(SUMS) {
                    for (i, sums) in sums.iter_mut().enumerate() {
                        let numbers = state.as_mut_ptr().add((row + i) * size + column);
                        let (key, query) = (s.splat(*keys.get_unchecked(row + i)), s.splat(*queries.get_unchecked(row + i)));
                        for (n, sum) in sums.iter_mut().enumerate() {
                            let number = s.fma(key, added[n], s.mul(decay, s.load(numbers.add(n * S::LANES))));
                            s.store(numbers.add(n * S::LANES), number);
                            *sum = s.fma(number, query, *sum);
                        }
                    }
                }
                for (n, sum) in total(sums).into_iter().enumerate() {
                    s.store(place.add(n * S::LANES), s.fma(s.splat(skip), values[n], sum));
                }
            }
        }
    }
}
