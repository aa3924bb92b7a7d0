//! Errors, with the limits that were exceeded.

use thiserror::Error;

/// Why a request was rejected on arrival.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Rejected {
    /// The prompt has no tokens.
    #[error("the prompt has no tokens")]
    EmptyPrompt,
    /// The request allows no new tokens.
    #[error("at least one new token must be asked for")]
    NoNewTokens,
    /// The held sequence that the request continues was dropped.
    #[error("the sequence to continue was dropped")]
    NotHeld,
    /// Another request continues the held sequence.
    #[error("another request continues the sequence: wait until it has ended, or continue a fork")]
    HeldBusy,
    /// The request exceeds the model's context length.
    #[error("{prompt} prompt tokens and {new} new ones exceed the {limit} tokens of the context")]
    TooLong {
        /// Tokens in the prompt.
        prompt: u64,
        /// Maximum new tokens.
        new: u64,
        /// `Config::max_model_len`.
        limit: u64,
    },
    /// The request would not fit even with the whole KV cache to itself.
    #[error("needs {needed} KV blocks, the cache has {have}: at most {fits} tokens, prompt and output together, fit")]
    NeverFits {
        /// Blocks needed at the request's maximum length.
        needed: u64,
        /// Usable blocks.
        have: u64,
        /// Tokens, prompt and output together, that would fit.
        fits: u64,
    },
    /// The queue is full.
    #[error("the queue is full: {queued} {what} are waiting, at most {limit} may")]
    QueueFull {
        /// The exceeded limit: requests or prompt tokens.
        what: &'static str,
        /// Number waiting, including the new request.
        queued: u64,
        /// Maximum number waiting.
        limit: u64,
        /// Predicted microseconds until the requests ahead have started.
        retry_after: u64,
    },
}

impl Rejected {
    /// The reason's name in reports.
    pub fn name(&self) -> &'static str {
        match self {
            Self::EmptyPrompt => "empty_prompt",
            Self::NoNewTokens => "no_new_tokens",
            Self::NotHeld => "not_held",
            Self::HeldBusy => "held_busy",
            Self::TooLong { .. } => "too_long",
            Self::NeverFits { .. } => "never_fits",
            Self::QueueFull { .. } => "queue_full",
        }
    }
}

/// Why a [`Config`](crate::Config) is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ConfigError {
    /// A limit is too small to run anything.
    #[error("{name} must be at least {least}, got {value}")]
    TooSmall {
        /// The field.
        name: &'static str,
        /// Its value.
        value: u64,
        /// The minimum.
        least: u64,
    },
    /// `max_num_batched_tokens` is less than `max_num_seqs`.
    #[error(
        "max_num_seqs ({max_num_seqs}) must be at most max_num_batched_tokens ({max_num_batched_tokens}): each sequence that decodes takes a token of every step"
    )]
    TooManySeqs {
        /// `Config::max_num_seqs`.
        max_num_seqs: u32,
        /// `Config::max_num_batched_tokens`.
        max_num_batched_tokens: u32,
    },
    /// `state_slots` is less than `max_num_seqs`.
    #[error("state_slots ({state_slots}) must be at least max_num_seqs ({max_num_seqs}), or 0 for a model without recurrent layers")]
    TooFewStateSlots {
        /// `Config::state_slots`.
        state_slots: u32,
        /// `Config::max_num_seqs`.
        max_num_seqs: u32,
    },
    /// A limit does not fit the 32-bit step buffers.
    #[error("{name} must be at most {most}, got {value}")]
    TooLarge {
        /// The field or the product of fields.
        name: &'static str,
        /// Its value.
        value: u64,
        /// The maximum.
        most: u64,
    },
}
