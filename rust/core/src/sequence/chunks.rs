//! A sequence's next chunk: its last token, a piece of its prompt, or drafted tokens.

use super::Sequence;
use crate::batch::{Chunk, WHOLE_TABLE};
use crate::request::{SeqId, Token};

impl Sequence {
    /// How many tokens can be proposed after its last one. `None` unless it computes its last token next.
    pub(crate) fn draft_room(&self) -> Option<usize> {
        let len = self.len();
        let decodes = self.is_running() && self.progress.pending == 0 && self.progress.computed + 1 == len;
        decodes.then(|| (self.progress.limit - len - 1) as usize)
    }

    /// Proposes the tokens after its last one. False unless it computes its last token next.
    pub(crate) fn propose(&mut self, tokens: &[Token]) -> bool {
        let Some(room) = self.draft_room() else { return false };
        self.draft.clear();
        self.draft.extend(tokens.iter().take(room));
        self.progress.fast_path_limit = 0;
        true
    }

    /// Puts the first so many drafted tokens into the step that is being planned, and drops the others.
    pub(crate) fn use_draft(&mut self, len: u32) {
        self.draft.truncate(len as usize);
        self.progress.drafting = len > 0;
    }

    /// The next chunk may not be its last token alone: it was stalled, or lost its slot.
    pub(crate) fn leave_fast_path(&mut self) {
        self.progress.fast_path_limit = 0;
    }

    /// What the step buffers say for the token at `position`: the token, or
    /// `-(slot + 1)` for "the token that this slot sampled last".
    pub(crate) fn input_at(&self, slot: u32, position: usize) -> i32 {
        let draft = || self.draft.get(position - self.tokens.len()).filter(|_| self.progress.drafting);
        match self.tokens.get(position).or_else(draft) {
            Some(&token) => token as i32,
            None => -(slot as i32) - 1,
        }
    }

    /// Whether its next token is the last of all, and neither needs a block nor completes one.
    #[inline]
    pub(crate) fn is_on_fast_path(&self) -> bool {
        self.progress.computed < self.progress.fast_path_limit
    }

    /// The next token of a sequence on the fast path.
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

    /// Its next `len` tokens. From now on they count as computed: whatever is
    /// planned later runs later.
    pub(crate) fn next_chunk(&mut self, id: SeqId, len: u32, table_from: u32, block_size: u32) -> Chunk {
        let slot = self.slot().expect("it runs");
        let start = self.progress.computed;
        let drafted = if self.progress.drafting { self.draft.len() as u32 } else { 0 };
        let (token, kv_slot) = (self.input_at(slot, start as usize), self.blocks.kv_slot(start, block_size));
        let samples = start + len == self.expected_len() + drafted;
        let progress = &mut self.progress;
        progress.computed += len;
        progress.pending += u32::from(samples);
        // The next one is fast if its block is there, and it is not the block's last.
        let offset = progress.computed % block_size;
        if samples && drafted == 0 && offset != 0 {
            progress.next_kv_slot = self.blocks.kv_slot(progress.computed, block_size);
            progress.fast_path_limit = progress.computed - offset + block_size - 1;
        } else {
            progress.fast_path_limit = 0;
        }
        Chunk { seq: id, slot, start, len, drafted, samples, token, kv_slot, table_from, preemptions: progress.preemptions }
    }

    /// Notes that a step which samples for it is committed.
    #[inline]
    pub(crate) fn take_sample(&mut self) {
        self.progress.pending -= 1;
    }

    /// Drops the draft of a committed chunk. With it the length was a guess, but a sequence that lost its blocks since the chunk
    /// was planned has nothing computed.
    pub(crate) fn settle_draft(&mut self, chunk: &Chunk) {
        self.progress.drafting = false;
        self.draft.clear();
        if self.progress.preemptions == chunk.preemptions {
            self.progress.computed = self.len() - 1;
        }
    }
}
