//! The tenants that are told of a cached block.
//!
//! A tenant must not learn which prompts others have sent. It is told of a cached block only if a request of its own
//! computed it before, or would have computed it if it had not been cached.

use super::{BlockId, BlockPool, Content};
use crate::latest::Latest;
use crate::memory::hash::BlockHash;

/// Maximum number of tenants that are remembered for a block.
const MAX_USERS: usize = 64;
/// Evictions for each block of the pool whose users are remembered.
const REMEMBERED: usize = 4;

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

/// The users of evicted blocks, for those whose content comes back from storage. The names alone tell which these are.
pub(super) type EvictedUsers = Latest<BlockHash, Users>;

impl BlockPool {
    /// Whether `user` is a user of the block. A block without a name is shared only within a tenant.
    pub(in crate::memory) fn is_used_by(&self, id: BlockId, user: User) -> bool {
        self.blocks[id.0 as usize].name.as_ref().is_none_or(|name| name.users.has(user))
    }

    /// Records that a request of `user` has computed the content of a named block, or would have if it were not cached.
    /// Returns the block's content if the user is new.
    pub(in crate::memory) fn use_by(&mut self, hash: BlockHash, user: User) -> Option<Content> {
        let name = self.name_mut(hash)?;
        name.users.add(user).then_some(name.content)
    }

    /// Takes back what [`use_by`](Self::use_by) recorded, unless the block was computed again since.
    pub(in crate::memory) fn unuse(&mut self, (hash, content): (BlockHash, Content), user: User) {
        if let Some(name) = self.name_mut(hash).filter(|name| name.content == content) {
            name.users.remove(user);
        }
    }

    /// Remembers the users of the latest evicted blocks from now on, for [`restore_users`](Self::restore_users).
    pub(crate) fn remember_users(&mut self) {
        self.evicted_users = Some(EvictedUsers::new(REMEMBERED * self.blocks.len()));
    }

    /// Gives a block that storage has brought back the users that it had.
    pub(in crate::memory) fn restore_users(&mut self, hash: BlockHash) {
        if let Some(users) = self.evicted_users.as_mut().map(|evicted| evicted.remove(&hash).unwrap_or_default())
            && let Some(name) = self.name_mut(hash)
        {
            name.users = users;
        }
    }

    /// Remembers the users of a named block that is evicted.
    pub(super) fn remember_evicted(&mut self, id: BlockId) {
        if self.evicted_users.is_some()
            && let Some(name) = &mut self.blocks[id.0 as usize].name
        {
            let (hash, users) = (name.hash, std::mem::take(&mut name.users));
            self.remember_users_of(hash, users);
        }
    }

    /// Remembers the users of a block that is evicted.
    pub(super) fn remember_users_of(&mut self, hash: BlockHash, users: Users) {
        if let Some(evicted) = self.evicted_users.as_mut().filter(|_| users.first != User::default()) {
            evicted.insert(hash, users);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::BlockHasher;

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
    #[test]
    fn evictions_without_users_are_not_remembered() {
        let mut pool = BlockPool::new(4, 1, BlockHasher::new(0));
        pool.remember_users();
        let (name, mut users) = (BlockHash::from_bits(1), Users::default());
        users.add(User::new(2));
        pool.remember_users_of(name, users);
        pool.remember_users_of(name, Users::default());
        let remembered = pool.evicted_users.as_ref().and_then(|evicted| evicted.get(&name));
        assert!(remembered.is_some_and(|users| users.has(User::new(2))));
    }
}
