//! The length of drafts: how many drafted tokens a step verifies.

use super::acceptance::Acceptance;
use crate::step::{DraftSource, MAX_DRAFT};
use crate::step_time::{Load, StepModel};

/// Tokens per second with drafts must be this many times those without, because rates and times are estimates.
const MARGIN: f64 = 1.1;

/// Probabilities that a draft is accepted up to and including each position. They never rise.
pub(crate) type Survival = [f64; MAX_DRAFT];

/// The expected tokens per second of a step by its number of drafted tokens. The number with the most is verified.
///
/// A step's time does not grow evenly with its rows, so one more token may not pay while four do.
#[derive(Debug)]
pub(crate) struct DraftGain<'a> {
    model: &'a StepModel,
    /// The step's decoding sequences.
    decodes: u32,
    /// Microseconds of the step before tokens are drafted, and of a row more by the linear model.
    time: f64,
    row: f64,
}

/// Drafts of a step whose tokens are equally likely to be accepted.
#[derive(Debug)]
pub(crate) struct Drafts {
    /// Probabilities of their tokens.
    pub(crate) survival: Survival,
    /// Index and number of tokens of each draft.
    pub(crate) drafts: Vec<(usize, usize)>,
}

impl<'a> DraftGain<'a> {
    /// Takes a step's decoding sequences, before tokens are drafted. `None` if too few such steps were observed lately.
    pub(crate) fn new(load: &Load, model: &'a StepModel) -> Option<Self> {
        let (time, predicted) = (model.decode_rows(load.decode_seqs)?, model.step(load));
        let row = if predicted > 0.0 { model.row(load) * time / predicted } else { 0.0 };
        Some(Self { model, decodes: load.decode_seqs, time, row })
    }

    /// The number of drafted tokens with the most expected tokens per second. Each is the first of its draft or a later one,
    /// and survives with a probability.
    ///
    /// A sequence that gets ahead of its batch saves its row of a later step, but the step runs for the others. So the tokens
    /// count in proportion to the sequences that have a draft.
    fn best(&self, drafted: impl IntoIterator<Item = (bool, f64)>) -> usize {
        let decodes = f64::from(self.decodes);
        let (mut ahead, mut saved) = (0.0, 0.0);
        let (mut best, mut most) = (0, MARGIN * decodes / self.time);
        for (count, (first, survival)) in (1..).zip(drafted) {
            ahead += f64::from(u8::from(first));
            saved += survival;
            let rate = (decodes + saved * ahead / decodes) / self.step(count);
            if rate > most {
                (best, most) = (count as usize, rate);
            }
        }
        best
    }

    /// Whether drafts of up to `most` tokens would pay if all were accepted.
    pub(crate) fn may_pay(&self, most: usize) -> bool {
        let decodes = self.decodes as usize;
        self.best((0..most * decodes).map(|count| (count < decodes, 1.0))) > 0
    }

    /// What a drafted token costs its sequence, in the sequence's part of a step without drafts.
    pub(crate) fn token_price(&self) -> f64 {
        self.row * f64::from(self.decodes) / self.time
    }

    /// Microseconds of the step with `drafted` tokens: observed, or by the linear model.
    fn step(&self, drafted: u32) -> f64 {
        self.model.decode_rows(self.decodes + drafted).unwrap_or_else(|| self.time + self.row * f64::from(drafted))
    }

    /// Calls `admit` with a draft's index and number of tokens for each token that pays, most probable first.
    pub(crate) fn admit(&self, groups: &[Drafts], mut admit: impl FnMut(usize, usize)) {
        let tokens = |(group, drafts): (usize, &Drafts)| {
            let longest = drafts.drafts.iter().map(|&(_, len)| len).max().unwrap_or(0);
            (0..longest).map(move |position| (group, position))
        };
        let mut sorted: Vec<_> = groups.iter().enumerate().flat_map(tokens).collect();
        let survival = |&(group, position): &(usize, usize)| groups[group].survival[position];
        sorted.sort_unstable_by(|a, b| survival(b).total_cmp(&survival(a)).then(a.1.cmp(&b.1)).then(a.0.cmp(&b.0)));
        let each = |at: &(usize, usize)| {
            let (drafts, position, survival) = (&groups[at.0].drafts, at.1, survival(at));
            drafts.iter().filter(move |(_, len)| *len > position).map(move |&(index, _)| (index, position + 1, survival))
        };
        let best = self.best(sorted.iter().flat_map(each).map(|(_, tokens, survival)| (tokens == 1, survival)));
        sorted.iter().flat_map(each).take(best).for_each(|(index, tokens, _)| admit(index, tokens));
    }
}

/// Decides how many tokens of each draft a step verifies, by learned acceptance rates.
#[derive(Debug, Default)]
pub struct DraftLengths {
    acceptance: Acceptance,
}

impl DraftLengths {
    pub(crate) fn acceptance(&self) -> &Acceptance {
        &self.acceptance
    }

    /// The number of tokens to verify of each of `drafts`, which are given by source and number of tokens. `load` has the
    /// step's decoding sequences, before tokens are drafted.
    pub fn admit(&mut self, load: &Load, model: &StepModel, drafts: &[(DraftSource, usize)]) -> Vec<usize> {
        let mut admitted = vec![0; drafts.len()];
        if let Some(gain) = DraftGain::new(load, model) {
            gain.admit(&self.by_source(drafts), |index, tokens| admitted[index] = tokens);
        }
        for (&(source, _), _) in drafts.iter().zip(&admitted).filter(|(_, admitted)| **admitted == 0) {
            self.acceptance.idle(source);
        }
        admitted
    }

    /// Learns that the first `accepted` of `drafted` tokens were accepted.
    pub fn observe(&mut self, source: DraftSource, drafted: usize, accepted: usize) {
        self.acceptance.observe(source, drafted, accepted);
    }

    /// The drafts by what decides their acceptance rates.
    fn by_source(&self, drafts: &[(DraftSource, usize)]) -> Vec<Drafts> {
        let mut groups: Vec<Drafts> = Vec::new();
        let mut group_of = [usize::MAX; DraftSource::KINDS];
        for (index, &(source, len)) in drafts.iter().enumerate() {
            let group = &mut group_of[source.kind()];
            if *group == usize::MAX {
                *group = groups.len();
                groups.push(Drafts { survival: self.acceptance.survival(source), drafts: Vec::with_capacity(drafts.len()) });
            }
            groups[*group].drafts.push((index, len));
        }
        groups
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn admitted(model: &StepModel, load: &Load, groups: &[(&[f64], &[usize])]) -> Vec<usize> {
        let (mut drafts, mut indices) = (Vec::new(), 0..);
        for (rates, lens) in groups {
            let survival = std::array::from_fn(|position| rates.get(position).copied().unwrap_or(0.0));
            drafts.push(Drafts { survival, drafts: lens.iter().copied().map(|len| (indices.next().unwrap_or(0), len)).collect() });
        }
        let mut admitted = vec![0; groups.iter().map(|(_, lens)| lens.len()).sum()];
        DraftGain::new(load, model).unwrap().admit(&drafts, |index, tokens| admitted[index] = tokens);
        admitted
    }

    fn decodes(decode_seqs: u32) -> Load {
        Load { decode_seqs, ..Load::default() }
    }

    /// A model of a machine whose steps take `time` by their rows.
    fn learned(most: u32, time: impl Fn(u32) -> u64) -> StepModel {
        let mut model = StepModel::default();
        for step in 0..8 * most {
            model.observe(&decodes(step / 8 + 1), time(step / 8 + 1));
        }
        model
    }

    #[test]
    fn tokens_are_proposed_while_they_raise_the_rate() {
        // A step takes 9 ms, and each row 1 ms.
        let model = learned(80, |rows| 9000 + 1000 * u64::from(rows));
        let one = |rates: &[f64], len: usize| admitted(&model, &decodes(1), &[(rates, &[len])]);
        assert_eq!(one(&[0.9, 0.8, 0.7, 0.6], 4), [4]);
        assert_eq!(one(&[0.9, 0.8, 0.7, 0.6], 2), [2]);
        assert_eq!(one(&[0.9, 0.4, 0.05], 3), [2]);
        assert_eq!(one(&[0.1], 1), [0]);
        assert_eq!(one(&[0.2], 1), [0], "a gain of a hundredth is no certain one");
        // A full batch: even certain tokens bring little.
        assert_eq!(admitted(&model, &decodes(64), &[(&[1.0], &[1; 10])]), [0; 10]);
        assert!(!DraftGain::new(&decodes(64), &model).unwrap().may_pay(1));
        assert!(DraftGain::new(&decodes(1), &model).unwrap().may_pay(1));
    }

    #[test]
    fn the_most_probable_tokens_of_all_drafts_are_first() {
        let model = learned(40, |rows| 8000 + 600 * u64::from(rows));
        assert_eq!(admitted(&model, &decodes(4), &[(&[0.8, 0.1], &[2, 1]), (&[1.0, 1.0, 0.95], &[3, 3])]), [1, 1, 3, 3]);
    }

    #[test]
    fn tokens_fill_the_tiles_of_rows_that_a_machine_computes_at_a_time() {
        // A tile of four rows takes 4 ms beside 6 ms.
        let model = learned(16, |rows| 6000 + 4000 * u64::from(rows.div_ceil(4)));
        let four = |rate: f64, lens: &[usize]| admitted(&model, &decodes(4), &[(&[rate], lens)]);
        assert_eq!(four(0.95, &[1; 2]), [0; 2], "half a tile");
        assert_eq!(four(0.95, &[1; 4]), [1; 4]);
        assert_eq!(four(0.3, &[1; 4]), [0; 4]);
        assert_eq!(admitted(&model, &decodes(3), &[(&[0.95], &[1])]), [1], "the tile's last row is free");
    }

    #[test]
    fn a_sequence_alone_is_not_driven_ahead_of_its_batch() {
        let model = learned(16, |rows| 9000 + 500 * u64::from(rows));
        let all = [0.95, 0.9, 0.85];
        assert_eq!(admitted(&model, &decodes(4), &[(&all, &[3])]), [0]);
        assert_eq!(admitted(&model, &decodes(4), &[(&all, &[3; 4])]), [3; 4]);
    }

    #[test]
    fn nothing_is_proposed_before_steps_without_drafts_were_observed() {
        let model = StepModel::new(9000.0, 1000.0, 1000.0, 0.0, 0.0);
        assert!(DraftGain::new(&decodes(1), &model).is_none());
    }
}
