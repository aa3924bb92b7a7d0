//! Which block each waiting request awaits: what keeps the order of the prefix
//! policy true while blocks are computed, without a look at every request.

use crate::policy::Policy;
use crate::request::{SeqId, Ticket};
use crate::sequence::{NO_ROW, Sequence};
use crate::{BlockHash, Scheduler};
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, VecDeque};

/// Sequences whose place is corrected in one step, at most: the rest follow in the next steps.
const MAX_FOLLOWED: usize = 64;

/// Waiting sequences, by the name of the block that they await.
#[derive(Debug, Default)]
pub(crate) struct Awaited {
    waiting: BTreeMap<(BlockHash, Ticket), SeqId>,
    /// How many await each name: nobody awaits most blocks that are computed, and that must be quick to see.
    names: FxHashMap<BlockHash, u32>,
    /// Names that are ready, or that nobody computes any more, each with the first ticket not yet told.
    ready: VecDeque<(BlockHash, Ticket)>,
}

impl Awaited {
    fn enter(&mut self, name: BlockHash, ticket: Ticket, id: SeqId) {
        self.waiting.insert((name, ticket), id);
        *self.names.entry(name).or_default() += 1;
    }

    /// Forgets what a sequence awaits.
    pub(crate) fn leave(&mut self, seq: &mut Sequence) {
        seq.awaited_from = None;
        let Some(block) = seq.awaited_block.take() else { return };
        let name = seq.names[block];
        self.waiting.remove(&(name, seq.ticket));
        let count = self.names.get_mut(&name).expect("somebody awaits it");
        *count -= 1;
        if *count == 0 {
            self.names.remove(&name);
        }
    }

    /// Notes that the block of that name is in the cache, or that nobody computes it any more.
    pub(crate) fn ready(&mut self, name: BlockHash) {
        if self.names.contains_key(&name) {
            self.ready.push_back((name, 0));
        }
    }

    /// The next sequence whose block is ready.
    fn next(&mut self) -> Option<SeqId> {
        while let Some((name, from)) = self.ready.front_mut() {
            if let Some((&(_, ticket), &id)) = self.waiting.range((*name, *from)..=(*name, Ticket::MAX)).next() {
                *from = ticket + 1;
                return Some(id);
            }
            self.ready.pop_front();
        }
        None
    }
}

impl Scheduler {
    /// Moves sequences whose cached prefix has grown to their new place.
    pub(crate) fn follow_awaited(&mut self) {
        for _ in 0..MAX_FOLLOWED {
            let Some(id) = self.awaited.next() else { return };
            let seq = &mut self.seqs[id];
            let (before, key) = (seq.chain.len(), seq.key);
            let ready = seq.awaited_block.filter(|&block| self.pool.is_named(seq.names[block]));
            self.awaited.leave(seq);
            let chain = self.pool.estimate(&seq.salt, &seq.names, ready.map_or(before, |block| block + 1));
            let now = chain.len();
            if now > before {
                seq.chain = chain;
                seq.uncached = (seq.tokens.len() - now * self.config.block_size as usize).max(1) as u32;
                self.queue.remove(key);
                self.place(id, true);
            } else {
                self.await_block(id, now);
            }
        }
    }

    /// Has a waiting sequence await a block of its own, if it has that many full ones.
    pub(crate) fn await_block(&mut self, id: SeqId, block: usize) {
        let seq = &mut self.seqs[id];
        if let Some(&name) = seq.names.get(block) {
            seq.awaited_block = Some(block);
            self.awaited.enter(name, seq.ticket, id);
        }
    }

    /// Looks up how much of a waiting sequence the cache has, from where it was looked up last.
    pub(crate) fn look_up(&mut self, id: SeqId) {
        let seq = &mut self.seqs[id];
        let size = self.config.block_size as usize;
        self.found.clear();
        seq.chain = self.pool.find_on(seq.chain.clone(), &seq.names, &seq.tokens, &mut self.found);
        seq.uncached = (seq.tokens.len() - seq.chain.len() * size).max(1) as u32;
    }

    /// Whether a prompt that is being computed will put what `id` needs next into the cache: then it would be a waste to
    /// compute that twice. The answer is remembered until all that both have in common is computed.
    pub(crate) fn is_being_computed(&mut self, id: SeqId) -> bool {
        if self.config.policy != Policy::Prefix || !self.config.prefix_caching {
            return false;
        }
        let seq = &self.seqs[id];
        if let (Some(from), Some(block)) = (seq.awaited_from, seq.awaited_block)
            && self.seqs.get(from).is_some_and(|other| computes(other, block))
        {
            return true;
        }
        let own = seq.chain.len();
        let same = self.partial.iter().find_map(|&other| {
            let running = self.seqs.get(other)?;
            let next = running.chain.len();
            let same = next >= own && computes(running, next) && running.names.get(next)? == seq.names.get(next)?;
            same.then_some((other, next))
        });
        let Some((other, next)) = same else { return false };
        // A name stands for its block and all before it: beyond the first that differs, all do.
        let common = {
            let (ours, theirs) = (&seq.names[next..], &self.seqs[other].names[next..]);
            let (mut low, mut high) = (1, ours.len().min(theirs.len()));
            while low < high {
                let middle = low.midpoint(high);
                (low, high) = if ours[middle] == theirs[middle] { (middle + 1, high) } else { (low, middle) };
            }
            next + low
        };
        self.awaited.leave(&mut self.seqs[id]);
        self.await_block(id, common - 1);
        self.seqs[id].awaited_from = Some(other);
        true
    }
}

/// Whether a sequence is computing its known tokens, and has yet to come to that block.
fn computes(seq: &Sequence, block: usize) -> bool {
    seq.row != NO_ROW && seq.computed < seq.tokens.len() as u32 && seq.chain.len() <= block
}
