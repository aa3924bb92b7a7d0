//! The sessions by name and by use. Their number is bounded, because clients choose names.

use super::session::{Session, SessionId};
use crate::memory::User;
use slotmap::SlotMap;
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::{Index, IndexMut};
use std::sync::Arc;

/// Maximum number of sessions, unless more have requests.
const MAX_SESSIONS: usize = 1 << 14;

/// Sessions with requests that are looked at when there is one too many. Their requests use them now, so they are placed anew.
const LOOKED_AT: u64 = 64;

/// All sessions.
#[derive(Debug, Default)]
pub(super) struct Directory {
    sessions: SlotMap<SessionId, Session>,
    /// Sessions by the tenant and its names for them and their subagents. Hashed with a random key, because clients choose names.
    names: HashMap<(User, Arc<str>), SessionId>,
    /// Sessions of each tenant by a use, the least recent first. One that was used since is placed anew when it is looked at.
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
        self.touch(id);
        let placed = self.uses;
        self.sessions[id].placed = placed;
        self.resize(user, |sessions| sessions.insert((placed, id)));
        id
    }

    /// Adds a tenant's name for a session or for a subagent of it.
    pub(super) fn name(&mut self, id: SessionId, name: &Arc<str>) {
        self.names.insert((self.sessions[id].user, Arc::clone(name)), id);
    }

    /// Removes a name of a subagent of a session, unless it has another thread.
    pub(super) fn forget_name(&mut self, id: SessionId, name: &Arc<str>) {
        let session = &self.sessions[id];
        if session.subagents().all(|other| other != name) {
            self.remove_name(id, session.user, name);
        }
    }

    /// Removes a name, if it is of this session.
    fn remove_name(&mut self, id: SessionId, user: User, name: &Arc<str>) {
        if let Entry::Occupied(entry) = self.names.entry((user, Arc::clone(name)))
            && *entry.get() == id
        {
            entry.remove();
        }
    }

    /// Makes a session the most recently used of its tenant.
    pub(super) fn touch(&mut self, id: SessionId) {
        self.uses += 1;
        self.sessions[id].used = self.uses;
    }

    /// The session to forget, if there are too many: the least recently used one without requests of the tenant with the most sessions.
    /// None if it is not found among the first, of which at most [`LOOKED_AT`] have requests.
    pub(super) fn excess(&mut self) -> Option<SessionId> {
        if self.sessions.len() <= MAX_SESSIONS {
            return None;
        }
        let (_, user) = self.sizes.last()?;
        let sessions = self.by_use.get_mut(user)?;
        let mut busy = 0;
        while busy < LOOKED_AT {
            let &(placed, id) = sessions.first()?;
            let session = &mut self.sessions[id];
            if session.used == placed && session.is_quiet() {
                return Some(id);
            }
            if session.used == placed {
                busy += 1;
                self.uses += 1;
                session.used = self.uses;
            }
            sessions.remove(&(placed, id));
            sessions.insert((session.used, id));
            session.placed = session.used;
        }
        None
    }

    /// Removes a session with its names.
    pub(super) fn remove(&mut self, id: SessionId) -> Session {
        let session = self.sessions.remove(id).expect("the caller looked");
        let user = session.user;
        for name in session.name.iter().chain(session.subagents()) {
            self.remove_name(id, user, name);
        }
        self.resize(user, |sessions| sessions.remove(&(session.placed, id)));
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

    #[test]
    fn of_many_sessions_with_requests_few_are_looked_at_for_each_new_one() {
        let mut kv = Kv::new(KvSizes { blocks: 2, block_size: 1, ..KvSizes::default() }, true, BlockHasher::new(0));
        let mut directory = Directory::default();
        let mut add = |directory: &mut Directory| directory.add(Session::new(User::new(1), 0, None, kv.open_owner(User::new(1))));
        for _ in 0..2 * MAX_SESSIONS {
            let id = add(&mut directory);
            directory[id].enter_queue();
            let before = directory.uses;
            assert_eq!(directory.excess(), None);
            assert!(directory.uses - before <= LOOKED_AT);
        }
        // Those without requests are forgotten, although others are used for longer.
        let first = add(&mut directory);
        for _ in 0..=2 * MAX_SESSIONS as u64 / LOOKED_AT {
            add(&mut directory);
            while let Some(excess) = directory.excess() {
                directory.remove(excess);
            }
        }
        assert!(!directory.contains(first));
    }

    #[test]
    fn the_least_recently_used_one_is_forgotten_first() {
        let mut kv = Kv::new(KvSizes { blocks: 2, block_size: 1, ..KvSizes::default() }, true, BlockHasher::new(0));
        let mut directory = Directory::default();
        let user = User::new(1);
        let mut add = |directory: &mut Directory| directory.add(Session::new(user, 0, None, kv.open_owner(user)));
        let first: Vec<_> = (0..4).map(|_| add(&mut directory)).collect();
        (4..MAX_SESSIONS).for_each(|_| {
            add(&mut directory);
        });
        for used in [2, 0, 0] {
            directory.touch(first[used]);
        }
        directory[first[3]].enter_queue();
        let forgotten: Vec<_> = (4..=MAX_SESSIONS + 1)
            .map(|_| {
                add(&mut directory);
                let excess = directory.excess().expect("one too many");
                directory.remove(excess);
                excess
            })
            .collect();
        // The fourth has a request. The others come after the first two of them, in the order of their uses.
        assert_eq!(forgotten[0], first[1]);
        assert_eq!(forgotten[MAX_SESSIONS - 4 + 1..], [first[2]]);
    }
}
