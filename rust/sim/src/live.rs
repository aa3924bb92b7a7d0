//! A simulated request that has not ended.

use crate::job::token;
use chairlift_core::{STOP, Time, Token, VerifiedDraft};
use std::sync::Arc;

/// A job that has not ended.
pub(crate) struct Live {
    pub(crate) len: u32,
    pub(crate) most: u32,
    pub(crate) output: Vec<Token>,
    /// Recorded drafts, by position.
    pub(crate) drafts: Vec<VerifiedDraft>,
    pub(crate) tag: u64,
    pub(crate) made: u32,
    pub(crate) tenant: Arc<str>,
    pub(crate) prompt: u32,
    /// Whether the job has a slot, or had one before a preemption.
    pub(crate) started: bool,
    /// The time of the job's last token. The next field is the longest gap between two tokens.
    pub(crate) last: Time,
    pub(crate) longest: Time,
}

impl Live {
    /// The token that follows the next `ahead` tokens: a generated one, or a stop token if the output ends before its limit.
    pub(crate) fn token(&self, ahead: u32) -> Token {
        let number = self.made + ahead + 1;
        if number >= self.len && self.len < self.most {
            return STOP;
        }
        let known = self.output.get(number as usize - 1).copied();
        known.unwrap_or_else(|| token(self.tag, u64::from(u32::MAX) + u64::from(number)))
    }

    /// What a recorded draft proposes after the sequence's first `position` tokens, which may be inside it.
    pub(crate) fn draft(&self, position: u32) -> Option<VerifiedDraft> {
        let after = self.drafts.partition_point(|draft| draft.position <= position);
        let draft = self.drafts.get(after.checked_sub(1)?)?;
        let passed = position - draft.position;
        // The model chose another token than the first one that was not accepted.
        (passed <= draft.accepted && passed < draft.tokens).then(|| VerifiedDraft {
            position,
            tokens: draft.tokens - passed,
            accepted: draft.accepted - passed,
            ..*draft
        })
    }
}
