//! The free cached blocks: a list for common blocks, one for each owner, and one for blocks on which others depend.

use crate::memory::BlockId;
use std::collections::BTreeSet;

/// When the blocks of an owner are evicted. Those of the first class go first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum EvictionClass {
    /// Before all others.
    Ended,
    /// After those of ended owners.
    Parked,
    /// After those of parked owners. Those of the owner that got this class last go first.
    ParkedWaiting,
    /// After common blocks that only one request used. Of these blocks, and common ones that several used, the least recently used go first.
    Active,
}

/// A list of free blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FreeList {
    /// Blocks that belong to no owner.
    Common,
    /// Blocks on which other cached blocks depend.
    Needed,
    /// Blocks of an owner.
    Owned(u32),
}

#[derive(Clone, Copy, Debug)]
struct Link {
    prev: u32,
    next: u32,
    /// Number of the latest release of the block.
    freed: u64,
}

/// Linked lists of free cached blocks. Every operation is O(1), or O(log owners) where a list becomes empty or ceases to be.
#[derive(Debug)]
pub(super) struct FreeLists {
    /// Links of all blocks, and then of the end of each list, which is linked with its first and its last block.
    links: Vec<Link>,
    blocks: u32,
    /// The class of each owner, and the number of the latest release when it got that.
    ranks: Vec<(EvictionClass, u64)>,
    /// Owners with free blocks in the order in which they lose them: by class, and then by the release of their first block or, if their
    /// requests wait, by the time for which they have waited.
    order: BTreeSet<(EvictionClass, u64, u32)>,
    freed: u64,
    len: usize,
}

/// Lists that exist without owners.
const UNOWNED: u32 = 2;

impl FreeLists {
    pub(super) fn new(blocks: u32) -> Self {
        let mut lists =
            Self { links: Vec::with_capacity(blocks as usize + 2), blocks, ranks: Vec::new(), order: BTreeSet::new(), freed: 0, len: 0 };
        for at in 0..blocks + UNOWNED {
            lists.links.push(Link { prev: at, next: at, freed: 0 });
        }
        lists
    }

    /// Adds the list of another owner, with the next number. The owner is active.
    pub(super) fn add_owner(&mut self) {
        let end = self.links.len() as u32;
        self.links.push(Link { prev: end, next: end, freed: 0 });
        self.ranks.push((EvictionClass::Active, 0));
    }

    /// Sets when an owner's blocks are evicted.
    pub(super) fn rank(&mut self, owner: u32, class: EvictionClass) {
        self.change(FreeList::Owned(owner), |lists| lists.ranks[owner as usize] = (class, lists.freed));
    }

    /// An owner's class, and the number of the latest release when it got that.
    pub(super) fn rank_of(&self, owner: u32) -> (EvictionClass, u64) {
        self.ranks[owner as usize]
    }

    /// Records the release of a block that is then added to a list.
    pub(super) fn release(&mut self, id: BlockId) {
        self.freed += 1;
        self.links[id.0 as usize].freed = self.freed;
    }

    /// Number of free cached blocks.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Adds a block that is evicted after all others of the list.
    pub(super) fn push_back(&mut self, list: FreeList, id: BlockId) {
        let end = self.end(list);
        self.link(list, id, self.links[end as usize].prev, end);
    }

    /// Adds a block that is evicted before all others of the list.
    pub(super) fn push_front(&mut self, list: FreeList, id: BlockId) {
        let end = self.end(list);
        self.link(list, id, end, self.links[end as usize].next);
    }

    /// Removes a block.
    pub(super) fn unlink(&mut self, list: FreeList, id: BlockId) {
        self.change(list, |lists| {
            let Link { prev, next, .. } = lists.links[id.0 as usize];
            lists.links[prev as usize].next = next;
            lists.links[next as usize].prev = prev;
        });
        self.len -= 1;
    }

    /// The block of a list that is evicted first.
    pub(super) fn first(&self, list: FreeList) -> Option<BlockId> {
        let first = self.links[self.end(list) as usize].next;
        (first < self.blocks).then_some(BlockId(first))
    }

    /// The owner that loses its blocks first, with its class and its place in it.
    pub(super) fn first_owner(&self) -> Option<(EvictionClass, u64, u32)> {
        self.order.first().copied()
    }

    /// Number of the latest release of a block.
    pub(super) fn freed(&self, id: BlockId) -> u64 {
        self.links[id.0 as usize].freed
    }

    /// The blocks of a list, in the order of eviction.
    pub(super) fn iter(&self, list: FreeList) -> impl Iterator<Item = BlockId> + '_ {
        let next = |&BlockId(at): &BlockId| Some(self.links[at as usize].next).filter(|&next| next < self.blocks).map(BlockId);
        std::iter::successors(self.first(list), next)
    }

    /// All free cached blocks.
    pub(super) fn all(&self) -> impl Iterator<Item = BlockId> + '_ {
        let owned = (0..self.ranks.len() as u32).map(FreeList::Owned);
        [FreeList::Common, FreeList::Needed].into_iter().chain(owned).flat_map(|list| self.iter(list))
    }

    fn end(&self, list: FreeList) -> u32 {
        self.blocks
            + match list {
                FreeList::Common => 0,
                FreeList::Needed => 1,
                FreeList::Owned(owner) => UNOWNED + owner,
            }
    }

    fn link(&mut self, list: FreeList, id: BlockId, prev: u32, next: u32) {
        self.change(list, |lists| {
            let link = &mut lists.links[id.0 as usize];
            (link.prev, link.next) = (prev, next);
            lists.links[prev as usize].next = id.0;
            lists.links[next as usize].prev = id.0;
        });
        self.len += 1;
    }

    /// Changes a list, and its owner's place in the order.
    fn change(&mut self, list: FreeList, change: impl FnOnce(&mut Self)) {
        let FreeList::Owned(owner) = list else { return change(self) };
        let before = self.place(owner);
        change(self);
        let after = self.place(owner);
        if before != after {
            before.map(|place| self.order.remove(&place));
            self.order.extend(after);
        }
    }

    /// The place of an owner with free blocks in the order.
    fn place(&self, owner: u32) -> Option<(EvictionClass, u64, u32)> {
        let first = self.first(FreeList::Owned(owner))?;
        let (class, since) = self.ranks[owner as usize];
        Some((class, if class == EvictionClass::ParkedWaiting { u64::MAX - since } else { self.freed(first) }, owner))
    }
}
