//! Counters since the start, and gauges of the current state.

use super::timeline::TimelineState;
use crate::policy::PreemptionReason;
use crate::request::nonzero;
use crate::step::Stall;
use serde::Serialize;

/// Counters since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counters {
    /// Steps planned.
    pub steps: u64,
    /// Prompt tokens of admitted requests.
    pub prompt_tokens: u64,
    /// Prompt tokens looked up in the prefix cache, once per request. Those that a held sequence has count as found.
    pub prefix_queries: u64,
    /// Looked-up prompt tokens that were cached.
    pub prefix_hits: u64,
    /// Prompt tokens whose KV was cached, but which were computed again because no recurrent state was saved after them.
    pub lost_hit_tokens: u64,
    /// Sampled tokens.
    pub generated_tokens: u64,
    /// Time of committed steps, in microseconds.
    pub step_us: u64,
    /// Energy that a meter measured, in microjoules, as far as it is divided. `None` without a meter.
    pub energy_uj: Option<u64>,
    /// The part of it that no request took: of the time between steps, and of sequences that had ended.
    pub idle_energy_uj: Option<u64>,
    /// Tokens computed by steps.
    pub computed_tokens: u64,
    /// The part of them that are prompts' tokens.
    pub computed_prompt_tokens: u64,
    /// Computed tokens that had already been computed before a preemption.
    pub recomputed_tokens: u64,
    /// Preemptions that discarded the sequence's KV.
    pub preemptions_recompute: u64,
    /// Preemptions that copied the sequence's KV to host memory.
    pub preemptions_swap: u64,
    /// All preemptions, by [`PreemptionReason`](crate::PreemptionReason).
    #[serde(skip)]
    pub preemptions_by_reason: [u64; PreemptionReason::COUNT],
    /// Blocks copied to host memory.
    pub swapped_blocks: u64,
    /// Requests that missed their deadline.
    pub expired: u64,
    /// Requests rejected because the queue was full.
    pub rejected_queue_full: u64,
}

/// Gauges of the current state, and [`Counters`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Stats {
    /// Counters since the start.
    #[serde(flatten)]
    pub counters: Counters,
    /// Sequences that hold a slot.
    pub running: usize,
    /// Waiting sequences, without swapped ones.
    pub waiting: usize,
    /// Waiting sequences with KV in host memory.
    pub swapped: usize,
    /// Slots of the batch.
    pub slots: usize,
    /// Blocks that sequences can use.
    pub total_blocks: usize,
    /// Usable blocks that no sequence holds.
    pub free_blocks: usize,
    /// Tokens with KV in the block tables of running sequences. The difference from `held_kv_slots` is fragmentation.
    pub used_tokens: usize,
    /// Token slots in the blocks of running sequences.
    pub held_kv_slots: usize,
    /// Blocks of the host pool.
    pub host_blocks: usize,
    /// Free blocks of the host pool.
    pub free_host_blocks: usize,
    /// Slots for recurrent states.
    pub state_slots: usize,
    /// Slots that hold a saved state, from which a sequence can resume.
    pub saved_states: usize,
    /// Prompt tokens of requests that have not run yet.
    pub queued_prompt_tokens: u64,
    /// Why no step was planned. `None` if there was no work.
    pub stall: Option<Stall>,
    /// Waiting sequences, by [`TimelineState`](crate::TimelineState).
    #[serde(serialize_with = "nonzero::<TimelineState, _, _>")]
    pub waiting_by_state: [usize; TimelineState::COUNT],
    /// Predicted wait of a request that arrives now, in microseconds.
    #[serde(rename = "predicted_wait_us")]
    pub predicted_wait: u64,
    /// Predicted wait of a session that is not active for its turn, in microseconds.
    #[serde(rename = "predicted_turn_us")]
    pub predicted_turn_wait: u64,
    /// Predicted time of a prompt of 1,024 tokens alone, in microseconds; 0 while unknown.
    #[serde(rename = "predicted_prefill_us")]
    pub predicted_prefill: u64,
    /// Predicted duration of the latest planned step, in microseconds.
    #[serde(rename = "predicted_step_us")]
    pub predicted_step: u64,
    /// Work that arrived in the last ten seconds divided by the work that could be served in that time, in thousandths.
    #[serde(skip)]
    pub saturation: u32,
}

/// Occupancy of slots and blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Occupancy {
    /// Sequences that hold a slot.
    pub running: usize,
    /// Sequences without a slot, including swapped ones.
    pub waiting: usize,
    /// Blocks held by sequences.
    pub blocks: usize,
}
