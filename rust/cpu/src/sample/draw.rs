//! Draws tokens: top-k, top-p and min-p filters, then inverse transform sampling from the remaining distribution.

use super::{BLOCK, Extent, order, padded, spread, token_of};
use crate::pool::ThreadPool;
use crate::simd::{Isa, Kernel, Simd};

/// Number of buckets, in order of falling logits. A power of two.
const BUCKETS: usize = 1024;
/// Range of the buckets, in units of the temperature. The last bucket has all tokens whose probability is below e^-32 times that of the
/// likeliest.
const REACH: f32 = 32.0;
/// Number of tokens that are compared with a bucket at once.
const FEW: usize = 32;

/// Sampling parameters of one row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Draw {
    /// 0: greedy. Takes the first of the likeliest tokens.
    pub temperature: f64,
    /// Number of likeliest tokens to keep. 0: all.
    pub top_k: usize,
    /// Keeps the fewest of these tokens whose share of their total probability is at least this number.
    pub top_p: f64,
    /// Keeps the tokens whose probability is at least this number times that of the likeliest.
    pub min_p: f64,
    /// Position in the cumulative distribution of the remaining tokens, likeliest first. In [0, 1).
    pub uniform: f64,
}

/// Chooses a token for each row of `logits` [draws, vocabulary]. `None` if a logit of the row is NaN or the largest is not finite.
///
/// Tokens are ordered likeliest first, and by id if they are equally likely. Tokens whose probability is below e^-87 times that of the
/// likeliest are never drawn. The result depends only on the row, bit for bit. Panics if the length of `logits` is not a multiple of the
/// number of draws.
pub fn choose(isa: Isa, logits: &[f32], draws: &[Draw], pool: &mut ThreadPool) -> Vec<Option<u32>> {
    let Some(vocabulary) = logits.len().checked_div(draws.len()) else { return Vec::new() };
    assert_eq!(vocabulary * draws.len(), logits.len(), "rows of one length");
    spread(draws.len(), vocabulary, pool, |i| isa.run(Row { logits: &logits[i * vocabulary..][..vocabulary], draw: draws[i] }))
}

struct Row<'a> {
    logits: &'a [f32],
    draw: Draw,
}

impl Kernel for Row<'_> {
    type Output = Option<u32>;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Option<u32> {
        let Self { logits, draw } = self;
        let extent = Extent::of(logits)?;
        if draw.temperature <= 0.0 {
            return Some(extent.first as u32);
        }
        let mut tokens = Ordered::new(s, logits, extent, draw);
        let mut kept = tokens.all();
        let mut limit = kept.count;
        if draw.top_k > 0 && draw.top_k < limit {
            limit = draw.top_k;
            kept = tokens.find(limit, |_| false);
        }
        limit = limit.min(tokens.likely.max(1));
        if draw.top_p < 1.0 || limit < kept.count {
            let wanted = if draw.top_p < 1.0 { draw.top_p * kept.mass } else { f64::INFINITY };
            kept = tokens.find(limit, |mass| mass >= wanted);
        }
        let target = draw.uniform * kept.mass;
        Some(tokens.find(kept.count, |mass| mass > target).token as u32)
    }
}

/// A prefix of the tokens, likeliest first.
#[derive(Clone, Copy)]
struct Prefix {
    /// The last token of the prefix.
    token: usize,
    count: usize,
    /// Sum of the tokens' weights.
    mass: f64,
}

/// A row's tokens, likeliest first. They are sorted only as far as needed.
///
/// Tokens are in buckets. All tokens of a bucket are at least as likely as those of the next, and a bucket is sorted only when it is
/// opened. A weight is a probability divided by that of the likeliest. Tokens of weight 0 are ignored.
struct Ordered<'a, S> {
    s: S,
    logits: &'a [f32],
    scale: Scale,
    counts: [u32; BUCKETS],
    masses: [f64; BUCKETS],
    /// Number of tokens that min-p keeps.
    likely: usize,
    /// The bucket that was opened last, its tokens as `order` keys, and their weights.
    open: Option<usize>,
    members: Vec<u64>,
    weights: Vec<f32>,
}

impl<'a, S: Simd> Ordered<'a, S> {
    #[inline(always)]
    fn new(s: S, logits: &'a [f32], extent: Extent, draw: Draw) -> Self {
        let scale = Scale::new(extent, draw.temperature);
        let (mut counts, mut masses, mut likely) = ([0; BUCKETS], [0.0; BUCKETS], 0);
        let (mut spare, mut weights, mut places) = ([0.0; BLOCK], [0.0; BLOCK], [0.0; BLOCK]);
        for part in logits.chunks(BLOCK) {
            let part = padded(part, &mut spare);
            scale.weigh(s, part, &mut weights);
            scale.place(s, part, &mut places);
            for (weight, place) in weights.iter().zip(&places) {
                let bucket = bucket(*place);
                counts[bucket] += u32::from(*weight > 0.0);
                masses[bucket] += f64::from(*weight);
            }
            likely += weights.iter().map(|weight| u32::from(f64::from(*weight) >= draw.min_p)).sum::<u32>() as usize;
        }
        Self { s, logits, scale, counts, masses, likely, open: None, members: Vec::new(), weights: Vec::new() }
    }

    /// All tokens with a weight. The last of them is unknown.
    #[inline(always)]
    fn all(&self) -> Prefix {
        let (mut count, mut mass) = (0, 0.0);
        for bucket in 0..BUCKETS {
            count += self.counts[bucket] as usize;
            mass += self.masses[bucket];
        }
        Prefix { token: usize::MAX, count, mass }
    }

    /// The shortest prefix that has `limit` tokens or whose weights are `enough`. There must be at least `limit` tokens.
    #[inline(always)]
    fn find(&mut self, limit: usize, enough: impl Fn(f64) -> bool) -> Prefix {
        let mut found = Prefix { token: usize::MAX, count: 0, mass: 0.0 };
        for bucket in 0..BUCKETS {
            let (count, mass) = (found.count + self.counts[bucket] as usize, found.mass + self.masses[bucket]);
            if count < limit && !enough(mass) {
                (found.count, found.mass) = (count, mass);
                continue;
            }
            self.look_into(bucket);
            for (member, weight) in self.members.iter().zip(&self.weights) {
                found = Prefix { token: token_of(*member), count: found.count + 1, mass: found.mass + f64::from(*weight) };
                if found.count >= limit || enough(found.mass) {
                    break;
                }
            }
            // Rounding can make the sum in this order smaller. Then the result is the bucket's last token.
            break;
        }
        found
    }

    #[inline(always)]
    fn look_into(&mut self, wanted: usize) {
        if self.open == Some(wanted) {
            return;
        }
        self.open = Some(wanted);
        self.members.clear();
        let (mut spare, mut weights, mut places) = ([0.0; BLOCK], [0.0; BLOCK], [0.0; BLOCK]);
        for (i, part) in self.logits.chunks(BLOCK).enumerate() {
            self.scale.place(self.s, padded(part, &mut spare), &mut places);
            for (j, (few, near)) in places.chunks_exact(FEW).zip(part.chunks(FEW)).enumerate() {
                // No early exit, so that the loop is vectorised. Usually none of these tokens is in the bucket.
                if !few.iter().fold(false, |found, place| found | (bucket(*place) == wanted)) {
                    continue;
                }
                let first = i * BLOCK + j * FEW;
                let there = near.iter().zip(few).enumerate().filter(|(_, (_, place))| bucket(**place) == wanted);
                self.members.extend(there.map(|(k, (x, _))| order(*x, first + k)));
            }
        }
        self.members.sort_unstable();
        self.weights.clear();
        for part in self.members.chunks(BLOCK) {
            spare.fill(f32::NEG_INFINITY);
            for (x, member) in spare.iter_mut().zip(part) {
                *x = self.logits[token_of(*member)];
            }
            self.scale.weigh(self.s, &spare, &mut weights);
            self.weights.extend(&weights[..part.len()]);
        }
    }
}

/// Converts logits to weights and buckets.
#[derive(Clone, Copy)]
struct Scale {
    best: f32,
    temperature: f32,
    /// Buckets per unit of logits.
    steps: f32,
}

impl Scale {
    fn new(extent: Extent, temperature: f64) -> Self {
        // Within these bounds no quotient is NaN. Temperatures outside them have no practical use.
        let temperature = (temperature as f32).clamp(1e-30, 1e30);
        let reach = (extent.best - extent.lowest).min(REACH * temperature);
        Self { best: extent.best, temperature, steps: (BUCKETS as f32 / reach).min(f32::MAX) }
    }

    /// Computes probabilities, divided by that of the likeliest.
    #[inline(always)]
    fn weigh<S: Simd>(self, s: S, logits: &[f32; BLOCK], weights: &mut [f32; BLOCK]) {
        let (best, temperature) = (s.splat(self.best), s.splat(self.temperature));
        for at in (0..BLOCK).step_by(S::LANES) {
            // SAFETY: a block is a whole number of registers.
            unsafe {
                let below = s.sub(s.load(logits.as_ptr().add(at)), best);
                s.store(weights.as_mut_ptr().add(at), s.exp(s.div(below, temperature)));
            }
        }
    }

    /// Computes the arguments of [`bucket`]. All operations are monotone, so a token never gets a later bucket than a less likely token.
    #[inline(always)]
    fn place<S: Simd>(self, s: S, logits: &[f32; BLOCK], places: &mut [f32; BLOCK]) {
        let (best, steps, last) = (s.splat(self.best), s.splat(self.steps), s.splat((BUCKETS - 1) as f32));
        for at in (0..BLOCK).step_by(S::LANES) {
            // SAFETY: a block is a whole number of registers.
            unsafe {
                let below = s.sub(best, s.load(logits.as_ptr().add(at)));
                let place = s.min(s.mul(below, steps), last);
                s.store(places.as_mut_ptr().add(at), s.add(place, s.splat(SHIFT)));
            }
        }
    }
}

/// 2^23. Adding a small integer to it puts the integer in the lowest bits of the sum.
const SHIFT: f32 = 8_388_608.0;

#[inline(always)]
fn bucket(place: f32) -> usize {
    place.to_bits() as usize % BUCKETS
}

#[cfg(test)]
mod tests {
    use super::super::tests::{Case, threads_of};
    use super::*;
    use proptest::prelude::*;

    const GREEDY: Draw = Draw { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, uniform: 0.0 };
    /// Maximum relative error of fp32 exponentials.
    const ROUNDING: f64 = 1e-5;

    /// A row's tokens in order, and the cumulative sums of their weights. Computed by sorting all tokens in fp64.
    struct Sorted {
        tokens: Vec<usize>,
        weights: Vec<f64>,
        sums: Vec<f64>,
    }

    impl Sorted {
        fn new(logits: &[f32], temperature: f64) -> Self {
            let mut tokens: Vec<usize> = (0..logits.len()).collect();
            tokens.sort_by(|a, b| logits[*b].partial_cmp(&logits[*a]).expect("no NaN"));
            let best = logits[tokens[0]];
            let weights: Vec<f64> = tokens.iter().map(|i| (f64::from(logits[*i] - best) / temperature).exp()).collect();
            let sums = weights.iter().scan(0.0, |sum, weight| Some(std::mem::replace(sum, *sum + weight) + weight)).collect();
            Self { tokens, weights, sums }
        }

        /// Number of tokens that the filters keep if the comparisons of top-p and min-p are relaxed by the relative `slack`.
        fn kept(&self, draw: Draw, slack: f64) -> usize {
            let k = if draw.top_k == 0 { self.tokens.len() } else { draw.top_k.min(self.tokens.len()) };
            let mass = draw.top_p * self.sums[k - 1];
            let before = |rank: usize| if rank == 0 { 0.0 } else { self.sums[rank - 1] };
            let within = |rank: usize| draw.top_p >= 1.0 || before(rank) < mass * (1.0 + slack);
            (0..k).take_while(|rank| within(*rank) && self.weights[*rank] * (1.0 + slack) >= draw.min_p).count().max(1)
        }

        /// Whether `token` is a valid result of the draw, up to rounding.
        fn may_give(&self, draw: Draw, token: usize) -> bool {
            let rank = self.tokens.iter().position(|i| *i == token).expect("a token of the row");
            let (least, most) = (self.kept(draw, -ROUNDING), self.kept(draw, ROUNDING));
            let after_start = self.sums[rank] - self.weights[rank] <= draw.uniform * self.sums[most - 1] * (1.0 + ROUNDING);
            let before_end = self.sums[rank] * (1.0 + ROUNDING) >= draw.uniform * self.sums[least - 1];
            rank < most && self.weights[rank] > 0.0 && after_start && before_end
        }
    }

    fn draws() -> impl Strategy<Value = Draw> {
        let temperature = prop_oneof![3 => 0.2..2.0f64, 1 => Just(1e-5), 1 => Just(1e-40), 1 => Just(100.0), 1 => Just(1e9)];
        let top_k = prop_oneof![Just(0), Just(1), 1..60usize, 1..6000usize];
        let top_p = prop_oneof![Just(1.0), Just(0.95), 0.0..1.0f64, Just(0.0), Just(1.0 - 1e-16)];
        let min_p = prop_oneof![3 => Just(0.0), 1 => Just(1.0), 1 => Just(0.05), 1 => 0.0..1.0f64];
        let uniform = prop_oneof![4 => 0.0..1.0f64, 1 => Just(0.0), 1 => Just(1.0 - f64::EPSILON / 2.0)];
        (temperature, top_k, top_p, min_p, uniform).prop_map(|(temperature, top_k, top_p, min_p, uniform)| Draw {
            temperature,
            top_k,
            top_p,
            min_p,
            uniform,
        })
    }

    proptest! {
        #[test]
        fn draws_are_those_of_sorting_everything(case: Case, draws in prop::collection::vec(draws(), 1..4)) {
            let row = case.logits();
            let logits = row.repeat(draws.len());
            for isa in Isa::without_digits() {
                for (draw, token) in draws.iter().zip(choose(isa, &logits, &draws, &mut threads_of(1))) {
                    let sorted = Sorted::new(&row, draw.temperature);
                    let token = token.expect("a finite row") as usize;
                    prop_assert!(sorted.may_give(*draw, token), "{isa:?} {draw:?} gave {token}");
                }
            }
        }

        #[test]
        fn greedy_takes_the_first_of_the_largest(case: Case) {
            let logits = case.logits();
            let best = Sorted::new(&logits, 1.0).tokens[0] as u32;
            for isa in Isa::without_digits() {
                prop_assert_eq!(choose(isa, &logits, &[GREEDY], &mut threads_of(1)), [Some(best)]);
            }
        }

        #[test]
        fn rows_that_are_not_finite_have_none(case: Case, at: prop::sample::Index, temperature in 0..2u8) {
            let draw = Draw { temperature: f64::from(temperature), ..GREEDY };
            let mut logits = case.logits();
            let at = at.index(logits.len());
            for bad in [f32::NAN, -f32::NAN, f32::from_bits(u32::MAX), f32::INFINITY] {
                logits[at] = bad;
                prop_assert_eq!(choose(Isa::best(), &logits, &[draw], &mut threads_of(1)), [None]);
            }
            logits.fill(f32::NEG_INFINITY);
            prop_assert_eq!(choose(Isa::best(), &logits, &[draw], &mut threads_of(1)), [None]);
        }
    }

    #[test]
    fn equal_tokens_come_in_the_order_of_their_numbers() {
        let logits = [0.0, 1.0, -0.0, 1.0, 0.0];
        // Two weights are 1 and three are 2/3. In twelfths, the cumulative weights are 3, 6, 8, 10 and 12.
        for (twelfth, expected) in [1, 1, 1, 3, 3, 3, 0, 0, 2, 2, 4, 4].into_iter().enumerate() {
            let draw = Draw { temperature: 1.0 / 1.5f64.ln(), uniform: (twelfth as f64 + 0.5) / 12.0, ..GREEDY };
            for isa in Isa::without_digits() {
                assert_eq!(choose(isa, &logits, &[draw], &mut threads_of(1)), [Some(expected)], "{twelfth}");
            }
        }
    }

    #[test]
    fn neighbours_and_threads_change_nothing() {
        let case = Case { seed: 0, vocabulary: 9000, spread: 2.5, steps: None, masked: 0.0 };
        let logits: Vec<f32> = (0..64).flat_map(|seed| Case { seed, ..case }.logits()).collect();
        let draws: Vec<Draw> = (0..64)
            .map(|i| Draw {
                temperature: f64::from(i % 3),
                top_k: i as usize % 5 * 100,
                top_p: 0.95,
                min_p: 0.0,
                uniform: f64::from(i) / 64.0,
            })
            .collect();
        let together = choose(Isa::best(), &logits, &draws, &mut threads_of(1));
        assert_eq!(choose(Isa::best(), &logits, &draws, &mut threads_of(2)), together);
        for (i, row) in logits.chunks(9000).enumerate() {
            assert_eq!(choose(Isa::best(), row, &draws[i..=i], &mut threads_of(1))[0], together[i]);
        }
    }
}
