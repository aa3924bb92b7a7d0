//! Plans the next tokens of prompts in progress.

use super::Scheduler;
use crate::request::{SeqId, Time};
use crate::sequence::{Phase, Sequence, Stage};
use crate::step::{Stall, StepPlan};
use crate::step_time::{AIM, FIRST_PREFILL};

/// Minimum time for prompts, whatever the decodes take, as a part of the target or of the step, whichever is longer.
const MIN_PREFILL: f64 = 0.15;
/// Without a target: the longest step with one prompt, as a multiple of the step with its decodes alone.
const DEFAULT_SLOWDOWN: f64 = 3.0;
/// Without a target: microseconds that a step with one prompt may take anyway. Readers do not notice such a gap between tokens.
const UNNOTICED_STEP: f64 = 60_000.0;
/// The part of a step's prompt tokens, as a divisor, that is guaranteed to the oldest prompt in progress.
const GUARANTEE: u32 = 4;

impl Scheduler {
    /// Limits the tokens for prompts by the target: the configured target, or three times the duration of the decodes
    /// alone, without the background, or `UNNOTICED_STEP` where that is longer. The default target costs throughput. It applies only beside
    /// decodes, with one prompt in progress, and without a `backlog`, which means requests that already waited in the previous plan.
    pub(super) fn bound_prefill(&self, plan: &mut StepPlan, backlog: bool) {
        let configured = self.config.target_itl > 0;
        let prompts = self.running.prompts();
        if prompts.is_empty() && self.waiting.len() == 0 {
            return;
        }
        let busy = backlog || prompts.iter().filter(|&&id| !self.seqs[id].is_background()).count() > 1;
        if !configured && (plan.foreground.decode_seqs == 0 || busy || !self.model.knows()) {
            return;
        }
        if !self.model.knows() {
            plan.tokens_left = plan.tokens_left.min(FIRST_PREFILL);
            return;
        }
        let alone = self.model.decode_step(&plan.foreground);
        let target = if configured { self.config.target_itl as f64 } else { UNNOTICED_STEP.max(DEFAULT_SLOWDOWN * alone) };
        // The prompt that runs next is not known yet. The longest prompt in progress is the most expensive.
        let context = prompts.iter().map(|&id| self.seqs[id].computed()).max().unwrap_or(0);
        let room = self.model.prefill_room(&plan.load, AIM * target, MIN_PREFILL * target.max(alone), context);
        plan.tokens_left = plan.tokens_left.min(room.max(1));
    }

    /// Divides the tokens left by decodes between prompts in progress and waiting sequences.
    ///
    /// If the policy orders prompts, its order decides. Otherwise waiting requests may use half of the tokens, so that a
    /// long prompt does not block them. The oldest prompt in progress is guaranteed a quarter of the step. The prompt
    /// nearest to its end comes first.
    pub(super) fn plan_prefills(&mut self, plan: &mut StepPlan, reserved: u32) {
        self.open_batch();
        if self.waiting.len() == 0 && self.running.prompts().is_empty() {
            self.accounts.block(None);
            return;
        }
        let (now, ageing) = (self.accounts.now(), self.config.queue_ageing);
        // A prompt in progress that has waited this long is older than any request that would be admitted.
        let starved = self.running.prompts().iter().any(|&id| is_starved(&self.seqs[id], now, ageing));
        let blocked = if plan.preempted.is_empty() && !starved { self.admit_aged(plan) } else { None };
        let seqs = &self.seqs;
        if self.rules.orders_prompts {
            let aged = self.running.aged();
            self.running.sort_prompts(|&id| (!is_starved(&seqs[id], now, ageing), aged != Some(id), seqs[id].queue_entry.key()));
            self.plan_prompts(plan, 0, blocked.is_none());
            self.plan_waiting(plan, reserved, blocked);
        } else {
            self.running.sort_prompts(|&id| {
                let seq = &seqs[id];
                (!is_starved(seq, now, ageing), seq.request().tier, seq.uncomputed(), seq.spec().arrival_number)
            });
            let foreground = self.running.prompts().iter().map(|&id| &seqs[id]).filter(|seq| !seq.is_background());
            let wanted = foreground.map(Sequence::uncomputed).fold(0, u32::saturating_add);
            let kept = plan.tokens_left.div_ceil(2).min(wanted);
            let guaranteed = plan.tokens_left.div_ceil(GUARANTEE);
            plan.tokens_left -= kept;
            self.plan_waiting(plan, reserved, blocked);
            plan.tokens_left += kept;
            self.plan_prompts(plan, guaranteed, false);
        }
    }

    /// Continues the prompts in progress. The oldest prompt gets at least `guaranteed` tokens, or all it needs. With
    /// `urgent`, more urgent waiting requests are admitted first, but not before the running aged request or before a
    /// prompt that was stalled for too long.
    fn plan_prompts(&mut self, plan: &mut StepPlan, guaranteed: u32, urgent: bool) {
        let prompts = self.running.prompts().iter().copied().filter(|&id| !self.seqs[id].is_background());
        let oldest = prompts.min_by_key(|&id| self.seqs[id].spec().arrival_number).filter(|_| guaranteed > 0);
        let mut reserved = oldest.map_or(0, |id| guaranteed.min(self.seqs[id].uncomputed()));
        for at in 0..self.running.prompts().len() {
            let id = self.running.prompts()[at];
            if urgent && plan.preempted.is_empty() {
                self.admit_before(id, plan);
            }
            if oldest == Some(id) {
                reserved = 0;
            }
            let available = self.step_tokens(id, plan, plan.tokens_left.saturating_sub(reserved));
            if available == 0 {
                self.stall_prompt(id);
            } else {
                self.plan_piece(id, self.seqs[id].blocks.held() as u32, available, plan);
            }
        }
    }

    /// Admits waiting requests that are more urgent than a prompt in progress.
    fn admit_before(&mut self, id: SeqId, plan: &mut StepPlan) {
        let seq = &self.seqs[id];
        if self.is_closed() || self.running.aged() == Some(id) || is_starved(seq, self.accounts.now(), self.config.queue_ageing) {
            return;
        }
        let key = seq.queue_entry.key();
        while plan.tokens_left > 0 && self.running.has_slot() {
            let first = self.waiting.first().filter(|&first| self.seqs[first].queue_entry.key() < key);
            if first.is_none_or(|first| self.admit(first, plan).is_err()) {
                break;
            }
        }
    }

    /// Plans the next piece, of at most `most` tokens, of a sequence that has the blocks for it. The step buffers already hold the first
    /// `table_from` entries of its block table.
    pub(super) fn plan_piece(&mut self, id: SeqId, table_from: u32, most: u32, plan: &mut StepPlan) {
        self.resume(id);
        // The caller has seen that there is room for a token.
        let available = self.step_tokens(id, plan, most).max(1);
        let seq = &mut self.seqs[id];
        let len = seq.uncomputed().min(available);
        seq.blocks.pay(available);
        plan.tokens_left -= len;
        let from = seq.computed();
        plan.load.add_piece(from, len);
        if !seq.is_background() {
            plan.foreground.add_piece(from, len);
        } else if let Some(room) = &mut plan.background {
            room.take_prompt(self.model.prefill(from.into(), len.into()));
        }
        let counters = &mut self.accounts.counters;
        counters.computed_tokens += u64::from(len);
        counters.computed_prompt_tokens += u64::from(seq.spec().prompt_len.saturating_sub(from).min(len));
        plan.chunks.push(seq.next_chunk(id, len, table_from, self.config.block_size));
        self.seal(id, plan.step);
    }

    /// Stalls a prompt, because this step has no tokens left for it.
    fn stall_prompt(&mut self, id: SeqId) {
        let seq = &mut self.seqs[id];
        if let Phase::Running { slot, stage: Stage::Prefill | Stage::Recompute } = seq.phase() {
            seq.leave_fast_path();
            self.enter(id, Phase::Running { slot, stage: Stage::Stalled });
        }
    }

    /// Resumes a sequence that may have been stalled.
    pub(super) fn resume(&mut self, id: SeqId) {
        let seq = &self.seqs[id];
        if let Phase::Running { slot, stage: Stage::Stalled } = seq.phase() {
            let stage = seq.prefill_stage();
            self.enter(id, Phase::Running { slot, stage });
        }
    }

    /// Why no step was planned. Panics if there is no reason, because the requests would then wait forever.
    pub(super) fn stall(&self) -> Option<Stall> {
        match () {
            () if self.seqs.is_empty() => None,
            () if self.steps.in_flight() => Some(Stall::InFlight),
            () if self.waiting.batch_opens_at().is_some() => Some(Stall::Batch),
            () if self.running.is_empty() && self.waiting.len() == 0 && self.waiting.kinds().on_session > 0 => Some(Stall::Session),
            () if self.running.is_empty() && self.waiting.len() == 0 && self.waiting.kinds().outside_queue() > 0 => None,
            () => panic!("runnable work and an empty plan: {:?}", self.stats()),
        }
    }
}

/// Whether a prompt in progress got no tokens for too long. Background prompts may wait forever.
fn is_starved(seq: &Sequence, now: Time, ageing: Time) -> bool {
    seq.is_stalled() && !seq.is_background() && now - seq.account.since() > ageing
}
