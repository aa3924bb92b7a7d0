//! The ends of answers, by which a prompt is recognised as the continuation of a conversation.

use super::session::SessionId;
use crate::latest::Latest;
use crate::memory::{BlockHash, User};

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
}

/// The latest answers by their ends.
#[derive(Debug)]
pub(super) struct Answers(Latest<End, Answer>);

impl Default for Answers {
    fn default() -> Self {
        Self(Latest::new(REMEMBERED))
    }
}

impl Answers {
    /// Remembers an answer to a user. It takes the place of an equal one.
    pub(super) fn add(&mut self, user: User, end: BlockHash, session: Option<SessionId>) {
        self.0.insert((user, end), Answer { session });
    }

    /// The answer to a user that a prompt continues whose full blocks have these names.
    pub(super) fn continued(&self, user: User, names: &[BlockHash]) -> Option<Answer> {
        names.iter().rev().take(LOOKED_AT).find_map(|&name| self.0.get(&(user, name)).copied())
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
    }
}
