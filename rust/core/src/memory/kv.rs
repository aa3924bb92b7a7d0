//! The KV cache: device and host blocks, their names and their holders.

use super::block::{BlockId, BlockPool, CacheChanges};
use super::hash::{BlockHash, BlockHasher};
use super::state_pool::StatePool;
use crate::request::Token;
use std::ops::{Deref, DerefMut};
use std::sync::Arc;

mod host;
mod lookup;
mod seq_blocks;
mod states;

pub use lookup::Restored;
pub(crate) use seq_blocks::SeqBlocks;

/// Blocks that a sequence can share when it is admitted.
#[derive(Debug, Default)]
pub(crate) struct Cached {
    blocks: Vec<BlockId>,
    /// A block that the fork's parent or the held sequence has partly filled, and the number of tokens computed with it.
    /// The sequence copies the block.
    tail: Option<(BlockId, u32)>,
}

/// Computed tokens of a sequence at its admission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Computed {
    pub(crate) tokens: u32,
    /// Leading tokens of these in blocks that requests of the same tenant have held before.
    pub(crate) own: u32,
}

/// Limits of one allocation at admission.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grant {
    /// Blocks to allocate.
    pub(crate) blocks: usize,
    /// Free blocks available to the sequence.
    pub(crate) room: usize,
    /// The step in which the sequence starts.
    pub(crate) step: u64,
}

/// Numbers of blocks, of host blocks, of slots for recurrent states, and of tokens in a block.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct KvSizes {
    pub(crate) blocks: u32,
    pub(crate) host_blocks: u32,
    pub(crate) state_slots: u32,
    /// Tokens whose KV takes as much memory as a state.
    pub(crate) state_tokens: u32,
    pub(crate) block_size: u32,
}

/// All KV blocks, and the slots of recurrent states. [`SeqBlocks`] holds each sequence's part.
#[derive(Debug)]
pub(crate) struct Kv {
    pool: BlockPool,
    states: StatePool,
    block_size: u32,
    /// Whether sequences share blocks of equal prefixes.
    sharing: bool,
    /// An empty list, kept to reuse its memory.
    spare: Vec<BlockId>,
}

/// What concerns blocks, and not the sequences that hold them, is asked of the pool. What only this room may do with it is private to it.
impl Deref for Kv {
    type Target = BlockPool;

    fn deref(&self) -> &BlockPool {
        &self.pool
    }
}

impl DerefMut for Kv {
    fn deref_mut(&mut self) -> &mut BlockPool {
        &mut self.pool
    }
}

impl Kv {
    pub(crate) fn new(sizes: KvSizes, sharing: bool, hasher: BlockHasher) -> Self {
        let KvSizes { blocks, host_blocks, state_slots, state_tokens, block_size } = sizes;
        let mut pool = BlockPool::new(blocks, block_size as usize, hasher).with_host(host_blocks);
        if state_slots > 0 {
            pool.record_dropped();
        }
        Self { pool, states: StatePool::new(state_slots, state_tokens), block_size, sharing, spare: Vec::new() }
    }

    /// Records from now on which blocks a sequence can begin after, for [`take_changes`](Self::take_changes).
    pub(crate) fn record_changes(&mut self) {
        if self.states.exists() {
            self.states.record_changes();
        } else {
            self.pool.record_changes();
        }
    }

    /// The changes since the last call. Empty unless they are recorded. No decision depends on it, so the states of blocks that are no longer
    /// cached are dropped later.
    pub(crate) fn take_changes(&mut self) -> CacheChanges {
        if self.states.exists() { self.states.take_changes() } else { self.pool.take_changes() }
    }

    /// Number of slots for states that hold nothing.
    pub(crate) fn unused_states(&self) -> usize {
        self.states.unused()
    }

    /// Finds the blocks that a sequence can share. A fork whose `parent` has computed its whole prompt also gets the
    /// block that holds the prompt's last token but one, for copying.
    pub(crate) fn find(&mut self, blocks: &mut SeqBlocks, tokens: &[Token], parent: Option<&SeqBlocks>, step: u64) -> Cached {
        // The sequence may have gained tokens while it waited.
        self.name(blocks, tokens);
        if self.states.exists() {
            return self.find_resumable(blocks, tokens);
        }
        let whole = (tokens.len() - 1) / self.block_size as usize;
        let mut found = std::mem::take(&mut self.spare);
        if self.sharing {
            blocks.chain = self.pool.find(&blocks.scope, &blocks.names, tokens, &mut found);
        } else {
            found.extend(parent.iter().flat_map(|parent| &parent.table.ids()[..whole]));
            blocks.reset_chain();
        }
        let partly = !(tokens.len() - 1).is_multiple_of(self.block_size as usize);
        let tail = parent.filter(|_| partly && found.len() == whole).map(|parent| parent.table.ids()[whole]);
        let tail = tail.filter(|&tail| self.pool.settled_before(tail, step));
        Cached { blocks: found, tail: tail.map(|tail| (tail, tokens.len() as u32 - 1)) }
    }

    /// Like [`find`](Self::find), for a sequence whose first `computed` tokens have KV in the blocks of `held`.
    pub(crate) fn find_held(&mut self, blocks: &mut SeqBlocks, tokens: &[Token], held: &SeqBlocks, computed: u32, step: u64) -> Cached {
        let mut cached = self.find(blocks, tokens, None, step);
        let whole = (computed / self.block_size) as usize;
        let longer = cached.blocks.len() as u32 * self.block_size < computed;
        let known = !self.sharing || held.chain.len() == whole;
        if self.states.exists() && !(longer && known && Self::resume_held(blocks, held, computed)) {
            return cached;
        }
        // Without the names in the cache, the chain of the held blocks is known only at its end.
        if cached.blocks.len() < whole && known {
            cached.blocks.clear();
            cached.blocks.extend(&held.table.ids()[..whole]);
            blocks.chain = held.chain.clone();
        }
        if cached.blocks.len() == whole && !computed.is_multiple_of(self.block_size) {
            cached.tail = Some((held.table.ids()[whole], computed));
        }
        cached
    }

    /// Takes the blocks of a sequence of `len` tokens that ends, for a held sequence, and its state if slots are left for `running`
    /// sequences. `position` is the number of tokens that planned steps compute. Returns the number of tokens that the blocks hold. Full
    /// blocks without a name are left out.
    pub(crate) fn hold(&mut self, blocks: &mut SeqBlocks, len: u32, position: u32, running: u32) -> (SeqBlocks, u32) {
        let named = if self.sharing { (blocks.chain.len() as u32 + 1) * self.block_size - 1 } else { u32::MAX };
        // Only uncommitted steps compute the last token.
        let computed = position.min(len - 1).min(named);
        let mut held = SeqBlocks::new(Arc::clone(&blocks.scope));
        std::mem::swap(&mut held.table, &mut blocks.table);
        held.table.set_owner(None);
        std::mem::swap(&mut held.chain, &mut blocks.chain);
        self.pool.truncate(&mut held.table, computed.div_ceil(self.block_size) as usize);
        self.hold_state(blocks, &mut held, computed, position, running);
        (held, computed)
    }

    /// A second holder of a held sequence's blocks.
    pub(crate) fn fork(&mut self, held: &SeqBlocks) -> SeqBlocks {
        let mut fork = SeqBlocks::new(Arc::clone(&held.scope));
        fork.chain = held.chain.clone();
        fork.table.reserve(held.held());
        held.table.ids().iter().for_each(|&id| self.pool.share(&mut fork.table, id));
        fork
    }

    /// Releases blocks that were found for a sequence that was not admitted.
    pub(crate) fn discard(&mut self, cached: Cached) {
        self.recycle(cached.blocks);
    }

    /// Allocates blocks for all tokens of a sequence, starting with the `cached` ones. Returns the computed tokens, or as
    /// an error the number of free blocks required. Appends block copies needed before the step to
    /// `copies`.
    pub(crate) fn admit(
        &mut self,
        blocks: &mut SeqBlocks,
        tokens: &[Token],
        mut cached: Cached,
        grant: Grant,
        copies: &mut Vec<(BlockId, BlockId)>,
    ) -> Result<Computed, usize> {
        let (len, size) = (tokens.len(), self.block_size as usize);
        // The last token is always computed, because its logits are sampled. If its block was cached, the step writes
        // the block again. The sequence then writes to a copy if other sequences hold the block. If the block is not
        // complete yet, the sequence does not share it.
        let mut rewritten = cached.blocks.last().copied().filter(|_| cached.blocks.len() * size == len);
        let mut copy = rewritten.is_some_and(|last| self.pool.holders(last) > 0);
        if copy && rewritten.is_some_and(|last| !self.pool.complete_before(last, grant.step)) {
            cached.blocks.clear();
            blocks.chain = self.pool.find(&blocks.scope, &blocks.names[..(len - 1) / size], tokens, &mut cached.blocks);
            (rewritten, copy) = (None, false);
        }
        let shared = cached.blocks.len();
        let own = cached.blocks.iter().take_while(|&&block| self.pool.is_used_by(block, blocks.user)).count();
        let taken = self.share(blocks, cached.blocks, grant, usize::from(copy));
        taken?;
        if copy {
            let (from, to) = self.pool.unshare_last(&mut blocks.table);
            self.pool.keep_copied(from);
            copies.push((from, to));
        } else if let Some(last) = rewritten {
            self.pool.rewrite(last, grant.step);
        }
        self.fill_up(blocks, grant.blocks);
        let tokens = cached.tail.map_or((shared * size).min(len - 1) as u32, |(_, computed)| computed);
        if let Some((tail, _)) = cached.tail {
            self.pool.keep_copied(tail);
            copies.push((tail, blocks.table.ids()[shared]));
        }
        // The tail is that of the fork's parent or of the held sequence, which have the same tenant.
        let own = if own == shared { tokens } else { (own * size) as u32 };
        blocks.paid = own;
        blocks.tentative.clear();
        Ok(Computed { tokens, own })
    }

    /// Adds the found blocks to a table if enough blocks are free for the grant and for `copies` copies.
    fn share(&mut self, blocks: &mut SeqBlocks, found: Vec<BlockId>, grant: Grant, copies: usize) -> Result<(), usize> {
        let needed = self.needed(&found, grant) + copies;
        let fits = needed <= grant.room;
        if fits {
            for &block in &found {
                self.pool.share(&mut blocks.table, block);
            }
            blocks.used = 0;
            blocks.seal_at = self.sharing.then_some((found.len() as u32 + 1) * self.block_size);
        }
        self.recycle(found);
        if fits { Ok(()) } else { Err(needed) }
    }

    /// Number of free blocks that a grant takes. Found blocks that a sequence holds take none.
    fn needed(&self, found: &[BlockId], grant: Grant) -> usize {
        grant.blocks - found.iter().filter(|&&block| self.pool.holders(block) > 0).count()
    }

    fn fill_up(&mut self, blocks: &mut SeqBlocks, len: usize) {
        let grown = self.pool.grow(&mut blocks.table, len);
        assert!(grown, "counted before");
    }

    /// Reserves capacity for a sequence of up to `limit` tokens, so that decoding does not allocate.
    pub(crate) fn reserve(&self, blocks: &mut SeqBlocks, limit: u32) {
        blocks.table.reserve(limit.div_ceil(self.block_size) as usize);
        if self.sharing {
            let full = (limit / self.block_size) as usize;
            blocks.names.reserve_exact(full - blocks.names.len());
            blocks.reserve_contents(full);
        }
    }

    /// Grows a sequence to `len` blocks. Panics if too few blocks are free.
    pub(crate) fn grow(&mut self, blocks: &mut SeqBlocks, len: usize) {
        let grown = self.pool.grow(&mut blocks.table, len);
        assert!(grown, "room was made before");
    }

    /// Names the blocks that hold only `known` tokens once `step` has run. Calls `named` for each.
    pub(crate) fn seal(&mut self, blocks: &mut SeqBlocks, known: &[Token], step: u64, mut named: impl FnMut(BlockHash)) {
        while let Some(at) = blocks.seal_at.filter(|&at| at as usize <= known.len()) {
            let full = &known[(at - self.block_size) as usize..at as usize];
            let block = blocks.chain.len();
            if blocks.names.len() == block {
                self.pool.name_block(&blocks.scope, full, &mut blocks.names);
            }
            let name = blocks.names[block];
            self.pool.seal(&blocks.table, &mut blocks.chain, name, full, step);
            self.name_state(blocks, at, name);
            named(name);
            blocks.seal_at = Some(at + self.block_size);
        }
        self.use_up_to(blocks, blocks.paid, step);
    }

    /// Makes the tenant a user of all named blocks of a sequence, because `step` computes the last token of its prompt. If the step
    /// is lost, [`forget`](Self::forget) undoes that.
    pub(crate) fn use_all(&mut self, blocks: &mut SeqBlocks, step: u64) {
        self.use_up_to(blocks, u32::MAX, step);
    }

    /// Makes the tenant a user of the named blocks of the leading `tokens`. Were it a user of all shared blocks at once, it could end
    /// the request before it would have computed them, ask again, and learn that others have them.
    fn use_up_to(&mut self, blocks: &mut SeqBlocks, tokens: u32, step: u64) {
        let end = blocks.chain.len().min(blocks.names.len()).min((tokens / self.block_size) as usize);
        for &name in blocks.names.get(blocks.used as usize..end).unwrap_or_default() {
            let content = self.pool.use_by(name, blocks.user).filter(|_| blocks.paid < u32::MAX);
            blocks.tentative.extend(content.map(|content| (step, name, content)));
        }
        blocks.used = blocks.used.max(end as u32);
    }

    /// Removes the names of blocks that step `since` or a later step completes, because their content may be invalid. The tenant
    /// is no longer a user of the blocks of which these steps made it one.
    pub(crate) fn forget(&mut self, blocks: &mut SeqBlocks, since: u64) {
        // Once, because another request of the tenant may use the blocks before this one ends.
        for (_, name, content) in blocks.tentative.extract_if(.., |(step, ..)| *step >= since) {
            self.pool.unuse((name, content), blocks.user);
        }
        self.pool.forget(&blocks.table, since);
        self.forget_states(blocks, since);
    }

    /// Removes the names of all blocks that a failed sequence has, and of those that it found and copied: the fault may be in them, and its
    /// tenant has computed none of them.
    pub(crate) fn forget_failed(&mut self, blocks: &mut SeqBlocks) {
        self.forget(blocks, 0);
        blocks.names.iter().for_each(|&name| self.pool.drop_name(name));
    }

    /// Releases the device blocks of a preempted sequence, and its state unless its KV is in host memory.
    pub(crate) fn release(&mut self, blocks: &mut SeqBlocks) {
        self.pool.release(&mut blocks.table);
        if blocks.host.is_empty() {
            self.end_state(blocks);
        }
        blocks.seal_at = None;
        blocks.reset_chain();
    }

    /// Releases all blocks and the state of a sequence that has ended.
    pub(crate) fn free_all(&mut self, blocks: &mut SeqBlocks) {
        self.pool.release(&mut blocks.table);
        self.end_state(blocks);
        self.pool.release_host(&mut blocks.host);
    }

    /// Panics unless the pools agree with the blocks of `all`, which must be all sequences.
    pub(crate) fn check<'a>(&self, all: impl Iterator<Item = &'a SeqBlocks> + Clone) {
        self.pool.check(all.clone().map(|blocks| &blocks.table));
        self.pool.check_host(all.clone().flat_map(|blocks| blocks.host.iter().copied()));
        self.check_states(all);
    }

    fn recycle(&mut self, mut list: Vec<BlockId>) {
        list.clear();
        self.spare = list;
    }
}
