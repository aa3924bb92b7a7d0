//! How much a request has before it, and whether it can make its deadline.

use super::Scheduler;
use crate::cost::StepModel;
use crate::phase::Phase;
use crate::policy::Policy;
use crate::request::Time;
use crate::sequence::Sequence;

/// One that waits must be able to make it with so much to spare; one that runs
/// is given up only when even so little would not do. Without a gap between the
/// two, those that start are those that just fail (the "domino effect" of
/// earliest-deadline-first under overload).
const TO_START: f64 = 1.25;
const TO_GO_ON: f64 = 0.75;

/// What a machine is taken to need while nothing is known of it, in microseconds.
const GUESS: Guess = Guess { prefill_token: 100.0, step: 1000.0 };

struct Guess {
    prefill_token: f64,
    step: f64,
}

/// Microseconds for `prompt` tokens after the first `from`, and then `output` ones.
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
    /// Microseconds that a sequence has before it, as far as can be told.
    pub(super) fn work_left(&self, seq: &Sequence) -> Time {
        time(&self.model, prompt_left(seq), seq.predicted_left())
    }

    /// When a sequence has missed its deadline, if it has one; under the deadline policy, the
    /// last moment at which it can still make it, by what its caller predicted.
    pub(super) fn due(&self, seq: &Sequence) -> Option<Time> {
        let spec = seq.spec();
        let ttft = spec.ttft_deadline.filter(|_| seq.times().first_token.is_none());
        if self.config.policy != Policy::Deadline || !self.model.knows() {
            return earliest(spec.deadline, ttft);
        }
        // Without a prediction all that is certain is one token more.
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

/// What a sequence has computed, and what it has to before its next token is sampled.
fn prompt_left(seq: &Sequence) -> (u32, u32) {
    match seq.phase() {
        Phase::Swapped { tokens } => (tokens, 0),
        Phase::Running { .. } => (seq.computed(), seq.len().saturating_sub(seq.computed() + 1)),
        Phase::New | Phase::Queued | Phase::WaitingOnParent | Phase::Preempted => (seq.len() - seq.uncached(), seq.uncached()),
    }
}
