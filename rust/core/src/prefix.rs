//! Whose cached prefix would grow by which block: what keeps the order of the
//! prefix policy true while blocks are computed, without a look at everybody.

use crate::request::{SeqId, Ticket};
use crate::{BlockHash, Scheduler};
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, VecDeque};

/// Sequences whose place is put right in one step, at most: the rest follow in the next ones.
const FOLLOWED: usize = 64;

/// Waiting sequences, by the name of the first full block of theirs that the cache lacks.
#[derive(Debug, Default)]
pub(crate) struct Hopes {
    waiting: BTreeMap<(BlockHash, Ticket), SeqId>,
    /// How many wait for each name: most blocks that are computed are nobody's hope, and that must be quick to see.
    names: FxHashMap<BlockHash, u32>,
    /// Names that came into the cache, for which somebody waits.
    fulfilled: VecDeque<BlockHash>,
}

impl Hopes {
    pub(crate) fn add(&mut self, name: BlockHash, ticket: Ticket, id: SeqId) {
        self.waiting.insert((name, ticket), id);
        *self.names.entry(name).or_default() += 1;
    }

    pub(crate) fn remove(&mut self, name: BlockHash, ticket: Ticket) {
        self.waiting.remove(&(name, ticket));
        let count = self.names.get_mut(&name).expect("somebody waits for it");
        *count -= 1;
        if *count == 0 {
            self.names.remove(&name);
        }
    }

    /// Notes that a block of that name is in the cache.
    pub(crate) fn sealed(&mut self, name: BlockHash) {
        if self.names.contains_key(&name) {
            self.fulfilled.push_back(name);
        }
    }

    /// Takes out somebody whose block came.
    fn next(&mut self) -> Option<SeqId> {
        while let Some(&name) = self.fulfilled.front() {
            if let Some((&(_, ticket), &id)) = self.waiting.range((name, 0)..=(name, Ticket::MAX)).next() {
                self.remove(name, ticket);
                return Some(id);
            }
            self.fulfilled.pop_front();
        }
        None
    }
}

impl Scheduler {
    /// Puts sequences whose cached prefix has grown to their new place.
    pub(crate) fn follow_hopes(&mut self) {
        for _ in 0..FOLLOWED {
            let Some(id) = self.hopes.next() else { return };
            let seq = &mut self.seqs[id];
            seq.hope = None;
            let (before, key) = (seq.chain.len(), seq.key);
            self.look_up(id);
            if self.seqs[id].chain.len() > before {
                self.queue.remove(key);
                self.place(id, true);
            }
        }
    }

    /// Looks how much of a waiting sequence the cache has, from where it was looked at last.
    pub(crate) fn look_up(&mut self, id: SeqId) {
        let seq = &mut self.seqs[id];
        let size = self.config.block_size as usize;
        self.found.clear();
        let chain = seq.chain.clone();
        let from = chain.len() * size;
        seq.chain = self.pool.find_on(chain, &seq.tokens[from..], &mut self.found);
        let cached = seq.chain.len() * size;
        seq.uncached = (seq.tokens.len() - cached).max(1) as u32;
        self.record_found(id, from / size);
    }

    /// Whether a prompt under way will put into the cache what `id` needs next:
    /// then computing that twice would be a waste.
    pub(crate) fn is_on_its_way(&mut self, id: SeqId) -> bool {
        let (seq, size) = (&self.seqs[id], self.config.block_size as usize);
        let block = seq.chain.len() * size..(seq.chain.len() + 1) * size;
        let Some(wanted) = seq.tokens.get(block.clone()) else { return false };
        let mut others = self.partial.iter().filter_map(|&other| self.seqs.get(other));
        let is_on_its_way = others.any(|other| {
            other.chain.equals(&seq.chain) && other.computed < other.tokens.len() as u32 && other.tokens.get(block.clone()) == Some(wanted)
        });
        if is_on_its_way && let Some(journal) = &mut self.journal {
            journal.name(seq, seq.chain.len() as u32, self.pool.next_name(&seq.chain, wanted));
        }
        is_on_its_way
    }
}
