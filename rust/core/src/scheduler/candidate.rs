//! Shows requests to the policy, with estimates of their remaining work.

use super::Scheduler;
use crate::policy::{Candidate, Estimate, Predictions};
use crate::request::Time;
use crate::sequence::{Phase, Sequence};

/// Assumed costs before the model has observed enough steps, in microseconds.
const GUESS: Guess = Guess { prefill_token: 100.0, step: 1000.0 };

struct Guess {
    prefill_token: f64,
    step: f64,
}

/// A sequence whose predictions a policy may ask for.
struct Shown<'a> {
    scheduler: &'a Scheduler,
    seq: &'a Sequence,
}

impl Predictions for Shown<'_> {
    fn cached_tokens(&self) -> u32 {
        self.seq.len() - self.seq.uncached()
    }

    fn output_left(&self) -> u32 {
        self.seq.predicted_left()
    }

    fn estimate(&self) -> Estimate {
        let ((from, prompt), model) = (prompt_left(self.seq), &self.scheduler.model);
        if model.knows() {
            Estimate { prompt: model.prefill(from.into(), prompt.into()), token: model.mean_step(), is_learned: true }
        } else {
            Estimate { prompt: GUESS.prefill_token * f64::from(prompt), token: GUESS.step, is_learned: false }
        }
    }

    fn preemption_cost(&self) -> Time {
        self.scheduler.preemption_cost(self.seq)
    }
}

impl Scheduler {
    /// Shows a sequence to the policy. Returns the answer.
    pub(super) fn show<R>(&self, seq: &Sequence, ask: impl FnOnce(&Candidate<'_>) -> R) -> R {
        let (request, times) = (seq.request(), seq.times());
        ask(&Candidate {
            tier: request.tier,
            priority: request.priority,
            arrived: times.arrived,
            started: seq.has_started(),
            deadline: request.deadline,
            ttft_deadline: request.ttft_deadline.filter(|_| times.first_token.is_none()),
            is_predicted: request.predicted_tokens.is_some(),
            weight: request.weight,
            tenant_service: self.tenant_service(seq),
            tenant_slots: self.accounts.running_of(seq.member().tenant),
            predictions: &Shown { scheduler: self, seq },
        })
    }

    /// The service of a sequence's tenant divided by its weight, where tenants take turns. 0 elsewhere.
    pub(super) fn tenant_service(&self, seq: &Sequence) -> u64 {
        if self.rules.takes_turns() { self.waiting.shares().counter(seq.member().tenant) } else { 0 }
    }

    /// The time at which a sequence has missed its deadline, or is dropped by the policy. `None` without a deadline: no policy can drop
    /// such a request.
    pub(super) fn due(&self, seq: &Sequence) -> Option<Time> {
        let request = seq.request();
        let ttft = request.ttft_deadline.filter(|_| seq.times().first_token.is_none());
        let missed = request.deadline.into_iter().chain(ttft).min()?;
        let dropped = self.show(seq, |request| self.config.scheduling_policy.drop_at(request));
        Some(dropped.map_or(missed, |at| at.min(missed)))
    }
}

/// Tokens that a sequence has computed, and tokens it must compute before the next sample.
fn prompt_left(seq: &Sequence) -> (u32, u32) {
    match seq.phase() {
        Phase::Swapped { tokens } => (tokens, 0),
        Phase::Running { .. } => (seq.computed(), seq.len().saturating_sub(seq.computed() + 1)),
        Phase::New | Phase::Queued | Phase::Preparing(_) | Phase::WaitSession { .. } | Phase::WaitingOnParent | Phase::Preempted => {
            (seq.len() - seq.uncached(), seq.uncached())
        }
    }
}
