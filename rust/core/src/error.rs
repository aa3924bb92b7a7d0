//! What can be refused, with the numbers that would not be.

use thiserror::Error;

/// Why a request was turned away at the door.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum Rejected {
    /// The prompt has no tokens.
    #[error("the prompt has no tokens")]
    EmptyPrompt,
    /// No new token was asked for.
    #[error("at least one new token must be asked for")]
    NoNewTokens,
    /// It is longer than the model can read.
    #[error("{prompt} prompt tokens and {new} new ones exceed the {limit} tokens of the context")]
    TooLong {
        /// Tokens in the prompt.
        prompt: u64,
        /// Tokens asked for.
        new: u64,
        /// `Config::max_model_len`.
        limit: u64,
    },
    /// It would not fit if it had the whole KV cache to itself.
    #[error("needs {needed} KV blocks, the cache has {have}: at most {fits} tokens, prompt and output together, fit")]
    NeverFits {
        /// Blocks at its longest.
        needed: u64,
        /// Blocks there are.
        have: u64,
        /// The prompt plus output that would fit, in tokens.
        fits: u64,
    },
    /// As many wait as may wait.
    #[error("the queue is full: {queued} {what} are waiting, at most {limit} may")]
    QueueFull {
        /// What there is too much of: requests or prompt tokens.
        what: &'static str,
        /// How many wait, the new one included.
        queued: u64,
        /// How many may.
        limit: u64,
        /// Microseconds after which those ahead of it will have started.
        retry_after: u64,
    },
}

/// Why a [`Config`](crate::Config) makes no scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ConfigError {
    /// A limit is too small to run anything.
    #[error("{name} must be at least {least}, got {value}")]
    TooSmall {
        /// The field.
        name: &'static str,
        /// Its value.
        value: u64,
        /// What it must be.
        least: u64,
    },
    /// A step has fewer tokens than sequences that decode.
    #[error("max_seqs ({max_seqs}) must be at most max_tokens ({max_tokens}): each sequence that decodes takes a token of every step")]
    TooManySeqs {
        /// `Config::max_seqs`.
        max_seqs: u32,
        /// `Config::max_tokens`.
        max_tokens: u32,
    },
    /// A limit does not fit the 32-bit step buffers.
    #[error("{name} must be at most {most}, got {value}")]
    TooLarge {
        /// The field or product.
        name: &'static str,
        /// Its value.
        value: u64,
        /// What it may be.
        most: u64,
    },
}
