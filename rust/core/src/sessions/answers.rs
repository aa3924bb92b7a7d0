//! The ends of answers, by which a prompt is recognised as the continuation of a conversation.

use super::session::SessionId;
use crate::memory::{BlockHash, User};
use std::collections::{HashMap, VecDeque};

/// Number of answers that are remembered.
const REMEMBERED: usize = 1 << 16;
/// Blocks at the end of a prompt among which the end of an answer is looked for. A turn adds the others.
const LOOKED_AT: usize = 512;

/// A user, and the name of the last full block of an answer to it, which has a token of the answer.
type End = (User, BlockHash);

/// An answer that a later prompt may continue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Answer {
    /// The session that the answer belongs to. None if its request belonged to none.
    pub(super) session: Option<SessionId>,
    /// Its number among all answers.
    number: u64,
}

/// The latest answers by their ends.
#[derive(Debug, Default)]
pub(super) struct Answers {
    by_end: HashMap<End, Answer>,
    /// With their numbers, in the order in which they ended.
    order: VecDeque<(End, u64)>,
    /// Number of answers so far.
    count: u64,
}

impl Answers {
    /// Remembers an answer to a user. It takes the place of an equal one.
    pub(super) fn add(&mut self, user: User, end: BlockHash, session: Option<SessionId>) {
        self.count += 1;
        self.by_end.insert((user, end), Answer { session, number: self.count });
        self.order.push_back(((user, end), self.count));
        if self.order.len() > REMEMBERED
            && let Some((oldest, number)) = self.order.pop_front()
            && self.by_end.get(&oldest).is_some_and(|latest| latest.number == number)
        {
            self.by_end.remove(&oldest);
        }
    }

    /// The answer to a user that a prompt continues whose full blocks have these names.
    pub(super) fn continued(&self, user: User, names: &[BlockHash]) -> Option<Answer> {
        if self.by_end.is_empty() {
            return None;
        }
        names.iter().rev().take(LOOKED_AT).find_map(|&name| self.by_end.get(&(user, name)).copied())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::BlockHasher;
    use crate::request::CacheScope;

    #[test]
    fn users_have_equal_answers_of_their_own_and_one_that_comes_again_is_remembered_longer() {
        let hasher = BlockHasher::new(0);
        let name = |number: u32| hasher.names(&CacheScope::default(), &[number], 1)[0];
        let [own, other] = [1, 2].map(User::new);
        let id = SessionId::default();
        let mut answers = Answers::default();
        let session = |answers: &Answers, user, number| answers.continued(user, &[name(number)]).map(|answer| answer.session);
        answers.add(own, name(1), Some(id));
        answers.add(own, name(2), Some(id));
        answers.add(other, name(1), None);
        assert_eq!([own, other].map(|user| session(&answers, user, 1)), [Some(Some(id)), Some(None)]);
        assert_eq!(session(&answers, other, 2), None);
        answers.add(own, name(1), Some(id));
        for number in 0..REMEMBERED as u32 - 2 {
            answers.add(other, name(3 + number), None);
        }
        assert_eq!([1, 2].map(|number| session(&answers, own, number)), [Some(Some(id)), None]);
        assert!(answers.by_end.len() <= REMEMBERED && answers.order.len() == REMEMBERED);
    }
}
