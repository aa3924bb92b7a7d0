//! Keeps the order of the prefix policy correct as prefixes grow.

use super::Scheduler;
use crate::request::SeqId;

impl Scheduler {
    /// Moves sequences whose cached prefix has grown, or whose awaited prompt has ended, to their new position.
    pub(super) fn reorder_ready(&mut self) {
        let mut last = None;
        self.waiting.begin_moves();
        while let Some(id) = self.waiting.next_ready() {
            let seq = &mut self.seqs[id];
            let awaited = seq.queue_entry.awaited().map(|awaited| awaited.block);
            let ready = awaited.filter(|&block| self.kv.is_named(seq.blocks.names()[block]));
            self.waiting.await_nothing(seq);
            let before = seq.blocks.cached_len();
            let cached = self.kv.estimate(&seq.blocks, ready.map_or(before, |block| block + 1), &mut last);
            let next = cached.len();
            if next > before {
                self.kv.set_chain(&mut seq.blocks, cached);
                seq.measure_uncached(self.config.block_size);
            }
            if !self.is_being_computed(id) {
                self.waiting.await_block(&mut self.seqs[id], id, next, None);
            }
            self.reorder(id);
        }
    }

    /// Moves a waiting sequence behind all others while it awaits the blocks of a running prompt, as far as this plan may.
    pub(super) fn move_last(&mut self, id: SeqId) {
        if self.key(&self.seqs[id]) != self.seqs[id].queue_entry.key() && self.waiting.take_move() {
            self.reorder(id);
        }
    }

    /// Moves a waiting sequence to its current position.
    fn reorder(&mut self, id: SeqId) {
        let key = self.key(&self.seqs[id]);
        self.waiting.reorder(&mut self.seqs[id], id, key);
    }
}
