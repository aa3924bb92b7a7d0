//! Estimates the next step, and shows a request to the policy with an estimate of its remaining work.

use super::Scheduler;
use crate::policy::{Candidate, Estimate};
use crate::request::Time;
use crate::sequence::{Phase, Sequence};
use crate::step_time::Load;

/// Assumed costs before the model has observed enough steps, in microseconds.
const GUESS: Guess = Guess { prefill_token: 100.0, step: 1000.0 };

struct Guess {
    prefill_token: f64,
    step: f64,
}

impl Scheduler {
    /// Predicted microseconds of the next step, and the number of requests whose first step it is. `None` before the model
    /// has observed enough steps.
    ///
    /// The estimate assumes that all waiting prompts begin for which there are slots, none of them cached, as far as the
    /// configured target allows. O(slots).
    pub fn next_step(&self) -> Option<(Time, u32)> {
        if !self.model.knows() {
            return None;
        }
        let waiting = self.waiting.backlog();
        let begins = waiting.reqs.min(self.running.free_slots() as u32);
        let each = waiting.prompt_tokens as f64 / f64::from(waiting.reqs.max(1));
        let (mut load, mut tokens) = (Load::default(), each * f64::from(begins));
        let mut prefill = self.model.prefill(0.0, each) * f64::from(begins);
        for seq in self.running_seqs() {
            let (computed, left) = (seq.computed(), seq.uncomputed());
            if left <= 1 {
                load.decode_seqs += 1;
                load.context_tokens += u64::from(computed);
            } else {
                tokens += f64::from(left);
                prefill += self.model.prefill(computed.into(), left.into());
            }
        }
        let room = f64::from(self.config.max_tokens.saturating_sub(load.decode_seqs));
        let part = if tokens > room { room / tokens } else { 1.0 };
        let alone = self.model.decode_step(&load);
        let target = if self.config.target_itl > 0 { alone.max(self.config.target_itl as f64) } else { f64::MAX };
        Some(((alone + prefill * part).min(target) as Time, begins))
    }

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
        Some(self.config.policy.drop_at(&self.candidate(seq)).map_or(missed, |drop| drop.min(missed)))
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
