//! Drafted tokens: where they come from, and what became of them.

use serde::{Deserialize, Serialize};

/// Maximum number of tokens drafted per sequence and step.
pub const MAX_DRAFT: usize = 16;

/// Where a draft comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum DraftSource {
    /// A match of this many tokens in the sequence itself.
    Text(usize),
    /// A match of this many tokens in a finished text.
    Corpus(usize),
    /// The request's grammar, which allows no other tokens.
    Grammar,
}

impl DraftSource {
    /// The source as a number, for journals: 0 for the grammar, 2 n for n tokens of the text, and 2 n + 1 for n of a
    /// finished text.
    pub fn code(self) -> u32 {
        match self {
            Self::Grammar => 0,
            Self::Text(len) => 2 * len as u32,
            Self::Corpus(len) => 2 * len as u32 + 1,
        }
    }

    /// The source with this [`code`](Self::code).
    pub fn of(code: u32) -> Self {
        match (code, code / 2) {
            (0, _) => Self::Grammar,
            (_, len) if code.is_multiple_of(2) => Self::Text(len as usize),
            (_, len) => Self::Corpus(len as usize),
        }
    }
}

/// A draft that a step verified.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VerifiedDraft {
    /// Where the draft came from.
    pub source: DraftSource,
    /// Number of the sequence's tokens before the draft.
    pub position: u32,
    /// Number of drafted tokens.
    pub tokens: u32,
    /// Number of accepted tokens.
    pub accepted: u32,
}
