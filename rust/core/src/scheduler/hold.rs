//! Held sequences: opens, forks, drops and evicts them, and changes the class of requests.

use super::Scheduler;
use crate::memory::SeqBlocks;
use crate::policy::{Grouping, Key};
use crate::request::{BACKGROUND, CacheScope, FinishReason, HeldId, SeqId, Time};
use crate::sequence::{HeldSeq, Phase, Sequence};
use crate::sessions::{SessionRef, is_long_quiet};
use std::sync::Arc;

impl Scheduler {
    /// Opens a held sequence without tokens. A request that [continues](crate::Continues) it and ends by a stop or by
    /// its length leaves its blocks to it. The blocks count against the tenant. They are the first to be evicted when
    /// blocks are scarce. The next request then computes the tokens again.
    pub fn open(&mut self, tenant: &Arc<str>, scope: &Arc<CacheScope>, now: Time) -> HeldId {
        self.accounts.tick(now);
        self.insert_held(tenant, SeqBlocks::new(Arc::clone(scope)), 0, None)
    }

    /// Opens a copy of a held sequence. Both share all blocks. A request that continues one of them copies the partly
    /// filled last block and shares the others. Returns `None` if the sequence was dropped. O(blocks).
    pub fn fork_held(&mut self, id: HeldId, now: Time) -> Option<HeldId> {
        let seq = self.held.get(id)?;
        self.accounts.tick(now);
        let (blocks, computed, session) = (self.kv.fork(&seq.blocks), seq.computed, seq.session);
        let tenant = Arc::clone(self.accounts.tenant_name(seq.tenant));
        self.held.touch(id);
        Some(self.insert_held(&tenant, blocks, computed, session))
    }

    /// Drops a held sequence. Its blocks are free for the next step. Requests that continue it go on. Returns false if
    /// it was dropped before.
    pub fn drop_held(&mut self, id: HeldId, now: Time) -> bool {
        if self.held.get(id).is_none() {
            return false;
        }
        self.accounts.tick(now);
        let tenant = self.release_held(id);
        self.held.remove(id);
        self.accounts.close_held(tenant);
        true
    }

    /// Moves a waiting or running request to another class. Returns false if the request has ended, or if one of the
    /// classes is [`BACKGROUND`].
    pub fn set_priority(&mut self, id: SeqId, priority: i32, now: Time) -> bool {
        let Some(seq) = self.seqs.get(id) else { return false };
        self.accounts.tick(now);
        let (before, phase) = (seq.class(), seq.phase());
        if seq.is_background() || priority == BACKGROUND {
            return false;
        }
        if before.1 == priority {
            return true;
        }
        match phase {
            Phase::Running { .. } => self.accounts.leaves_slot(seq.member()),
            Phase::Preparing(_) | Phase::WaitSession { .. } | Phase::WaitingOnParent => {}
            Phase::New | Phase::Queued | Phase::Preempted | Phase::Swapped { .. } => self.dequeue(id),
        }
        let seq = &mut self.seqs[id];
        let member = self.accounts.change_class(seq.member(), priority);
        seq.change_class(priority, member, &self.accounts);
        match phase {
            Phase::Running { .. } => {
                self.accounts.runs(member);
                self.running.change_class(before, (before.0, priority));
                if self.rules.grouping == Grouping::Classes {
                    let entry = &mut self.seqs[id].queue_entry;
                    entry.set_key(Key { group: priority.into(), ..entry.key() });
                }
            }
            Phase::Preparing(_) | Phase::WaitSession { .. } | Phase::WaitingOnParent => {}
            Phase::New | Phase::Queued | Phase::Preempted | Phase::Swapped { .. } => {
                self.enqueue(id, true);
                self.running.retry_refused();
            }
        }
        true
    }

    /// Number of held sequences, and the number of their blocks, where a shared block counts once for each.
    pub fn held(&self) -> (usize, usize) {
        (self.held.len(), self.held.blocks())
    }

    /// The number of a held sequence in the order of opening.
    pub(crate) fn held_number(&self, id: HeldId) -> Option<u64> {
        self.held.get(id).map(|seq| seq.number)
    }

    /// Number of held sequences opened so far.
    pub(crate) fn opened(&self) -> u64 {
        self.held.opened()
    }

    /// Gives the blocks of a sequence that ends by a stop or by its length to the held sequence that it continues.
    pub(super) fn leave_blocks(&mut self, seq: &mut Sequence, reason: FinishReason) {
        let Some(continues) = seq.request().continues else { return };
        if !self.held.end(continues.held) || !matches!(reason, FinishReason::Stop | FinishReason::Length) {
            return;
        }
        self.release_held(continues.held);
        // A sequence that was preempted has no blocks.
        if seq.is_decoding() {
            let (len, position) = (seq.len(), seq.computed());
            // As many slots again stay for saved states, and for those before drafted tokens.
            let (blocks, computed) = self.kv.hold(&mut seq.blocks, len, position, 2 * self.config.max_num_seqs);
            self.held.fill(continues.held, blocks, computed, seq.session(), self.accounts.now());
        }
    }

    /// Evicts held sequences until `blocks` are free. Evicts none if that cannot be enough. Returns whether as many are free.
    pub(super) fn evict_held(&mut self, blocks: usize) -> bool {
        if self.kv.free_after(self.held.blocks()) < blocks {
            return false;
        }
        while self.kv.free() < blocks && self.evict_one_held() {}
        self.kv.free() >= blocks
    }

    /// Evicts the least recently used held sequence. Returns false if there is none.
    pub(super) fn evict_one_held(&mut self) -> bool {
        let victim = self.held.victims(self.steps.plan_number()).next().map(|(id, _)| id);
        victim.map(|id| self.release_held(id)).is_some()
    }

    /// Releases the blocks of a held sequence without a session that has been quiet for as long as a session that makes room for one with
    /// this reload. Returns false if there is none.
    pub(super) fn evict_quiet_held(&mut self, reload: f64) -> bool {
        let is_quiet = |seq: &HeldSeq| {
            let reloads = reload + self.model.prefill(0.0, seq.computed.into());
            !seq.session.is_some_and(|of| self.sessions.knows(of)) && is_long_quiet(self.accounts.now().saturating_sub(seq.since), reloads)
        };
        let quiet = self.held.victims(self.steps.plan_number()).find(|(_, seq)| is_quiet(seq)).map(|(id, _)| id);
        quiet.map(|id| self.release_held(id)).is_some()
    }

    /// Releases the blocks of held sequences of parked sessions. O(held sequences).
    pub(super) fn release_parked_held(&mut self) {
        let is_parked = |seq: &HeldSeq| seq.session.is_some_and(|of| self.sessions.knows(of) && !self.sessions.is_active(of));
        let victims = self.held.victims(self.steps.plan_number());
        let parked: Vec<_> = victims.filter(|(_, seq)| is_parked(seq)).map(|(id, _)| id).collect();
        for id in parked {
            self.release_held(id);
        }
    }

    /// Releases the blocks of a held sequence, to its session if it has one. Returns its tenant.
    fn release_held(&mut self, id: HeldId) -> u32 {
        let session = self.held.get(id).and_then(|seq| seq.session);
        let (mut blocks, tenant, time) = self.held.take(id, self.accounts.now());
        if let Some(of) = session.filter(|&of| self.sessions.knows(of)) {
            blocks.set_owner(self.sessions.owner(of));
        }
        self.accounts.book_held(tenant, blocks.held(), time);
        self.kv.free_all(&mut blocks);
        tenant
    }

    fn insert_held(&mut self, tenant: &Arc<str>, blocks: SeqBlocks, computed: u32, session: Option<SessionRef>) -> HeldId {
        let (tenant, new) = self.accounts.open_held(tenant);
        if new && self.rules.takes_turns() {
            self.waiting.shares_mut().introduce(tenant);
        }
        self.held.open(tenant, blocks, computed, session, self.accounts.now())
    }
}
