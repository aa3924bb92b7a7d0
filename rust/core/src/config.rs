//! The limits a scheduler works within, and the order in which it serves.

use crate::policy::Policy;
use crate::request::Time;

/// When waiting sequences may join those that run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Batching {
    /// At every step (Orca, OSDI'22).
    #[default]
    Continuous,
    /// Only when all of the batch before have ended, up to `size` at once, as the classic servers do.
    Static {
        /// Sequences in a batch.
        size: u32,
    },
    /// As static, but a batch also waits until it is full or its first has waited `timeout` microseconds.
    Dynamic {
        /// Sequences in a batch.
        size: u32,
        /// Longest wait for others, in microseconds.
        timeout: Time,
    },
}

/// Which blocks a sequence must find free to be admitted, beyond those for the tokens it has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reservation {
    /// A watermark: sequences that outgrow what is left preempt each other.
    #[default]
    Watermark,
    /// Blocks for all that it, and each that runs, may generate: nobody is preempted for want of blocks (as in TGI).
    MaxTokens,
    /// Blocks for the estimated peak of all that run and itself, each taken to generate what was predicted or allowed, one
    /// token a step; those that end sooner give theirs back (`LightLLM`'s rule).
    Peak,
}

impl Reservation {
    /// Every reservation, by the name that flags and journals use.
    pub const NAMES: [(&'static str, Self); 3] = [("watermark", Self::Watermark), ("max-tokens", Self::MaxTokens), ("peak", Self::Peak)];

    /// The reservation's name.
    pub fn name(self) -> &'static str {
        Self::NAMES[self as usize].0
    }

    /// The reservation of that name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::NAMES.iter().find(|(known, _)| *known == name).map(|&(_, reservation)| reservation)
    }
}

/// Limits, fixed for the life of a scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Blocks in the KV cache, the scratch block 0 included.
    pub num_blocks: u32,
    /// Tokens in a block.
    pub block_size: u32,
    /// Tokens in a step.
    pub max_tokens: u32,
    /// Sequences in a step, and slots of the step buffers; at most `max_tokens`.
    pub max_seqs: u32,
    /// Longest prompt plus output.
    pub max_model_len: u32,
    /// Whether sequences share the blocks of equal beginnings.
    pub prefix_caching: bool,
    /// Blocks that stay free when a sequence is admitted beside others, so
    /// that the running ones can grow instead of preempting each other.
    pub watermark: u32,
    /// What must be free for a sequence to be admitted: the watermark counts only if nothing else is reserved.
    pub reservation: Reservation,
    /// The order in which waiting sequences are served.
    pub policy: Policy,
    /// When they may join.
    pub batching: Batching,
    /// Requests that may wait; those that ran already do not count.
    pub max_queued_reqs: u32,
    /// Their prompt tokens, together.
    pub max_queued_tokens: u64,
    /// Microseconds that a request may be passed over: by others of its
    /// policy, or, where it does not fit, by those behind it that do.
    pub ageing: Time,
    /// What a step should take at most, in microseconds, where it is prompts that would make it longer; 0 for three times
    /// what its decodes take alone, while no more than one prompt is in progress.
    pub target_itl: Time,
    /// Blocks of the host pool; 0 if preempted sequences are always computed again.
    pub host_blocks: u32,
    /// Nanoseconds that the copy of one block takes, one way.
    pub swap_ns_per_block: u32,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            num_blocks: 1025,
            block_size: 16,
            max_tokens: 256,
            max_seqs: 64,
            max_model_len: 8192,
            prefix_caching: true,
            watermark: 0,
            reservation: Reservation::Watermark,
            policy: Policy::Fcfs,
            batching: Batching::Continuous,
            max_queued_reqs: u32::MAX,
            max_queued_tokens: u64::MAX,
            ageing: 10_000_000,
            target_itl: 0,
            host_blocks: 0,
            swap_ns_per_block: 0,
        }
    }
}

impl Config {
    /// The blocks that sequences can hold: all but the scratch block.
    pub fn usable_blocks(&self) -> u32 {
        self.num_blocks - 1
    }

    /// The length of a sequence's block table at its longest.
    pub fn max_blocks_per_seq(&self) -> u32 {
        self.max_model_len.div_ceil(self.block_size)
    }
}
