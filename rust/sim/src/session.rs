//! Recorded sessions of agents.

use crate::job::token;
use chairlift_core::{Tier, Time, Token};

/// One request of a session's thread.
#[derive(Clone, Debug, Default)]
pub struct Turn {
    /// Microseconds from the end of the thread's request before it, or of the subagents before it, to this one.
    pub think: Time,
    /// Prompt tokens.
    pub prompt: u32,
    /// Output tokens.
    pub output: u32,
    /// Whether the output calls a tool, so that the next request comes without the user.
    pub calls_tool: bool,
    /// The last full block of the prompt, 0 for none. The blocks before it are its parents.
    pub leaf: u32,
    /// The threads that run side by side before this request of the main thread, which waits for all: the first, and their number.
    pub subagents: (u32, u32),
}

/// A recorded session: what its threads asked for, and how their prompts' blocks follow from each other.
#[derive(Clone, Debug, Default)]
pub struct Session {
    /// The requests of each thread. Thread 0 is the main one; the others are subagents.
    pub threads: Vec<Vec<Turn>>,
    /// The block before each block. Block 0 is the beginning, and is its own parent.
    pub parents: Vec<u32>,
    /// Blocks at the beginning of the main thread's prompts that sessions of the same `group` share, such as the definitions of tools.
    pub shared: u32,
    /// What the shared blocks are named by.
    pub group: u64,
    /// Index into the tenants.
    pub tenant: u32,
    /// The tier of its requests.
    pub tier: Tier,
    /// The weight of its requests.
    pub weight: u32,
}

impl Session {
    /// The blocks of a prompt, from its beginning.
    fn path(&self, leaf: u32) -> Vec<u32> {
        let mut path: Vec<u32> =
            std::iter::successors(Some(leaf), |&at| Some(self.parents[at as usize])).take_while(|&at| at != 0).collect();
        path.reverse();
        path
    }

    /// The tokens of a prompt in the session's replay number `instance`, with blocks of `block` tokens. Prompts of one replay are equal
    /// as far as their blocks are. The tokens after the last full block are those of request `tag` alone.
    pub(crate) fn prompt(&self, turn: &Turn, instance: u64, tag: u64, block: u32) -> Vec<Token> {
        let mut prompt = Vec::with_capacity(turn.prompt as usize);
        for (depth, id) in self.path(turn.leaf).into_iter().enumerate() {
            // Numbers of replays and groups are small, so that names of blocks differ.
            let name = if id <= self.shared && depth + 1 == id as usize {
                !(self.group << 32 | u64::from(id))
            } else {
                instance << 32 | u64::from(id)
            };
            prompt.extend((0..u64::from(block)).map(|at| token(name, at)));
        }
        prompt.truncate(turn.prompt as usize);
        prompt.extend((prompt.len() as u64..u64::from(turn.prompt)).map(|at| token(!tag, at)));
        prompt
    }

    /// For each thread, the prompt tokens of its requests that no earlier request of the session has, in the recorded order: threads
    /// begin before the request that waits for them.
    pub(crate) fn fresh_tokens(&self, block: u32) -> Vec<Vec<u32>> {
        let mut seen = vec![false; self.parents.len()];
        let mut fresh: Vec<Vec<u32>> = self.threads.iter().map(|thread| Vec::with_capacity(thread.len())).collect();
        let mut count = |turn: &Turn| {
            let new = self.path(turn.leaf).into_iter().filter(|&id| !std::mem::replace(&mut seen[id as usize], true)).count() as u32;
            let full = self.depth(turn.leaf) * block;
            (new * block + turn.prompt.saturating_sub(full)).clamp(1, turn.prompt.max(1))
        };
        for turn in &self.threads[0] {
            for number in turn.subagents.0..turn.subagents.0 + turn.subagents.1 {
                fresh[number as usize] = self.threads[number as usize].iter().map(&mut count).collect();
            }
            fresh[0].push(count(turn));
        }
        fresh
    }

    fn depth(&self, leaf: u32) -> u32 {
        self.path(leaf).len() as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two turns of a main thread, the second after a subagent. Blocks have 4 tokens; the first two are shared.
    pub(crate) fn small() -> Session {
        let turn = |prompt, leaf, subagents| Turn { think: 1_000_000, prompt, output: 2, calls_tool: true, leaf, subagents };
        Session {
            threads: vec![vec![turn(13, 3, (0, 0)), turn(18, 4, (1, 1))], vec![turn(9, 6, (0, 0))]],
            parents: vec![0, 0, 1, 2, 3, 0, 5],
            shared: 2,
            ..Session::default()
        }
    }

    #[test]
    fn prompts_are_equal_as_far_as_their_blocks() {
        let session = small();
        let prompts = |instance| -> Vec<Vec<Token>> {
            session.threads.iter().flatten().zip(0..).map(|(turn, tag)| session.prompt(turn, instance, tag, 4)).collect()
        };
        let (one, other) = (prompts(1), prompts(2));
        let common = |a: &[Token], b: &[Token]| a.iter().zip(b).take_while(|(a, b)| a == b).count();
        assert_eq!(one.iter().map(Vec::len).collect::<Vec<_>>(), [13, 18, 9]);
        assert_eq!([common(&one[0], &one[1]), common(&one[0], &one[2]), common(&one[0], &other[0])], [12, 0, 8]);
    }

    #[test]
    fn fresh_tokens_are_those_that_no_earlier_request_had() {
        assert_eq!(small().fresh_tokens(4), [vec![13, 6], vec![9]]);
    }
}
