//! The block that each waiting request awaits. It keeps the prefix policy's order correct while blocks are computed,
//! without a scan of all requests.

use crate::memory::BlockHash;
use crate::request::{ArrivalNumber, SeqId};
use crate::sequence::{AwaitedBlock, Sequence};
use rustc_hash::FxHashMap;
use std::collections::{BTreeMap, VecDeque};

/// Waiting sequences by the name of the block that they await.
#[derive(Debug, Default)]
pub(crate) struct Awaited {
    waiting: BTreeMap<(BlockHash, ArrivalNumber), SeqId>,
    /// Number of sequences that await each name. Most computed blocks are awaited by no sequence, so this check must be fast.
    names: FxHashMap<BlockHash, u32>,
    /// Names that are ready, or that no sequence computes any more, each with the first arrival not yet reported.
    ready: VecDeque<(BlockHash, ArrivalNumber)>,
}

impl Awaited {
    /// Makes a sequence await block number `block`, if it has that many full blocks.
    pub(crate) fn enter(&mut self, seq: &mut Sequence, id: SeqId, block: usize, computed_by: Option<SeqId>) {
        let Some(&name) = seq.blocks.names().get(block) else { return };
        self.waiting.insert((name, seq.spec().arrival_number), id);
        *self.names.entry(name).or_default() += 1;
        seq.queue_entry.set_awaited(Some(AwaitedBlock { block, computed_by }));
    }

    /// Clears the block that a sequence awaits.
    pub(crate) fn leave(&mut self, seq: &mut Sequence) {
        let Some(AwaitedBlock { block, .. }) = seq.queue_entry.awaited() else { return };
        seq.queue_entry.set_awaited(None);
        let name = seq.blocks.names()[block];
        self.waiting.remove(&(name, seq.spec().arrival_number));
        let count = self.names.get_mut(&name).expect("somebody awaits it");
        *count -= 1;
        if *count == 0 {
            self.names.remove(&name);
        }
    }

    /// Records that the block with this name is cached, or that no sequence computes it any more.
    pub(crate) fn ready(&mut self, name: BlockHash) {
        if self.names.contains_key(&name) {
            self.ready.push_back((name, 0));
        }
    }

    /// Whether [`next`](Self::next) will return this sequence. For tests.
    pub(crate) fn will_return(&self, seq: &Sequence) -> bool {
        let awaited = seq.queue_entry.awaited().map(|awaited| seq.blocks.names()[awaited.block]);
        self.ready.iter().any(|&(name, from)| Some(name) == awaited && from <= seq.spec().arrival_number)
    }

    /// The next sequence whose awaited block is ready.
    pub(crate) fn next(&mut self) -> Option<SeqId> {
        while let Some((name, from)) = self.ready.front_mut() {
            if let Some((&(_, arrival_number), &id)) = self.waiting.range((*name, *from)..=(*name, ArrivalNumber::MAX)).next() {
                *from = arrival_number + 1;
                return Some(id);
            }
            self.ready.pop_front();
        }
        None
    }
}
