//! The tenants that are told of a cached block.
//!
//! A tenant must not learn which prompts others have sent. It is told of a cached block only if a request of its own
//! computed it before, or would have computed it if it had not been cached.

/// Maximum number of tenants that are remembered for a block.
const MAX_USERS: usize = 64;

/// Identifies a tenant. The number is never reused, so that a new tenant does not get what another one used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct User(u64);

impl User {
    /// The tenant with this number, at least 1. The default stands for no tenant.
    pub(crate) fn new(number: u64) -> Self {
        debug_assert!(number > 0);
        Self(number)
    }
}

/// The tenants that have used a block. A tenant that is not remembered counts as one that has not.
#[derive(Debug, Default)]
pub(super) struct Users {
    /// Most blocks have one user, and then need no allocation.
    first: User,
    /// The other users, the one that came first at the front.
    others: Vec<User>,
}

impl Users {
    pub(super) fn has(&self, user: User) -> bool {
        user != User::default() && (self.first == user || self.others.contains(&user))
    }

    /// Adds a user and returns whether it is new. If there are too many, the one that came first is forgotten.
    pub(super) fn add(&mut self, user: User) -> bool {
        if user == User::default() || self.has(user) {
            return false;
        }
        if self.first == User::default() {
            self.first = user;
            return true;
        }
        if self.others.len() + 1 == MAX_USERS {
            self.first = self.others.remove(0);
        }
        self.others.push(user);
        true
    }

    /// Removes a user.
    pub(super) fn remove(&mut self, user: User) {
        if self.first == user {
            self.first = if self.others.is_empty() { User::default() } else { self.others.remove(0) };
        } else {
            self.others.retain(|&other| other != user);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_users_are_remembered() {
        let mut users = Users::default();
        let all: Vec<_> = (1..=2 * MAX_USERS as u64).map(User::new).collect();
        for (at, &user) in all.iter().enumerate() {
            assert!(!users.has(user));
            users.add(user);
            users.add(user);
            let remembered = &all[(at + 1).saturating_sub(MAX_USERS)..=at];
            assert!(all.iter().all(|user| users.has(*user) == remembered.contains(user)));
        }
        users.add(User::default());
        assert!(!users.has(User::default()));
    }
}
