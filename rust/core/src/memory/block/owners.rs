//! Owners of cached blocks: sessions, whose blocks are evicted together.
//!
//! A block belongs to the owner for which all requests have used it, and is common once others have used it too. A
//! cached block depends on the block before it: while an owner's block is cached, the blocks before it are evicted after it.

use super::free_lists::{EvictionClass, FreeList};
use super::{BlockId, BlockPool, Name, ROOT, User};
use crate::request::named_enum;

/// A session as the cache sees it. The number is reused once no cached block belongs to an owner that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CacheOwner(u32);

named_enum! {
    /// For whom a cached block of a session was evicted.
    pub enum Taker {
        /// Another request of the session.
        SameSession = "same_session",
        /// Another session of the same tenant.
        SameTenant = "same_tenant",
        /// A session of another tenant.
        OtherTenant = "other_tenant",
        /// A request without a session, KV from storage, or another model.
        NoSession = "no_session",
    }
}

/// To whom a named block belongs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Owner {
    /// No request has released it yet.
    #[default]
    Unused,
    /// One request without an owner has used it.
    OneRequest,
    /// Several have used it.
    Common,
    /// Only this owner has used it, beside a request that had none.
    Owned(CacheOwner),
}

/// Blocks of each owner.
#[derive(Debug, Default)]
pub(super) struct Owners {
    list: Vec<Owned>,
    /// Numbers of ended owners without blocks.
    vacant: Vec<u32>,
}

#[derive(Debug, Default)]
struct Owned {
    /// The session's tenant.
    user: User,
    /// Cached blocks that belong to the owner.
    blocks: u32,
    /// Blocks that were evicted, by [`Taker`].
    evicted: [u32; Taker::COUNT],
    ended: bool,
}

impl CacheOwner {
    /// Its index among the owners.
    pub(super) fn number(self) -> u32 {
        self.0
    }
}

impl Owners {
    pub(super) fn has_ended(&self, owner: CacheOwner) -> bool {
        self.list[owner.0 as usize].ended
    }
}

impl BlockPool {
    /// Adds an owner of blocks: a session of `user`.
    pub(crate) fn open_owner(&mut self, user: User) -> CacheOwner {
        let opened = Owned { user, ..Owned::default() };
        let owner = if let Some(number) = self.owners.vacant.pop() {
            self.owners.list[number as usize] = opened;
            CacheOwner(number)
        } else {
            self.owners.list.push(opened);
            self.free.add_owner();
            CacheOwner(self.owners.list.len() as u32 - 1)
        };
        self.rank_owner(owner, EvictionClass::Active);
        owner
    }

    /// The owner's blocks that were evicted since the last call, by [`Taker`].
    pub(crate) fn take_evicted(&mut self, owner: CacheOwner) -> [u32; Taker::COUNT] {
        std::mem::take(&mut self.owners.list[owner.0 as usize].evicted)
    }

    /// Records that a cached block is evicted for a session, or for another use.
    pub(super) fn note_evicted(&mut self, id: BlockId, taker: Option<CacheOwner>) {
        if let Some(Owner::Owned(owner)) = self.blocks[id.0 as usize].name.as_ref().map(|name| name.owner) {
            self.count_evicted(owner, taker, 1);
        }
    }

    /// Records that blocks of a session are no longer cached, for a session or for another use.
    pub(super) fn count_evicted(&mut self, owner: CacheOwner, taker: Option<CacheOwner>, blocks: u32) {
        let user = self.owners.list[owner.0 as usize].user;
        let taker = match taker {
            None => Taker::NoSession,
            Some(taker) if taker == owner => Taker::SameSession,
            Some(taker) if self.owners.list[taker.0 as usize].user == user => Taker::SameTenant,
            Some(_) => Taker::OtherTenant,
        };
        self.owners.list[owner.0 as usize].evicted[taker as usize] += blocks;
    }

    /// Ends an owner. Its blocks are evicted before others, and belong to the next owner whose request uses them. No table may have it.
    pub(crate) fn end_owner(&mut self, owner: CacheOwner) {
        self.rank_owner(owner, EvictionClass::Ended);
        self.owners.list[owner.0 as usize].ended = true;
        self.drop_owner_from_host(owner);
        self.reuse_owner(owner);
    }

    /// Sets when an owner's blocks are evicted.
    pub(crate) fn rank_owner(&mut self, owner: CacheOwner, class: EvictionClass) {
        self.free.rank(owner.0, class);
        self.rank_on_host(owner);
    }

    /// The free cached block that is evicted next. Panics if there is none.
    pub(super) fn next_evicted(&self) -> BlockId {
        let common = self.free.first(FreeList::Common);
        let owner = self.free.first_owner();
        let first_of = |owner| self.free.first(FreeList::Owned(owner)).expect("a list in the order has a block");
        match (owner, common) {
            (Some((class, _, owner)), _) if class < EvictionClass::Active => first_of(owner),
            (Some((_, number, owner)), Some(block)) if self.is_hot(block) && number < self.free.freed(block) => first_of(owner),
            (_, Some(block)) => block,
            (Some((.., owner)), None) => first_of(owner),
            (None, None) => self.free.first(FreeList::Needed).expect("a free cached block"),
        }
    }

    /// Whether several requests have used a common block.
    fn is_hot(&self, id: BlockId) -> bool {
        self.blocks[id.0 as usize].name.as_ref().is_some_and(|name| name.owner == Owner::Common)
    }

    /// The list of a free named block.
    pub(super) fn list_of(&self, id: BlockId) -> FreeList {
        let name = self.blocks[id.0 as usize].name.as_ref().expect("a named block");
        match name.owner {
            _ if name.dependents > 0 => FreeList::Needed,
            Owner::Owned(owner) => FreeList::Owned(owner.0),
            _ => FreeList::Common,
        }
    }

    /// Records that a request uses a block that it holds, for its owner if it has one.
    pub(super) fn note_use(&mut self, id: BlockId, user: Option<CacheOwner>) {
        let Some(name) = &self.blocks[id.0 as usize].name else { return };
        let owner = match (name.owner, user) {
            (Owner::Owned(owner), Some(user)) if owner == user => return,
            (Owner::Owned(owner), _) if self.owners.has_ended(owner) => user.map_or(Owner::OneRequest, Owner::Owned),
            (Owner::Unused | Owner::OneRequest, Some(user)) => Owner::Owned(user),
            (Owner::Unused, None) => Owner::OneRequest,
            _ => Owner::Common,
        };
        self.set_owner(id, owner);
    }

    /// Records that a named block loses its name. Call it before.
    pub(super) fn disown(&mut self, id: BlockId) {
        self.set_owner(id, Owner::Unused);
        if self.blocks[id.0 as usize].name.as_ref().is_some_and(|name| name.dependents > 0) {
            self.remove_dependent(self.parent(id));
        }
    }

    /// Panics unless the lists, the counts of dependent blocks and those of owners agree with the blocks. `is_free` tells which blocks are free.
    pub(super) fn check_owners(&self) {
        let mut dependents = vec![0; self.blocks.len()];
        let mut blocks = vec![0; self.owners.list.len()];
        for (id, name) in (0..).zip(&self.blocks).filter_map(|(id, block)| Some((BlockId(id), block.name.as_ref()?))) {
            if let Owner::Owned(owner) = name.owner {
                blocks[owner.0 as usize] += 1;
            }
            if let Some(parent) = self.parent(id).filter(|_| name.is_kept()) {
                dependents[parent.0 as usize] += 1;
            }
        }
        for (id, block) in self.blocks.iter().enumerate() {
            let counted = block.name.as_ref().map_or(0, |name| name.dependents);
            assert!(counted == dependents[id] || block.name.is_none(), "blocks that depend on block {id}");
        }
        assert_eq!(blocks, self.owners.list.iter().map(|owned| owned.blocks).collect::<Vec<_>>(), "blocks of owners");
        let lists = [FreeList::Common, FreeList::Needed].into_iter().chain((0..blocks.len() as u32).map(FreeList::Owned));
        for list in lists {
            self.free.iter(list).for_each(|id| assert_eq!(self.list_of(id), list, "list of block {id:?}"));
        }
    }

    fn reuse_owner(&mut self, owner: CacheOwner) {
        let Owned { ended, blocks, .. } = self.owners.list[owner.0 as usize];
        if ended && blocks == 0 {
            self.owners.vacant.push(owner.0);
        }
    }

    /// Changes the owner of a block that no list has.
    fn set_owner(&mut self, id: BlockId, owner: Owner) {
        let name = self.blocks[id.0 as usize].name.as_mut().expect("a named block");
        let was_kept = name.is_kept();
        let before = std::mem::replace(&mut name.owner, owner);
        let is_kept = name.is_kept();
        if let Owner::Owned(owner) = owner {
            self.owners.list[owner.0 as usize].blocks += 1;
        }
        if let Owner::Owned(before) = before {
            self.owners.list[before.0 as usize].blocks -= 1;
            self.reuse_owner(before);
        }
        match (was_kept, is_kept) {
            (false, true) => self.add_dependent(self.parent(id)),
            (true, false) => self.remove_dependent(self.parent(id)),
            _ => {}
        }
    }

    /// The block before a named block, if it is still cached.
    fn parent(&self, id: BlockId) -> Option<BlockId> {
        let name = self.blocks[id.0 as usize].name.as_ref()?;
        let parent = self.blocks[name.parent_block.0 as usize].name.as_ref();
        // A block that has come back from host memory does not know the blocks after it that stayed.
        let is_parent = |parent: &&Name| name.parent != ROOT && parent.content == name.parent && parent.number < name.number;
        parent.filter(is_parent).map(|_| name.parent_block)
    }

    fn add_dependent(&mut self, mut block: Option<BlockId>) {
        while let Some(id) = block {
            let (free, list) = (self.blocks[id.0 as usize].holders == 0, self.list_of(id));
            let name = self.blocks[id.0 as usize].name.as_mut().expect("a named block");
            let was_kept = name.is_kept();
            name.dependents += 1;
            if free && list != FreeList::Needed {
                self.free.unlink(list, id);
                self.free.push_back(FreeList::Needed, id);
            }
            block = self.parent(id).filter(|_| !was_kept);
        }
    }

    fn remove_dependent(&mut self, mut block: Option<BlockId>) {
        while let Some(id) = block {
            let block_free = self.blocks[id.0 as usize].holders == 0;
            let name = self.blocks[id.0 as usize].name.as_mut().expect("a named block");
            name.dependents -= 1;
            if name.dependents > 0 {
                return;
            }
            let is_kept = name.is_kept();
            if block_free {
                self.free.unlink(FreeList::Needed, id);
                match self.list_of(id) {
                    // It was used when the block that depended on it was.
                    list @ FreeList::Owned(_) => self.free.push_front(list, id),
                    list => self.free.push_back(list, id),
                }
            }
            block = self.parent(id).filter(|_| !is_kept);
        }
    }
}
