//! The sessions by name and by use. Their number is bounded, because clients choose names.

use super::session::{Session, SessionId};
use crate::memory::User;
use slotmap::SlotMap;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::{Index, IndexMut};
use std::sync::Arc;

/// Maximum number of sessions, unless more have requests.
const MAX_SESSIONS: usize = 1 << 14;

/// All sessions.
#[derive(Debug, Default)]
pub(super) struct Directory {
    sessions: SlotMap<SessionId, Session>,
    /// Sessions by the tenant and its names for them and their subagents. Hashed with a random key, because clients choose names.
    names: HashMap<(User, Arc<str>), SessionId>,
    /// Sessions of each tenant, the least recently used first.
    by_use: BTreeMap<User, BTreeSet<(u64, SessionId)>>,
    /// Tenants by their number of sessions.
    sizes: BTreeSet<(usize, User)>,
    uses: u64,
}

impl Index<SessionId> for Directory {
    type Output = Session;

    fn index(&self, id: SessionId) -> &Session {
        &self.sessions[id]
    }
}

impl IndexMut<SessionId> for Directory {
    fn index_mut(&mut self, id: SessionId) -> &mut Session {
        &mut self.sessions[id]
    }
}

impl Directory {
    pub(super) fn len(&self) -> usize {
        self.sessions.len()
    }

    pub(super) fn contains(&self, id: SessionId) -> bool {
        self.sessions.contains_key(id)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (SessionId, &Session)> {
        self.sessions.iter()
    }

    /// The session that a tenant calls by this name.
    pub(super) fn named(&self, user: User, name: &Arc<str>) -> Option<SessionId> {
        self.names.get(&(user, Arc::clone(name))).copied()
    }

    /// Adds a session.
    pub(super) fn add(&mut self, session: Session) -> SessionId {
        let (user, name) = (session.user, session.name.clone());
        let id = self.sessions.insert(session);
        if let Some(name) = name {
            self.name(id, &name);
        }
        self.resize(user, |sessions| sessions.insert((0, id)));
        self.touch(id);
        id
    }

    /// Adds a tenant's name for a session or for a subagent of it.
    pub(super) fn name(&mut self, id: SessionId, name: &Arc<str>) {
        self.names.insert((self.sessions[id].user, Arc::clone(name)), id);
    }

    /// Removes a name.
    pub(super) fn forget_name(&mut self, user: User, name: &Arc<str>) {
        self.names.remove(&(user, Arc::clone(name)));
    }

    /// Makes a session the most recently used of its tenant.
    pub(super) fn touch(&mut self, id: SessionId) {
        self.uses += 1;
        let session = &mut self.sessions[id];
        let before = std::mem::replace(&mut session.used, self.uses);
        let sessions = self.by_use.entry(session.user).or_default();
        sessions.remove(&(before, id));
        sessions.insert((self.uses, id));
    }

    /// The session to forget, if there are too many: the least recently used one without requests of the tenant with the most sessions.
    pub(super) fn excess(&self) -> Option<SessionId> {
        if self.sessions.len() <= MAX_SESSIONS {
            return None;
        }
        let (_, user) = self.sizes.last()?;
        self.by_use[user].iter().map(|&(_, id)| id).find(|&id| self.sessions[id].is_quiet())
    }

    /// Removes a session with its names.
    pub(super) fn remove(&mut self, id: SessionId) -> Session {
        let session = self.sessions.remove(id).expect("the caller looked");
        let user = session.user;
        for name in session.name.iter().chain(session.subagents()) {
            self.forget_name(user, name);
        }
        self.resize(user, |sessions| sessions.remove(&(session.used, id)));
        session
    }

    fn resize(&mut self, user: User, change: impl FnOnce(&mut BTreeSet<(u64, SessionId)>) -> bool) {
        let sessions = self.by_use.entry(user).or_default();
        self.sizes.remove(&(sessions.len(), user));
        change(sessions);
        if sessions.is_empty() {
            self.by_use.remove(&user);
        } else {
            self.sizes.insert((sessions.len(), user));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{BlockHasher, Kv, KvSizes};

    #[test]
    fn a_tenant_with_many_names_makes_only_its_own_sessions_forgotten() {
        let mut kv = Kv::new(KvSizes { blocks: 2, block_size: 1, ..KvSizes::default() }, true, BlockHasher::new(0));
        let mut directory = Directory::default();
        let [few, many] = [1, 2].map(User::new);
        let mut add = |directory: &mut Directory, user, number: usize| {
            directory.add(Session::new(user, 0, Some(number.to_string().into()), kv.open_owner(user)))
        };
        let kept = add(&mut directory, few, 0);
        for number in 0..2 * MAX_SESSIONS {
            add(&mut directory, many, number);
            while let Some(excess) = directory.excess() {
                assert_eq!(directory.remove(excess).user, many);
            }
            assert!(directory.len() <= MAX_SESSIONS && directory.names.len() == directory.len());
        }
        assert_eq!(directory.named(few, &"0".into()), Some(kept));
        assert_eq!(directory.named(many, &"0".into()), None, "the least recently used");
    }
}
