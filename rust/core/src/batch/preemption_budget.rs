//! How much preemption may cost under policies with a budget.

use crate::request::Time;

/// Budget of preemption, as a divisor of the elapsed time.
const BUDGET: Time = 50;
/// Maximum budget, in microseconds.
const MAX_BUDGET: i64 = 1_000_000;

/// Budget of preemption: a fiftieth of the elapsed time. A preemption that costs more than the budget
/// leaves it negative.
#[derive(Debug, Default)]
pub(crate) struct PreemptionBudget {
    /// Remaining microseconds. Negative after a preemption that cost more than the budget.
    left: i64,
    /// When the budget last grew.
    at: Time,
}

impl PreemptionBudget {
    /// Grows the budget up to `now`.
    pub(crate) fn grow(&mut self, now: Time) {
        let part = (now - self.at) / BUDGET;
        self.left = self.left.saturating_add(part as i64).min(MAX_BUDGET);
        self.at += part * BUDGET;
    }

    /// Whether the budget allows a preemption.
    pub(crate) fn allows(&self) -> bool {
        self.left >= 0
    }

    /// Charges a preemption that costs `cost` microseconds.
    pub(crate) fn spend(&mut self, cost: Time) {
        self.left = self.left.saturating_sub_unsigned(cost);
    }
}
