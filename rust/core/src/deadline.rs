//! How much a request has before it, and whether it can make its deadline.

use crate::policy::Policy;
use crate::request::{SeqId, Time};
use crate::sequence::{NO_ROW, Sequence};
use crate::{Scheduler, StepModel};

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
    pub(crate) fn work_left(&self, seq: &Sequence) -> Time {
        time(&self.model, prompt_left(seq), seq.predicted_left())
    }

    /// When a sequence has missed its deadline; under the deadline policy, the
    /// last moment at which it can still make it, by what its caller predicted.
    pub(crate) fn due(&self, seq: &Sequence) -> Time {
        let ttft = if seq.first_token.is_none() { seq.ttft_deadline } else { Time::MAX };
        if self.config.policy != Policy::Deadline || !self.model.knows() {
            return seq.deadline.min(ttft);
        }
        // Without a prediction all that is certain is one token more.
        let output = seq.predicted.map_or(1, |_| seq.predicted_left());
        let prompt = prompt_left(seq);
        let margin = if seq.started.is_some() { TO_GO_ON } else { TO_START };
        let before = |time: Time, needed: Time| {
            if time == Time::MAX { time } else { time.saturating_sub((needed as f64 * margin) as Time) }
        };
        before(seq.deadline, time(&self.model, prompt, output)).min(before(ttft, time(&self.model, prompt, 1)))
    }

    /// Has a sequence's deadlines looked at when they are `due`.
    pub(crate) fn watch(&mut self, id: SeqId, due: Time) {
        let seq = &mut self.seqs[id];
        if due != Time::MAX {
            seq.look_at = Some(due);
            self.deadlines.insert((due, seq.ticket), id);
        }
    }
}

/// What a sequence has computed, and what it has to before its next token is sampled.
fn prompt_left(seq: &Sequence) -> (u32, u32) {
    match seq.row {
        _ if seq.saved > 0 => (seq.saved, 0),
        NO_ROW => (seq.tokens.len() as u32 - seq.uncached, seq.uncached),
        _ => (seq.computed, (seq.tokens.len() as u32).saturating_sub(seq.computed + 1)),
    }
}
