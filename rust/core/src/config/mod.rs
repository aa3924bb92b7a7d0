//! The scheduler's limits and serving order, and the table of settings from which journals, what-if and the binding read and
//! write them.
//!
//! This room owns what is fixed for the life of a scheduler. It may know the policies' names and no state.

mod settings;

pub use settings::{SETTINGS, Setting, SettingError, SettingKind, Value};

use crate::policy::{Fcfs, Policy};
use crate::request::{Time, named_enum};
use crate::step_time::ExpertCount;

/// When waiting sequences may join the running ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Batching {
    /// At every step (Orca, OSDI'22).
    #[default]
    Continuous,
    /// Only when the whole previous batch has ended, up to `size` sequences at once, as in classic model servers.
    Static {
        /// Sequences in a batch.
        size: u32,
    },
    /// Like static, but a batch also waits until it is full or its first request has waited `timeout` microseconds.
    Dynamic {
        /// Sequences in a batch.
        size: u32,
        /// Longest wait for others, in microseconds.
        timeout: Time,
    },
}

named_enum! {
    /// The blocks that must be free to admit a sequence, beyond the blocks for its known tokens.
    #[derive(Default)]
    pub enum Reservation {
        /// A watermark. Sequences that outgrow the free blocks preempt each other.
        #[default]
        Watermark = "watermark",
        /// Blocks for all tokens that the sequence and each running sequence may generate. No sequence is preempted for
        /// lack of blocks (as in TGI).
        MaxTokens = "max-tokens",
        /// Blocks for the estimated peak of the running sequences and the new one. Each is assumed to generate its
        /// predicted or maximum tokens, one token per step. Sequences that end sooner release their blocks (`LightLLM`'s
        /// rule).
        Peak = "peak",
    }
}

named_enum! {
    /// Which requests belong to sessions, which take turns when their contexts do not fit into the cache together.
    #[derive(Default)]
    pub enum SessionTurns {
        /// None.
        Off = "off",
        /// Those that name a session.
        #[default]
        Named = "named",
        /// Those that name a session, and those whose prompt continues an earlier answer.
        All = "all",
    }
}

/// Limits, fixed for a scheduler's lifetime.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Blocks in the KV cache, including scratch block 0.
    pub num_kv_blocks: u32,
    /// Tokens per block.
    pub block_size: u32,
    /// Maximum tokens per step.
    pub max_num_batched_tokens: u32,
    /// Maximum sequences per step, and slots of the step buffers. At most `max_num_batched_tokens`.
    pub max_num_seqs: u32,
    /// Maximum prompt plus output tokens.
    pub max_model_len: u32,
    /// Whether sequences share the blocks of equal prefixes.
    pub enable_prefix_caching: bool,
    /// Blocks that stay free when a sequence is admitted beside others, so that running sequences can grow instead of
    /// preempting each other.
    pub watermark: u32,
    /// The blocks that must be free to admit a sequence. The watermark applies only to [`Reservation::Watermark`].
    pub kv_reservation: Reservation,
    /// The order in which waiting sequences are served.
    pub scheduling_policy: &'static dyn Policy,
    /// When waiting sequences may join the running ones.
    pub batching: Batching,
    /// Maximum waiting requests. Requests that already ran do not count.
    pub max_num_queued_reqs: u32,
    /// Maximum prompt tokens of waiting requests, in total.
    pub max_num_queued_tokens: u64,
    /// Microseconds that a request may be bypassed, by requests that the policy puts first or by requests behind it
    /// that fit while it does not.
    pub queue_ageing: Time,
    /// Target for the longest step in microseconds, applied by limiting prompt tokens. 0 means three times the duration
    /// of the decodes alone, or 60 ms if that is longer, while at most one prompt is in progress.
    pub target_itl: Time,
    /// The longest step with background requests beside others, in hundredths of the step's time without them. 0 for no limit.
    pub background_slowdown: u32,
    /// Microseconds that requests with a deadline for their first token wait for others at most, while nothing runs. Continuous
    /// batching only.
    pub gather: Time,
    /// Which requests belong to sessions.
    pub session_turns: SessionTurns,
    /// Microseconds that a request waits for its session's turn at most. Then it is served although its session's context does not fit.
    pub max_session_wait: Time,
    /// Blocks of the host pool. 0 if preempted sequences are always recomputed.
    pub host_blocks: u32,
    /// Nanoseconds to copy one block in one direction.
    pub swap_ns_per_block: u32,
    /// Slots for recurrent states. 0 for a model without recurrent layers, otherwise at least `max_num_seqs`, because each
    /// running sequence has one.
    pub state_slots: u32,
    /// Tokens whose KV takes as much memory as a recurrent state: a conversation has at most as many saved states as its KV is worth, and
    /// at least one. 0 for no limit.
    pub state_tokens: u32,
    /// Experts of a layer, and those that a token uses. The step-time model knows them.
    pub experts: ExpertCount,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            num_kv_blocks: 1025,
            block_size: 16,
            max_num_batched_tokens: 256,
            max_num_seqs: 64,
            max_model_len: 8192,
            enable_prefix_caching: true,
            watermark: 0,
            kv_reservation: Reservation::Watermark,
            scheduling_policy: &Fcfs,
            batching: Batching::Continuous,
            max_num_queued_reqs: u32::MAX,
            max_num_queued_tokens: u64::MAX,
            queue_ageing: 10_000_000,
            target_itl: 0,
            background_slowdown: 300,
            gather: 0,
            session_turns: SessionTurns::Named,
            max_session_wait: 510_000_000,
            host_blocks: 0,
            swap_ns_per_block: 0,
            state_slots: 0,
            state_tokens: 0,
            experts: ExpertCount::default(),
        }
    }
}

impl Config {
    /// Blocks that sequences can use: all but the scratch block.
    pub fn usable_blocks(&self) -> u32 {
        self.num_kv_blocks - 1
    }

    /// Blocks that one sequence of the maximum length needs: the least that can serve every request. The last token needs no KV.
    pub fn least_blocks(&self) -> u32 {
        (self.max_model_len - 1).div_ceil(self.block_size).clamp(1, self.usable_blocks())
    }

    /// Maximum length of a sequence's block table.
    pub fn max_blocks_per_seq(&self) -> u32 {
        self.max_model_len.div_ceil(self.block_size)
    }
}
