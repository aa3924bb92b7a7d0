//! Prefixes whose KV is stored outside, for example on disk.
//!
//! Only prefixes without a salt are stored, because a salt is a secret of its requests. A group is none.

use super::Scheduler;
use crate::memory::{BlockHash, CacheChanges, Restored, StateSlot, StoredBlock};
use crate::request::{Time, Token};

impl Scheduler {
    /// Number of full blocks at the start of `tokens` that a request of a group, without a salt, could share.
    pub fn cached_blocks(&mut self, group: &str, tokens: &[Token]) -> usize {
        self.kv.cached(group, tokens)
    }

    /// Names free blocks for the full blocks of `tokens` that are not cached, as many as are free, so that requests
    /// of the group without a salt find them. Sequences keep all their blocks, and no block is taken that one holds; the least recently
    /// used cached blocks are evicted. While copies to host memory are outstanding, it takes none. In a model with states, it also takes a
    /// slot for the state after all these blocks; while steps are in flight, which may use slots, it takes nothing.
    pub fn restore(&mut self, group: &str, tokens: &[Token], now: Time) -> Restored {
        self.accounts.tick(now);
        let busy = self.steps.owes_copies() || self.kv.has_states() && self.steps.in_flight();
        if busy {
            return Restored { cached: self.kv.cached(group, tokens), ..Restored::default() };
        }
        let waiting = &mut self.waiting;
        self.kv.restore(group, tokens, |name| waiting.block_ready(name))
    }

    /// The names of the full blocks of `tokens`, as [`restore`](Self::restore) gives them.
    pub(crate) fn restored_names(&mut self, group: &str, tokens: &[Token]) -> Vec<BlockHash> {
        self.kv.unsalted_names(group, tokens)
    }

    /// Records changes of the cached blocks from now on, for a router. Call [`take_cache_changes`](Self::take_cache_changes)
    /// after each step, because the record grows.
    pub fn record_cache_changes(&mut self) {
        self.kv.record_changes();
    }

    /// Remembers from now on which tenants have used the latest evicted blocks, for a caller that [restores](Self::restore) them.
    pub fn remember_users(&mut self) {
        self.kv.remember_users();
    }

    /// The blocks that were cached and dropped since the last call. Empty unless they are recorded.
    pub fn take_cache_changes(&mut self) -> CacheChanges {
        self.kv.take_changes()
    }

    /// The cached blocks whose KV is computed, that no salt protects, and whose content is newer than `after`. Older content
    /// comes first. O(blocks log blocks).
    pub fn stored_blocks(&self, after: u64) -> Vec<StoredBlock> {
        self.kv.stored(self.steps.committed(), after)
    }

    /// The states that are complete and saved for later requests: the content of the cached block that each follows, and its slot.
    /// O(slots).
    pub fn stored_states(&self) -> Vec<(u64, StateSlot)> {
        self.kv.stored_states(self.steps.committed())
    }

    /// Part of the free blocks, and of the slots for states if that is less, that holds nothing. Once it is 0, new content evicts
    /// cached content.
    pub fn unused(&self) -> f64 {
        let part = |unused: usize, all: u32| unused as f64 / f64::from(all);
        let blocks = part(self.kv.unused(), self.config.num_kv_blocks);
        if self.kv.has_states() { blocks.min(part(self.kv.unused_states(), self.config.state_slots)) } else { blocks }
    }
}
