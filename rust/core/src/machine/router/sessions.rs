//! The engines that sessions stay with.

use std::collections::HashMap;

/// The engine of the last request of each session. Keeps the latest `limit` sessions at least and twice as many at most.
#[derive(Debug)]
pub(super) struct Sessions {
    limit: usize,
    new: HashMap<u64, u32>,
    old: HashMap<u64, u32>,
}

impl Sessions {
    pub(super) fn new(limit: usize) -> Self {
        Self { limit: limit.max(1), new: HashMap::new(), old: HashMap::new() }
    }

    pub(super) fn get(&self, session: u64) -> Option<u32> {
        self.new.get(&session).or_else(|| self.old.get(&session)).copied()
    }

    pub(super) fn insert(&mut self, session: u64, engine: u32) {
        if self.new.len() == self.limit && !self.new.contains_key(&session) {
            self.old = std::mem::take(&mut self.new);
        }
        self.new.insert(session, engine);
    }

    pub(super) fn forget(&mut self, engine: u32) {
        self.new.retain(|_, &mut of| of != engine);
        self.old.retain(|_, &mut of| of != engine);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_sessions_are_remembered_and_no_more_than_twice_the_limit() {
        let mut sessions = Sessions::new(100);
        for session in 0..10_000 {
            sessions.insert(session, session as u32 % 3);
            assert!(sessions.new.len() + sessions.old.len() <= 200);
            assert_eq!(sessions.get(session.saturating_sub(99)), Some(session.saturating_sub(99) as u32 % 3));
        }
        assert_eq!(sessions.get(0), None);
        sessions.insert(9_990, 7);
        assert_eq!(sessions.get(9_990), Some(7), "the latest counts");
    }
}
