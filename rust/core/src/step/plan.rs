//! The plan of one forward pass, as flat integer arrays for the model runner.

use crate::memory::{BlockId, StateSlot};
use crate::request::{SeqId, Time};
use crate::step_time::{BackgroundRoom, Load};
use std::cell::Cell;

/// Consecutive tokens of one sequence in one step: a piece of its prompt, a decode token, or a decode token followed by
/// drafted tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// The sequence.
    pub seq: SeqId,
    /// The sequence's slot in the step buffers.
    pub slot: u32,
    /// Position of the first token.
    pub start: u32,
    /// Number of tokens.
    pub len: u32,
    /// Number of drafted tokens at the end of the chunk.
    pub drafted: u32,
    /// Whether the chunk reaches the sequence's end and therefore samples. It yields one token, plus one for each
    /// accepted drafted token.
    pub samples: bool,
    /// Value for `input_ids` of the first token.
    pub(crate) token: i32,
    pub(crate) kv_slot: u32,
    /// Number of block table entries already written to the buffers. [`WHOLE_TABLE`] if all are written.
    pub(crate) table_from: u32,
    /// The sequence's preemption count at planning. If the count is higher at the commit, the sequence no longer holds
    /// the blocks that this chunk wrote.
    pub(crate) preemptions: u32,
}

/// Value of `table_from` for a block table without changes.
pub(crate) const WHOLE_TABLE: u32 = u32::MAX;

/// A sequence that was given a slot in this step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Admitted {
    /// The slot that the sequence holds until it ends or is preempted.
    pub slot: u32,
    /// The sequence.
    pub seq: SeqId,
    /// The request's tag.
    pub tag: u64,
    /// Prompt tokens that were cached when the request was first admitted.
    pub cached_tokens: u32,
    /// Those of them that the tenant may be told of: see [`Timeline::own_cached_tokens`](crate::Timeline::own_cached_tokens).
    pub own_cached_tokens: u32,
    /// Time the request had waited when first admitted, in microseconds.
    pub queued: Time,
}

/// What a step does with recurrent states. Empty for a model without recurrent layers.
#[derive(Debug, Default)]
pub struct StateMoves {
    /// The slot of each chunk's state, in the order of the chunks. A chunk at position 0 begins without a state, whatever its
    /// slot holds.
    pub slots: Vec<StateSlot>,
    /// Copies between slots, (from, to). They run one after another, after the block copies and before the pass.
    pub copies: Vec<(StateSlot, StateSlot)>,
    /// The states that the pass saves. Only later steps read them.
    pub saves: Vec<StateSave>,
}

/// A state that a pass saves while it computes a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateSave {
    /// Index of the chunk.
    pub chunk: u32,
    /// Number of the sequence's tokens after which the state is saved: after the chunk's first token at least.
    pub position: u32,
    /// The slot that gets the state.
    pub to: StateSlot,
}

/// The plan of one forward pass. Pass it to [`Scheduler::commit`](crate::Scheduler::commit).
#[derive(Debug, Default)]
#[must_use = "the sequences of a plan that is never committed wait for ever"]
pub struct StepPlan {
    /// Chunks in batch order: decodes, then prompt pieces in planning order.
    pub chunks: Vec<Chunk>,
    /// Block copies to the host pool, (device, host). They run first.
    pub swap_out: Vec<(BlockId, u32)>,
    /// Block copies from the host pool, (host, device). They run after `swap_out`.
    pub swap_in: Vec<(u32, BlockId)>,
    /// Block copies, (from, to). They run one after another, after `swap_in` and before the pass.
    pub copies: Vec<(BlockId, BlockId)>,
    /// What the step does with recurrent states.
    pub states: StateMoves,
    /// Sequences admitted in this step.
    pub admitted: Vec<Admitted>,
    /// Tags of the sequences that were preempted in this step.
    pub preempted: Vec<u64>,
    /// The step's work, for the step-time model.
    pub load: Load,
    /// Position of the plan in the order of commits.
    pub(crate) step: u64,
    pub(crate) planned: Time,
    /// Tokens that the step can still get.
    pub(crate) tokens_left: u32,
    /// The part of `load` of requests that are not in the background.
    pub(crate) foreground: Load,
    /// What background requests may still add. `None` if they are not limited.
    pub(crate) background: Option<BackgroundRoom>,
    /// Whether a background sequence that decodes got no token.
    pub(crate) leaves_out_background: bool,
}

/// Number of entries that a plan writes to each array.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lens {
    /// Tokens in the pass.
    pub tokens: usize,
    /// Sequences in the pass.
    pub seqs: usize,
    /// Positions to sample.
    pub samples: usize,
    /// Block copies before the pass.
    pub copies: usize,
    /// Block table entries that changed.
    pub table_writes: usize,
    /// Copies of recurrent states before the pass.
    pub state_copies: usize,
    /// Recurrent states that the pass saves.
    pub state_saves: usize,
}

/// Arrays that the caller owns, in page-locked memory for example, so that copies to the device can overlap. The caller
/// may read them while the scheduler writes them, so the elements are `Cell`.
#[derive(Clone, Copy, Debug)]
pub struct StepBuffers<'a> {
    /// `[max_num_batched_tokens]`: tokens. `-(slot + 1)` stands for the token sampled for that slot in the previous step, if that
    /// step is not committed yet.
    pub input_ids: &'a [Cell<i32>],
    /// `[max_num_batched_tokens]`
    pub positions: &'a [Cell<i32>],
    /// `[max_num_batched_tokens]`: KV slot of each token's key and value, block * block size + offset.
    pub slot_mapping: &'a [Cell<i32>],
    /// `[max_num_seqs + 1]`: index of the first token of each sequence, and the end of the last sequence.
    pub query_starts: &'a [Cell<i32>],
    /// `[max_num_seqs]`: context length after the pass.
    pub context_lens: &'a [Cell<i32>],
    /// `[max_num_seqs]`: batch slot of each sequence.
    pub batch_slots: &'a [Cell<i32>],
    /// `[max_num_batched_tokens]`: token index of each position to sample.
    pub sample_at: &'a [Cell<i32>],
    /// `[max_num_batched_tokens]`: batch slot of each position to sample.
    pub sample_slots: &'a [Cell<i32>],
    /// `[2 * max_num_seqs]`: pairs of blocks (from, to).
    pub copies: &'a [Cell<i32>],
    /// `[max_num_seqs, max_blocks]`, row-major, by slot. The array persists between steps. A step writes only changed entries.
    pub block_tables: &'a [Cell<i32>],
    /// `[2 * max_num_seqs * max_blocks]`: pairs of an index in `block_tables` and the value written there. Empty if the
    /// caller keeps no copy of the tables.
    pub table_writes: &'a [Cell<i32>],
    /// `[max_num_seqs]`: slot of each sequence's recurrent state. This and the next two are empty without such states.
    pub state_slots: &'a [Cell<i32>],
    /// `[2 * max_num_seqs]`: pairs of state slots (from, to).
    pub state_copies: &'a [Cell<i32>],
    /// `[3 * state_slots]`: triples of a sequence's index in the step, a number of its tokens, and the slot that gets the state after
    /// them.
    pub state_saves: &'a [Cell<i32>],
    /// Row length of `block_tables`.
    pub max_blocks: usize,
}

impl StateMoves {
    fn reset(&mut self) {
        self.slots.clear();
        self.copies.clear();
        self.saves.clear();
    }
}

impl StepPlan {
    /// Resets a used plan and keeps its memory.
    pub(crate) fn reset(&mut self, step: u64, now: Time) {
        self.chunks.clear();
        self.swap_out.clear();
        self.swap_in.clear();
        self.copies.clear();
        self.states.reset();
        self.admitted.clear();
        self.preempted.clear();
        (self.load, self.foreground, self.background) = (Load::default(), Load::default(), None);
        (self.step, self.planned, self.leaves_out_background) = (step, now, false);
    }
}
