//! Held sequences: they keep computed KV between two requests.

use crate::error::Rejected;
use crate::memory::{Kv, SeqBlocks};
use crate::request::{HeldId, Time};
use crate::sessions::SessionRef;
use slotmap::SlotMap;
use std::collections::BTreeMap;
use std::sync::Arc;

/// A held sequence.
#[derive(Debug)]
pub(crate) struct HeldSeq {
    /// Number in the order of opening, forks included.
    pub(crate) number: u64,
    /// The tenant that the sequence counts against.
    pub(crate) tenant: u32,
    pub(crate) blocks: SeqBlocks,
    /// The session of the request that left the blocks.
    pub(crate) session: Option<SessionRef>,
    /// Leading tokens with KV in the blocks.
    pub(crate) computed: u32,
    /// Whether a request continues the sequence.
    busy: bool,
    /// When the sequence got its blocks.
    pub(crate) since: Time,
    /// Position in the order of use.
    used: u64,
    /// The last plan that admitted a request which continues the sequence.
    planned: u64,
}

/// All held sequences.
#[derive(Debug, Default)]
pub(crate) struct Held {
    seqs: SlotMap<HeldId, HeldSeq>,
    /// Sequences with blocks, least recently used first.
    by_use: BTreeMap<u64, HeldId>,
    /// Blocks of all held sequences. A shared block counts once for each.
    blocks: usize,
    opened: u64,
    uses: u64,
}

impl Held {
    /// Adds a sequence. Its `blocks` hold its first `computed` tokens.
    pub(crate) fn open(&mut self, tenant: u32, blocks: SeqBlocks, computed: u32, session: Option<SessionRef>, now: Time) -> HeldId {
        let empty = SeqBlocks::new(Arc::clone(blocks.scope()));
        let seq =
            HeldSeq { number: self.opened, tenant, blocks: empty, session, computed: 0, busy: false, since: now, used: 0, planned: 0 };
        self.opened += 1;
        let id = self.seqs.insert(seq);
        self.fill(id, blocks, computed, session, now);
        id
    }

    pub(crate) fn get(&self, id: HeldId) -> Option<&HeldSeq> {
        self.seqs.get(id)
    }

    /// Number of held sequences opened so far, forks included.
    pub(crate) fn opened(&self) -> u64 {
        self.opened
    }

    /// Number of held sequences.
    pub(crate) fn len(&self) -> usize {
        self.seqs.len()
    }

    /// Blocks of all held sequences. A shared block counts once for each.
    pub(crate) fn blocks(&self) -> usize {
        self.blocks
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &HeldSeq> + Clone {
        self.seqs.values()
    }

    /// Begins a request that continues a sequence.
    pub(crate) fn begin(&mut self, id: HeldId) -> Result<(), Rejected> {
        let seq = self.seqs.get_mut(id).ok_or(Rejected::NotHeld)?;
        if std::mem::replace(&mut seq.busy, true) {
            return Err(Rejected::HeldBusy);
        }
        self.touch(id);
        Ok(())
    }

    /// Ends the request that continues a sequence. Returns false if the sequence was dropped.
    pub(crate) fn end(&mut self, id: HeldId) -> bool {
        self.seqs.get_mut(id).map(|seq| seq.busy = false).is_some()
    }

    /// Gives blocks to a sequence that has none, from a request of a session if it had one.
    pub(crate) fn fill(&mut self, id: HeldId, blocks: SeqBlocks, computed: u32, session: Option<SessionRef>, now: Time) {
        let seq = &mut self.seqs[id];
        self.blocks += blocks.held();
        (seq.blocks, seq.computed, seq.session, seq.since) = (blocks, computed, session, now);
        self.touch(id);
    }

    /// Takes the blocks of a sequence. Returns them with its tenant and the time it held them.
    pub(crate) fn take(&mut self, id: HeldId, now: Time) -> (SeqBlocks, u32, Time) {
        let seq = &mut self.seqs[id];
        self.by_use.remove(&seq.used);
        self.blocks -= seq.blocks.held();
        seq.computed = 0;
        let empty = SeqBlocks::new(Arc::clone(seq.blocks.scope()));
        (std::mem::replace(&mut seq.blocks, empty), seq.tenant, now.saturating_sub(seq.since))
    }

    /// Makes a sequence the most recently used.
    pub(crate) fn touch(&mut self, id: HeldId) {
        let Some(seq) = self.seqs.get_mut(id) else { return };
        self.by_use.remove(&seq.used);
        self.uses += 1;
        seq.used = self.uses;
        if seq.blocks.held() > 0 {
            self.by_use.insert(self.uses, id);
        }
    }

    /// Keeps a sequence's blocks until the end of plan number `plan`, because the step copies from them.
    pub(crate) fn keep(&mut self, id: HeldId, plan: u64) {
        self.touch(id);
        if let Some(seq) = self.seqs.get_mut(id) {
            seq.planned = plan;
        }
    }

    /// The sequences that can lose their blocks in plan number `plan`, least recently used first.
    pub(crate) fn victims(&self, plan: u64) -> impl Iterator<Item = (HeldId, &HeldSeq)> {
        self.by_use.values().map(|&id| (id, &self.seqs[id])).take_while(move |(_, seq)| seq.planned != plan)
    }

    /// Removes a sequence without blocks.
    pub(crate) fn remove(&mut self, id: HeldId) {
        let seq = self.seqs.remove(id).expect("the caller looked");
        debug_assert_eq!(seq.blocks.held(), 0);
    }

    /// Releases the blocks of all sequences.
    pub(crate) fn free_all(&mut self, kv: &mut Kv) {
        self.seqs.values_mut().for_each(|seq| kv.free_all(&mut seq.blocks));
    }

    /// Panics unless the order and the counts agree with the sequences.
    pub(crate) fn check(&self, block_size: u32) {
        assert_eq!(self.blocks, self.iter().map(|seq| seq.blocks.held()).sum::<usize>(), "blocks of held sequences");
        assert_eq!(self.by_use.len(), self.iter().filter(|seq| seq.blocks.held() > 0).count(), "order of held sequences");
        assert!(self.by_use.iter().all(|(used, &id)| self.seqs[id].used == *used));
        for seq in self.iter() {
            assert_eq!(seq.blocks.held(), seq.computed.div_ceil(block_size) as usize, "blocks of a held sequence");
        }
    }
}
