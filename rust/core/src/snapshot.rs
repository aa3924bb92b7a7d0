//! What a dashboard shows: who has which slot, who waits and why, which blocks
//! are held, and who rode in the newest steps.

use crate::recent_steps::StepSeen;
use crate::request::Time;
use crate::timeline::TimelineState;
use std::sync::Arc;

/// A sequence that has a slot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotSeen {
    /// Its slot.
    pub slot: u32,
    /// Which sequence.
    pub tag: u64,
    /// Whose.
    pub tenant: Arc<str>,
    /// Its class.
    pub priority: i32,
    /// `prefill`, `recompute`, `decode` or `stalled`.
    pub state: &'static str,
    /// Tokens of its prompt.
    pub prompt_tokens: u32,
    /// Leading tokens whose KV is in the cache, or will be after the step under way.
    pub computed_tokens: u32,
    /// Tokens generated.
    pub output_tokens: u32,
    /// Blocks in its table.
    pub blocks: usize,
    /// Microseconds since it was added.
    pub age: Time,
}

/// A sequence that waits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaitSeen {
    /// Which sequence.
    pub tag: u64,
    /// Whose.
    pub tenant: Arc<str>,
    /// Its class.
    pub priority: i32,
    /// What it waits for at present.
    pub state: TimelineState,
    /// Tokens of its prompt.
    pub prompt_tokens: u32,
    /// Tokens generated before it lost its slot.
    pub output_tokens: u32,
    /// Microseconds since it was added, or lost its slot.
    pub waited: Time,
}

/// A look at everything.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// Those with slots, in the order of their admission.
    pub slots: Vec<SlotSeen>,
    /// The first of those that wait, in the queue's order; forks that wait for a prompt are in no queue.
    pub waiting: Vec<WaitSeen>,
    /// The KV blocks in their order: [`FREE`](Self::FREE), [`CACHED`](Self::CACHED), [`SHARED`](Self::SHARED), or
    /// [`HELD`](Self::HELD) plus the slot of its one holder. A cell of several blocks shows what most of them are.
    pub cells: Vec<u32>,
    /// Blocks to a cell.
    pub blocks_per_cell: usize,
    /// The steps planned since the last look, as long as that was not long ago, the oldest first.
    pub steps: Vec<StepSeen>,
}

impl Snapshot {
    /// Nobody holds it, and there is nothing in it.
    pub const FREE: u32 = 0;
    /// Nobody holds it, and a prompt may find it.
    pub const CACHED: u32 = 1;
    /// Several sequences hold it.
    pub const SHARED: u32 = 2;
    /// The sequence of slot 0 holds it.
    pub const HELD: u32 = 3;
}
