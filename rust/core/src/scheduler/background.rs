//! Limits what background requests add to a step, so that the streams of other requests keep their speed.

use super::Scheduler;
use crate::request::{SeqId, Tier, Time};
use crate::step::StepPlan;
use crate::step_time::{AIM, BackgroundRoom, FIRST_PREFILL, Load};

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

impl Scheduler {
    /// What the background may add to the decodes of others. `None` without background requests and without a limit.
    pub(super) fn background_room(&self) -> Option<BackgroundRoom> {
        let runs = self.running.least_urgent_class().is_some_and(|(tier, _)| tier == Tier::Background);
        let waits = self.waiting.len() > self.waiting.foreground();
        if !(runs || waits) || self.config.background_slowdown == 0 {
            return None;
        }
        let (mut foreground, mut prompts) = (Load::default(), self.waiting.foreground() > 0);
        for seq in self.running_seqs().filter(|seq| !seq.is_background() && !seq.has_nothing_to_plan()) {
            if seq.uncomputed() > 1 {
                prompts = true;
            } else {
                foreground.decode_seqs += 1;
                let drafted = seq.draft().len() as u32;
                foreground.drafted_tokens += drafted;
                foreground.context_tokens += u64::from(seq.computed() + 1 + drafted);
            }
        }
        let (time, owed) = self.background_time(&foreground, prompts);
        Some(BackgroundRoom::new(&self.model, time, owed))
    }

    /// Predicted microseconds that the background may add to the decodes of `foreground`, and whether it gets a token whatever it
    /// costs. `prompts` is set if other requests' prompts are in progress or wait.
    fn background_time(&self, foreground: &Load, prompts: bool) -> (f64, bool) {
        let (decodes, plan) = (foreground.decode_seqs > 0, self.steps.plan_number());
        let slowdown = f64::from(self.config.background_slowdown) / 100.0;
        let base = if decodes { *foreground } else { Load { decode_seqs: 1, ..Load::default() } };
        let measured = self.background.alone(&base);
        if !self.model.knows() {
            return (f64::INFINITY, true);
        }
        if decodes && !prompts && (measured.is_none() || plan.is_multiple_of(MEASURED_EVERY)) {
            // Without the owed token, a stream whose number of drafted tokens changes in each step would leave the background nothing.
            return (0.0, plan % OWED_EVERY == 1);
        }
        let alone = measured.unwrap_or_else(|| self.model.step(&base));
        match (decodes, prompts) {
            (false, false) if self.background.had_others(EXPECTED_FOR, self.accounts.now()) => ((slowdown - 1.0) * alone, true),
            (false, false) => ((ALONE - 1.0) * alone, true),
            (true, false) => (self.background.predicted((AIM * slowdown - 1.0) * alone), plan % OWED_EVERY == 1),
            (_, true) => (self.background.predicted(BESIDE_PROMPTS * (slowdown - 1.0) * alone), !decodes || plan % OWED_EVERY == 1),
        }
    }

    /// How many of `available` tokens of a step a prompt may have. A background prompt has none beside prompts of other requests.
    pub(super) fn step_tokens(&self, id: SeqId, plan: &StepPlan, available: u32) -> u32 {
        let seq = &self.seqs[id];
        let Some(room) = plan.background.filter(|_| seq.is_background()) else { return available };
        if plan.foreground.prefill_tokens > 0 || self.has_foreground_prompt() {
            return 0;
        }
        if !self.model.knows() {
            return available.min(FIRST_PREFILL.saturating_sub(plan.load.prefill_tokens));
        }
        available.min(self.model.prefill_fits(room.time(), seq.computed()).max(u32::from(room.is_owed() || plan.chunks.is_empty())))
    }

    /// Whether a background request may start: no other request waits, no prompt of another is in progress, and all sequences
    /// that decode have their tokens.
    pub(super) fn may_start_background(&self, id: SeqId, plan: &StepPlan) -> bool {
        let waits = self.waiting.foreground() > 0 || self.has_foreground_prompt() || plan.leaves_out_background;
        !waits && self.step_tokens(id, plan, 1) > 0
    }

    /// Whether the prompt of a request that is not in the background was in progress when the plan began.
    fn has_foreground_prompt(&self) -> bool {
        self.running.prompts().iter().any(|&id| !self.seqs[id].is_background())
    }
}
