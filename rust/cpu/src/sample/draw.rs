//! Draws tokens: top-k, top-p, min-p, and the inverse of what is left of the cumulative distribution.

use super::{BLOCK, Extent, order, padded, spread, token_of};
use crate::simd::{Isa, Kernel, Simd, exp};

/// Into how many buckets of falling logits the tokens are put. A power of two.
const BUCKETS: usize = 1024;
/// How far down the buckets reach, in units of the temperature: the last one holds all that is less likely than e^-32 of the best.
const REACH: f32 = 32.0;
/// Tokens that are asked together whether one is in a bucket.
const FEW: usize = 32;

/// How one row is to be drawn.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Draw {
    /// 0: the first of the likeliest.
    pub temperature: f64,
    /// So many of the likeliest are left; 0: all.
    pub top_k: usize,
    /// Of these the fewest that have together this part of their probability.
    pub top_p: f64,
    /// Of these those that are at least this probable in comparison with the likeliest.
    pub min_p: f64,
    /// Where in the cumulative distribution of what is left, likeliest first; in [0, 1).
    pub uniform: f64,
}

/// A token for each row of `logits` [draws, vocabulary]; `None` where there is NaN among them or the best is not finite.
///
/// Tokens are ordered likeliest first, equal ones by their number. One whose probability is below e^-87 of the likeliest's is never
/// drawn. The result depends on nothing but the row, bit for bit. Panics if the logits are not so many rows of one length.
pub fn choose(isa: Isa, logits: &[f32], draws: &[Draw], threads: usize) -> Vec<Option<u32>> {
    let Some(vocabulary) = logits.len().checked_div(draws.len()) else { return Vec::new() };
    assert_eq!(vocabulary * draws.len(), logits.len(), "rows of one length");
    spread(draws.len(), vocabulary, threads, |i| isa.run(Row { logits: &logits[i * vocabulary..][..vocabulary], draw: draws[i] }))
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

/// The tokens up to one of them, likeliest first.
#[derive(Clone, Copy)]
struct Prefix {
    /// The last of them.
    token: usize,
    count: usize,
    /// The sum of their weights.
    mass: f64,
}

/// A row's tokens, likeliest first, as far as anybody needs to know their order.
///
/// They lie in buckets of which each holds likelier ones than the next, and only a bucket that is looked into is sorted.
/// A weight is a probability over that of the likeliest; tokens of weight 0 are as good as none.
struct Ordered<'a, S> {
    s: S,
    logits: &'a [f32],
    scale: Scale,
    counts: [u32; BUCKETS],
    masses: [f64; BUCKETS],
    /// How many tokens min-p leaves.
    likely: usize,
    /// The bucket that was looked into last, its tokens by `order`, and their weights.
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

    /// All that have a weight; the last of them is not known.
    #[inline(always)]
    fn all(&self) -> Prefix {
        let (mut count, mut mass) = (0, 0.0);
        for bucket in 0..BUCKETS {
            count += self.counts[bucket] as usize;
            mass += self.masses[bucket];
        }
        Prefix { token: usize::MAX, count, mass }
    }

    /// The fewest tokens, likeliest first, that are `limit` or whose weights are `enough`. There must be as many as `limit`.
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
            // In this order the sum may have come out smaller by a rounding: then it is the bucket's last.
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
                // Without a way out, so that it is done with registers: mostly there is none.
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

/// What makes weights and buckets of logits.
#[derive(Clone, Copy)]
struct Scale {
    best: f32,
    temperature: f32,
    /// Buckets in a unit of logits.
    steps: f32,
}

impl Scale {
    fn new(extent: Extent, temperature: f64) -> Self {
        // Within these bounds no quotient is NaN; nobody means a temperature beyond them.
        let temperature = (temperature as f32).clamp(1e-30, 1e30);
        let reach = (extent.best - extent.lowest).min(REACH * temperature);
        Self { best: extent.best, temperature, steps: (BUCKETS as f32 / reach).min(f32::MAX) }
    }

    /// Probabilities over that of the likeliest.
    #[inline(always)]
    fn weigh<S: Simd>(self, s: S, logits: &[f32; BLOCK], weights: &mut [f32; BLOCK]) {
        let (best, temperature) = (s.splat(self.best), s.splat(self.temperature));
        for at in (0..BLOCK).step_by(S::LANES) {
            // SAFETY: a block is a whole number of registers.
            unsafe {
                let below = s.sub(s.load(logits.as_ptr().add(at)), best);
                s.store(weights.as_mut_ptr().add(at), exp(s, s.div(below, temperature)));
            }
        }
    }

    /// What [`bucket`] makes buckets of. All steps are monotone, so no token comes into a later one than a less likely.
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

/// 2^23: a small integer added to it stands in the lowest bits of the sum.
const SHIFT: f32 = 8_388_608.0;

#[inline(always)]
fn bucket(place: f32) -> usize {
    place.to_bits() as usize % BUCKETS
}

#[cfg(test)]
mod tests {
    use super::super::tests::Case;
    use super::*;
    use proptest::prelude::*;

    const GREEDY: Draw = Draw { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, uniform: 0.0 };
    /// What fp32 exponentials may differ by, relative to themselves.
    const ROUNDING: f64 = 1e-5;

    /// A row's tokens in order, and the sums of their weights, by sorting everything in fp64.
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

        /// How many tokens are left, if what top-p and min-p compare is larger by `slack`, relatively.
        fn kept(&self, draw: Draw, slack: f64) -> usize {
            let k = if draw.top_k == 0 { self.tokens.len() } else { draw.top_k.min(self.tokens.len()) };
            let mass = draw.top_p * self.sums[k - 1];
            let before = |rank: usize| if rank == 0 { 0.0 } else { self.sums[rank - 1] };
            let within = |rank: usize| draw.top_p >= 1.0 || before(rank) < mass * (1.0 + slack);
            (0..k).take_while(|rank| within(*rank) && self.weights[*rank] * (1.0 + slack) >= draw.min_p).count().max(1)
        }

        /// Whether the draw may have given `token`, up to rounding.
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
            for isa in Isa::available() {
                for (draw, token) in draws.iter().zip(choose(isa, &logits, &draws, 1)) {
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
            for isa in Isa::available() {
                prop_assert_eq!(choose(isa, &logits, &[GREEDY], 1), [Some(best)]);
            }
        }

        #[test]
        fn rows_that_are_not_finite_have_none(case: Case, at: prop::sample::Index, temperature in 0..2u8) {
            let draw = Draw { temperature: f64::from(temperature), ..GREEDY };
            let mut logits = case.logits();
            let at = at.index(logits.len());
            for bad in [f32::NAN, -f32::NAN, f32::from_bits(u32::MAX), f32::INFINITY] {
                logits[at] = bad;
                prop_assert_eq!(choose(Isa::best(), &logits, &[draw], 1), [None]);
            }
            logits.fill(f32::NEG_INFINITY);
            prop_assert_eq!(choose(Isa::best(), &logits, &[draw], 1), [None]);
        }
    }

    #[test]
    fn equal_tokens_come_in_the_order_of_their_numbers() {
        let logits = [0.0, 1.0, -0.0, 1.0, 0.0];
        // Two weights of 1 and three of 2/3: in twelfths, tokens end at 3, 6, 8, 10 and 12.
        for (twelfth, expected) in [1, 1, 1, 3, 3, 3, 0, 0, 2, 2, 4, 4].into_iter().enumerate() {
            let draw = Draw { temperature: 1.0 / 1.5f64.ln(), uniform: (twelfth as f64 + 0.5) / 12.0, ..GREEDY };
            for isa in Isa::available() {
                assert_eq!(choose(isa, &logits, &[draw], 1), [Some(expected)], "{twelfth}");
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
        let together = choose(Isa::best(), &logits, &draws, 1);
        assert_eq!(choose(Isa::best(), &logits, &draws, 2), together);
        for (i, row) in logits.chunks(9000).enumerate() {
            assert_eq!(choose(Isa::best(), row, &draws[i..=i], 1)[0], together[i]);
        }
    }
}
