//! Data for a dashboard: the sequence in each slot, waiting sequences with their reasons, the use of the blocks, and
//! the latest steps.

use super::recent_steps::StepSeen;
use super::timeline::TimelineState;
use crate::request::{Tier, Time, nonzero};
use serde::Serialize;
use std::sync::Arc;

/// A sequence with a slot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct SlotSeen {
    /// The slot.
    pub slot: u32,
    /// The request's tag.
    pub tag: u64,
    /// The request's tenant.
    pub tenant: Arc<str>,
    /// The request's class.
    pub priority: i32,
    /// The request's tier.
    pub tier: Tier,
    /// [`Prefill`](TimelineState::Prefill), [`Recompute`](TimelineState::Recompute), [`Decode`](TimelineState::Decode) or
    /// [`Stalled`](TimelineState::Stalled).
    pub state: TimelineState,
    /// Prompt tokens.
    pub prompt_tokens: u32,
    /// Leading tokens with KV in the cache, counting the step in flight.
    pub computed_tokens: u32,
    /// Generated tokens.
    pub output_tokens: u32,
    /// Blocks in the sequence's table.
    pub blocks: usize,
    /// Microseconds since the request was added.
    #[serde(rename = "age_us")]
    pub age: Time,
}

/// A waiting sequence.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct WaitSeen {
    /// The request's tag.
    pub tag: u64,
    /// The request's tenant.
    pub tenant: Arc<str>,
    /// The request's class.
    pub priority: i32,
    /// The request's tier.
    pub tier: Tier,
    /// The current reason for waiting.
    pub state: TimelineState,
    /// Prompt tokens.
    pub prompt_tokens: u32,
    /// Tokens generated before the sequence lost its slot.
    pub output_tokens: u32,
    /// Microseconds since the request was added or lost its slot.
    #[serde(rename = "waited_us")]
    pub waited: Time,
}

/// A snapshot of the scheduler's state.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Snapshot {
    /// Sequences with slots, in the order of admission.
    #[serde(rename = "running")]
    pub slots: Vec<SlotSeen>,
    /// The first waiting sequences in the queue's order. Forks that wait for a prompt are not in the queue.
    pub waiting: Vec<WaitSeen>,
    /// The number of all waiting sequences by tier.
    #[serde(serialize_with = "nonzero::<Tier, _, _>")]
    pub waiting_by_tier: [usize; Tier::COUNT],
    /// The KV blocks in order: [`FREE`](Self::FREE), [`CACHED`](Self::CACHED), [`SHARED`](Self::SHARED), or
    /// [`HELD`](Self::HELD) plus the slot of the only holder. A cell of several blocks shows the most frequent value.
    #[serde(skip)]
    pub cells: Vec<u32>,
    /// Blocks per cell.
    pub blocks_per_cell: usize,
    /// Steps planned since the previous snapshot if that was recent, oldest first.
    pub steps: Vec<StepSeen>,
}

impl Snapshot {
    /// No sequence holds the block and it has no cached content.
    pub const FREE: u32 = 0;
    /// No sequence holds the block, but it is cached and a prompt can reuse it.
    pub const CACHED: u32 = 1;
    /// Several sequences hold the block.
    pub const SHARED: u32 = 2;
    /// Only the sequence of slot 0 holds the block.
    pub const HELD: u32 = 3;
}
