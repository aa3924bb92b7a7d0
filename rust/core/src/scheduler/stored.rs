//! Prefixes whose KV is stored outside, for example on disk.
//!
//! Only prefixes without a salt are stored, because a salt is a secret of its requests. A group is none.

use super::Scheduler;
use crate::memory::{BlockHash, BlockId, CacheChanges, StoredBlock};
use crate::request::{Time, Token};

impl Scheduler {
    /// Number of full blocks at the start of `tokens` that a request of a group, without a salt, would find in the cache.
    pub fn cached_blocks(&mut self, group: &str, tokens: &[Token]) -> usize {
        self.kv.cached(group, tokens)
    }

    /// Names free blocks for the full blocks of `tokens` that are not cached, as many as are free, so that requests
    /// of the group without a salt find them. Sequences keep all their blocks, and no block is taken that one holds; the least recently
    /// used cached blocks are evicted. While copies to host memory are outstanding, it takes none. Returns the number of leading blocks that were cached, and the blocks that follow
    /// them. The caller must write their KV before the next step.
    pub fn restore(&mut self, group: &str, tokens: &[Token], now: Time) -> (usize, Vec<BlockId>) {
        self.accounts.tick(now);
        if self.steps.owes_copies() || self.config.state_slots > 0 {
            return (self.kv.cached(group, tokens), Vec::new());
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

    /// The blocks that were cached and dropped since the last call. Empty unless they are recorded.
    pub fn take_cache_changes(&mut self) -> CacheChanges {
        self.kv.take_changes()
    }

    /// The cached blocks whose KV is computed, that no salt protects, and whose content is newer than `after`. Older content
    /// comes first. O(blocks log blocks).
    pub fn stored_blocks(&self, after: u64) -> Vec<StoredBlock> {
        if self.config.state_slots > 0 { Vec::new() } else { self.kv.stored(self.steps.committed(), after) }
    }

    /// Number of free blocks that are not cached. Once there are none, new blocks evict cached ones.
    pub fn unused_blocks(&self) -> usize {
        self.kv.unused()
    }
}
