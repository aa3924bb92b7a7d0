//! Learns how often drafted tokens are accepted.

use crate::step::{DraftSource, MAX_DRAFT};

impl DraftSource {
    /// Number of kinds with their own acceptance rates.
    pub(crate) const KINDS: usize = 2 * Acceptance::CLASSES + 1;

    /// The kind of draft, below [`KINDS`](Self::KINDS).
    pub(crate) fn kind(self) -> usize {
        self.class().map_or(Self::KINDS - 1, |(row, class)| row * Acceptance::CLASSES + class)
    }

    /// The row of the source and the class of its match's length; `None` if its tokens are certain.
    fn class(self) -> Option<(usize, usize)> {
        match self {
            Self::Text(len) => Some((0, Acceptance::class(len))),
            Self::Corpus(len) => Some((1, Acceptance::class(len))),
            Self::Grammar => None,
        }
    }
}

/// Acceptance rates of drafted tokens, by source, match length and position.
#[derive(Debug)]
pub(crate) struct Acceptance {
    /// Counts of (accepted, all) drafted tokens whose predecessors were accepted.
    counts: [[[(f64, f64); MAX_DRAFT]; Self::CLASSES]; 2],
}

impl Default for Acceptance {
    fn default() -> Self {
        let prior = |class: usize| (Self::PRIOR[class] * Self::PRIOR_WEIGHT, Self::PRIOR_WEIGHT);
        Self { counts: [std::array::from_fn(|class| [prior(class); MAX_DRAFT]); 2] }
    }
}

impl Acceptance {
    const CLASSES: usize = 6;
    /// Assumed rate before any observation, by class. The next constant is its weight in tokens.
    const PRIOR: [f64; Self::CLASSES] = [0.4, 0.5, 0.6, 0.7, 0.8, 0.9];
    const PRIOR_WEIGHT: f64 = 8.0;
    /// Factor applied to earlier observations for each new token, because content changes.
    const DECAY: f64 = 0.995;
    /// Like `DECAY`, for each proposal that was predicted not to pay, so that it is tried again later.
    const IDLE_DECAY: f64 = 0.9995;

    fn class(len: usize) -> usize {
        match len {
            0..=3 => 0,
            4 => 1,
            5..=6 => 2,
            7..=10 => 3,
            11..=20 => 4,
            _ => 5,
        }
    }

    /// Probabilities that a draft is accepted up to and including each position.
    pub(crate) fn survival(&self, source: DraftSource) -> [f64; MAX_DRAFT] {
        let mut survival = [1.0; MAX_DRAFT];
        let Some((row, class)) = source.class() else { return survival };
        let mut until = 1.0;
        for (survival, (accepted, all)) in survival.iter_mut().zip(&self.counts[row][class]) {
            until *= accepted / all;
            *survival = until;
        }
        survival
    }

    /// Records that the first `accepted` of `drafted` tokens were accepted.
    pub(crate) fn observe(&mut self, source: DraftSource, drafted: usize, accepted: usize) {
        let Some((row, class)) = source.class() else { return };
        for (position, count) in self.counts[row][class].iter_mut().enumerate().take(drafted.min(accepted + 1)) {
            Self::fade(count, Self::PRIOR[class], Self::DECAY);
            count.0 += f64::from(u8::from(position < accepted));
            count.1 += 1.0;
        }
    }

    /// Records that the first token of a match was not worth proposing.
    pub(crate) fn idle(&mut self, source: DraftSource) {
        if let Some((row, class)) = source.class() {
            Self::fade(&mut self.counts[row][class][0], Self::PRIOR[class], Self::IDLE_DECAY);
        }
    }

    /// Moves a count towards the assumed rate.
    fn fade(count: &mut (f64, f64), prior: f64, keep: f64) {
        count.0 = prior * Self::PRIOR_WEIGHT + keep * (count.0 - prior * Self::PRIOR_WEIGHT);
        count.1 = Self::PRIOR_WEIGHT + keep * (count.1 - Self::PRIOR_WEIGHT);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn survival(acceptance: &Acceptance, source: DraftSource, position: usize) -> f64 {
        acceptance.survival(source)[position]
    }

    #[test]
    fn what_is_accepted_is_learned_by_source_and_length_and_fades() {
        let (mut acceptance, text) = (Acceptance::default(), DraftSource::Text(3));
        let before = acceptance.survival(text);
        (0..200).for_each(|_| acceptance.observe(text, 4, 0));
        assert!(survival(&acceptance, text, 0) < 0.05);
        let second = survival(&acceptance, text, 1) / survival(&acceptance, text, 0);
        assert!((second - before[0]).abs() < 1e-9, "nothing was seen of the second");
        assert_eq!(acceptance.survival(DraftSource::Corpus(3)).map(f64::to_bits), before.map(f64::to_bits), "another source");
        (0..20_000).for_each(|_| acceptance.idle(text));
        assert!((survival(&acceptance, text, 0) - before[0]).abs() < 0.01);
        (0..200).for_each(|_| acceptance.observe(text, 4, 4));
        assert!(survival(&acceptance, text, 3) > 0.6);
        assert!(survival(&acceptance, DraftSource::Text(30), 3) < 0.7, "another length");
    }

    #[test]
    fn forced_tokens_are_certain() {
        let mut acceptance = Acceptance::default();
        acceptance.observe(DraftSource::Grammar, 4, 0);
        acceptance.idle(DraftSource::Grammar);
        assert!(acceptance.survival(DraftSource::Grammar).iter().all(|&survival| survival >= 1.0));
    }
}
