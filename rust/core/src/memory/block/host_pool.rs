//! Blocks in host memory: those of swapped sequences, and cached blocks of sessions that were evicted from the device.

use super::owners::CacheOwner;
use super::users::Users;
use super::{BlockId, Chain, Content};
use crate::memory::hash::BlockHash;
use crate::request::{CacheScope, Token};
use rustc_hash::FxHashMap;
use std::collections::BTreeMap;
use std::sync::Arc;

/// To whom a cached block belongs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HostList {
    /// Several sessions.
    Common,
    /// One session.
    Owned(CacheOwner),
}

impl HostList {
    fn index(self) -> usize {
        match self {
            Self::Common => 0,
            Self::Owned(owner) => owner.number() as usize + 1,
        }
    }
}

/// The place of a list in the order in which lists are dropped. No two lists have the same one.
pub(super) type Place = (u8, u64, u32);

/// The place of the list of common blocks, after all others.
pub(super) const COMMON: Place = (3, 0, 0);

/// The cached blocks of a [`HostList`].
#[derive(Debug, Default)]
struct List {
    place: Place,
    /// The one that was evicted last is at the end.
    blocks: Vec<u32>,
}

/// A cached block. It has the content that it had on the device.
#[derive(Debug)]
pub(super) struct HostBlock {
    pub(super) hash: BlockHash,
    pub(super) content: Content,
    pub(super) parent: Content,
    /// Scope of a chain's first block.
    pub(super) scope: Option<Arc<CacheScope>>,
    pub(super) users: Users,
    pub(super) list: HostList,
}

/// The blocks of the host pool. Each swapped sequence knows those that it holds.
#[derive(Debug)]
pub(super) struct HostPool {
    block_size: usize,
    free: Vec<u32>,
    /// Blocks that copies of the current plan may still read. They are free from the next plan on.
    released: Vec<u32>,
    named: FxHashMap<BlockHash, u32>,
    /// Cached blocks, by host block.
    cached: Vec<Option<HostBlock>>,
    /// Tokens of cached blocks, `[blocks, block_size]`.
    tokens: Vec<Token>,
    /// By [`HostList`].
    lists: Vec<List>,
    /// The lists with cached blocks, the one that is dropped first at the front.
    order: BTreeMap<Place, HostList>,
    /// Copies from the device that the current plan makes, in their order.
    pub(super) copies: Vec<(BlockId, u32)>,
    /// The current plan's step, if blocks that it evicts are copied.
    pub(super) keeps_in: Option<u64>,
    /// Contents that were dropped, if they are recorded.
    dropped: Option<Vec<Content>>,
}

impl HostPool {
    pub(super) fn new(count: u32, block_size: usize) -> Self {
        Self {
            block_size,
            free: (0..count).rev().collect(),
            released: Vec::new(),
            named: FxHashMap::default(),
            cached: (0..count).map(|_| None).collect(),
            tokens: vec![0; count as usize * block_size],
            lists: vec![List { place: COMMON, blocks: Vec::new() }],
            order: BTreeMap::new(),
            copies: Vec::new(),
            keeps_in: None,
            dropped: None,
        }
    }

    /// Records the contents that are dropped from now on, for [`dropped`](Self::dropped).
    pub(super) fn record_dropped(&mut self) {
        self.dropped = Some(Vec::new());
    }

    /// The contents that were dropped, for the caller to take. Panics unless they are recorded.
    pub(super) fn dropped(&mut self) -> &mut Vec<Content> {
        self.dropped.as_mut().expect("they are recorded")
    }

    /// The contents of cached blocks, and those that were dropped and not taken.
    pub(super) fn known_contents(&self) -> impl Iterator<Item = Content> + '_ {
        let cached = self.cached.iter().flatten().map(|block| block.content);
        cached.chain(self.dropped.iter().flatten().copied())
    }

    /// The content of the cached block with this name.
    pub(super) fn content_of(&self, name: BlockHash) -> Option<Content> {
        self.named.get(&name).and_then(|&at| self.cached[at as usize].as_ref()).map(|block| block.content)
    }

    pub(super) fn len(&self) -> usize {
        self.cached.len()
    }

    /// Number of blocks that no swapped sequence holds.
    pub(super) fn free(&self) -> usize {
        self.free.len() + self.released.len() + self.named.len()
    }

    /// Number of blocks that the current plan can give to swapped sequences.
    pub(super) fn room(&self) -> usize {
        self.free.len() + self.named.len()
    }

    /// Number of cached blocks.
    pub(super) fn cached(&self) -> usize {
        self.named.len()
    }

    /// Frees the released blocks, because the copies that read them belong to earlier plans.
    pub(super) fn settle(&mut self) {
        self.free.append(&mut self.released);
    }

    /// Takes a block that is neither held nor cached.
    pub(super) fn take(&mut self) -> Option<u32> {
        self.free.pop()
    }

    /// Releases `blocks`. Only later plans may write them.
    pub(super) fn release(&mut self, blocks: &mut Vec<u32>) {
        self.released.append(blocks);
    }

    /// Whether a block with this name is cached.
    pub(super) fn has(&self, name: BlockHash) -> bool {
        self.named.contains_key(&name)
    }

    /// Caches a block that [`take`](Self::take) gave.
    pub(super) fn add(&mut self, at: u32, block: HostBlock, tokens: &[Token]) {
        let list = &mut self.lists[block.list.index()];
        list.blocks.push(at);
        self.order.insert(list.place, block.list);
        self.named.insert(block.hash, at);
        self.tokens[at as usize * self.block_size..][..self.block_size].copy_from_slice(tokens);
        self.cached[at as usize] = Some(block);
    }

    /// Removes a cached block that holds `tokens` directly after `chain`, for a copy of the current plan.
    pub(super) fn remove(&mut self, name: BlockHash, chain: &Chain, tokens: &[Token]) -> Option<(u32, HostBlock)> {
        let at = *self.named.get(&name)?;
        let block = self.cached[at as usize].as_ref().expect("it is cached");
        let same = chain.is_before(block.parent, block.scope.as_ref())
            && self.tokens[at as usize * self.block_size..][..self.block_size] == *tokens;
        same.then(|| {
            let block = self.uncache(at);
            self.released.push(at);
            (at, block)
        })
    }

    /// Drops the cached block with this name, if there is one.
    pub(super) fn drop_named(&mut self, name: BlockHash) {
        if let Some(&at) = self.named.get(&name) {
            let block = self.uncache(at);
            self.free.push(at);
            self.dropped.iter_mut().for_each(|dropped| dropped.push(block.content));
        }
    }

    /// Drops the cached blocks of a list, and returns them.
    pub(super) fn drop_list(&mut self, list: HostList) -> Vec<HostBlock> {
        let list = &mut self.lists[list.index()];
        self.order.remove(&list.place);
        let dropped = std::mem::take(&mut list.blocks);
        let uncache = |&at: &u32| {
            let block = self.cached[at as usize].take().expect("it is cached");
            self.named.remove(&block.hash);
            self.dropped.iter_mut().for_each(|dropped| dropped.push(block.content));
            block
        };
        let blocks = dropped.iter().map(uncache).collect();
        self.free.extend(&dropped);
        blocks
    }

    /// Sets the place of a list, which is new or has another one.
    pub(super) fn rank(&mut self, list: HostList, place: Place) {
        let index = list.index();
        if self.lists.len() <= index {
            self.lists.resize_with(index + 1, List::default);
        }
        let ranked = &mut self.lists[index];
        let before = std::mem::replace(&mut ranked.place, place);
        if !ranked.blocks.is_empty() {
            self.order.remove(&before);
            self.order.insert(place, list);
        }
    }

    /// The list that is dropped first, if it is dropped before that of a block to keep, which may be none.
    pub(super) fn first_dropped(&self, before: Option<HostList>) -> Option<HostList> {
        let (&place, &list) = self.order.first_key_value()?;
        before.is_none_or(|before| place < self.lists[before.index()].place).then_some(list)
    }

    fn uncache(&mut self, at: u32) -> HostBlock {
        let block = self.cached[at as usize].take().expect("it is cached");
        self.named.remove(&block.hash);
        let list = &mut self.lists[block.list.index()];
        // The ends of prompts are evicted first, and their beginnings come back first.
        let index = list.blocks.iter().rposition(|&other| other == at).expect("its list has it");
        list.blocks.remove(index);
        if list.blocks.is_empty() {
            self.order.remove(&list.place);
        }
        block
    }

    /// Panics unless the cached, the free and the `held` blocks are all blocks, each once, and the lists have the cached ones.
    pub(super) fn check(&self, held: impl Iterator<Item = u32>) {
        let cached = || self.lists.iter().flat_map(|list| &list.blocks).copied();
        let mut all: Vec<u32> = self.free.iter().chain(&self.released).copied().chain(cached()).chain(held).collect();
        all.sort_unstable();
        assert!(all.into_iter().eq(0..self.len() as u32), "a host block is lost or held twice");
        assert_eq!(cached().count(), self.named.len(), "names of cached host blocks");
        for (list, index) in self.lists.iter().zip(0..) {
            let ranked = self.order.get(&list.place).map(|list| list.index());
            assert_eq!(ranked, (!list.blocks.is_empty()).then_some(index), "order of the lists");
            for &at in &list.blocks {
                let block = self.cached[at as usize].as_ref().expect("a list has a block that is not cached");
                assert_eq!((block.list.index(), self.named.get(&block.hash)), (index, Some(&at)), "list and name of a host block");
            }
        }
    }
}
