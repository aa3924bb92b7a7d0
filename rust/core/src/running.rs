//! The next tokens of the sequences that run.

use crate::Scheduler;
use crate::batch::{Chunk, StepPlan, WHOLE_TABLE};
use crate::cost::FIRST_PREFILL;
use crate::ledger::State;
use crate::policy::Policy;
use crate::request::SeqId;
use crate::sequence::{NO_ROW, Sequence};
use crate::stats::Stall;

/// What prompts may take however long the decodes take, as a part of the target or, if that is longer, of the step.
const MIN_PREFILL: f64 = 0.15;
/// Without a target: how much longer than its decodes alone a step with one prompt may take.
const DEFAULT_SLOWDOWN: f64 = 3.0;
/// The part of the target that is aimed at: a prompt's next piece is always a little dearer than those the model has seen.
const AIM: f64 = 0.9;
/// The part of a step's prompt tokens, as a divisor, that the oldest prompt that has begun is sure of.
const GUARANTEE: u32 = 4;

impl Scheduler {
    /// Gives each sequence that decodes its next token, and drops those that
    /// ended. `spare` blocks are free beyond what these tokens need.
    pub(crate) fn plan_decodes(&mut self, plan: &mut StepPlan, budget: &mut u32, mut spare: usize) {
        self.partial.clear();
        let (mut kept, mut quick, mut context) = (0, 0, 0);
        for at in 0..self.running.len() {
            let id = self.running[at];
            let Some(seq) = self.seqs.get_mut(id).filter(|seq| seq.row != NO_ROW) else { continue };
            self.running[kept] = id;
            kept += 1;
            let expected = seq.expected_len();
            // Nothing left to sample, or the length is open until the commit.
            if expected == seq.limit || seq.drafting {
                continue;
            }
            if seq.computed < seq.quick_until {
                *budget -= 1;
                quick += 1;
                context += u64::from(seq.computed) + 1;
                plan.chunks.push(quick_chunk(seq, id));
            } else if seq.computed + 1 < expected {
                self.partial.push(id);
            } else {
                let later = self.running.len() - at - 1;
                self.plan_decode(id, plan, budget, &mut spare, later as u32);
            }
        }
        self.running.truncate(kept);
        plan.load.decode_seqs += quick;
        plan.load.context_tokens += context;
        self.counters.computed_tokens += u64::from(plan.load.decode_seqs);
    }

    /// Leaves prompts as many tokens as the target allows: the configured one,
    /// or, without one, three times what the decodes take alone. The latter
    /// costs throughput, so it holds only beside decodes, for one prompt, and
    /// without a `backlog`: requests that already waited in the plan before.
    pub(crate) fn bound_prefill(&self, plan: &StepPlan, budget: &mut u32, backlog: bool) {
        let configured = self.config.target_itl > 0;
        let busy = backlog || self.partial.len() > 1;
        if !configured && (plan.load.decode_seqs == 0 || busy || !self.model.knows()) {
            return;
        }
        if !self.model.knows() {
            *budget = (*budget).min(FIRST_PREFILL);
            return;
        }
        let alone = self.model.step(&plan.load);
        let target = if configured { self.config.target_itl as f64 } else { DEFAULT_SLOWDOWN * alone };
        // Whose turn it will be is not known yet: the longest of those begun is the dearest.
        let context = self.partial.iter().map(|&id| self.seqs[id].computed).max().unwrap_or(0);
        let room = self.model.prefill_room(&plan.load, AIM * target, MIN_PREFILL * target.max(alone), context);
        *budget = (*budget).min(room.max(1));
    }

    /// Divides the tokens that decodes left among prompts that have begun and
    /// sequences that wait.
    ///
    /// Where the policy knows urgency, it decides. Else waiting requests may
    /// have half, so that a long prompt does not keep others out. Of the
    /// prompts that have begun, the oldest is sure of a quarter of the step, and
    /// the one nearest to its end comes first.
    pub(crate) fn plan_prefills(&mut self, plan: &mut StepPlan, budget: &mut u32, promised: u32) {
        self.open_batch();
        // Who has begun and waited as long is older than whoever would come in.
        let late = self.partial.iter().any(|&id| self.is_overdue(id));
        let barred = if plan.preempted.is_empty() && !late { self.admit_elder(plan, budget) } else { None };
        let mut partial = std::mem::take(&mut self.partial);
        let left = |id: SeqId| self.seqs[id].expected_len() - self.seqs[id].computed;
        if self.has_urgency() {
            partial.sort_unstable_by_key(|&id| (!self.is_overdue(id), self.elder != Some(id), self.seqs[id].key));
            self.partial = partial;
            self.plan_partial(plan, budget, 0, barred.is_none());
            self.plan_waiting(plan, budget, promised, barred);
        } else {
            partial.sort_unstable_by_key(|&id| (!self.is_overdue(id), left(id), self.seqs[id].ticket));
            let wanted = partial.iter().map(|&id| left(id)).fold(0, u32::saturating_add);
            self.partial = partial;
            let kept = budget.div_ceil(2).min(wanted);
            let guaranteed = budget.div_ceil(GUARANTEE);
            let mut rest = *budget - kept;
            self.plan_waiting(plan, &mut rest, promised, barred);
            *budget = rest + kept;
            self.plan_partial(plan, budget, guaranteed, false);
        }
    }

    /// Whether a sequence has been put off for too long.
    fn is_overdue(&self, id: SeqId) -> bool {
        let seq = &self.seqs[id];
        seq.stalled && self.clocks.now() - seq.account.since() > self.config.ageing
    }

    /// Whether the policy says of any two requests which is more urgent, running or not.
    fn has_urgency(&self) -> bool {
        self.config.policy.has_classes() || self.config.policy == Policy::Shortest
    }

    /// Continues the prompts that have begun. The oldest gets at least
    /// `guaranteed` tokens, or all that it needs. With `urgent`, more urgent
    /// waiting requests are admitted before, but not before the aged one that
    /// runs, nor before one that was put off for too long.
    fn plan_partial(&mut self, plan: &mut StepPlan, budget: &mut u32, guaranteed: u32, urgent: bool) {
        let oldest = self.partial.iter().copied().min_by_key(|&id| self.seqs[id].ticket).filter(|_| guaranteed > 0);
        let mut reserved = oldest.map_or(0, |id| guaranteed.min(self.seqs[id].expected_len() - self.seqs[id].computed));
        for at in 0..self.partial.len() {
            let id = self.partial[at];
            if urgent && !self.is_overdue(id) && self.elder != Some(id) && plan.preempted.is_empty() {
                let key = self.seqs[id].key;
                while *budget > 0 && !self.free_rows.is_empty() {
                    let Some(first) = self.queue.first().filter(|&first| self.seqs[first].key < key) else { break };
                    if self.admit(first, plan, budget).is_err() {
                        break;
                    }
                }
            }
            if oldest == Some(id) {
                reserved = 0;
            }
            let mut available = budget.saturating_sub(reserved);
            if available == 0 {
                self.put_off(id);
            } else {
                let table_from = self.seqs[id].table.ids().len() as u32;
                self.plan_piece(id, table_from, plan, &mut available);
                *budget = available + reserved;
            }
        }
    }

    /// Plans the next piece of a sequence that has the blocks for it; the step
    /// buffers have the first `table_from` of them.
    pub(crate) fn plan_piece(&mut self, id: SeqId, table_from: u32, plan: &mut StepPlan, budget: &mut u32) {
        self.go_on(id);
        let seq = &mut self.seqs[id];
        let len = (seq.expected_len() - seq.computed).min(*budget);
        *budget -= len;
        let from = seq.computed;
        plan.load.context_tokens += u64::from(from + len);
        self.counters.computed_tokens += u64::from(len);
        // One token of a prompt costs what a decode does.
        if len == 1 {
            plan.load.decode_seqs += 1;
        } else {
            plan.load.prefill_tokens += len;
            plan.load.prefill_pairs += u64::from(len) * (u64::from(from) + u64::from(len) / 2);
        }
        let chunk = seq.next_chunk(id, len, table_from, self.config.block_size);
        plan.chunks.push(chunk);
        self.seal(id, plan.step);
    }

    /// Plans a sequence's last token, which may need a block or complete one,
    /// and its drafted ones, which are worth spare tokens and blocks, but nobody's eviction, and not the tokens of the
    /// `later` sequences that are still to be planned.
    fn plan_decode(&mut self, id: SeqId, plan: &mut StepPlan, budget: &mut u32, spare: &mut usize, later: u32) {
        self.go_on(id);
        let seq = &mut self.seqs[id];
        let block_size = self.config.block_size;
        let table_from = seq.table.ids().len();
        let blocks = |tokens: u32| (tokens.div_ceil(block_size) as usize).max(table_from);
        let drafted = (seq.draft.len() as u32).min((*budget - 1).saturating_sub(later));
        let mut end = seq.computed + 1;
        let extra = blocks(end + drafted) - blocks(end);
        if drafted > 0 && extra <= *spare {
            *spare -= extra;
            seq.draft.truncate(drafted as usize);
            seq.drafting = true;
            end += drafted;
        } else {
            seq.draft.clear();
        }
        let grown = self.pool.grow(&mut seq.table, blocks(end));
        assert!(grown, "room was made before");
        let len = end - seq.computed;
        *budget -= len;
        plan.load.decode_seqs += 1;
        plan.load.prefill_tokens += len - 1;
        plan.load.context_tokens += u64::from(end);
        self.counters.computed_tokens += u64::from(len - 1);
        let grew = seq.table.ids().len() > table_from;
        let from = if grew || len > 1 { table_from as u32 } else { WHOLE_TABLE };
        plan.chunks.push(seq.next_chunk(id, len, from, block_size));
        if grew {
            self.hold_blocks(id);
        }
        self.seal(id, plan.step);
    }

    /// Puts a sequence off to a later step: this one has no tokens left for it.
    fn put_off(&mut self, id: SeqId) {
        let seq = &mut self.seqs[id];
        if !seq.stalled {
            (seq.stalled, seq.quick_until) = (true, 0);
            self.enter(id, State::Stalled);
        }
    }

    /// Lets a sequence go on that may have been put off.
    fn go_on(&mut self, id: SeqId) {
        let seq = &mut self.seqs[id];
        if seq.stalled {
            seq.stalled = false;
            let state = seq.running_state();
            self.enter(id, state);
        }
    }

    /// Says why nothing was planned. Panics if there was no reason: requests that wait for nothing would wait for ever.
    pub(crate) fn name_stall(&mut self) {
        self.stall = match () {
            () if self.seqs.is_empty() => None,
            () if self.committed < self.counters.steps => Some(Stall::InFlight),
            () if self.wake_at.is_some() => Some(Stall::Batch),
            () => panic!("runnable work and an empty plan: {:?}", self.stats()),
        };
    }
}

/// The next token of a sequence that is on the quick way: see [`Sequence::quick_until`].
#[inline]
fn quick_chunk(seq: &mut Sequence, id: SeqId) -> Chunk {
    let start = seq.computed;
    let token = if seq.pending == 0 { *seq.tokens.last().expect("a prompt") as i32 } else { -(seq.row as i32) - 1 };
    let slot = seq.slot;
    seq.computed += 1;
    seq.slot += 1;
    seq.pending += 1;
    Chunk {
        seq: id,
        row: seq.row,
        start,
        len: 1,
        drafted: 0,
        samples: true,
        token,
        slot,
        table_from: WHOLE_TABLE,
        preemptions: seq.preemptions,
    }
}
