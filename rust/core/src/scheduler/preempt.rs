//! Preemption: chooses the sequences that lose their blocks when too few are free.

use super::Scheduler;
use crate::batch::headroom;
use crate::config::{Batching, Reservation};
use crate::policy::{Candidate, Class, Grouping, Preemption, PreemptionReason};
use crate::queue::Walk;
use crate::request::{SeqId, Tier, Time};
use crate::sequence::{Phase, Sequence};
use crate::step::StepPlan;
use std::cmp::Reverse;

/// Maximum number of waiting sequences for which one step preempts others.
const MAX_URGENT: u32 = 16;

/// The space made free for a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct Room {
    /// Free blocks beyond the need of running sequences in the step.
    pub(super) spare: usize,
    /// Number of sequences at the front of the queue with reserved slots and blocks.
    pub(super) reserved: u32,
}

/// Slots and blocks.
#[derive(Clone, Copy, Debug, Default)]
struct Space {
    slots: usize,
    blocks: usize,
}

/// A waiting request for which others may be preempted.
#[derive(Clone, Copy, Debug)]
struct Urgent {
    id: SeqId,
    tag: u64,
    /// Sequences of tiers above this one may be preempted for the request.
    above: Tier,
    /// Blocks that the request needs.
    blocks: usize,
    /// Why the policy preempts for the request. `None` if it does not: then only less urgent tiers are preempted.
    reason: Option<PreemptionReason>,
}

impl Scheduler {
    /// Preempts until the running sequences have the blocks they need in this step. If that preempted none, preempts
    /// for more urgent waiting requests.
    pub(super) fn make_room(&mut self, plan: &mut StepPlan) -> Room {
        // Each sequence needs at most one block. If that many are free, counting is unnecessary.
        if self.kv.free() < self.running.len() {
            while let (_, Some(needs_block)) = self.needed_blocks() {
                if self.evict_one_held() {
                    continue;
                }
                let victim = self.victim(|_| true).expect("who needs a block can lose its own");
                let for_tag = self.seqs[needs_block].spec().tag;
                self.preempt(victim, for_tag, PreemptionReason::Blocks, plan);
            }
        }
        let need = if self.kv.free() < self.running.len() { self.needed_blocks().0 } else { self.running.len() };
        let for_waiting = plan.preempted.is_empty() && !self.is_closed();
        let reserved = if for_waiting { self.preempt_for_waiting(plan, need) } else { 0 };
        Room { spare: self.kv.free().saturating_sub(need), reserved }
    }

    /// Number of blocks that decodes need in this step, and the first sequence without a free block.
    fn needed_blocks(&self) -> (usize, Option<SeqId>) {
        let (free, mut need, mut needs_block) = (self.kv.free(), 0, None);
        for id in self.running.iter() {
            let Some(seq) = self.seqs.get(id).filter(|seq| seq.is_running()) else { continue };
            if seq.has_nothing_to_plan() || seq.uncomputed() != 1 {
                continue;
            }
            if seq.computed() as usize == seq.blocks.held() * self.config.block_size as usize {
                need += 1;
                if need > free {
                    needs_block.get_or_insert(id);
                }
            }
        }
        (need, needs_block)
    }

    /// The eligible sequence to preempt first: a background or flex sequence, then by tier, by policy, by the smallest loss
    /// and by the latest arrival. Protected sequences come after all others of the default and priority tiers.
    fn victim(&self, eligible: impl Fn(&Sequence) -> bool) -> Option<SeqId> {
        let first = self.preemptible(eligible).max_by_key(|(_, seq)| {
            let (rank, tier) = (self.show(seq, |running| self.config.scheduling_policy.victim_rank(running)), seq.request().tier);
            (tier.max(Tier::Default), !seq.is_protected(), tier, rank, Reverse(seq.computed()), seq.spec().arrival_number)
        });
        first.map(|(id, _)| id)
    }

    /// Eligible sequences that can lose their blocks.
    fn preemptible(&self, eligible: impl Fn(&Sequence) -> bool) -> impl Iterator<Item = (SeqId, &Sequence)> {
        let running = self.running.iter().filter_map(|id| self.seqs.get(id).map(|seq| (id, seq)));
        running.filter(move |&(id, seq)| seq.is_running() && self.running.non_preemptible() != Some(id) && eligible(seq))
    }

    /// Preempts less urgent sequences for the first requests of the queue that need slots or blocks. Returns how many
    /// of these requests now have them. Running sequences use `need` blocks.
    fn preempt_for_waiting(&mut self, plan: &mut StepPlan, mut need: usize) -> u32 {
        if self.config.kv_reservation != Reservation::Watermark || self.config.batching != Batching::Continuous {
            return 0;
        }
        let mut reason = self.policy_preempts_for();
        if reason.is_none() && !self.has_more_urgent_tier() {
            return 0;
        }
        let (mut reserved, mut walk) = (Space::default(), Walk::default());
        // The most urgent class that lost a slot in this step. Requests of that class are not admitted.
        let mut most_urgent_lost = (Tier::Background, i32::MAX);
        while reserved.slots < MAX_URGENT as usize {
            let Some(urgent) = self.next_urgent(&mut walk, most_urgent_lost, reason) else { break };
            if !self.fits_beside(reserved, need, Space::default(), urgent.blocks) {
                // The previous need may have been an estimate.
                need = need.min(self.needed_blocks().0);
            }
            self.evict_held_for(reserved, need, urgent.blocks);
            if !self.fits_beside(reserved, need, Space::default(), urgent.blocks) && !self.could_fit(reserved, need, &urgent) {
                // Where preemption has a budget, each step changes the result. Elsewhere, only a sequence that is admitted
                // or leaves does.
                if !self.preempts_within_budget() {
                    self.running.refuse(urgent.id);
                }
                break;
            }
            while !self.fits_beside(reserved, need, Space::default(), urgent.blocks) {
                let victim = self.show(&self.seqs[urgent.id], |waiting| self.victim(|seq| self.is_less_urgent(seq, &urgent, waiting)));
                let Some(victim) = victim else { return reserved.slots as u32 };
                let lost = self.seqs[victim].class();
                most_urgent_lost = most_urgent_lost.min(lost);
                let by_tier = lost.0 > urgent.above;
                if self.preempts_within_budget() && !by_tier {
                    let cost = self.preemption_cost(&self.seqs[victim]);
                    self.running.preemption_budget(self.accounts.now()).spend(cost);
                }
                let reason = reason.filter(|_| !by_tier).unwrap_or(PreemptionReason::Priority);
                self.preempt(victim, urgent.tag, reason, plan);
                // Held sequences may share the blocks that the victim held.
                self.evict_held_for(reserved, need, urgent.blocks);
            }
            reserved.slots += 1;
            reserved.blocks += urgent.blocks;
            if self.rules.takes_turns() {
                if self.running.least_urgent_class().is_none_or(|(tier, _)| tier < Tier::Background) {
                    break; // the next request may belong to the tenant that lost a slot
                }
                reason = None;
            }
        }
        reserved.slots as u32
    }

    /// The reason for which the policy lets waiting requests preempt others. `None` if it does not.
    fn policy_preempts_for(&mut self) -> Option<PreemptionReason> {
        match self.rules.preemption {
            Preemption::Never => None,
            Preemption::Free(reason) => Some(reason),
            Preemption::WithinBudget(reason) => self.running.preemption_budget(self.accounts.now()).allows().then_some(reason),
        }
    }

    fn preempts_within_budget(&self) -> bool {
        matches!(self.rules.preemption, Preemption::WithinBudget(_))
    }

    /// Whether a request waits for whose tier a running sequence may be preempted.
    fn has_more_urgent_tier(&self) -> bool {
        let most_urgent = self.waiting.most_urgent_tier();
        self.running.least_urgent_class().is_some_and(|(tier, _)| most_urgent.is_some_and(|first| self.rules.preempts_above(first) < tier))
    }

    /// The next waiting request for which others may be preempted. Its class must be more urgent than that of a running
    /// sequence and of all sequences preempted in this step. Without classes and without a `reason`, its tier must be.
    fn next_urgent(&mut self, walk: &mut Walk, most_urgent_lost: Class, reason: Option<PreemptionReason>) -> Option<Urgent> {
        let id = self.waiting.next(walk)?;
        let seq = &self.seqs[id];
        let second = seq.is_last_chance() && self.running.non_preemptible().is_some();
        if seq.pending() > 0 || second || self.running.is_refused(id) || seq.is_background() {
            return None;
        }
        let (class, above) = (seq.class(), self.rules.preempts_above(seq.request().tier));
        let least_urgent = self.running.least_urgent_class();
        let is_urgent = match (reason, self.rules.grouping) {
            (Some(_), Grouping::Classes) => class < most_urgent_lost && least_urgent.is_some_and(|least| class < least),
            (Some(_), Grouping::Single | Grouping::Tenants(_)) => class.0 <= most_urgent_lost.0,
            (None, _) => class.0 < most_urgent_lost.0 && least_urgent.is_some_and(|(tier, _)| above < tier),
        };
        if !is_urgent {
            return None;
        }
        Some(Urgent {
            id,
            tag: seq.spec().tag,
            above,
            blocks: seq.queue_entry.needs_blocks().unwrap_or_else(|| seq.blocks_at_admission(self.config.block_size)),
            reason,
        })
    }

    /// Whether a running sequence may be preempted for an urgent request, which the policy sees as `waiting`.
    fn is_less_urgent(&self, seq: &Sequence, urgent: &Urgent, waiting: &Candidate<'_>) -> bool {
        let policy_allows = || {
            let allowed = self.rules.allow_preemption(waiting, seq.class(), self.tenant_service(seq));
            allowed && self.show(seq, |running| self.config.scheduling_policy.may_preempt(waiting, running))
        };
        !seq.is_protected() && (seq.request().tier > urgent.above || urgent.reason.is_some() && policy_allows())
    }

    /// Whether a waiting request fits if all eligible sequences are preempted for it.
    fn could_fit(&self, reserved: Space, need: usize, urgent: &Urgent) -> bool {
        self.show(&self.seqs[urgent.id], |waiting| {
            let add = |space: Space, seq: &Sequence| Space { slots: space.slots + 1, blocks: space.blocks + seq.blocks.held() };
            let victims = self.preemptible(|seq| self.is_less_urgent(seq, urgent, waiting));
            let most = victims.fold(Space::default(), |space, (_, seq)| add(space, seq));
            self.fits_beside(reserved, need, most, urgent.blocks)
        })
    }

    /// Evicts held sequences if only blocks are missing for one more sequence that needs `blocks`.
    fn evict_held_for(&mut self, reserved: Space, need: usize, blocks: usize) {
        while self.running.free_slots() > reserved.slots && !self.fits_beside(reserved, need, Space::default(), blocks) {
            if !self.evict_one_held() {
                return;
            }
        }
    }

    /// Whether one more sequence that needs `blocks` fits beside the running sequences, which need `need` blocks now,
    /// and beside the `reserved` space. Counts as if `more` space were free.
    fn fits_beside(&self, reserved: Space, need: usize, more: Space, blocks: usize) -> bool {
        let free_slots = self.running.free_slots() + more.slots;
        let running = self.config.max_num_seqs as usize - free_slots;
        let taken = reserved.blocks + need.min(running) + headroom(self.config.watermark, running + reserved.slots);
        let free = self.kv.free_after(more.blocks).saturating_sub(taken);
        free_slots > reserved.slots && free >= blocks
    }

    /// Takes the blocks and the slot from a running sequence and queues it at its old position. A pending token is
    /// still delivered. Blocks completed by uncommitted steps lose their names, because these steps may fail.
    fn preempt(&mut self, id: SeqId, for_tag: u64, reason: PreemptionReason, plan: &mut StepPlan) {
        let swap = self.is_worth_swapping(&self.seqs[id]);
        let seq = &mut self.seqs[id];
        let computed = seq.computed();
        self.kv.forget(&mut seq.blocks, self.steps.committed());
        if swap {
            self.kv.swap_out(&mut seq.blocks, computed);
        }
        self.accounts.count_preemption(reason, swap);
        self.kv.release(&mut seq.blocks);
        seq.preempt(swap);
        let tag = seq.spec().tag;
        seq.account.preempt(reason, Some(for_tag).filter(|&by| by != tag), swap);
        plan.preempted.push(tag);
        self.release_slot(id);
        self.enter(id, if swap { Phase::Swapped { tokens: computed } } else { Phase::Preempted });
        self.seqs[id].note_blocks(&self.accounts);
        self.enqueue(id, true);
    }

    /// Whether it is cheaper to copy a sequence's KV to host memory and back than to compute it again.
    fn is_worth_swapping(&self, seq: &Sequence) -> bool {
        let blocks = seq.computed().div_ceil(self.config.block_size) as usize;
        let fits = blocks > 0 && blocks <= self.kv.host_room() && !seq.is_drafting() && self.kv.can_keep_state(self.config.max_num_seqs);
        fits && (!self.model.knows() || self.swap_time(seq) < self.recompute_time(seq))
    }

    /// Microseconds that it costs to preempt a sequence.
    pub(super) fn preemption_cost(&self, seq: &Sequence) -> Time {
        let recompute = self.recompute_time(seq);
        let cost = if self.kv.host().1 > 0 { self.swap_time(seq).min(recompute) } else { recompute };
        cost as Time
    }

    fn swap_time(&self, seq: &Sequence) -> f64 {
        let blocks = seq.computed().div_ceil(self.config.block_size);
        self.copy_time(blocks)
    }

    fn recompute_time(&self, seq: &Sequence) -> f64 {
        let kept = self.kv.kept_tokens(&seq.blocks);
        self.model.prefill(kept.into(), (seq.computed() - kept).into())
    }
}
