//! Where evicted blocks of sessions go in host memory, and how they come back.
//!
//! A block is either on the device or in host memory. It keeps its content number, so the blocks that continue it are found after it
//! wherever they are.

use super::free_lists::EvictionClass;
use super::host_pool::{HostBlock, HostList, Place};
use super::owners::{CacheOwner, Owner};
use super::{BlockHash, BlockId, BlockPool, BlockTable, Chain, Content};
use crate::request::Token;

impl BlockPool {
    /// Number of host blocks, and of those that no swapped sequence holds.
    pub(crate) fn host(&self) -> (usize, usize) {
        (self.host.len(), self.host.free())
    }

    /// Number of host blocks that the current plan can give to swapped sequences.
    pub(crate) fn host_room(&self) -> usize {
        self.host.room()
    }

    /// Begins the plan of `step`. `keeps` is set if blocks of sessions that it evicts are copied to host memory, and `reads` if it makes
    /// copies from host memory of an earlier plan.
    pub(crate) fn begin_plan(&mut self, step: u64, keeps: bool, reads: bool) {
        self.host.keeps_in = keeps.then_some(step);
        if !reads {
            self.host.settle();
        }
    }

    /// Ends a plan. Appends its copies to host memory to `copies`, and returns their number. Where two have the same host block, the later
    /// one counts.
    pub(crate) fn end_plan(&mut self, copies: &mut Vec<(BlockId, u32)>) -> usize {
        self.host.keeps_in = None;
        self.release_copied();
        let before = copies.len();
        copies.append(&mut self.host.copies);
        copies.len() - before
    }

    /// Copies a block to a host block for a swapped sequence, and returns that. Panics if there is no [room](Self::host_room).
    pub(in crate::memory) fn copy_to_host(&mut self, id: BlockId) -> u32 {
        let host = self.take_host(None, None).expect("a host block that no sequence holds");
        self.host.copies.push((id, host));
        host
    }

    /// Releases the host blocks of a swapped sequence.
    pub(in crate::memory) fn release_host(&mut self, blocks: &mut Vec<u32>) {
        self.host.release(blocks);
    }

    /// Whether evicted blocks are in host memory.
    pub(crate) fn has_kept(&self) -> bool {
        self.host.cached() > 0
    }

    /// Number of blocks in host memory that continue the first `from` of these names. Only the names are compared.
    pub(in crate::memory) fn kept_after(&self, from: usize, names: &[BlockHash]) -> usize {
        names.get(from..).map_or(0, |names| names.partition_point(|&name| self.host.has(name)))
    }

    /// The content of the block with this name in host memory.
    pub(in crate::memory) fn kept_content(&self, name: BlockHash) -> Option<Content> {
        self.host.content_of(name)
    }

    /// Copies blocks that continue `chain` from host memory to new blocks of `table`, which has the blocks of the chain. It copies at most
    /// `most` blocks, and as many as are free, and returns their number. Appends the copies to `reads`, and calls `on_name` for each block.
    /// The blocks are complete after the current plan's `step`.
    pub(crate) fn read_back(
        &mut self,
        table: &mut BlockTable,
        mut chain: Chain,
        (names, tokens): (&[BlockHash], &[Token]),
        (most, step): (usize, u64),
        reads: &mut Vec<(u32, BlockId)>,
        mut on_name: impl FnMut(BlockHash),
    ) -> usize {
        let first = chain.len;
        for (&name, tokens) in names.iter().zip(tokens.chunks_exact(self.block_size)).skip(first).take(most) {
            if self.free() == 0 {
                break;
            }
            let Some((host, block)) = self.host.remove(name, &chain, tokens) else { break };
            let id = self.take_free(table.owner);
            table.ids.push(id);
            self.give_name(id, &chain, (name, block.content), tokens, step);
            self.blocks[id.0 as usize].name.as_mut().expect("it was just named").users = block.users;
            chain.advance(block.content, id);
            reads.push((host, id));
            on_name(name);
        }
        chain.len - first
    }

    /// Copies a block that is evicted to host memory, if it belongs to a session and there is room. Returns whether it does.
    pub(super) fn keep_on_host(&mut self, id: BlockId, taker: Option<CacheOwner>) -> bool {
        let Some(step) = self.host.keeps_in else { return false };
        let name = self.blocks[id.0 as usize].name.as_ref().expect("a named block");
        let list = match name.owner {
            Owner::Owned(owner) if !self.owners.has_ended(owner) => HostList::Owned(owner),
            // Without the blocks that several sessions share, those after them would not be found.
            Owner::Common if self.host.cached() > 0 => HostList::Common,
            _ => return false,
        };
        // The copy runs before the step, and reads only what earlier steps have written.
        if name.step >= step {
            return false;
        }
        let hash = name.hash;
        let Some(host) = self.take_host(Some(list), taker) else { return false };
        let name = self.blocks[id.0 as usize].name.as_mut().expect("a named block");
        let (users, scope) = (std::mem::take(&mut name.users), name.scope.clone());
        let kept = HostBlock { hash, content: name.content, parent: name.parent, scope, users, list };
        self.host.add(host, kept, &self.tokens[id.0 as usize * self.block_size..][..self.block_size]);
        self.host.copies.push((id, host));
        true
    }

    /// Drops the blocks that an owner has in host memory.
    pub(super) fn drop_owner_from_host(&mut self, owner: CacheOwner) {
        self.drop_list_from_host(HostList::Owned(owner));
    }

    /// Panics unless the host pool agrees with the blocks that swapped sequences hold.
    pub(in crate::memory) fn check_host(&self, held: impl Iterator<Item = u32>) {
        self.host.check(held);
        assert!(self.host.copies.is_empty() && self.host.keeps_in.is_none(), "a plan did not end");
        assert!(!self.named.keys().any(|&name| self.host.has(name)), "a block is on the device and in host memory");
    }

    /// Takes a host block for a block of a list, or for a swapped sequence without one. Lists that are dropped before that list lose their
    /// blocks for it, and all lists do for a swapped sequence.
    fn take_host(&mut self, list: Option<HostList>, taker: Option<CacheOwner>) -> Option<u32> {
        loop {
            if let Some(block) = self.host.take() {
                return Some(block);
            }
            let dropped = self.host.first_dropped(list)?;
            self.drop_from_host(dropped, taker);
        }
    }

    /// Places an owner's list in the order in which lists are dropped: sessions that were parked and have no request, the one that was parked
    /// first at the front, because it may never send another; those that wait for their turns, the last one first; those that are coming
    /// back; common blocks.
    pub(super) fn rank_on_host(&mut self, owner: CacheOwner) {
        let number = owner.number();
        let place: Place = match self.free.rank_of(number) {
            (EvictionClass::Ended | EvictionClass::Parked, since) => (0, since, number),
            (EvictionClass::ParkedWaiting, since) => (1, u64::MAX - since, number),
            (EvictionClass::Active, _) => (2, 0, number),
        };
        self.host.rank(HostList::Owned(owner), place);
    }

    fn drop_from_host(&mut self, list: HostList, taker: Option<CacheOwner>) {
        let dropped = self.drop_list_from_host(list);
        if let HostList::Owned(owner) = list {
            self.count_evicted(owner, taker, dropped);
        }
    }

    /// Drops the blocks of a list, and returns their number.
    fn drop_list_from_host(&mut self, list: HostList) -> u32 {
        let dropped = self.host.drop_list(list);
        let number = dropped.len() as u32;
        for block in dropped {
            self.remember_users_of(block.hash, block.users);
        }
        number
    }
}
