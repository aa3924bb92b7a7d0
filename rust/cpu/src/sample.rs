//! Sampling: chooses tokens from rows of logits, and computes log-probabilities.

mod draw;
mod score;
mod uniform;

use std::sync::OnceLock;

use crate::pool::ThreadPool;

pub use draw::{Draw, choose};
pub use score::{Score, score};
pub use uniform::uniform;

/// Logits that are processed at once. Their intermediate results stay in the L1 cache.
const BLOCK: usize = 1024;
/// Minimum logits for which the threads of a pool are woken up.
const WORTH: usize = 1 << 17;

/// Maps a number to an integer with the same order. NaNs are beyond the infinities, and both zeros have the same rank.
#[inline(always)]
fn rank(x: f32) -> i32 {
    let bits = (x + 0.0).to_bits() as i32;
    bits ^ ((bits >> 31) & i32::MAX)
}

/// Sort key of a token in its row. The likeliest token has the smallest key. Equal logits are ordered by token id.
#[inline(always)]
fn order(x: f32, token: usize) -> u64 {
    let falling = (rank(x) as u32) ^ 0x7fff_ffff;
    (u64::from(falling) << 32) | token as u64
}

/// The token of an [`order`] key.
#[inline(always)]
fn token_of(order: u64) -> usize {
    order as u32 as usize
}

/// The extremes of a row's logits.
#[derive(Clone, Copy)]
struct Extent {
    /// The first token with the largest logit.
    first: usize,
    best: f32,
    lowest: f32,
}

impl Extent {
    /// `None` if a logit is NaN or the largest is not finite.
    #[inline(always)]
    fn of(logits: &[f32]) -> Option<Self> {
        let (mut best, mut block, mut lowest) = (i32::MIN, 0, i32::MAX);
        for (i, part) in logits.chunks(BLOCK).enumerate() {
            let (mut high, mut low) = (i32::MIN, i32::MAX);
            for &x in part {
                high = high.max(rank(x));
                low = low.min(rank(x));
            }
            if high > best {
                (best, block) = (high, i);
            }
            lowest = lowest.min(low);
        }
        let infinity = rank(f32::INFINITY);
        if lowest < rank(f32::NEG_INFINITY) || best >= infinity || best <= rank(f32::NEG_INFINITY) {
            return None;
        }
        let first = (block * BLOCK..logits.len()).find(|&i| rank(logits[i]) == best)?;
        Some(Self { first, best: number(best), lowest: number(lowest) })
    }
}

/// The number with this [`rank`].
fn number(rank: i32) -> f32 {
    f32::from_bits((rank ^ ((rank >> 31) & i32::MAX)) as u32)
}

/// A full block: the logits, padded with minus infinity.
#[inline(always)]
fn padded<'a>(part: &'a [f32], spare: &'a mut [f32; BLOCK]) -> &'a [f32; BLOCK] {
    if let Ok(full) = part.try_into() {
        return full;
    }
    spare.fill(f32::NEG_INFINITY);
    spare[..part.len()].copy_from_slice(part);
    spare
}

/// Collects the results of `row` for all rows, in order. All threads of the pool compute rows, if there is enough work for them.
fn spread<T: Send + Sync>(rows: usize, vocabulary: usize, pool: &mut ThreadPool, row: impl Fn(usize) -> T + Sync) -> Vec<T> {
    if rows < 2 || rows * vocabulary < WORTH {
        return (0..rows).map(row).collect();
    }
    let found: Vec<OnceLock<T>> = (0..rows).map(|_| OnceLock::new()).collect();
    pool.run(|worker| {
        worker.parallel_for(rows, |i| {
            found[i].get_or_init(|| row(i));
        });
    });
    found.into_iter().map(|found| found.into_inner().expect("a thread computed each row")).collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A row of finite and masked logits. At least one is finite.
    #[derive(Clone, Copy, Debug)]
    pub(crate) struct Case {
        pub(crate) seed: u64,
        pub(crate) vocabulary: usize,
        /// Scale of the logits.
        pub(crate) spread: f32,
        /// If set, logits are multiples of `spread / steps`, so that many are equal.
        pub(crate) steps: Option<f32>,
        /// Share of logits that are minus infinity.
        pub(crate) masked: f32,
    }

    impl Case {
        pub(crate) fn logits(self) -> Vec<f32> {
            let mut state = self.seed;
            let mut uniform = || {
                // SplitMix64 (Steele et al., 2014).
                state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
                let mut z = state;
                z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
                z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
                ((z ^ (z >> 31)) >> 40) as f32 / (1 << 24) as f32
            };
            let mut logits: Vec<f32> = (0..self.vocabulary)
                .map(|_| {
                    let masked = uniform() < self.masked;
                    // The sum of four uniform numbers is nearly normal.
                    let x = (uniform() + uniform() + uniform() + uniform() - 2.0) * 1.7;
                    let x = self.steps.map_or(x, |steps| (x * steps).round() / steps) * self.spread;
                    // Rounding can exceed the largest number.
                    let x = x.clamp(f32::MIN, f32::MAX);
                    if masked { f32::NEG_INFINITY } else { x }
                })
                .collect();
            if logits.iter().all(|x| x.is_infinite()) {
                logits[0] = 0.0;
            }
            logits
        }
    }

    impl Arbitrary for Case {
        type Parameters = ();
        type Strategy = BoxedStrategy<Self>;

        fn arbitrary_with((): ()) -> BoxedStrategy<Self> {
            let vocabulary = prop_oneof![1..40usize, 1..5000usize, Just(1024), Just(4096)];
            let spread = prop_oneof![Just(2.5f32), Just(0.0), 0.01..30.0f32, Just(1e-4), Just(1e4), Just(1e38)];
            let steps = prop_oneof![2 => Just(None), 1 => (1.0..40.0f32).prop_map(Some)];
            let masked = prop_oneof![2 => Just(0.0f32), 1 => 0.0..1.0f32];
            (any::<u64>(), vocabulary, spread, steps, masked)
                .prop_map(|(seed, vocabulary, spread, steps, masked)| Self { seed, vocabulary, spread, steps, masked })
                .boxed()
        }
    }

    #[test]
    fn ranks_are_in_the_order_of_the_numbers() {
        let rising = [f32::NEG_INFINITY, f32::MIN, -1.0, -f32::MIN_POSITIVE, -1e-45, 0.0, 1e-45, 2.5, f32::MAX, f32::INFINITY];
        assert!(rising.is_sorted_by(|a, b| rank(*a) < rank(*b)));
        assert!(rising.iter().all(|&x| number(rank(x)).to_bits() == x.to_bits()));
        assert_eq!(rank(-0.0), rank(0.0));
        // Arithmetic can change the sign of NaN. With either sign, its rank is beyond the infinities.
        assert!([f32::NAN, -f32::NAN].iter().all(|&x| rank(x) > rank(f32::INFINITY) || rank(x) < rank(f32::NEG_INFINITY)));
        assert!(order(2.0, 9) < order(1.0, 0) && order(0.0, 3) < order(-0.0, 4) && order(-1.0, 0) < order(f32::NEG_INFINITY, 0));
        assert_eq!(token_of(order(-3.0, 255_999)), 255_999);
    }

    #[test]
    fn rows_come_back_in_order_from_any_number_of_threads() {
        for (rows, threads) in [(0, 3), (1, 4), (5, 3), (64, 7)] {
            assert_eq!(spread(rows, WORTH, &mut threads_of(threads), |i| i), (0..rows).collect::<Vec<_>>());
        }
    }

    /// A pool.
    pub(crate) fn threads_of(count: usize) -> ThreadPool {
        ThreadPool::new(count).expect("threads start")
    }
}
