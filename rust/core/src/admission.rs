//! Decides how many drafted tokens a step verifies.

use crate::acceptance::{Acceptance, DraftSource, MAX_DRAFT};
use crate::cost::{Load, StepModel};

/// A drafted token must be worth this many times its cost, because rates and costs are estimates.
const MARGIN: f64 = 1.15;

/// Probabilities that a draft is accepted up to and including each position. They never rise.
pub(crate) type Survival = [f64; MAX_DRAFT];

/// Expected tokens and time of a step, to which drafted tokens are added while they raise the tokens per second.
#[derive(Debug)]
pub(crate) struct Admission {
    tokens: f64,
    /// Microseconds of the step.
    time: f64,
    /// Microseconds of one more drafted token.
    each: f64,
}

/// Drafts of a step whose tokens are equally likely to be accepted.
#[derive(Debug)]
pub(crate) struct Drafts {
    /// Probabilities of their tokens.
    pub(crate) survival: Survival,
    /// Index and number of tokens of each draft.
    pub(crate) drafts: Vec<(usize, usize)>,
}

impl Admission {
    /// Takes a step's decoding sequences, before tokens are drafted.
    pub(crate) fn new(load: &Load, model: &StepModel) -> Self {
        Self { tokens: load.decode_seqs.into(), time: model.step(load), each: model.drafted_token() }
    }

    /// Whether a token that is accepted with probability `survival` raises the tokens per second.
    pub(crate) fn pays(&self, survival: f64) -> bool {
        survival * self.time > MARGIN * self.tokens * self.each
    }

    /// Calls `admit` with a draft's index and number of tokens for each token that pays, most probable first. Each added
    /// token raises the threshold for the others.
    pub(crate) fn admit(mut self, groups: &[Drafts], mut admit: impl FnMut(usize, usize)) {
        let tokens = |(group, drafts): (usize, &Drafts)| {
            let longest = drafts.drafts.iter().map(|&(_, len)| len).max().unwrap_or(0);
            (0..longest).map(move |position| (group, position))
        };
        let mut sorted: Vec<_> = groups.iter().enumerate().flat_map(tokens).collect();
        let survival = |&(group, position): &(usize, usize)| groups[group].survival[position];
        sorted.sort_unstable_by(|a, b| survival(b).total_cmp(&survival(a)).then(a.1.cmp(&b.1)).then(a.0.cmp(&b.0)));
        for at in sorted {
            for &(index, _) in groups[at.0].drafts.iter().filter(|(_, len)| *len > at.1) {
                if !self.pays(survival(&at)) {
                    return;
                }
                self.tokens += survival(&at);
                self.time += self.each;
                admit(index, at.1 + 1);
            }
        }
    }
}

/// Decides how many tokens of each draft a step verifies, by learned acceptance rates.
#[derive(Debug)]
pub struct DraftAdmission {
    acceptance: Acceptance,
}

impl Default for DraftAdmission {
    fn default() -> Self {
        Self { acceptance: Acceptance::new() }
    }
}

impl DraftAdmission {
    pub(crate) fn acceptance(&self) -> &Acceptance {
        &self.acceptance
    }

    /// The number of tokens to verify of each of `drafts`, which are given by source and number of tokens. `load` has the
    /// step's decoding sequences, before tokens are drafted.
    pub fn admit(&mut self, load: &Load, model: &StepModel, drafts: &[(DraftSource, usize)]) -> Vec<usize> {
        let mut admitted = vec![0; drafts.len()];
        Admission::new(load, model).admit(&self.by_source(drafts), |index, tokens| admitted[index] = tokens);
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

    fn admitted(load: &Load, model: &StepModel, groups: &[(&[f64], &[usize])]) -> Vec<usize> {
        let (mut drafts, mut indices) = (Vec::new(), 0..);
        for (rates, lens) in groups {
            let survival = std::array::from_fn(|position| rates.get(position).copied().unwrap_or(0.0));
            drafts.push(Drafts { survival, drafts: lens.iter().copied().map(|len| (indices.next().unwrap_or(0), len)).collect() });
        }
        let mut admitted = vec![0; groups.iter().map(|(_, lens)| lens.len()).sum()];
        Admission::new(load, model).admit(&drafts, |index, tokens| admitted[index] = tokens);
        admitted
    }

    #[test]
    fn tokens_are_proposed_while_they_raise_the_rate() {
        // One sequence: a step takes 10 ms, and each drafted token 1 ms.
        let model = StepModel::new(9000.0, 1000.0, 1000.0, 0.0, 0.0);
        let load = Load { decode_seqs: 1, ..Load::default() };
        assert_eq!(admitted(&load, &model, &[(&[0.9, 0.8, 0.7, 0.6], &[4])]), [4]);
        assert_eq!(admitted(&load, &model, &[(&[0.9, 0.8, 0.7, 0.6], &[2])]), [2]);
        assert_eq!(admitted(&load, &model, &[(&[0.9, 0.4, 0.05], &[3])]), [2]);
        assert_eq!(admitted(&load, &model, &[(&[0.1], &[1])]), [0]);
        // A full batch: a drafted token costs as much as another sequence, so only a nearly certain token pays.
        let model = StepModel::new(1000.0, 1000.0, 1000.0, 0.0, 0.0);
        let load = Load { decode_seqs: 64, ..Load::default() };
        assert_eq!(admitted(&load, &model, &[(&[0.95], &[1])]), [0]);
    }

    #[test]
    fn the_most_probable_tokens_of_all_drafts_are_first() {
        // Each added token raises the threshold: 0.46 at first, 0.61 after three, and 0.66 after five.
        let model = StepModel::new(8000.0, 1000.0, 500.0, 0.0, 0.0);
        let load = Load { decode_seqs: 4, ..Load::default() };
        assert_eq!(admitted(&load, &model, &[(&[0.8, 0.65], &[2, 1]), (&[1.0, 1.0, 0.95], &[3])]), [1, 1, 3]);
    }
}
