//! Physical KV blocks: the holders, the name and the free state of each.

use self::free_lists::FreeLists;
use self::host_pool::HostPool;
use self::limit::Unbacked;
use self::owners::{Owner, Owners};
use self::users::{EvictedUsers, Users};
use super::hash::{BlockHash, BlockHasher};
use crate::request::{CacheScope, Token};
use rustc_hash::FxHashMap;
use std::sync::Arc;

mod chain;
mod changes;
mod contents;
mod free_lists;
mod host;
mod host_pool;
mod limit;
mod lookup;
mod owners;
mod stored;
mod table;
mod users;

pub use chain::Chain;
pub(crate) use chain::Estimate;
pub use changes::CacheChanges;
pub(super) use changes::ChangeLog;
pub(crate) use free_lists::EvictionClass;
pub(crate) use owners::CacheOwner;
pub use owners::Taker;
pub use stored::StoredBlock;
pub use table::BlockTable;
pub(crate) use users::User;

/// Index of a physical block. Block 0 is scratch and is never allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockId(pub u32);

/// How a block is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BlockUse {
    /// No sequence holds the block and it has no cached content.
    Free,
    /// No sequence holds the block, but it is cached and a prompt can reuse it.
    Cached,
    /// One sequence holds the block.
    Held,
    /// Several sequences hold the block.
    Shared,
}

/// Identifies block content together with all content before it. Equal numbers mean equal content up to and including
/// the block. A number is never reused.
pub(super) type Content = u64;

const ROOT: Content = 0;

/// Content of a named block, apart from its tokens.
#[derive(Debug)]
struct Name {
    hash: BlockHash,
    /// Counts the names given. Content that was in host memory has a new number.
    number: u64,
    content: Content,
    parent: Content,
    /// The block with that content.
    parent_block: BlockId,
    /// Scope of a chain's first block. Later blocks get the scope from their parent.
    scope: Option<Arc<CacheScope>>,
    /// The step that completes the block.
    step: u64,
    users: Users,
    owner: Owner,
    /// Cached blocks that continue this one and belong to an owner, or on which such blocks depend.
    dependents: u32,
}

impl Name {
    /// Whether the block before this one is evicted after it.
    fn is_kept(&self) -> bool {
        self.dependents > 0 || matches!(self.owner, Owner::Owned(_))
    }
}

#[derive(Debug)]
struct Block {
    holders: u32,
    name: Option<Name>,
}

/// All blocks of the cache.
///
/// A free block keeps its name until [`grow`](Self::grow) allocates it, so [`find`](Self::find) can reuse it. `grow`
/// takes blocks without a name first, then blocks without memory up to the limit, then the least recently freed.
///
/// ```
/// use chairlift_core::{BlockHasher, BlockPool, BlockTable, CacheScope, Chain};
/// use std::sync::Arc;
///
/// // Two blocks of two tokens, beside the scratch block.
/// let mut pool = BlockPool::new(3, 2, BlockHasher::new(7));
/// let (scope, tokens) = (Arc::new(CacheScope::default()), [1, 2, 3, 4]);
/// let (mut table, mut names, mut chain) = (BlockTable::default(), Vec::new(), Chain::root(&scope));
/// pool.name_blocks(&scope, &tokens, &mut names);
/// assert!(pool.grow(&mut table, 2));
/// for (block, &name) in tokens.chunks(2).zip(&names) {
///     pool.seal(&table, &mut chain, name, block, 0);
/// }
/// let blocks = table.ids().to_vec();
/// pool.release(&mut table);
///
/// // Both blocks are free and still cached. An equal prompt finds them, and another sequence may hold them.
/// let mut found = Vec::new();
/// pool.find(&scope, &names, &tokens, &mut found);
/// assert_eq!(found, blocks);
/// found.iter().for_each(|&block| pool.share(&mut table, block));
/// assert_eq!(pool.holders(blocks[0]), 1);
/// pool.release(&mut table);
/// ```
#[derive(Debug)]
pub struct BlockPool {
    block_size: usize,
    blocks: Vec<Block>,
    /// Tokens of named blocks, `[blocks, block_size]`.
    tokens: Vec<Token>,
    hasher: BlockHasher,
    named: FxHashMap<BlockHash, BlockId>,
    /// Free blocks that have memory and no name.
    unnamed: Vec<BlockId>,
    unbacked: Unbacked,
    /// Most blocks that may have memory: those that are held, cached or unnamed.
    limit: usize,
    /// Free blocks that have a name.
    free: FreeLists,
    owners: Owners,
    host: HostPool,
    next_content: Content,
    /// Number of names given.
    names_given: u64,
    /// Number of names computed and looked up.
    lookups: u64,
    changes: ChangeLog,
    /// Contents of blocks that lost their names, if they are recorded.
    dropped: Option<Vec<Content>>,
    /// Blocks that the current plan copies to others. Each counts as a holder.
    copied: Vec<BlockId>,
    /// The users of evicted blocks, if storage outside may bring them back.
    evicted_users: Option<EvictedUsers>,
}

impl BlockPool {
    /// Creates a pool of `count` blocks of `block_size` tokens. Block 0 is reserved. `hasher` computes the names.
    pub fn new(count: u32, block_size: usize, hasher: BlockHasher) -> Self {
        let block = |_| Block { holders: 0, name: None };
        Self {
            block_size,
            blocks: (0..count).map(block).collect(),
            tokens: vec![0; count as usize * block_size],
            hasher,
            named: FxHashMap::with_capacity_and_hasher(count as usize, rustc_hash::FxBuildHasher),
            unnamed: Vec::new(),
            unbacked: Unbacked::new(count),
            limit: count as usize - 1,
            free: FreeLists::new(count),
            owners: Owners::default(),
            host: HostPool::new(0, block_size),
            next_content: ROOT + 1,
            names_given: 0,
            lookups: 0,
            changes: ChangeLog::default(),
            dropped: None,
            copied: Vec::new(),
            evicted_users: None,
        }
    }

    /// Adds `count` blocks in host memory to a new pool.
    pub(crate) fn with_host(self, count: u32) -> Self {
        Self { host: HostPool::new(count, self.block_size), ..self }
    }

    /// The hasher that computes names.
    pub(crate) fn hasher(&self) -> &BlockHasher {
        &self.hasher
    }

    /// Number of names computed and looked up so far. The number is the same on every machine.
    pub fn lookups(&self) -> u64 {
        self.lookups
    }

    /// Appends the names of full blocks of `tokens` that `names` lacks.
    pub fn name_blocks(&mut self, scope: &CacheScope, tokens: &[Token], names: &mut Vec<BlockHash>) {
        names.reserve((tokens.len() / self.block_size).saturating_sub(names.len()));
        for block in tokens.chunks_exact(self.block_size).skip(names.len()) {
            self.name_block(scope, block, names);
        }
    }

    /// Appends the name of the block that follows the blocks in `names`.
    pub fn name_block(&mut self, scope: &CacheScope, block: &[Token], names: &mut Vec<BlockHash>) {
        let parent = names.last().copied().unwrap_or_else(|| self.hasher.root(scope));
        names.push(self.hasher.child(parent, block));
        self.lookups += 1;
    }

    /// Number of sequences that hold block `id`.
    pub fn holders(&self, id: BlockId) -> u32 {
        self.blocks[id.0 as usize].holders
    }

    /// The use of each block, without the scratch block.
    pub(crate) fn uses(&self) -> impl Iterator<Item = BlockUse> + '_ {
        self.blocks[1..].iter().map(|block| match (block.holders, &block.name) {
            (0, None) => BlockUse::Free,
            (0, Some(_)) => BlockUse::Cached,
            (1, _) => BlockUse::Held,
            _ => BlockUse::Shared,
        })
    }

    /// Adds a cached block to `table`.
    pub fn share(&mut self, table: &mut BlockTable, id: BlockId) {
        if self.blocks[id.0 as usize].holders == 0 {
            self.free.unlink(self.list_of(id), id);
        }
        self.blocks[id.0 as usize].holders += 1;
        table.ids.push(id);
    }

    /// Grows `table` to `len` blocks. Returns false and changes nothing if too few blocks are free.
    #[must_use]
    pub fn grow(&mut self, table: &mut BlockTable, len: usize) -> bool {
        let wanted = len.saturating_sub(table.ids.len());
        if wanted > self.free() {
            return false;
        }
        for _ in 0..wanted {
            let id = self.take_free(table.owner);
            table.ids.push(id);
        }
        true
    }

    /// Replaces the last block of `table` with a new block that only this table holds. Returns (shared, new). The
    /// caller must copy the first to the second before it writes. Panics if no block is free.
    pub fn unshare_last(&mut self, table: &mut BlockTable) -> (BlockId, BlockId) {
        let shared = table.ids.pop().expect("a table with a block");
        let fresh = self.take_free(table.owner);
        table.ids.push(fresh);
        self.decref(shared, table.owner);
        (shared, fresh)
    }

    fn name_mut(&mut self, hash: BlockHash) -> Option<&mut Name> {
        let id = self.named.get(&hash)?;
        self.blocks[id.0 as usize].name.as_mut()
    }

    /// Whether a named block is complete before `step` begins.
    pub fn complete_before(&self, id: BlockId, step: u64) -> bool {
        self.blocks[id.0 as usize].name.as_ref().is_some_and(|name| name.step < step)
    }

    /// Whether a filled block is complete before `step` begins. Only a named block can be the work of another sequence
    /// in that step.
    pub fn settled_before(&self, id: BlockId, step: u64) -> bool {
        self.blocks[id.0 as usize].name.as_ref().is_none_or(|name| name.step < step)
    }

    /// Records that `step` writes the end of a named block again.
    pub fn rewrite(&mut self, id: BlockId, step: u64) {
        if let Some(name) = self.blocks[id.0 as usize].name.as_mut() {
            name.step = step;
        }
    }

    /// Names the next full block of `table`, which holds `tokens` after `step` has run, so that later sequences can
    /// find it. If equal content is already cached, the block stays unnamed and the chain continues from the cached
    /// content. If another block has the same name but `find` would not accept it here (its parent is no longer named,
    /// or the names collide), that block loses the name.
    pub fn seal(&mut self, table: &BlockTable, chain: &mut Chain, hash: BlockHash, tokens: &[Token], step: u64) {
        debug_assert_eq!(tokens.len(), self.block_size);
        let id = table.ids[chain.len];
        let other = self.named.get(&hash).copied();
        let cached = other.and_then(|other| Some((self.content_if(other, chain, tokens)?, other)));
        let (content, block) = cached.unwrap_or_else(|| {
            self.drop_name(hash);
            self.host.drop_named(hash);
            let content = self.new_content();
            self.give_name(id, chain, (hash, content), tokens, step);
            (content, id)
        });
        chain.advance(content, block);
    }

    /// Names block `id`, which continues `chain` and holds `tokens` after `step` has run.
    fn give_name(&mut self, id: BlockId, chain: &Chain, (hash, content): (BlockHash, Content), tokens: &[Token], step: u64) {
        debug_assert!(self.blocks[id.0 as usize].holders > 0 && self.blocks[id.0 as usize].name.is_none());
        let scope = (chain.content == ROOT).then(|| Arc::clone(&chain.scope));
        self.names_given += 1;
        self.blocks[id.0 as usize].name = Some(Name {
            hash,
            number: self.names_given,
            content,
            parent: chain.content,
            parent_block: chain.block,
            scope,
            step,
            users: Users::default(),
            owner: Owner::default(),
            dependents: 0,
        });
        self.tokens[id.0 as usize * self.block_size..][..self.block_size].copy_from_slice(tokens);
        self.named.insert(hash, id);
        self.changes.record(hash, true);
    }

    /// Removes the names of blocks in `table` that step `since` or a later step completes, because their content may be invalid.
    pub fn forget(&mut self, table: &BlockTable, since: u64) {
        for &id in &table.ids {
            if !self.complete_before(id, since) {
                self.take_name(id);
            }
        }
    }

    /// Removes this name from its block, if a block has it.
    pub(in crate::memory) fn drop_name(&mut self, name: BlockHash) {
        if let Some(&id) = self.named.get(&name) {
            self.take_name(id);
        }
    }

    /// Releases every block of `table`, last first. The end of a sequence is the least likely part to be shared, so it
    /// is reused first. A block is never reused before the blocks that continue it.
    pub fn release(&mut self, table: &mut BlockTable) {
        self.truncate(table, 0);
    }

    /// Releases the blocks of `table` after the first `len`, last first.
    pub fn truncate(&mut self, table: &mut BlockTable, len: usize) {
        while table.ids.len() > len {
            let id = table.ids.pop().expect("a longer table");
            self.decref(id, table.owner);
        }
    }

    /// Panics unless the pool agrees with `tables`, which must be all tables.
    pub fn check<'a>(&self, tables: impl Iterator<Item = &'a BlockTable>) {
        let mut held = vec![0; self.blocks.len()];
        tables.flat_map(BlockTable::ids).for_each(|id| held[id.0 as usize] += 1);
        let mut free = vec![false; self.blocks.len()];
        let mut mark = |id: u32, named: bool| {
            assert!(!std::mem::replace(&mut free[id as usize], true), "block {id} is free twice");
            assert_eq!(self.blocks[id as usize].name.is_some(), named, "block {id} is on the wrong free list");
        };
        self.unnamed.iter().chain(self.unbacked.iter()).for_each(|id| mark(id.0, false));
        let listed = self.free.all().inspect(|id| mark(id.0, true)).count();
        assert_eq!(listed, self.free.len(), "length of the free lists");
        self.check_owners();
        assert!(self.backed() <= self.limit.max(self.held()), "more blocks have memory than may");
        assert!(!free[0] && held[0] == 0, "the scratch block is in use");
        for (id, block) in self.blocks.iter().enumerate().skip(1) {
            assert_eq!(block.holders, held[id], "holders of block {id}");
            assert_eq!(block.holders == 0, free[id], "block {id}: free list and holders disagree");
        }
        let names = self.blocks.iter().filter(|block| block.name.is_some()).count();
        assert_eq!(names, self.named.len(), "a name without a block, or a block without its name");
        for (hash, id) in &self.named {
            assert_eq!(self.blocks[id.0 as usize].name.as_ref().map(|name| name.hash), Some(*hash));
        }
    }

    fn new_content(&mut self) -> Content {
        self.next_content += 1;
        self.next_content - 1
    }

    fn take_free(&mut self, taker: Option<CacheOwner>) -> BlockId {
        let unused = self.unnamed.pop().or_else(|| self.back_one());
        let id = unused.unwrap_or_else(|| self.evict(taker));
        self.blocks[id.0 as usize].holders = 1;
        id
    }

    /// Removes the block's name, if any. Its content is lost.
    fn take_name(&mut self, id: BlockId) {
        let content = self.unname(id);
        if let Some(dropped) = &mut self.dropped {
            dropped.extend(content);
        }
    }

    /// Removes the block's name, if any. Returns its content.
    fn unname(&mut self, id: BlockId) -> Option<Content> {
        let block = &self.blocks[id.0 as usize];
        let (hash, content) = block.name.as_ref().map(|name| (name.hash, name.content))?;
        if block.holders == 0 {
            self.free.unlink(self.list_of(id), id);
            self.unnamed.push(id);
        }
        self.disown(id);
        self.blocks[id.0 as usize].name = None;
        self.named.remove(&hash);
        self.changes.record(hash, false);
        Some(content)
    }

    /// Removes the name of the free cached block that is evicted next, and takes the block for a session or for another use.
    fn evict(&mut self, taker: Option<CacheOwner>) -> BlockId {
        let id = self.next_evicted();
        if self.keep_on_host(id, taker) {
            self.unname(id);
        } else {
            self.note_evicted(id, taker);
            self.remember_evicted(id);
            self.take_name(id);
        }
        self.unnamed.pop().expect("it was just freed")
    }

    /// Keeps a held block until the end of the current plan, which copies it to another block. A held sequence may lose it in the same plan,
    /// and a copy from host memory to it would run first.
    pub(super) fn keep_copied(&mut self, id: BlockId) {
        debug_assert!(self.holders(id) > 0);
        self.blocks[id.0 as usize].holders += 1;
        self.copied.push(id);
    }

    /// Releases the blocks that the plan copies.
    fn release_copied(&mut self) {
        while let Some(id) = self.copied.pop() {
            self.release_one(id);
        }
    }

    fn decref(&mut self, id: BlockId, user: Option<CacheOwner>) {
        self.note_use(id, user);
        self.release_one(id);
    }

    /// Takes one holder from a block.
    fn release_one(&mut self, id: BlockId) {
        let block = &mut self.blocks[id.0 as usize];
        block.holders -= 1;
        if block.holders > 0 {
            return;
        }
        if block.name.is_none() {
            self.unnamed.push(id);
        } else {
            self.free.release(id);
            self.free.push_back(self.list_of(id), id);
        }
        self.give_back();
    }
}

#[cfg(test)]
mod tests;
