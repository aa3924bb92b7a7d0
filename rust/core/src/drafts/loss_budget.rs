//! The budget of what a sequence may lose by drafts.

/// Steps of its own that a sequence may lose at first, and most that it may lose of what it gained.
const START: f64 = 1.0;
const MOST: f64 = 4.0;
/// Part of a step that a sequence may lose more with each step.
const RATE: f64 = 0.01;

/// What drafted tokens cost and save a sequence in a step, in its own steps without drafts.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Price {
    /// Cost of a drafted token.
    pub(crate) token: f64,
    /// What an accepted token saves.
    pub(crate) accepted: f64,
}

/// What a sequence can still lose by drafts, in its own steps. It pays for drafted tokens and gets what accepted ones save.
///
/// It is never negative. So after n steps without drafts, those with drafts have taken at most 1.01 n + 1, by the model of
/// the step's time. (A conservative bandit: Wu et al., 2016.)
#[derive(Debug)]
pub(crate) struct LossBudget(f64);

impl Default for LossBudget {
    fn default() -> Self {
        Self(START)
    }
}

impl LossBudget {
    /// Counts a step. Returns how many of `most` tokens the sequence can pay for, at the price of `token` each.
    pub(crate) fn step(&mut self, most: usize, token: f64) -> usize {
        self.0 = (self.0 + RATE).min(MOST);
        ((self.0 / token) as usize).min(most)
    }

    /// Records how many drafted tokens were accepted.
    pub(crate) fn observe(&mut self, drafted: usize, accepted: usize, price: Price) {
        self.0 = (self.0 - drafted as f64 * price.token).max(0.0) + accepted as f64 * price.accepted;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The drafted tokens of each of `steps` steps, of which a part is accepted.
    fn drafted(steps: usize, loss_budget: &mut LossBudget, price: Price, accepted: impl Fn(usize) -> usize) -> Vec<usize> {
        let mut step = |_| {
            let drafted = loss_budget.step(8, price.token);
            loss_budget.observe(drafted, accepted(drafted), price);
            drafted
        };
        (0..steps).map(&mut step).collect()
    }

    #[test]
    fn drafts_that_fail_cost_a_hundredth_and_one_step() {
        for token in [0.01, 0.12, 0.3, 0.66, 1.5] {
            for steps in [10, 100, 1000] {
                let price = Price { token, accepted: 1.0 };
                let lost = drafted(steps, &mut LossBudget::default(), price, |_| 0).iter().sum::<usize>() as f64 * token;
                assert!(lost <= START + RATE * steps as f64 + 1e-9, "{token}: {lost} of {steps} steps");
                assert!(steps < 1000 || lost > 0.5 * RATE * steps as f64, "{token}: it is tried again and again");
            }
        }
    }

    #[test]
    fn drafts_that_are_accepted_soon_have_all_tokens() {
        let price = Price { token: 0.12, accepted: 1.0 };
        assert_eq!(drafted(4, &mut LossBudget::default(), price, |drafted| drafted), [8; 4]);
        // In a large batch a token costs most of a step.
        let price = Price { token: 0.66, accepted: 1.0 };
        assert_eq!(drafted(8, &mut LossBudget::default(), price, |drafted| drafted), [1, 2, 3, 4, 6, 6, 6, 6]);
    }

    #[test]
    fn what_was_gained_is_not_lost_for_long() {
        let (mut loss_budget, price) = (LossBudget::default(), Price { token: 0.12, accepted: 1.0 });
        drafted(100, &mut loss_budget, price, |drafted| drafted);
        let lost = drafted(100, &mut loss_budget, price, |_| 0).iter().sum::<usize>() as f64 * price.token;
        assert!((1.0..=MOST + RATE * 100.0).contains(&lost), "{lost}");
    }
}
