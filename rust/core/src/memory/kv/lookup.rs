//! The names of a sequence's blocks, and which of them are cached.

use super::super::block::{BlockId, BlockTable, Chain, Estimate};
use super::super::hash::BlockHash;
use super::super::state_pool::StateSlot;
use super::{Kv, SeqBlocks};
use crate::request::{CacheScope, Token};
use std::sync::Arc;

/// A prefix whose KV is read from storage. Everything new must be written before the next step.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Restored {
    /// Number of leading blocks that were cached.
    pub cached: usize,
    /// The new blocks after them.
    pub blocks: Vec<BlockId>,
    /// The slot for the state after all blocks. `None` if it is saved, without a slot for it, or in a model without states.
    pub state: Option<StateSlot>,
}

impl Kv {
    /// Names of the full blocks of `tokens` after the first `from`. Missing names are computed and not stored.
    pub(crate) fn names<'a>(&'a self, blocks: &'a SeqBlocks, tokens: &'a [Token], from: usize) -> impl Iterator<Item = BlockHash> + 'a {
        let hasher = self.pool.hasher();
        let known = from.min(blocks.names.len());
        let mut name = known.checked_sub(1).map_or_else(|| hasher.root(&blocks.scope), |last| blocks.names[last]);
        let rest = tokens.chunks_exact(self.block_size as usize).enumerate().skip(known).map(move |(at, block)| {
            name = blocks.names.get(at).copied().unwrap_or_else(|| hasher.child(name, block));
            name
        });
        rest.skip(from - known)
    }

    /// Computes the missing names of a sequence's full blocks.
    pub(crate) fn name(&mut self, blocks: &mut SeqBlocks, tokens: &[Token]) {
        if self.sharing {
            self.pool.name_blocks(&blocks.scope, tokens, &mut blocks.names);
        }
    }

    /// Extends a waiting sequence's chain of cached blocks from its latest lookup.
    pub(crate) fn look_up(&mut self, blocks: &mut SeqBlocks, tokens: &[Token]) {
        let mut found = std::mem::take(&mut self.spare);
        let chain = self.pool.find_on(blocks.chain.clone(), &blocks.names, tokens, &mut found);
        self.set_chain(blocks, chain);
        self.recycle(found);
    }

    /// Number of full blocks at the start of `tokens`, in a group and without a salt, that a sequence can share.
    pub(crate) fn cached(&mut self, group: &str, tokens: &[Token]) -> usize {
        let mut found = std::mem::take(&mut self.spare);
        let (names, _) = self.find_unsalted(group, tokens, &mut found);
        let len = self.usable(&names, found.len());
        self.recycle(found);
        len
    }

    /// Names free blocks for the full blocks of `tokens`, in a group and without a salt, that are not cached: as many as are free. The
    /// least recently used cached blocks lose their names. Calls `on_name` for each name. Returns the number of blocks that
    /// were cached, and the new blocks that follow them. The caller writes their KV before the next step.
    pub(crate) fn restore(&mut self, group: &str, tokens: &[Token], mut on_name: impl FnMut(BlockHash)) -> Restored {
        let mut found = Vec::new();
        let (names, mut chain) = self.find_unsalted(group, tokens, &mut found);
        let mut table = BlockTable::default();
        for &id in &found {
            self.pool.share(&mut table, id);
        }
        let len = names.len().min(found.len() + self.pool.free());
        let grown = self.pool.grow(&mut table, len);
        assert!(grown, "counted before");
        let size = self.block_size as usize;
        for (name, block) in names.iter().zip(tokens.chunks_exact(size)).take(len).skip(found.len()) {
            self.pool.seal(&table, &mut chain, *name, block, 0);
            self.pool.restore_users(*name);
            on_name(*name);
        }
        let restored = table.ids()[found.len()..].to_vec();
        self.pool.release(&mut table);
        let state = if len == names.len() { self.restore_state(&names, chain.content()) } else { None };
        Restored { cached: found.len(), blocks: restored, state }
    }

    /// Names of the full blocks of `tokens` in a group, without a salt. None if sequences share no blocks.
    pub(crate) fn unsalted_names(&mut self, group: &str, tokens: &[Token]) -> Vec<BlockHash> {
        let mut names = Vec::new();
        if self.sharing {
            self.pool.name_blocks(&CacheScope::of_group(group), tokens, &mut names);
        }
        names
    }

    /// Finds the cached blocks of `tokens` in a group, without a salt. Returns the names of all full blocks and the end of the chain.
    fn find_unsalted(&mut self, group: &str, tokens: &[Token], found: &mut Vec<BlockId>) -> (Vec<BlockHash>, Chain) {
        let names = self.unsalted_names(group, tokens);
        let chain = self.pool.find(&Arc::new(CacheScope::of_group(group)), &names, tokens, found);
        (names, chain)
    }

    /// Estimates how many blocks of a waiting sequence are cached beyond its first `from`: see [`BlockPool::estimate`].
    /// `last` is the previous estimate. It is reused for equal names, so the cache must not change between the calls.
    pub(crate) fn estimate(&mut self, blocks: &SeqBlocks, from: usize, last: &mut Option<Estimate>) -> Chain {
        let known = last.take().filter(|last| last.holds_for(&blocks.names, from));
        let estimate = known.unwrap_or_else(|| self.pool.estimate(&blocks.names, from));
        *last = Some(estimate);
        estimate.chain(&blocks.scope)
    }
}
