//! One forward pass, as the model runner needs it: flat arrays of integers.

use crate::block::BlockId;
use crate::cost::Load;
use crate::request::{FinishReason, SeqId, Time, Token};
use crate::timeline::Timeline;
use std::cell::Cell;

/// Consecutive tokens of one sequence in one step: a piece of its prompt, a
/// decode token, or a decode token and the drafted ones after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Whose tokens.
    pub seq: SeqId,
    /// The sequence's place in the step buffers.
    pub slot: u32,
    /// Position of the first.
    pub start: u32,
    /// How many.
    pub len: u32,
    /// How many of them, at the end, are drafted.
    pub drafted: u32,
    /// Whether the chunk reaches the sequence's end, and so yields tokens:
    /// one, and one more for each drafted token that proves right.
    pub samples: bool,
    /// The first token and its cache slot, as the step buffers want them.
    pub(crate) token: i32,
    pub(crate) kv_slot: u32,
    /// Entries of the sequence's block table that the buffers have already;
    /// [`WHOLE_TABLE`] if they have them all.
    pub(crate) table_from: u32,
    /// The sequence's preemptions when this was planned: if it has more at the
    /// commit, its blocks are not the ones this chunk wrote.
    pub(crate) preemptions: u32,
}

/// Says that a chunk's block table did not change.
pub(crate) const WHOLE_TABLE: u32 = u32::MAX;

/// A sequence that got a slot of the batch in this step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Admitted {
    /// The slot it holds until it ends or is preempted.
    pub slot: u32,
    /// The sequence.
    pub seq: SeqId,
    /// Its request's tag.
    pub tag: u64,
    /// Prompt tokens that were in the cache when it was first admitted.
    pub cached_tokens: u32,
    /// How long it had waited then, in microseconds.
    pub queued: Time,
}

/// What one forward pass computes. Spend it with [`Scheduler::commit`](crate::Scheduler::commit).
#[derive(Debug, Default)]
#[must_use = "the sequences of a plan that is never committed wait for ever"]
pub struct StepPlan {
    /// In batch order: decodes, then pieces of prompts in the order of their planning.
    pub chunks: Vec<Chunk>,
    /// Blocks to be copied to the host pool, (device, host), before anything else.
    pub swap_out: Vec<(BlockId, u32)>,
    /// Blocks to be copied from the host pool, (host, device), after that.
    pub swap_in: Vec<(u32, BlockId)>,
    /// Blocks to be copied, (from, to), one after the other, after that and before the pass.
    pub copies: Vec<(BlockId, BlockId)>,
    /// Sequences admitted in this step.
    pub admitted: Vec<Admitted>,
    /// Tags of the sequences that lost their blocks and slot to make room.
    pub preempted: Vec<u64>,
    /// What the step has to do, for the step-time model.
    pub load: Load,
    /// The plan's place in the order of commits.
    pub(crate) step: u64,
    pub(crate) planned: Time,
}

/// How much of each array a plan fills.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lens {
    /// Tokens in the pass.
    pub tokens: usize,
    /// Sequences in the pass.
    pub seqs: usize,
    /// Positions to be sampled.
    pub samples: usize,
    /// Blocks to be copied first.
    pub copies: usize,
    /// Entries of block tables that changed.
    pub table_writes: usize,
}

/// One token, on its way to the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Output {
    /// Whose token.
    pub tag: u64,
    /// The token; meaningless with [`FinishReason::Error`].
    pub token: Token,
    /// Set with the request's last token.
    pub finish: Option<FinishReason>,
}

/// What one step gave: reused from step to step, so that a steady step does
/// not allocate.
#[derive(Debug, Default)]
pub struct Outputs {
    /// One a token, in batch order; several of one sequence stand together.
    pub tokens: Vec<Output>,
    /// One a request that ended.
    pub ended: Vec<Timeline>,
}

/// Arrays that the caller owns (pinned, say, so that a copy to the device can
/// overlap) and may look at while they are filled: hence `Cell`.
#[derive(Clone, Copy, Debug)]
pub struct StepBuffers<'a> {
    /// `[max_tokens]`: tokens; `-(slot + 1)` stands for the token that the
    /// slot sampled in the step before, when that step was not yet committed.
    pub input_ids: &'a [Cell<i32>],
    /// `[max_tokens]`
    pub positions: &'a [Cell<i32>],
    /// `[max_tokens]`: cache slot of each token's key and value, block * block size + offset.
    pub slot_mapping: &'a [Cell<i32>],
    /// `[max_seqs + 1]`: first token of each sequence, and the end of the last.
    pub query_starts: &'a [Cell<i32>],
    /// `[max_seqs]`: context length after the pass.
    pub context_lens: &'a [Cell<i32>],
    /// `[max_seqs]`: batch slot of each sequence.
    pub batch_slots: &'a [Cell<i32>],
    /// `[max_tokens]`: index on the token axis of each position to be sampled.
    pub sample_at: &'a [Cell<i32>],
    /// `[max_tokens]`: slot of each position to be sampled.
    pub sample_slots: &'a [Cell<i32>],
    /// `[2 * max_seqs]`: pairs of blocks, from and to.
    pub copies: &'a [Cell<i32>],
    /// `[max_seqs, max_blocks]`, row-major, by slot, and kept from step to
    /// step: only entries that changed are written.
    pub block_tables: &'a [Cell<i32>],
    /// `[2 * max_seqs * max_blocks]`, or empty where nobody keeps the tables
    /// elsewhere: pairs of a place in `block_tables` and what was written there.
    pub table_writes: &'a [Cell<i32>],
    /// Row length of `block_tables`.
    pub max_blocks: usize,
}

impl StepPlan {
    /// Makes an empty plan of a spent one, keeping its memory.
    pub(crate) fn reuse(mut self, step: u64, now: Time) -> Self {
        self.chunks.clear();
        self.swap_out.clear();
        self.swap_in.clear();
        self.copies.clear();
        self.admitted.clear();
        self.preempted.clear();
        self.load = Load::default();
        (self.step, self.planned) = (step, now);
        self
    }
}
