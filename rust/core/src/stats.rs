//! What an operator wants to know: counters since the start, and what is true now.

use crate::timeline::{PREEMPTION_REASONS, STATES};

/// Why no step was planned although there are requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stall {
    /// Whoever runs waits for a commit.
    InFlight,
    /// A batch waits for more requests.
    Batch,
}

impl Stall {
    /// The name that reports use.
    pub fn name(self) -> &'static str {
        match self {
            Self::InFlight => "in_flight",
            Self::Batch => "batch",
        }
    }
}

/// Counters since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Steps planned.
    pub steps: u64,
    /// Prompt tokens of admitted requests.
    pub prompt_tokens: u64,
    /// Prompt tokens looked for in the prefix cache, once a request.
    pub prefix_queries: u64,
    /// Of those, tokens found.
    pub prefix_hits: u64,
    /// Tokens sampled.
    pub generated_tokens: u64,
    /// Tokens that steps computed.
    pub computed_tokens: u64,
    /// Of those, tokens that had been computed before a preemption.
    pub recomputed_tokens: u64,
    /// Times that a sequence lost its blocks and its KV.
    pub preemptions_recompute: u64,
    /// Times that it lost its blocks, with a copy in host memory.
    pub preemptions_swap: u64,
    /// Preemptions of both kinds, by [`PreemptionReason`](crate::PreemptionReason).
    pub preemptions_by_reason: [u64; PREEMPTION_REASONS],
    /// Blocks copied to host memory.
    pub swapped_blocks: u64,
    /// Requests that missed their deadline.
    pub expired: u64,
    /// Requests refused because the queue was full.
    pub rejected_queue_full: u64,
}

/// What is true now, and [`Counters`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stats {
    /// Counters since the start.
    pub counters: Counters,
    /// Sequences that hold a slot.
    pub running: usize,
    /// Sequences that wait, swapped ones not included.
    pub waiting: usize,
    /// Sequences that wait with their KV in host memory.
    pub swapped: usize,
    /// Rows there are.
    pub slots: usize,
    /// Blocks that sequences can hold.
    pub total_blocks: usize,
    /// Of those, blocks that nobody holds.
    pub free_blocks: usize,
    /// Tokens with KV in running sequences' tables, and the slots of those tables: the rest is fragmentation.
    pub used_tokens: usize,
    /// Token slots in those tables.
    pub held_slots: usize,
    /// Blocks of the host pool.
    pub host_blocks: usize,
    /// Of those, free ones.
    pub free_host_blocks: usize,
    /// Prompt tokens of requests that never ran.
    pub queued_prompt_tokens: u64,
    /// Why nothing was planned when there was something to do.
    pub stall: Option<Stall>,
    /// Sequences that wait, by [`TimelineState`].
    pub waiting_by_state: [usize; STATES],
    /// Microseconds that a request arriving now would wait.
    pub predicted_wait: u64,
    /// Microseconds that the last planned step should take.
    pub predicted_step: u64,
    /// Work that arrived in the last ten seconds over work that could be served in them, in thousandths.
    pub saturation: u32,
}

/// How full it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Occupancy {
    /// Sequences that hold a slot.
    pub running: usize,
    /// Sequences that do not, swapped ones included.
    pub waiting: usize,
    /// Blocks that sequences hold.
    pub blocks: usize,
}
