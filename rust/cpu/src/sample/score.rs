//! Log-probabilities and ranks of tokens, and the likeliest tokens.

use super::{BLOCK, Extent, order, padded, rank, spread, token_of};
use crate::pool::ThreadPool;
use crate::simd::{Isa, Kernel, Simd};

/// Number of logits that are compared with the bound at once.
const FEW: usize = 64;

/// Log-probability and rank of a token at temperature 1.
#[derive(Clone, Debug, PartialEq)]
pub struct Score {
    /// The token.
    pub token: u32,
    /// The token's log-probability. If a logit is NaN or the largest is not finite, all log-probabilities are NaN and ranks are
    /// meaningless.
    pub logprob: f32,
    /// The token's rank. 1: no token is likelier.
    pub rank: u32,
    /// The likeliest tokens and their log-probabilities, best first. Equally likely tokens are ordered by id.
    pub likeliest: Vec<(u32, f32)>,
}

/// Computes a score for each row of `logits` [tokens, vocabulary], with the `count` likeliest tokens, or all tokens if there are fewer.
///
/// The result depends only on the row, bit for bit. Panics if the length of `logits` is not a multiple of the number of tokens, or if a
/// token is not in the vocabulary.
pub fn score(isa: Isa, logits: &[f32], tokens: &[u32], count: usize, pool: &mut ThreadPool) -> Vec<Score> {
    let Some(vocabulary) = logits.len().checked_div(tokens.len()) else { return Vec::new() };
    assert_eq!(vocabulary * tokens.len(), logits.len(), "rows of one length");
    spread(tokens.len(), vocabulary, pool, |i| isa.run(Row { logits: &logits[i * vocabulary..][..vocabulary], token: tokens[i], count }))
}

struct Row<'a> {
    logits: &'a [f32],
    token: u32,
    count: usize,
}

impl Kernel for Row<'_> {
    type Output = Score;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Score {
        let Self { logits, token, count } = self;
        let Some(Extent { best, .. }) = Extent::of(logits) else {
            let likeliest = (0..count.min(logits.len()) as u32).map(|i| (i, f32::NAN)).collect();
            return Score { token, logprob: f32::NAN, rank: 1, likeliest };
        };
        let total = log_total(s, logits, best);
        let logprob = |token: usize| (f64::from(logits[token]) - f64::from(best) - total) as f32;
        let own = logits[token as usize];
        let likelier: u32 = logits.chunks(BLOCK).map(|part| part.iter().map(|x| u32::from(*x > own)).sum::<u32>()).sum();
        let likeliest = likeliest(logits, count).into_iter().map(|i| (i as u32, logprob(i))).collect();
        Score { token, logprob: logprob(token as usize), rank: likelier + 1, likeliest }
    }
}

/// The logarithm of the sum of `exp(logit - best)`, where `best` is the largest logit.
#[inline(always)]
fn log_total<S: Simd>(s: S, logits: &[f32], best: f32) -> f64 {
    let (mut total, mut spare) = (0.0, [0.0; BLOCK]);
    for part in logits.chunks(BLOCK) {
        let part = padded(part, &mut spare);
        let mut sum = s.splat(0.0);
        for at in (0..BLOCK).step_by(S::LANES) {
            // SAFETY: a block is a whole number of registers.
            let x = unsafe { s.load(part.as_ptr().add(at)) };
            sum = s.add(sum, s.exp(s.sub(x, s.splat(best))));
        }
        total += f64::from(s.sum(sum));
    }
    total.ln()
}

/// The `count` likeliest tokens, best first.
#[inline(always)]
fn likeliest(logits: &[f32], count: usize) -> Vec<usize> {
    if count == 0 {
        return Vec::new();
    }
    // Collects candidates until there are twice as many as requested. Then it drops half of them and raises the bound for new candidates.
    let (room, mut bound) = ((2 * count).max(FEW), i32::MIN);
    let mut found = Vec::with_capacity(room + FEW);
    for (i, few) in logits.chunks(FEW).enumerate() {
        // Of equal tokens the first is likelier, so a later token must exceed the bound.
        if !few.iter().fold(false, |better, x| better | (rank(*x) > bound)) {
            continue;
        }
        let better = few.iter().enumerate().filter(|(_, x)| rank(**x) > bound);
        found.extend(better.map(|(j, x)| order(*x, i * FEW + j)));
        if found.len() >= room {
            let (_, last, _) = found.select_nth_unstable(count - 1);
            bound = rank(logits[token_of(*last)]);
            found.truncate(count);
        }
    }
    found.sort_unstable();
    found.truncate(count);
    found.into_iter().map(token_of).collect()
}

#[cfg(test)]
mod tests {
    use super::super::tests::{Case, threads_of};
    use super::*;
    use proptest::prelude::*;

    /// Computes a score in fp64 by sorting all tokens.
    fn reference(logits: &[f32], token: usize, count: usize) -> Score {
        let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let sum: f64 = logits.iter().map(|x| (f64::from(*x) - f64::from(best)).exp()).sum();
        let logprob = |i: usize| (f64::from(logits[i]) - f64::from(best) - sum.ln()) as f32;
        let mut order: Vec<usize> = (0..logits.len()).collect();
        order.sort_by(|a, b| logits[*b].partial_cmp(&logits[*a]).expect("no NaN"));
        order.truncate(count);
        Score {
            token: token as u32,
            logprob: logprob(token),
            rank: 1 + logits.iter().filter(|x| **x > logits[token]).count() as u32,
            likeliest: order.into_iter().map(|i| (i as u32, logprob(i))).collect(),
        }
    }

    proptest! {
        #[test]
        fn scores_are_those_of_sorting_everything(case: Case, token: prop::sample::Index, count in prop_oneof![0..8usize, 0..600usize]) {
            let logits = case.logits();
            let token = token.index(logits.len());
            let expected = reference(&logits, token, count);
            for isa in Isa::without_digits() {
                let found = score(isa, &logits, &[token as u32], count, &mut threads_of(1)).remove(0);
                prop_assert_eq!((found.token, found.rank), (expected.token, expected.rank));
                prop_assert_eq!(found.likeliest.len(), expected.likeliest.len());
                let pairs = found.likeliest.iter().zip(&expected.likeliest);
                for (a, b) in pairs.chain([(&(0, found.logprob), &(0, expected.logprob))]) {
                    prop_assert_eq!(a.0, b.0);
                    prop_assert!(a.1.total_cmp(&b.1).is_eq() || (a.1 - b.1).abs() <= 2e-6 + b.1.abs() * 1e-6, "{} {}", a.1, b.1);
                }
            }
        }
    }

    #[test]
    fn rows_that_are_not_finite_have_no_log_probabilities() {
        for bad in [f32::NAN, f32::from_bits(u32::MAX), f32::INFINITY] {
            let mut logits = [1.0; 200];
            logits[150] = bad;
            let found = score(Isa::best(), &logits, &[3], 5, &mut threads_of(1)).remove(0);
            assert!(found.logprob.is_nan() && found.likeliest.len() == 5 && found.likeliest.iter().all(|(_, logprob)| logprob.is_nan()));
        }
    }

    #[test]
    fn neighbours_and_threads_change_nothing() {
        let case = Case { seed: 3, vocabulary: 9000, spread: 4.0, steps: None, masked: 0.1 };
        let (rows, tokens): (_, Vec<u32>) = (64, (0..64).collect());
        let logits: Vec<f32> = (0..rows).flat_map(|seed| Case { seed, ..case }.logits()).collect();
        let together = score(Isa::best(), &logits, &tokens, 5, &mut threads_of(1));
        assert_eq!(score(Isa::best(), &logits, &tokens, 5, &mut threads_of(2)), together);
        for (i, row) in logits.chunks(9000).enumerate().step_by(9) {
            assert_eq!(score(Isa::best(), row, &tokens[i..=i], 5, &mut threads_of(1))[0], together[i]);
        }
    }
}
