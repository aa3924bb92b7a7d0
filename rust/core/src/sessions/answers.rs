//! The ends of answers, by which a prompt is recognised as the continuation of a conversation.

use super::session::SessionId;
use crate::memory::{BlockHash, User};
use std::collections::{HashMap, VecDeque};

/// Number of answers that are remembered.
const REMEMBERED: usize = 1 << 16;
/// Blocks at the end of a prompt among which the end of an answer is looked for. A turn adds the others.
const LOOKED_AT: usize = 512;

/// An answer that a later prompt may continue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Answer {
    pub(super) user: User,
    /// The session that the answer belongs to. None if its request belonged to none.
    pub(super) session: Option<SessionId>,
}

/// The latest answers by the name of their last full block, which has a token of the answer.
#[derive(Debug, Default)]
pub(super) struct Answers {
    by_end: HashMap<BlockHash, Answer>,
    /// In the order in which they ended.
    order: VecDeque<BlockHash>,
}

impl Answers {
    /// Remembers an answer.
    pub(super) fn add(&mut self, end: BlockHash, answer: Answer) {
        if self.by_end.insert(end, answer).is_some() {
            return;
        }
        self.order.push_back(end);
        if self.order.len() > REMEMBERED
            && let Some(oldest) = self.order.pop_front()
        {
            self.by_end.remove(&oldest);
        }
    }

    /// The answer of a user that a prompt continues whose full blocks have these names, and the number of blocks up to its end.
    pub(super) fn continued(&self, user: User, names: &[BlockHash]) -> Option<(Answer, u32)> {
        if self.by_end.is_empty() {
            return None;
        }
        let looked_at = names.iter().enumerate().rev().take(LOOKED_AT);
        let mut known = looked_at.filter_map(|(at, name)| Some((*self.by_end.get(name)?, at as u32 + 1)));
        known.find(|(answer, _)| answer.user == user)
    }
}
