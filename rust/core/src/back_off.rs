//! Limits what a sequence whose drafts fail may cost.

/// Consecutive failures after which a pause grows no more.
const MOST_FAILURES: u32 = 6;

/// Exponential back-off of one sequence. After the n-th draft in a row of which no token was accepted, the sequence is not
/// looked up for 2^n steps (64 at most), and its next draft has 1 / 2^n of the tokens (at least one).
///
/// A sequence of which nothing is ever accepted has thus one drafted token in 65 steps after its first seven drafts.
#[derive(Debug, Default)]
pub(crate) struct BackOff {
    failures: u32,
    /// Remaining steps of the pause.
    pause: u32,
}

impl BackOff {
    /// Counts a step. Returns how many tokens may be drafted of `most`, none during a pause.
    pub(crate) fn step(&mut self, most: usize) -> Option<usize> {
        if self.pause > 0 {
            self.pause -= 1;
            return None;
        }
        Some((most >> self.failures).max(most.min(1)))
    }

    /// Records how many tokens of a draft were accepted.
    pub(crate) fn observe(&mut self, accepted: usize) {
        if accepted > 0 {
            self.failures = 0;
        } else {
            self.failures = (self.failures + 1).min(MOST_FAILURES);
            self.pause = 1 << self.failures;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The drafted tokens of each of `steps` steps, if the drafts have `accepted` accepted tokens each.
    fn drafted(steps: usize, back_off: &mut BackOff, accepted: usize) -> Vec<usize> {
        let mut step = || {
            let drafted = back_off.step(8).unwrap_or(0);
            if drafted > 0 {
                back_off.observe(accepted);
            }
            drafted
        };
        (0..steps).map(|_| step()).collect()
    }

    #[test]
    fn drafts_that_fail_become_short_and_rare() {
        let mut back_off = BackOff::default();
        assert_eq!(drafted(10, &mut back_off, 0), [8, 0, 0, 4, 0, 0, 0, 0, 2, 0]);
        let later = drafted(1300, &mut back_off, 0);
        assert_eq!(later[..200].iter().sum::<usize>(), 5);
        assert_eq!(later[200..].iter().sum::<usize>(), 1100_usize.div_ceil(65));
    }

    #[test]
    fn an_accepted_token_ends_it() {
        let mut back_off = BackOff::default();
        drafted(200, &mut back_off, 0);
        let after = drafted(70, &mut back_off, 1);
        let resumed = after.iter().position(|&drafted| drafted > 0).unwrap();
        assert_eq!(after[resumed], 1);
        assert!(after[resumed + 1..].iter().all(|&drafted| drafted == 8));
        assert_eq!(BackOff::default().step(0), Some(0));
    }
}
