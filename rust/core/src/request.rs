//! What a caller asks for, and the words for it.

use slotmap::{Key as _, KeyData, new_key_type};
use std::sync::Arc;

/// A vocabulary index.
pub type Token = u32;

/// Microseconds on the caller's clock.
pub type Time = u64;

/// The order of arrival.
pub(crate) type ArrivalNumber = u64;

new_key_type! {
    /// A sequence's handle. Never reused: a plan may outlive the sequences it
    /// names, and their tokens must not reach a successor.
    pub struct SeqId;
}

impl SeqId {
    /// The handle as a plain number, for callers in other languages.
    pub fn to_bits(self) -> u64 {
        self.data().as_ffi()
    }

    /// The handle that [`to_bits`](Self::to_bits) gave. Any other number names no sequence.
    pub fn from_bits(bits: u64) -> Self {
        KeyData::from_ffi(bits).into()
    }
}

/// What a caller asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// The caller's own name for it, echoed in every output.
    pub tag: u64,
    /// At least one token.
    pub prompt: Vec<Token>,
    /// At least one.
    pub max_new_tokens: u32,
    /// Tokens that end the request when sampled.
    pub stop: Vec<Token>,
    /// Requests share cached blocks only under equal salts.
    pub salt: Arc<[u8]>,
    /// Its class: lower goes first, where the policy has classes.
    pub priority: i32,
    /// Whose request it is.
    pub tenant: Arc<str>,
    /// The tenant's share against others', at least 1.
    pub weight: u32,
    /// When it must have ended.
    pub deadline: Option<Time>,
    /// When its first token must be there.
    pub ttft_deadline: Option<Time>,
    /// How long the caller expects the output to be.
    pub predicted_tokens: Option<u32>,
}

impl Default for Request {
    fn default() -> Self {
        Self {
            tag: 0,
            prompt: Vec::new(),
            max_new_tokens: 16,
            stop: Vec::new(),
            salt: [].into(),
            priority: 0,
            tenant: "".into(),
            weight: 1,
            deadline: None,
            ttft_deadline: None,
            predicted_tokens: None,
        }
    }
}

/// Why a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// It sampled one of its stop tokens.
    Stop,
    /// It reached `max_new_tokens`.
    Length,
    /// The model gave no valid token for it.
    Error,
    /// It missed its deadline, or surely would have.
    Deadline,
    /// Its caller did not want it any more.
    Abort,
}
