//! Limits what background requests add to a step, so that the streams of other requests keep their speed.

use super::Scheduler;
use crate::request::{SeqId, Tier};
use crate::step::StepPlan;
use crate::step_time::{BackgroundRoom, FIRST_PREFILL, Load};

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
            if seq.decodes_next() {
                foreground.decode_seqs += 1;
                let rows = seq.decode_rows();
                foreground.drafted_tokens += rows - 1;
                foreground.context_tokens += u64::from(seq.computed() + rows);
            } else {
                prompts = true;
            }
        }
        let slowdown = f64::from(self.config.background_slowdown) / 100.0;
        let (plan, now) = (self.steps.plan_number(), self.accounts.now());
        Some(self.background.room(&self.model, slowdown, &foreground, prompts, plan, now))
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
