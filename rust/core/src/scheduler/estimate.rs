//! Estimates the next step, the remaining work of a request, and whether it can meet its deadline.

use super::Scheduler;
use crate::policy::Policy;
use crate::request::Time;
use crate::sequence::{Phase, Sequence};
use crate::step_time::{Load, StepModel};

/// Safety margin. A waiting request must be able to meet its deadline with its estimate multiplied by the first factor.
/// A running request is ended only if it misses its deadline even with the second factor. Without the gap, EDF under
/// overload starts requests that barely miss (the "domino effect" of earliest-deadline-first).
const TO_START: f64 = 1.25;
const TO_GO_ON: f64 = 0.75;

/// Assumed costs before the model has observed enough steps, in microseconds.
const GUESS: Guess = Guess { prefill_token: 100.0, step: 1000.0 };

struct Guess {
    prefill_token: f64,
    step: f64,
}

/// Predicted microseconds for `prompt` tokens after the first `from`, followed by `output` tokens.
fn time(model: &StepModel, (from, prompt): (u32, u32), output: u32) -> Time {
    let (from, prompt, output) = (f64::from(from), f64::from(prompt), f64::from(output));
    let time = if model.knows() {
        model.prefill(from, prompt) + model.mean_step() * output
    } else {
        GUESS.prefill_token * prompt + GUESS.step * output
    };
    time as Time
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

    /// Predicted microseconds of a sequence's remaining work.
    pub(super) fn work_left(&self, seq: &Sequence) -> Time {
        time(&self.model, prompt_left(seq), seq.predicted_left())
    }

    /// The time at which a sequence has missed its deadline, if it has one. Under the deadline policy, the latest time
    /// at which it can still meet the deadline, by its caller's prediction.
    pub(super) fn due(&self, seq: &Sequence) -> Option<Time> {
        let spec = seq.spec();
        let ttft = spec.ttft_deadline.filter(|_| seq.times().first_token.is_none());
        if self.config.policy != Policy::Deadline || !self.model.knows() {
            return earliest(spec.deadline, ttft);
        }
        // Without a prediction, only one more token is certain.
        let output = spec.predicted.map_or(1, |_| seq.predicted_left());
        let prompt = prompt_left(seq);
        let margin = if seq.has_started() { TO_GO_ON } else { TO_START };
        let before = |at: Time, output: u32| at.saturating_sub((time(&self.model, prompt, output) as f64 * margin) as Time);
        earliest(spec.deadline.map(|at| before(at, output)), ttft.map(|at| before(at, 1)))
    }
}

fn earliest(one: Option<Time>, other: Option<Time>) -> Option<Time> {
    one.into_iter().chain(other).min()
}

/// Tokens that a sequence has computed, and tokens it must compute before the next sample.
fn prompt_left(seq: &Sequence) -> (u32, u32) {
    match seq.phase() {
        Phase::Swapped { tokens } => (tokens, 0),
        Phase::Running { .. } => (seq.computed(), seq.len().saturating_sub(seq.computed() + 1)),
        Phase::New | Phase::Queued | Phase::WaitingOnParent | Phase::Preempted => (seq.len() - seq.uncached(), seq.uncached()),
    }
}
