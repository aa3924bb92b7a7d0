//! A sequence's next chunk: its last token, a prompt piece or drafted tokens.

use super::Sequence;
use crate::request::{SeqId, Token};
use crate::step::{Chunk, WHOLE_TABLE};

impl Sequence {
    /// Number of tokens that can be drafted. `None` unless the next token to compute is the last token.
    pub(crate) fn draft_room(&self) -> Option<usize> {
        let len = self.len();
        let decodes = self.is_running() && self.progress.pending == 0 && self.progress.computed + 1 == len;
        decodes.then(|| (self.progress.limit - len - 1) as usize)
    }

    /// Sets the drafted tokens. Returns false unless the next token to compute is the last token.
    pub(crate) fn propose(&mut self, tokens: &[Token]) -> bool {
        let Some(room) = self.draft_room() else { return false };
        self.draft.clear();
        self.draft.extend(tokens.iter().take(room));
        self.progress.fast_path_limit = 0;
        true
    }

    /// Uses the first `len` drafted tokens in the step that is being planned and drops the rest.
    pub(crate) fn use_draft(&mut self, len: u32) {
        self.draft.truncate(len as usize);
        self.progress.drafting = len > 0;
    }

    /// Disables the fast path, because the sequence was stalled or lost its slot.
    pub(crate) fn leave_fast_path(&mut self) {
        self.progress.fast_path_limit = 0;
    }

    /// The `input_ids` value of the token at `position`: the token, or `-(slot + 1)` for the token that the slot sampled last.
    pub(crate) fn input_at(&self, slot: u32, position: usize) -> i32 {
        let draft = || self.draft.get(position - self.tokens.len()).filter(|_| self.progress.drafting);
        match self.tokens.get(position).or_else(draft) {
            Some(&token) => token as i32,
            None => -(slot as i32) - 1,
        }
    }

    /// Whether the next token is the last token, needs no new block and does not complete a block.
    #[inline]
    pub(crate) fn is_on_fast_path(&self) -> bool {
        self.progress.computed < self.progress.fast_path_limit
    }

    /// Plans the next token of a sequence on the fast path.
    #[inline]
    pub(crate) fn fast_chunk(&mut self, id: SeqId, slot: u32) -> Chunk {
        let progress = &mut self.progress;
        let start = progress.computed;
        let token = if progress.pending == 0 { *self.tokens.last().expect("a prompt") as i32 } else { -(slot as i32) - 1 };
        let kv_slot = progress.next_kv_slot;
        progress.computed += 1;
        progress.next_kv_slot += 1;
        progress.pending += 1;
        Chunk {
            seq: id,
            slot,
            start,
            len: 1,
            drafted: 0,
            samples: true,
            token,
            kv_slot,
            table_from: WHOLE_TABLE,
            preemptions: progress.preemptions,
        }
    }

    /// Plans the next `len` tokens. They count as computed from now on, because later plans run later.
    pub(crate) fn next_chunk(&mut self, id: SeqId, len: u32, table_from: u32, block_size: u32) -> Chunk {
        let slot = self.slot().expect("it runs");
        let start = self.progress.computed;
        let drafted = if self.progress.drafting { self.draft.len() as u32 } else { 0 };
        let (token, kv_slot) = (self.input_at(slot, start as usize), self.blocks.kv_slot(start, block_size));
        let samples = start + len == self.expected_len() + drafted;
        let progress = &mut self.progress;
        progress.computed += len;
        progress.pending += u32::from(samples);
        // The next token is on the fast path if its block is allocated and it is not the block's last token.
        let offset = progress.computed % block_size;
        if samples && drafted == 0 && offset != 0 {
            progress.next_kv_slot = self.blocks.kv_slot(progress.computed, block_size);
            progress.fast_path_limit = progress.computed - offset + block_size - 1;
        } else {
            progress.fast_path_limit = 0;
        }
        Chunk { seq: id, slot, start, len, drafted, samples, token, kv_slot, table_from, preemptions: progress.preemptions }
    }

    /// Records the commit of a step that samples for this sequence.
    #[inline]
    pub(crate) fn take_sample(&mut self) {
        self.progress.pending -= 1;
    }

    /// Drops the draft of a committed chunk, after which `computed` tokens are computed. The sequence's length was provisional with the
    /// draft. If the sequence was preempted after planning, its computed tokens are others.
    pub(crate) fn settle_draft(&mut self, chunk: &Chunk, computed: u32) {
        self.progress.drafting = false;
        self.draft.clear();
        if self.progress.preemptions == chunk.preemptions {
            self.progress.computed = computed;
        }
    }
}
