//! The results of a step.

use crate::ledger::Timeline;
use crate::request::{FinishReason, Token};

/// A sample that ends its request without a token, because only the prompt's embedding was wanted.
pub const NO_TOKEN: i32 = -2;

/// One output token for the caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Output {
    /// Tag of the request.
    pub tag: u64,
    /// The token. Not valid with [`FinishReason::Error`], nor where the sample was [`NO_TOKEN`].
    pub token: Token,
    /// Finish reason, set on the request's last token.
    pub finish: Option<FinishReason>,
}

/// Results of one step. The caller reuses the value, so that a steady step does not allocate.
#[derive(Debug, Default)]
pub struct Outputs {
    /// Tokens in batch order. Tokens of one sequence are adjacent.
    pub tokens: Vec<Output>,
    /// Timelines of the requests that ended.
    pub ended: Vec<Timeline>,
}
