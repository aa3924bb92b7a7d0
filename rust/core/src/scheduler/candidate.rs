//! Shows a request to the policy, with an estimate of its remaining work.

use super::Scheduler;
use crate::policy::{Candidate, Estimate};
use crate::request::Time;
use crate::sequence::{Phase, Sequence};

/// Assumed costs before the model has observed enough steps, in microseconds.
const GUESS: Guess = Guess { prefill_token: 100.0, step: 1000.0 };

struct Guess {
    prefill_token: f64,
    step: f64,
}

impl Scheduler {
    /// A sequence as the policy sees it.
    pub(super) fn candidate(&self, seq: &Sequence) -> Candidate {
        let (request, times, tenant) = (seq.request(), seq.times(), seq.member().tenant);
        Candidate {
            tier: request.tier,
            priority: request.priority,
            arrived: times.arrived,
            started: seq.has_started(),
            cached_tokens: seq.len() - seq.uncached(),
            deadline: request.deadline,
            ttft_deadline: request.ttft_deadline.filter(|_| times.first_token.is_none()),
            predicted_output: request.predicted_tokens.map(|_| seq.predicted_left()),
            output_left: seq.predicted_left(),
            estimate: self.estimate(seq),
            preemption_cost: if seq.is_running() { self.preemption_cost(seq) } else { 0 },
            weight: request.weight,
            tenant_service: if self.rules.takes_turns() { self.waiting.service(tenant) } else { 0 },
            tenant_slots: self.accounts.running_of(tenant),
        }
    }

    fn estimate(&self, seq: &Sequence) -> Estimate {
        let (from, prompt) = prompt_left(seq);
        if self.model.knows() {
            Estimate { prompt: self.model.prefill(from.into(), prompt.into()), token: self.model.mean_step(), is_learned: true }
        } else {
            Estimate { prompt: GUESS.prefill_token * f64::from(prompt), token: GUESS.step, is_learned: false }
        }
    }

    /// The time at which a sequence has missed its deadline, or is dropped by the policy. `None` without a deadline: no policy can drop
    /// such a request.
    pub(super) fn due(&self, seq: &Sequence) -> Option<Time> {
        let request = seq.request();
        let ttft = request.ttft_deadline.filter(|_| seq.times().first_token.is_none());
        let missed = request.deadline.into_iter().chain(ttft).min()?;
        Some(self.config.scheduling_policy.drop_at(&self.candidate(seq)).map_or(missed, |drop| drop.min(missed)))
    }
}

/// Tokens that a sequence has computed, and tokens it must compute before the next sample.
fn prompt_left(seq: &Sequence) -> (u32, u32) {
    match seq.phase() {
        Phase::Swapped { tokens } => (tokens, 0),
        Phase::Running { .. } => (seq.computed(), seq.len().saturating_sub(seq.computed() + 1)),
        Phase::New | Phase::Queued | Phase::WaitingOnParent | Phase::Preempted => (seq.len() - seq.uncached(), seq.uncached()),
    }
}
