//! The limit of a pool: how many of its blocks may have memory, so that several pools can share bytes.

use super::{BlockId, BlockPool};

/// Free blocks without memory.
///
/// A block that is given back has memory until the caller discards its content. The next block to be used is the one
/// given back last, whether or not it was discarded, so that no decision depends on the discarding.
#[derive(Debug)]
pub(super) struct Unbacked {
    ids: Vec<BlockId>,
    /// Number of blocks, from the start, that have no memory. The others were given back since.
    discarded: usize,
}

impl Unbacked {
    /// The blocks of a pool of `count` blocks, none of which was used.
    pub(super) fn new(count: u32) -> Self {
        Self { ids: (1..count).rev().map(BlockId).collect(), discarded: count as usize - 1 }
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &BlockId> {
        self.ids.iter()
    }

    fn pop(&mut self) -> Option<BlockId> {
        let id = self.ids.pop();
        self.discarded = self.discarded.min(self.ids.len());
        id
    }
}

impl BlockPool {
    /// Number of blocks that can be given to sequences now.
    pub fn free(&self) -> usize {
        self.free_after(0)
    }

    /// Number of blocks that could be given to sequences if they released `more` blocks.
    pub fn free_after(&self, more: usize) -> usize {
        (self.limit + more).saturating_sub(self.held())
    }

    /// Number of free blocks that are not cached. Once there are none, new blocks evict cached ones.
    pub fn unused(&self) -> usize {
        self.unnamed.len() + self.limit.saturating_sub(self.backed())
    }

    /// Number of blocks that sequences hold.
    pub fn held(&self) -> usize {
        self.kept() - self.free.len()
    }

    /// Number of blocks that are held or cached.
    pub fn kept(&self) -> usize {
        self.backed() - self.unnamed.len()
    }

    /// Number of blocks with memory: those that are held, cached, or free again. At most the limit, or what is held.
    pub fn backed(&self) -> usize {
        self.blocks.len() - 1 - self.unbacked.ids.len()
    }

    /// The most blocks that may have memory.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// Sets the limit, at most all blocks but the scratch block. If more blocks have memory, free ones are given back:
    /// those without a name first, then the least recently freed. Held blocks beyond the limit are given back as they are
    /// released, and no block is given to a sequence before.
    pub fn set_limit(&mut self, limit: usize) {
        self.limit = limit.min(self.blocks.len() - 1);
        self.give_back();
    }

    /// The blocks that were given back since the last call and not used again. The caller discards their content before
    /// the next step.
    pub fn take_given_back(&mut self) -> Vec<BlockId> {
        let given_back = self.unbacked.ids[self.unbacked.discarded..].to_vec();
        self.unbacked.discarded = self.unbacked.ids.len();
        given_back
    }

    /// Gives free blocks back while more blocks have memory than may.
    pub(super) fn give_back(&mut self) {
        while self.backed() > self.limit {
            let Some(id) = self.unnamed.pop().or_else(|| self.evict_cached()) else { return };
            self.unbacked.ids.push(id);
        }
    }

    /// A block that has no memory yet, if one more may have it.
    pub(super) fn back_one(&mut self) -> Option<BlockId> {
        if self.backed() < self.limit { self.unbacked.pop() } else { None }
    }

    /// Evicts a free cached block.
    fn evict_cached(&mut self) -> Option<BlockId> {
        (self.free.len() > 0).then(|| self.evict(None))
    }
}
