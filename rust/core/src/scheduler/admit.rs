//! Admission: gives waiting sequences slots and blocks.

use super::Scheduler;
use crate::batch::{Growth, headroom};
use crate::config::{Batching, Reservation};
use crate::ledger::QueuePosition;
use crate::memory::{Computed, Grant};
use crate::policy::{CacheUse, Key};
use crate::queue::Walk;
use crate::request::{SeqId, Tier, Time};
use crate::sequence::{Need, Phase, Sequence};
use crate::step::{Admitted, StepPlan};
use crate::step_time::Load;

/// Maximum number of requests that do not fit and are considered for each request that does.
const MAX_REJECTED: usize = 64;
/// Maximum number of later requests admitted before a request that does not fit.
const MAX_BYPASSED: u32 = 256;
/// A rejected request is measured again after this many plans, because its prefix may be cached by then.
const MEASURED_FOR: u64 = 64;

impl Scheduler {
    /// Moves the requests added since the last plan into the queue.
    pub(super) fn queue_new(&mut self) {
        for id in self.waiting.take_new() {
            if let Some(seq) = self.seqs.get_mut(id).filter(|seq| seq.phase() == Phase::New) {
                seq.enter(Phase::Queued, &self.accounts);
            }
        }
    }

    /// Adds a sequence to the queue. `returns` is set if the sequence ran before.
    pub(super) fn enqueue(&mut self, id: SeqId, returns: bool) {
        let seq = &mut self.seqs[id];
        self.accounts.waits(seq.member());
        self.waiting.count(seq);
        let (blocks, tokens) = seq.blocks_and_tokens();
        self.kv.name(blocks, tokens);
        if self.config.enable_prefix_caching && self.rules.cache != CacheUse::Unused {
            blocks.reset_chain();
            self.kv.look_up(blocks, tokens);
            seq.measure_uncached(self.config.block_size);
        }
        let key = self.key(&self.seqs[id]);
        let seq = &mut self.seqs[id];
        self.waiting.place(seq, id, key, returns);
        self.await_next_block(id);
    }

    /// The position of a waiting sequence in the order.
    pub(super) fn key(&self, seq: &Sequence) -> Key {
        let (spec, rules) = (seq.spec(), self.rules);
        if seq.is_background() {
            return Key::background(spec.arrival_number);
        }
        let arrived = seq.times().arrived;
        let rank = match seq.request().tier {
            _ if rules.ranked => self.show(seq, |request| self.config.scheduling_policy.rank(request)),
            _ if !rules.takes_turns() => 0,
            // Within a tenant, tiers move the arrival, so that no request of the tenant waits for ever.
            Tier::Priority => arrived.saturating_sub(self.config.queue_ageing),
            Tier::Default | Tier::Background => arrived,
            Tier::Flex => arrived.saturating_add(self.config.queue_ageing),
        };
        let key = Key::new(rules, seq.class(), seq.member().tenant, rank, spec.arrival_number);
        Key { awaits_prompt: seq.queue_entry.awaits_prompt(), ..key }
    }

    /// Where ranks follow the cache, makes a waiting sequence await the block after its cached ones.
    pub(super) fn await_next_block(&mut self, id: SeqId) {
        if self.rules.cache == CacheUse::Followed {
            let seq = &mut self.seqs[id];
            let next = seq.blocks.cached_len();
            self.waiting.await_block(seq, id, next, None);
        }
    }

    /// Sets whether plans admit no waiting requests as long as any sequence runs, and preempt none for them. For a caller whose prompts another
    /// server computes: while that has enough to do, it closes the queue.
    pub fn close_queue(&mut self, closed: bool, now: Time) {
        self.accounts.tick(now);
        self.closed = closed;
    }

    /// Whether no waiting request may be admitted now.
    pub(super) fn is_closed(&self) -> bool {
        self.closed && !self.running.is_empty()
    }

    /// Removes a waiting sequence from the queue.
    pub(super) fn dequeue(&mut self, id: SeqId) {
        let seq = &mut self.seqs[id];
        self.waiting.remove(seq);
        self.accounts.leaves_queue(seq.member());
    }

    /// Admits waiting sequences while tokens, slots and blocks allow. If this step preempted sequences, only the first
    /// `reserved` are admitted. If an aged request is `blocked`, given as its group and its need, none is admitted.
    pub(super) fn plan_waiting(&mut self, plan: &mut StepPlan, reserved: u32, blocked: Option<(u32, Need)>) {
        let mut left = if plan.preempted.is_empty() { u32::MAX } else { reserved };
        let (mut first_blocked, mut rejected, mut walk) = (blocked, 0, Walk::default());
        self.waiting.clear_rejected();
        while blocked.is_none()
            && !self.is_closed()
            && left > 0
            && plan.tokens_left > 0
            && self.running.has_slot()
            && rejected < MAX_REJECTED
        {
            let Some(id) = self.waiting.next(&mut walk) else { break };
            if self.seqs[id].queue_entry.was_rejected_in(self.steps.plan_number()) {
                continue; // rejected before the walk restarted, or before it was moved
            }
            if self.seqs[id].is_background() && !self.may_start_background(id, plan) {
                break;
            }
            left -= 1;
            match self.admit(id, plan) {
                Ok(()) => {
                    if self.bypass_rejected() {
                        break;
                    }
                    // The service charged for the admission changes the tenant that is next.
                    if self.rules.takes_turns() {
                        walk = Walk::default();
                    }
                }
                Err(need) => {
                    if need == Need::Prefix && self.rules.cache == CacheUse::Followed {
                        self.move_last(id);
                    } else {
                        first_blocked.get_or_insert((self.seqs[id].member().group, need));
                    }
                    rejected += 1;
                    if self.reject(id, need) {
                        break;
                    }
                }
            }
        }
        self.note_blocked(first_blocked, plan);
    }

    /// Counts an admission for the requests rejected before it. Returns whether no more requests may bypass one of them.
    fn bypass_rejected(&mut self) -> bool {
        let mut closed = false;
        for &id in self.waiting.rejected() {
            let entry = &mut self.seqs[id].queue_entry;
            entry.bypass();
            closed |= entry.bypassed() >= MAX_BYPASSED;
        }
        closed
    }

    /// Records the need of a rejected request. Returns whether no more requests may bypass it.
    fn reject(&mut self, id: SeqId, need: Need) -> bool {
        let entry = &mut self.seqs[id].queue_entry;
        entry.reject(self.steps.plan_number());
        match need {
            Need::Batch => self.waiting.kinds().returning == 0,
            Need::Blocks(_) | Need::NonPreemptible => {
                let now = self.accounts.now();
                let since = entry.rejected_since(now);
                if entry.bypassed() >= MAX_BYPASSED || now - since > self.config.queue_ageing {
                    return true;
                }
                self.waiting.reject(id);
                false
            }
            Need::Slot | Need::Budget | Need::NextStep | Need::Commit | Need::Prefix | Need::Read => false,
        }
    }

    /// Records the group that is next in the queue and the resource that blocks it. Defaults to the first of the queue.
    fn note_blocked(&mut self, blocked: Option<(u32, Need)>, plan: &StepPlan) {
        let need = match () {
            () if !plan.preempted.is_empty() => Some(Need::NextStep),
            () if !self.running.has_slot() => Some(Need::Slot),
            () if plan.tokens_left == 0 || self.is_closed() => Some(Need::Budget),
            // Tokens and slots are left, so the policy's order holds the other requests back.
            () => None,
        };
        let blocked = blocked.or_else(|| {
            let first = self.waiting.first()?;
            Some((self.seqs[first].member().group, need?))
        });
        self.accounts.block(blocked.map(|(group, need)| (group, need.state())));
    }

    /// Gives a waiting sequence a slot and blocks for all its tokens, cached blocks first, and plans its first chunk.
    /// Returns the missing resource as an error.
    pub(super) fn admit(&mut self, id: SeqId, plan: &mut StepPlan) -> Result<(), Need> {
        let closed = match self.config.batching {
            Batching::Continuous => self.waiting.batch_opens_at().is_some(),
            Batching::Static { .. } | Batching::Dynamic { .. } => self.waiting.batch_remaining() == 0,
        };
        if closed && !self.seqs[id].has_started() {
            return Err(Need::Batch);
        }
        if self.step_tokens(id, plan, plan.tokens_left) == 0 {
            return Err(Need::Budget);
        }
        let held_back = self.held_back(id);
        let seq = &self.seqs[id];
        // The sequence was preempted while a sampled token was still pending.
        if seq.pending() > 0 {
            return Err(Need::Commit);
        }
        let measured = !(self.steps.plan_number() + seq.spec().arrival_number).is_multiple_of(MEASURED_FOR);
        let (needs_blocks, blocks) = (seq.queue_entry.needs_blocks().filter(|_| measured), seq.blocks_at_admission(self.config.block_size));
        let last_chance = seq.is_last_chance();
        if let Some(blocks) = needs_blocks.filter(|&blocks| blocks > self.kv.free().saturating_sub(held_back))
            && !self.evict_held(blocks + held_back)
        {
            return Err(Need::Blocks(blocks));
        }
        if last_chance && self.running.non_preemptible().is_some() {
            return Err(Need::NonPreemptible);
        }
        let computed = loop {
            let grant = Grant { blocks, room: self.kv.free().saturating_sub(held_back), step: plan.step };
            match self.take_blocks(id, grant, plan) {
                Err(Need::Blocks(blocks)) if self.evict_held(blocks + held_back) => {}
                taken => break taken?,
            }
        };
        self.start(id, computed, plan);
        self.plan_piece(id, 0, plan.tokens_left, plan);
        Ok(())
    }

    /// Free blocks that `id` may not use if it is admitted beside the running sequences.
    fn held_back(&mut self, id: SeqId) -> usize {
        let reservation = self.config.kv_reservation;
        if reservation == Reservation::Watermark {
            return headroom(self.config.watermark, self.running.len());
        }
        let size = self.config.block_size;
        if self.running.reserved().is_stale() {
            let mut reserved = std::mem::take(self.running.reserved());
            reserved.renew(self.running_seqs().map(|seq| Growth::of(seq, seq.blocks.held(), reservation, size)));
            *self.running.reserved() = reserved;
        }
        let seq = &self.seqs[id];
        let own = Growth::of(seq, seq.blocks_at_admission(self.config.block_size), reservation, size);
        self.running.reserved().held_back(own, reservation, size)
    }

    /// Allocates blocks for all tokens of a sequence, from host memory or the cache where possible. Returns the computed
    /// tokens.
    fn take_blocks(&mut self, id: SeqId, grant: Grant, plan: &mut StepPlan) -> Result<Computed, Need> {
        let seq = &mut self.seqs[id];
        let taken = if let Phase::Swapped { tokens: swapped } = seq.phase() {
            let (blocks, tokens) = seq.blocks_and_tokens();
            self.kv.swap_in(blocks, tokens, swapped, grant, &mut plan.swap_in).map(|()| Computed { tokens: swapped, own: swapped })
        } else {
            match self.read_back(id, grant, plan) {
                Ok(true) => {
                    let cached = self.find_cached(id, plan.step)?;
                    let (blocks, tokens) = self.seqs[id].blocks_and_tokens();
                    self.kv.admit(blocks, tokens, cached, grant, &mut plan.copies)
                }
                Ok(false) => return Err(Need::Read),
                Err(blocks) => Err(blocks),
            }
        };
        taken.map_err(|blocks| {
            self.seqs[id].queue_entry.set_needs_blocks(blocks);
            Need::Blocks(blocks)
        })
    }

    /// Gives a slot to a sequence that has its blocks.
    fn start(&mut self, id: SeqId, computed: Computed, plan: &mut StepPlan) {
        self.dequeue(id);
        let seq = &mut self.seqs[id];
        let stage = seq.first_stage();
        let limit = seq.limit();
        if let Some(continues) = seq.request().continues {
            self.held.keep(continues.held, self.steps.plan_number());
        }
        self.kv.end_swap(&mut seq.blocks);
        let (len, turn) = (seq.len(), seq.request().user_turn_end);
        self.kv.begin_state(&mut seq.blocks, computed.tokens, len, turn, &mut plan.states.copies);
        self.kv.reserve(&mut seq.blocks, limit);
        seq.reserve_tokens();
        let (is_first, now, member) = (!seq.has_started(), self.accounts.now(), seq.member());
        let again = seq.start(computed, now);
        self.accounts.counters.recomputed_tokens += u64::from(again);
        let (prompt_len, weight) = (seq.spec().prompt_len, seq.request().weight);
        if is_first {
            self.waiting.start_batch_member();
            if let Some(of) = seq.session() {
                seq.note_evicted(self.kv.take_evicted(self.sessions.owner(of)), self.config.block_size);
            }
            let looked_for = self.config.enable_prefix_caching && seq.parent().is_none();
            self.accounts.count_admission(prompt_len, computed.tokens, looked_for, seq.blocks.lost_hit().tokens);
            if let Some(charges) = self.rules.charges().filter(|_| !seq.is_background()) {
                self.waiting.shares_mut().charge(member.tenant, charges.service(u64::from(prompt_len - computed.tokens), 0), weight);
            }
        }
        let slot = self.running.assign(id, seq);
        self.accounts.begin_compute(slot, id);
        let queued = seq.queued(now);
        plan.admitted.push(Admitted {
            slot,
            seq: id,
            tag: seq.spec().tag,
            cached_tokens: seq.cached_tokens(),
            own_cached_tokens: seq.own_cached_tokens(),
            queued,
        });
        self.accounts.runs(member);
        seq.enter(Phase::Running { slot, stage }, &self.accounts);
        seq.note_blocks(&self.accounts);
    }

    /// Releases a running sequence's slot. The caller then sets the next phase or removes the sequence.
    pub(super) fn release_slot(&mut self, id: SeqId) {
        let seq = &mut self.seqs[id];
        let slot = seq.slot().expect("it runs");
        seq.leave_fast_path();
        if self.rules.cache == CacheUse::Followed {
            // The sequence will not compute these blocks, so sequences that await them must be considered again.
            seq.blocks.names().iter().for_each(|&name| self.waiting.block_ready(name));
        }
        self.running.release(id, slot, seq.class());
        self.accounts.end_compute(slot, id, &mut seq.account);
        self.accounts.leaves_slot(seq.member());
    }

    /// Admits the oldest request if it has waited too long and no other aged request runs. If it does not fit, returns
    /// its group and need, and no other request is admitted until it fits.
    pub(super) fn admit_aged(&mut self, plan: &mut StepPlan) -> Option<(u32, Need)> {
        // In the order of arrival, only requests of more urgent tiers can starve a request.
        let starves = self.rules.can_starve() || self.rules.is_arrival_order() && self.waiting.has_several_tiers();
        if !starves || self.is_closed() || self.running.aged().is_some() || plan.tokens_left == 0 || !self.running.has_slot() {
            return None;
        }
        let id = self.waiting.oldest()?;
        let seq = &self.seqs[id];
        if self.accounts.now() - seq.times().arrived <= self.config.queue_ageing || seq.pending() > 0 {
            return None;
        }
        let (group, started) = (seq.member().group, seq.has_started());
        match self.admit(id, plan) {
            Ok(()) => {
                let account = &mut self.seqs[id].account;
                account.start(QueuePosition { aged: !started || account.queue_position().aged, ..account.queue_position() });
                self.running.set_aged(id);
                None
            }
            Err(need @ (Need::Blocks(_) | Need::NonPreemptible)) => Some((group, need)),
            Err(_) => None,
        }
    }

    /// Lets a batch start under static and dynamic batching.
    pub(super) fn open_batch(&mut self) {
        let oldest = if self.config.batching == Batching::Continuous { None } else { self.waiting.oldest() };
        let oldest = oldest.map(|id| self.seqs[id].times().arrived);
        let gathers_until = self.gathers_until();
        self.waiting.open_batch(self.config.batching, self.running.is_empty(), oldest, gathers_until, self.accounts.now());
    }

    /// While nothing runs, the time until which the waiting requests wait for others, so that the next steps carry more.
    ///
    /// A request waits for at most half of the time to the deadline of its first token, and only as long as twice the
    /// predicted time of all waiting prompts is left. A request without such a deadline does not wait, and the others
    /// start with it. `None` if nobody waits for others, or a step is full.
    fn gathers_until(&self) -> Option<Time> {
        let gather = self.config.gather;
        let waiting = self.waiting.len();
        if gather == 0 || waiting == 0 || !self.running.is_empty() || !self.model.knows() || waiting >= self.config.max_num_seqs as usize {
            return None;
        }
        // A request that waits for its session's turn does not start with the others, nor do its forks.
        let first = |seq: &Sequence| seq.parent().filter(|_| seq.phase() == Phase::WaitingOnParent).map(|parent| &self.seqs[parent]);
        let in_line = |seq: &Sequence| first(seq).map_or(seq.waits_for_session(), Sequence::waits_for_session);
        let queued = || self.seqs.values().filter(|&seq| !seq.is_running() && seq.preparation().is_none() && !in_line(seq));
        let tokens = queued().map(|seq| u64::from(seq.len())).sum::<u64>();
        if tokens >= u64::from(self.config.max_num_batched_tokens) {
            return None;
        }
        let load = Load { prefill_tokens: tokens as u32, context_tokens: tokens, prefill_pairs: tokens * tokens / 2, ..Load::default() };
        let takes = 2 * self.model.step(&load) as Time;
        let latest = |seq: &Sequence| {
            let arrived = seq.times().arrived;
            let ttft = seq.request().ttft_deadline.filter(|_| !seq.has_started()).unwrap_or(arrived);
            let half = arrived + ttft.saturating_sub(arrived) / 2;
            half.min(ttft.saturating_sub(takes)).min(arrived.saturating_add(gather.min(self.config.queue_ageing)))
        };
        queued().map(latest).min()
    }
}
