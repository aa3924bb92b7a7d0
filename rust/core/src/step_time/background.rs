//! What background requests add to the steps of other requests, and what they may add.

use super::model::{AIM, Load, StepModel};
use super::row_times::RowTimes;
use crate::request::Time;

/// The part of the pace that each step replaces.
const RECENT: f64 = 0.25;
/// The least and the largest pace. A pace without bounds takes thousands of steps to come back from steps in which the background cost
/// nothing.
const PACES: (f64, f64) = (1.0 / 16.0, 16.0);

/// The longest step of background requests alone, as a multiple of a step with one decoding sequence. A request that arrives waits
/// for that step. The step's fixed time is then at most a tenth of it.
const ALONE: f64 = 10.0;
/// Microseconds after a step with other requests in which more of them are expected. Steps of background requests alone are then
/// as short as beside a stream.
const EXPECTED_FOR: Time = 10_000_000;
/// While a prompt of another request is in progress or waits, the background's decodes get this part of the time that they may
/// otherwise add. The prompt gets the rest.
const BESIDE_PROMPTS: f64 = 0.25;
/// In one of this many plans, the background gets a token whatever it costs.
const OWED_EVERY: u64 = 16;
/// In one of this many plans, the background gets no token, so that the time of a step without it is measured.
const MEASURED_EVERY: u64 = 32;

/// Times of steps with and without background requests.
///
/// While background requests run beside others, the step-time model cannot tell the fixed time of a step from that of its rows.
/// The time without them is therefore measured, and what they add is compared with its prediction.
#[derive(Clone, Debug)]
pub(crate) struct BackgroundCost {
    /// Times of steps without background requests and prompts.
    alone: RowTimes,
    /// Running mean of the time that background requests added to recent steps of others, divided by its prediction.
    pace: f64,
    /// The end of the latest step with other requests. `None` before the first.
    others_at: Option<Time>,
}

impl Default for BackgroundCost {
    fn default() -> Self {
        Self { alone: RowTimes::default(), pace: 1.0, others_at: None }
    }
}

impl BackgroundCost {
    /// Records a step of `load` that took `took` microseconds until `now`. `foreground` is the part of requests that are not in the
    /// background.
    pub(crate) fn observe(&mut self, foreground: &Load, load: &Load, model: &StepModel, took: Time, now: Time) {
        let took = took as f64;
        if foreground.tokens() > 0 {
            self.others_at = Some(now);
        }
        if foreground.decode_seqs == 0 || foreground.prefill_tokens > 0 {
            return;
        }
        if foreground == load {
            self.alone.observe(foreground.decode_rows(), took);
        } else if let Some(alone) = self.alone(foreground) {
            let predicted = self.pace * (model.step(load) - model.step(foreground));
            let ratio = ((took - alone) / predicted).clamp(0.5, 2.0);
            if predicted > 0.0 {
                self.pace = (self.pace * (1.0 + RECENT * (ratio - 1.0))).clamp(PACES.0, PACES.1);
            }
        }
    }

    /// What the background may add to a step with the decodes of `foreground`, so that it takes at most `slowdown` times as long as they
    /// do alone. `prompts` is set if other requests' prompts are in progress or wait. `plan` is the number of the plan.
    pub(crate) fn room(&self, model: &StepModel, slowdown: f64, foreground: &Load, prompts: bool, plan: u64, now: Time) -> BackgroundRoom {
        let (time, owed) = self.time(model, slowdown, foreground, prompts, plan, now);
        let [_, _, _, context_token, _] = model.coefficients();
        BackgroundRoom { time, owed, row: model.row(foreground), context_token }
    }

    /// Predicted microseconds that the background may add, and whether it gets a token whatever it costs.
    fn time(&self, model: &StepModel, slowdown: f64, foreground: &Load, prompts: bool, plan: u64, now: Time) -> (f64, bool) {
        let decodes = foreground.decode_seqs > 0;
        let base = if decodes { *foreground } else { Load { decode_seqs: 1, ..Load::default() } };
        let measured = self.alone(&base);
        if !model.knows() {
            return (f64::INFINITY, true);
        }
        if decodes && !prompts && (measured.is_none() || plan.is_multiple_of(MEASURED_EVERY)) {
            // Without the owed token, a stream whose number of drafted tokens changes in each step would leave the background nothing.
            return (0.0, plan % OWED_EVERY == 1);
        }
        let alone = measured.unwrap_or_else(|| model.step(&base));
        match (decodes, prompts) {
            (false, false) if self.expects_others(now) => ((slowdown - 1.0) * alone, true),
            (false, false) => ((ALONE - 1.0) * alone, true),
            (true, false) => (self.predicted((AIM * slowdown - 1.0) * alone), plan % OWED_EVERY == 1),
            (_, true) => (self.predicted(BESIDE_PROMPTS * (slowdown - 1.0) * alone), !decodes || plan % OWED_EVERY == 1),
        }
    }

    /// Microseconds of a step with the decoding sequences of `foreground` and nothing else. `None` if too few were measured.
    fn alone(&self, foreground: &Load) -> Option<f64> {
        self.alone.step(foreground.decode_rows())
    }

    /// Whether a step with other requests ended a short time before `now`, so that more of them are expected.
    fn expects_others(&self, now: Time) -> bool {
        self.others_at.is_some_and(|at| now < at.saturating_add(EXPECTED_FOR))
    }

    /// Divides a time that background requests may add into the predicted time that takes so long.
    fn predicted(&self, time: f64) -> f64 {
        time / self.pace
    }
}

/// What background requests may still add to a step.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct BackgroundRoom {
    /// Predicted microseconds.
    time: f64,
    /// Whether the next sequence gets a token whatever it costs.
    owed: bool,
    /// Microseconds of a decoded token, and of a token of its context.
    row: f64,
    context_token: f64,
}

impl BackgroundRoom {
    pub(crate) fn time(&self) -> f64 {
        self.time
    }

    pub(crate) fn is_owed(&self) -> bool {
        self.owed
    }

    /// Takes the time of a sequence's next tokens, its last one and drafted ones, after the first `computed`. Returns false if
    /// there is too little.
    pub(crate) fn take_decode(&mut self, rows: u32, computed: u32) -> bool {
        let time = self.row * f64::from(rows) + self.context_token * f64::from(computed + rows);
        let fits = self.owed || time <= self.time;
        if fits {
            self.take_prompt(time);
        }
        fits
    }

    /// Takes the predicted time of a prompt's tokens.
    pub(crate) fn take_prompt(&mut self, time: f64) {
        self.owed = false;
        self.time -= time;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_room_follows_what_the_background_was_seen_to_add() {
        // The model takes a row for a third of what it costs.
        let (model, truth) = (StepModel::new(9000.0, 300.0, 300.0, 0.0, 0.0), StepModel::new(9000.0, 300.0, 900.0, 0.0, 0.0));
        let [foreground, load] = [2, 10].map(|decode_seqs| Load { decode_seqs, ..Load::default() });
        let mut cost = BackgroundCost::default();
        assert_eq!(cost.alone(&foreground), None);
        for load in [foreground, foreground].into_iter().chain([load; 20]) {
            cost.observe(&foreground, &load, &model, truth.step(&load) as Time, 7);
        }
        assert!(cost.expects_others(6 + EXPECTED_FOR) && !cost.expects_others(7 + EXPECTED_FOR));
        let alone = cost.alone(&foreground).unwrap();
        assert!((alone - 10_800.0).abs() < 1.0, "{alone}");
        assert!((cost.predicted(7200.0) - 2400.0).abs() < 50.0, "eight rows: {}", cost.predicted(7200.0));
    }

    #[test]
    fn rows_that_cost_nothing_for_long_are_soon_known_to_cost_something_again() {
        let model = StepModel::new(9000.0, 300.0, 900.0, 0.0, 0.0);
        let [foreground, load] = [2, 10].map(|decode_seqs| Load { decode_seqs, ..Load::default() });
        let mut cost = BackgroundCost::default();
        let [alone, with] = [&foreground, &load].map(|load| model.step(load) as Time);
        (0..2).for_each(|_| cost.observe(&foreground, &foreground, &model, alone, 7));
        for (took, least, most) in [(alone, 7200.0 * 4.0, 7200.0 * 16.1), (100 * with, 7200.0 / 16.1, 7200.0 / 4.0)] {
            (0..10_000).for_each(|_| cost.observe(&foreground, &load, &model, took, 7));
            let room = cost.predicted(7200.0);
            assert!((least..most).contains(&room), "{room}");
            (0..60).for_each(|_| cost.observe(&foreground, &load, &model, with, 7));
            let room = cost.predicted(7200.0);
            assert!((7100.0..7300.0).contains(&room), "{room}");
        }
    }
}
