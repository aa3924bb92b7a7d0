//! The KV cache: blocks of the device and of host memory, their names, and who holds them.

use crate::block::{BlockId, BlockPool, BlockTable, BlockUse, Chain, Estimate};
use crate::hash::{BlockHash, BlockHasher};
use crate::host::HostPool;
use crate::request::Token;
use std::sync::Arc;

/// What a sequence has of the KV cache. Only [`Kv`] changes it.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct SeqBlocks {
    /// Known and computed tokens at which its next block gets its name: none without a prefix cache.
    seal_at: Option<u32>,
    table: BlockTable,
    /// The names of its full blocks, as far as they were computed: none without a prefix cache.
    names: Vec<BlockHash>,
    /// The blocks that have their names in the cache, or had when it was looked at last.
    chain: Chain,
    salt: Arc<[u8]>,
    /// Blocks of host memory that have its KV, while it is swapped.
    host: Vec<u32>,
}

impl SeqBlocks {
    /// Those of a sequence that has none yet.
    pub(crate) fn new(salt: Arc<[u8]>) -> Self {
        let chain = Chain::root(&salt);
        Self { seal_at: None, table: BlockTable::default(), names: Vec::new(), chain, salt, host: Vec::new() }
    }

    pub(crate) fn ids(&self) -> &[BlockId] {
        self.table.ids()
    }

    /// How many it holds.
    #[inline]
    pub(crate) fn held(&self) -> usize {
        self.table.ids().len()
    }

    pub(crate) fn names(&self) -> &[BlockHash] {
        &self.names
    }

    /// How many of its first blocks are in the cache, as far as it was looked at.
    pub(crate) fn cached_len(&self) -> usize {
        self.chain.len()
    }

    pub(crate) fn salt(&self) -> &Arc<[u8]> {
        &self.salt
    }

    pub(crate) fn host(&self) -> &[u32] {
        &self.host
    }

    /// Whether one of its blocks is to get its name once so many tokens are known and computed.
    #[inline]
    pub(crate) fn is_due(&self, known: u32) -> bool {
        self.seal_at.is_some_and(|at| at <= known)
    }

    /// Where the cache keeps the token at `position`, whose block it has.
    pub(crate) fn kv_slot(&self, position: u32, block_size: u32) -> u32 {
        self.table.ids()[(position / block_size) as usize].0 * block_size + position % block_size
    }

    /// Notes what the cache has of it.
    pub(crate) fn set_chain(&mut self, chain: Chain) {
        self.chain = chain;
    }

    /// Forgets what the cache has of it.
    pub(crate) fn reset_chain(&mut self) {
        self.chain = Chain::root(&self.salt);
    }
}

/// The blocks that a sequence can share when it is admitted.
#[derive(Debug, Default)]
pub(crate) struct Cached {
    blocks: Vec<BlockId>,
    /// The one that a fork's parent has filled in part: it is to be copied.
    tail: Option<BlockId>,
}

/// What a sequence gets if there is room for it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grant {
    /// Blocks that it gets.
    pub(crate) blocks: usize,
    /// Free blocks that it may use.
    pub(crate) room: usize,
    /// The step that it starts in.
    pub(crate) step: u64,
}

/// Every block there is. A sequence's part of it is in its [`SeqBlocks`].
#[derive(Debug)]
pub(crate) struct Kv {
    pool: BlockPool,
    host: HostPool,
    block_size: u32,
    /// Whether sequences share the blocks of equal beginnings.
    sharing: bool,
    /// An empty list, kept for its memory.
    spare: Vec<BlockId>,
}

impl Kv {
    pub(crate) fn new(blocks: u32, host_blocks: u32, block_size: u32, sharing: bool, hasher: BlockHasher) -> Self {
        let pool = BlockPool::new(blocks, block_size as usize, hasher);
        Self { pool, host: HostPool::new(host_blocks), block_size, sharing, spare: Vec::new() }
    }

    /// Blocks that nobody holds.
    #[inline]
    pub(crate) fn free(&self) -> usize {
        self.pool.free()
    }

    /// Blocks of host memory, and how many of them are free.
    pub(crate) fn host(&self) -> (usize, usize) {
        (self.host.len(), self.host.free())
    }

    /// Names computed and looked up so far.
    pub(crate) fn lookups(&self) -> u64 {
        self.pool.lookups()
    }

    /// Who has each block, the scratch block left out.
    pub(crate) fn uses(&self) -> impl Iterator<Item = BlockUse> + '_ {
        self.pool.uses()
    }

    /// The names of all full blocks of `tokens`, those that were not computed yet too.
    pub(crate) fn names<'a>(&'a self, blocks: &'a SeqBlocks, tokens: &'a [Token]) -> impl Iterator<Item = BlockHash> + 'a {
        let hasher = self.pool.hasher();
        let mut name = hasher.root(&blocks.salt);
        tokens.chunks_exact(self.block_size as usize).enumerate().map(move |(at, block)| {
            name = blocks.names.get(at).copied().unwrap_or_else(|| hasher.child(name, block));
            name
        })
    }

    /// Computes the names of a sequence's full blocks that have none yet.
    pub(crate) fn name(&mut self, blocks: &mut SeqBlocks, tokens: &[Token]) {
        if self.sharing {
            self.pool.name_blocks(&blocks.salt, tokens, &mut blocks.names);
        }
    }

    /// Whether the cache has a block of that name.
    pub(crate) fn is_named(&mut self, name: BlockHash) -> bool {
        self.pool.is_named(name)
    }

    /// Looks up how much of a waiting sequence the cache has, from where it was looked up last.
    pub(crate) fn look_up(&mut self, blocks: &mut SeqBlocks, tokens: &[Token]) {
        let mut found = std::mem::take(&mut self.spare);
        blocks.chain = self.pool.find_on(blocks.chain.clone(), &blocks.names, tokens, &mut found);
        self.recycle(found);
    }

    /// About how much of a waiting sequence the cache has beyond its first `from` blocks: see [`BlockPool::estimate`].
    /// `last` is what was estimated before, with nothing else done in between: where names are equal the answer is too.
    pub(crate) fn estimate(&mut self, blocks: &SeqBlocks, from: usize, last: &mut Option<Estimate>) -> Chain {
        let known = last.take().filter(|last| last.holds_for(&blocks.names, from));
        let estimate = known.unwrap_or_else(|| self.pool.estimate(&blocks.names, from));
        *last = Some(estimate);
        estimate.chain(&blocks.salt)
    }

    /// Finds the blocks that a sequence can share. A fork whose `parent` has all of its prompt also gets the block that the
    /// last but one token of the prompt lies in, for copying.
    pub(crate) fn find(&mut self, blocks: &mut SeqBlocks, tokens: &[Token], parent: Option<&SeqBlocks>, step: u64) -> Cached {
        // Tokens may have come while it waited.
        self.name(blocks, tokens);
        let whole = (tokens.len() - 1) / self.block_size as usize;
        let mut found = std::mem::take(&mut self.spare);
        if self.sharing {
            blocks.chain = self.pool.find(&blocks.salt, &blocks.names, tokens, &mut found);
        } else {
            found.extend(parent.iter().flat_map(|parent| &parent.table.ids()[..whole]));
            blocks.reset_chain();
        }
        let partly = !(tokens.len() - 1).is_multiple_of(self.block_size as usize);
        let tail = parent.filter(|_| partly && found.len() == whole).map(|parent| parent.table.ids()[whole]);
        Cached { blocks: found, tail: tail.filter(|&tail| self.pool.settled_before(tail, step)) }
    }

    /// Takes back what was found for a sequence that is not admitted.
    pub(crate) fn discard(&mut self, cached: Cached) {
        self.recycle(cached.blocks);
    }

    /// Gives a sequence blocks for all its tokens, those found for it first, and says how many tokens are computed then;
    /// or how many free blocks it needs. Adds what must be copied before the step to `copies`.
    pub(crate) fn admit(
        &mut self,
        blocks: &mut SeqBlocks,
        tokens: &[Token],
        mut cached: Cached,
        grant: Grant,
        copies: &mut Vec<(BlockId, BlockId)>,
    ) -> Result<u32, usize> {
        let (len, size) = (tokens.len(), self.block_size as usize);
        // The last token always runs, or there would be nothing to sample
        // from. If its block was found it is written again, so in a copy when
        // others hold it, and not at all when there is nothing to copy yet.
        let mut rewritten = cached.blocks.last().copied().filter(|_| cached.blocks.len() * size == len);
        let mut copy = rewritten.is_some_and(|last| self.pool.holders(last) > 0);
        if copy && rewritten.is_some_and(|last| !self.pool.complete_before(last, grant.step)) {
            cached.blocks.clear();
            blocks.chain = self.pool.find(&blocks.salt, &blocks.names[..(len - 1) / size], tokens, &mut cached.blocks);
            (rewritten, copy) = (None, false);
        }
        let shared = cached.blocks.len();
        let taken = self.share(blocks, cached.blocks, grant, usize::from(copy));
        taken?;
        if copy {
            copies.push(self.pool.unshare_last(&mut blocks.table));
        } else if let Some(last) = rewritten {
            self.pool.rewrite(last, grant.step);
        }
        self.fill_up(blocks, grant.blocks);
        let Some(tail) = cached.tail else { return Ok((shared * size).min(len - 1) as u32) };
        // What its parent's prompt left in a block partly filled.
        copies.push((tail, blocks.table.ids()[shared]));
        Ok(len as u32 - 1)
    }

    /// Gives a swapped sequence blocks for its KV, those that the cache has first; or says how many free blocks it needs. Adds
    /// what must be copied from host memory to `swap_in`. The host's blocks are its own until [`end_swap`](Self::end_swap).
    pub(crate) fn swap_in(
        &mut self,
        blocks: &mut SeqBlocks,
        tokens: &[Token],
        swapped_tokens: u32,
        grant: Grant,
        swap_in: &mut Vec<(u32, BlockId)>,
    ) -> Result<(), usize> {
        let mut found = std::mem::take(&mut self.spare);
        if self.sharing {
            self.name(blocks, tokens);
            let whole = (swapped_tokens / self.block_size) as usize;
            blocks.chain = self.pool.find(&blocks.salt, &blocks.names[..whole], tokens, &mut found);
        }
        let shared = found.len();
        self.share(blocks, found, grant, 0)?;
        self.fill_up(blocks, grant.blocks);
        swap_in.extend(blocks.host.iter().zip(blocks.table.ids()).skip(shared).map(|(&host, &block)| (host, block)));
        Ok(())
    }

    /// Adds the blocks found to a table, if there is room for all the blocks that it gets now, and for so many `copies`.
    fn share(&mut self, blocks: &mut SeqBlocks, found: Vec<BlockId>, grant: Grant, copies: usize) -> Result<(), usize> {
        let revived = found.iter().filter(|&&block| self.pool.holders(block) == 0).count();
        let needed = revived + grant.blocks - found.len() + copies;
        let fits = needed <= grant.room;
        if fits {
            for &block in &found {
                self.pool.share(&mut blocks.table, block);
            }
            blocks.seal_at = self.sharing.then_some((found.len() as u32 + 1) * self.block_size);
        }
        self.recycle(found);
        if fits { Ok(()) } else { Err(needed) }
    }

    fn fill_up(&mut self, blocks: &mut SeqBlocks, len: usize) {
        let grown = self.pool.grow(&mut blocks.table, len);
        assert!(grown, "counted before");
    }

    /// Makes room for a sequence of up to so many tokens, so that decoding does not allocate.
    pub(crate) fn reserve(&self, blocks: &mut SeqBlocks, limit: u32) {
        blocks.table.reserve(limit.div_ceil(self.block_size) as usize);
        if self.sharing {
            blocks.names.reserve_exact((limit / self.block_size) as usize - blocks.names.len());
        }
    }

    /// Grows a sequence to so many blocks. Panics if too few are free.
    pub(crate) fn grow(&mut self, blocks: &mut SeqBlocks, len: usize) {
        let grown = self.pool.grow(&mut blocks.table, len);
        assert!(grown, "room was made before");
    }

    /// Names the blocks that, once `step` has run, are full of `known` tokens, and tells `named` of each.
    pub(crate) fn seal(&mut self, blocks: &mut SeqBlocks, known: &[Token], step: u64, mut named: impl FnMut(BlockHash)) {
        while let Some(at) = blocks.seal_at.filter(|&at| at as usize <= known.len()) {
            let full = &known[(at - self.block_size) as usize..at as usize];
            let block = blocks.chain.len();
            if blocks.names.len() == block {
                self.pool.name_block(&blocks.salt, full, &mut blocks.names);
            }
            let name = blocks.names[block];
            self.pool.seal(&blocks.table, &mut blocks.chain, name, full, step);
            named(name);
            blocks.seal_at = Some(at + self.block_size);
        }
    }

    /// Takes the names from the blocks that the step `since`, or a later one, completes: what they hold may be no good.
    pub(crate) fn forget(&mut self, blocks: &SeqBlocks, since: u64) {
        self.pool.forget(&blocks.table, since);
    }

    /// Takes a preempted sequence's blocks.
    pub(crate) fn release(&mut self, blocks: &mut SeqBlocks) {
        self.pool.release(&mut blocks.table);
        blocks.seal_at = None;
        blocks.reset_chain();
    }

    /// Takes all that a sequence has, since it ends.
    pub(crate) fn free_all(&mut self, blocks: &mut SeqBlocks) {
        self.pool.release(&mut blocks.table);
        self.host.release(&mut blocks.host);
    }

    /// Has the KV of a sequence's first tokens copied to host memory, and says how many blocks that are. Panics if there are
    /// not enough.
    pub(crate) fn swap_out(&mut self, blocks: &mut SeqBlocks, computed: u32, swap_out: &mut Vec<(BlockId, u32)>) -> usize {
        let used = computed.div_ceil(self.block_size) as usize;
        for &block in &blocks.table.ids()[..used] {
            let host = self.host.take();
            blocks.host.push(host);
            swap_out.push((block, host));
        }
        used
    }

    /// Gives the host's blocks back of a sequence that was swapped in.
    pub(crate) fn end_swap(&mut self, blocks: &mut SeqBlocks) {
        self.host.release(&mut blocks.host);
    }

    /// Panics unless the pools agree with what sequences have, which must be all there is.
    pub(crate) fn check<'a>(&self, all: impl Iterator<Item = &'a SeqBlocks> + Clone) {
        self.pool.check(all.clone().map(|blocks| &blocks.table));
        self.host.check(all.flat_map(|blocks| blocks.host.iter().copied()));
    }

    fn recycle(&mut self, mut list: Vec<BlockId>) {
        list.clear();
        self.spare = list;
    }
}
