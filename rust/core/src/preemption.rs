//! Making room: whose blocks are taken when there are too few, and how they come back.

use crate::batch::StepPlan;
use crate::config::Batching;
use crate::ledger::{Cause, PreemptionReason, State};
use crate::policy::{Policy, worth_preempting};
use crate::queue::Walk;
use crate::request::{SeqId, Time};
use crate::sequence::{NO_ROW, Sequence};
use crate::{BlockId, Chain, Reservation, Scheduler};
use std::cmp::Reverse;

/// Waiting sequences for whom others are preempted in one step, at most.
const MOST_URGENT: u32 = 16;

/// The room that was made for a step.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Way {
    /// Blocks that are free beyond what running sequences need in the step.
    pub(crate) spare: usize,
    /// Of the waiting sequences, so many of the first have their place.
    pub(crate) promised: u32,
}

impl Scheduler {
    /// Preempts until those that run have the blocks they need in this step,
    /// and, if nobody had to go for that, for more urgent ones that wait.
    pub(crate) fn make_room(&mut self, plan: &mut StepPlan) -> Way {
        // Each needs one block at most: while there are so many, nobody has to count.
        if self.pool.free() < self.running.len() {
            while let Some(needy) = self.needy() {
                let victim = self.victim(|_| true).expect("who needs a block can lose its own");
                let for_tag = self.seqs[needy].tag;
                self.preempt(victim, for_tag, PreemptionReason::Blocks, plan);
            }
        }
        let need = if self.pool.free() < self.running.len() { self.need().0 } else { self.running.len() };
        let promised = if plan.preempted.is_empty() { self.make_way(plan, need) } else { 0 };
        Way { spare: self.pool.free().saturating_sub(need), promised }
    }

    /// Blocks that decodes need in this step, and the first sequence for which there is none.
    fn need(&self) -> (usize, Option<SeqId>) {
        let (free, mut need, mut needy) = (self.pool.free(), 0, None);
        for &id in &self.running {
            let Some(seq) = self.seqs.get(id).filter(|seq| seq.row != NO_ROW) else { continue };
            let expected = seq.expected_len();
            if expected == seq.limit || seq.drafting || seq.computed + 1 != expected {
                continue;
            }
            if seq.computed as usize == seq.table.ids().len() * self.config.block_size as usize {
                need += 1;
                if need > free {
                    needy.get_or_insert(id);
                }
            }
        }
        (need, needy)
    }

    fn needy(&self) -> Option<SeqId> {
        self.need().1
    }

    /// Who of the eligible loses its blocks first: by policy, then who loses
    /// least, then who came last. Protected ones come after all others.
    fn victim(&self, eligible: impl Fn(&Sequence) -> bool) -> Option<SeqId> {
        let first = self.losable(eligible).max_by_key(|(_, seq)| {
            let rank = match self.config.policy {
                Policy::Priority | Policy::Deadline => i64::from(seq.priority),
                Policy::Fair => self.queue.shares.counter(seq.tenant) as i64,
                Policy::Shortest => self.work_left(seq) as i64,
                Policy::Fcfs | Policy::Prefix | Policy::Vtc => 0,
            };
            (!seq.is_protected(), rank, Reverse(seq.computed), seq.ticket)
        });
        first.map(|(id, _)| id)
    }

    /// The eligible ones of those that can lose their blocks.
    fn losable(&self, eligible: impl Fn(&Sequence) -> bool) -> impl Iterator<Item = (SeqId, &Sequence)> {
        let running = self.running.iter().filter_map(|&id| self.seqs.get(id).map(|seq| (id, seq)));
        running.filter(move |&(id, seq)| seq.row != NO_ROW && self.non_preemptible != Some(id) && eligible(seq))
    }

    /// Preempts less urgent sequences for the first of the queue, which need
    /// rows or blocks; returns how many of these have them now. `need` blocks are spoken for.
    fn make_way(&mut self, plan: &mut StepPlan, mut need: usize) -> u32 {
        let by_class = self.config.policy.has_classes();
        let may_preempt = match self.config.policy {
            Policy::Fcfs | Policy::Prefix | Policy::Vtc => false,
            Policy::Fair => self.preemption_budget.allows(),
            Policy::Priority | Policy::Deadline | Policy::Shortest => true,
        };
        let reserves = self.config.reservation != Reservation::Watermark;
        if !may_preempt || reserves || self.config.batching != Batching::Continuous {
            return 0;
        }
        let reason = match self.config.policy {
            Policy::Fair => PreemptionReason::Fairness,
            Policy::Shortest => PreemptionReason::Shortest,
            _ => PreemptionReason::Priority,
        };
        let (mut promised, mut blocks, mut walk) = (0, 0, Walk::default());
        // The most urgent class that somebody had to leave: its own kind does not come in.
        let mut left = i32::MAX;
        while promised < MOST_URGENT {
            let Some(id) = self.queue.next(&mut walk) else { break };
            let first = &self.seqs[id];
            if first.pending > 0 || (first.is_last_chance() && self.non_preemptible.is_some()) || self.refused == Some((id, self.admitted))
            {
                break;
            }
            let (priority, tag, work) = (first.priority, first.tag, self.work_left(first));
            if by_class && (priority >= left || self.running_classes.last_key_value().is_none_or(|(&least, _)| least <= priority)) {
                break;
            }
            let wanted = if first.needs_free > 0 { first.needs_free } else { self.blocks_at_admission(id) };
            let (seats, weight, tenant) = (self.tenants.peek(first.tenant).running, first.weight, first.tenant);
            let less_urgent = |this: &Self, seq: &Sequence| match this.config.policy {
                _ if seq.is_protected() => false,
                Policy::Shortest => worth_preempting(this.work_left(seq), this.cost(seq), work),
                // The least served takes a place of one that was served more and, for its weight, has more than twice its rows even then.
                Policy::Fair if this.queue.shares.counter(seq.tenant) <= this.queue.shares.counter(tenant) => false,
                Policy::Fair => {
                    let others = this.tenants.peek(seq.tenant).running;
                    2 * u64::from(seats + 1) * u64::from(seq.weight) < u64::from(others) * u64::from(weight)
                }
                _ => seq.priority > priority,
            };
            if self.room_beside(promised, blocks, need, (0, 0)) < Some(wanted) {
                // What was said to be needed may have been a guess.
                need = need.min(self.need().0);
            }
            if self.room_beside(promised, blocks, need, (0, 0)) < Some(wanted) {
                let losable = self.losable(|seq| less_urgent(self, seq));
                let most = losable.fold((0, 0), |(rows, blocks), (_, seq)| (rows + 1, blocks + seq.table.ids().len()));
                if self.room_beside(promised, blocks, need, most) < Some(wanted) {
                    // What each tenant was served changes with every step; the rest only when somebody comes or goes.
                    self.refused = Some((id, self.admitted)).filter(|_| self.config.policy != Policy::Fair);
                    break;
                }
            }
            while self.room_beside(promised, blocks, need, (0, 0)) < Some(wanted) {
                let Some(victim) = self.victim(|seq| less_urgent(self, seq)) else { return promised };
                left = left.min(self.seqs[victim].priority);
                if self.config.policy == Policy::Fair {
                    self.preemption_budget.spend(self.cost(&self.seqs[victim]));
                }
                self.preempt(victim, tag, reason, plan);
            }
            promised += 1;
            blocks += wanted;
            if self.config.policy == Policy::Fair {
                break; // the next in turn may be of the tenant that lost a row for this one
            }
        }
        promised
    }

    /// Blocks for one more sequence beside those that run, which need `need`
    /// now, and `promised` others with `blocks`; `None` without a row for it.
    /// Counts as if so many rows and blocks `more` were free.
    fn room_beside(&self, promised: u32, blocks: usize, need: usize, more: (usize, usize)) -> Option<usize> {
        let free_rows = self.free_rows.len() + more.0;
        let running = self.config.max_seqs as usize - free_rows;
        let spoken_for = blocks + need.min(running) + self.headroom(running + promised as usize);
        let free = (self.pool.free() + more.1).saturating_sub(spoken_for);
        (free_rows > promised as usize).then_some(free)
    }

    /// Takes blocks and row from a running sequence and queues it at its old
    /// place. A token on its way still arrives. Names that rest on steps not
    /// yet committed go: nobody would take them back if those steps fail.
    fn preempt(&mut self, id: SeqId, for_tag: u64, reason: PreemptionReason, plan: &mut StepPlan) {
        let swap = self.is_worth_swapping(&self.seqs[id]);
        let seq = &mut self.seqs[id];
        self.pool.forget(&seq.table, self.committed);
        if swap {
            let used = seq.computed.div_ceil(self.config.block_size) as usize;
            for &block in &seq.table.ids()[..used] {
                let host = self.host.take();
                seq.host.push(host);
                plan.swap_out.push((block, host));
            }
            self.counters.swapped_blocks += used as u64;
            self.counters.preemptions_swap += 1;
            seq.account.swaps += 1;
            (seq.saved, seq.lost) = (seq.computed, 0);
        } else {
            self.counters.preemptions_recompute += 1;
            seq.lost = seq.lost.max(seq.computed);
        }
        self.pool.release(&mut seq.table);
        seq.account.computed_tokens += u64::from(seq.computed - seq.computed_from);
        (seq.computed, seq.computed_from, seq.seal_at) = (0, 0, u32::MAX);
        (seq.decoding, seq.chain) = (false, Chain::root(&seq.salt));
        seq.draft.clear();
        seq.preemptions += 1;
        seq.account.preempted_for[reason as usize] += 1;
        self.counters.preemptions_by_reason[reason as usize] += 1;
        if seq.tag != for_tag {
            seq.account.blame(for_tag);
        }
        plan.preempted.push(seq.tag);
        self.enter(id, if swap { State::Swapped } else { State::Preempted });
        self.hold_blocks(id);
        self.unseat(id);
        self.enqueue(id, true);
    }

    /// Brings a sequence's KV back from host memory, but for what the cache has.
    pub(crate) fn swap_in(&mut self, id: SeqId, room: usize, plan: &mut StepPlan) -> Result<(), Cause> {
        let seq = &mut self.seqs[id];
        self.found.clear();
        if self.config.prefix_caching {
            self.pool.name_blocks(&seq.salt, &seq.tokens, &mut seq.names);
            let whole = seq.saved as usize / self.config.block_size as usize;
            seq.chain = self.pool.find(&seq.salt, &seq.names[..whole], &seq.tokens, &mut self.found);
        }
        let blocks = self.share_found(id, room, 0)?;
        let seq = &mut self.seqs[id];
        let grown = self.pool.grow(&mut seq.table, blocks);
        assert!(grown, "counted before");
        let pairs = seq.host.iter().zip(seq.table.ids()).skip(self.found.len());
        plan.swap_in.extend(pairs.map(|(&host, &block): (&u32, &BlockId)| (host, block)));
        self.host.release(&mut seq.host);
        seq.computed = seq.saved;
        // It may have been on its way back when it had to go again.
        seq.decoding = seq.first_token.is_some() && seq.saved as usize + 1 == seq.tokens.len();
        // `saved` tells the queue that it waits swapped: it is cleared once it has left.
        Ok(())
    }

    /// Whether copying a sequence's KV to the host and back is cheaper than computing it again.
    fn is_worth_swapping(&self, seq: &Sequence) -> bool {
        let blocks = seq.computed.div_ceil(self.config.block_size) as usize;
        let fits = blocks > 0 && blocks <= self.host.free() && !seq.drafting;
        fits && (!self.model.knows() || self.swap_time(seq) < self.recompute_time(seq))
    }

    /// Microseconds that preempting a sequence costs.
    fn cost(&self, seq: &Sequence) -> Time {
        let cost = if self.host.free() > 0 { self.swap_time(seq).min(self.recompute_time(seq)) } else { self.recompute_time(seq) };
        cost as Time
    }

    fn swap_time(&self, seq: &Sequence) -> f64 {
        let blocks = seq.computed.div_ceil(self.config.block_size);
        2.0 * f64::from(blocks) * f64::from(self.config.swap_ns_per_block) / 1000.0
    }

    fn recompute_time(&self, seq: &Sequence) -> f64 {
        self.model.prefill(0.0, seq.computed.into())
    }
}
