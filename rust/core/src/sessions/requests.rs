//! Which session a request belongs to, and what it leaves there.

use super::session::{Session, SessionId, SessionRef, State, Wait};
use super::turns::Sessions;
use crate::memory::{BlockHash, CacheOwner, EvictionClass, Kv, User};
use crate::request::{SeqId, SessionEvent, Tier, Time};
use std::sync::Arc;

/// A new request, for the session that it belongs to.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Joins<'a> {
    pub(crate) seq: SeqId,
    pub(crate) user: User,
    pub(crate) tenant: u32,
    pub(crate) tier: Tier,
    /// The tenant's names for the session, and for the one that began it.
    pub(crate) session: Option<&'a Arc<str>>,
    pub(crate) parent: Option<&'a Arc<str>>,
    /// Whether a prompt without a name may continue a session.
    pub(crate) by_prompt: bool,
    /// Names of the prompt's full blocks.
    pub(crate) names: &'a [BlockHash],
    pub(crate) tokens: u32,
    /// Whether the request has run before.
    pub(crate) started: bool,
    /// When the request arrived, and when it no longer waits for its session's turn.
    pub(crate) arrived: Time,
    pub(crate) due: Time,
}

/// A request that has joined a session, which is in no order until the request [enters](Sessions::enter).
#[derive(Clone, Copy, Debug)]
#[must_use = "the session is in no order"]
pub(crate) struct Joined {
    pub(crate) of: SessionRef,
    /// Blocks of the session multiplied by the microseconds for which it kept them without a request.
    pub(crate) kept_block_us: u64,
    /// Leading blocks of the prompt that the session has computed before.
    known: u32,
    /// Whether the session had no request before.
    is_first: bool,
    /// Whether no session waited for its turn.
    no_line: bool,
}

impl Sessions {
    /// Adds a request to its session. `None` if it belongs to none.
    pub(crate) fn join(&mut self, joins: &Joins<'_>, now: Time, kv: &mut Kv) -> Option<Joined> {
        let (id, subagent) = self.find(joins, kv)?;
        let no_line = self.line.is_empty();
        self.directory.touch(id);
        self.remove_from_orders(id);
        let mut forgotten = Vec::new();
        let session = &mut self.directory[id];
        let (is_first, kept_block_us) = (session.is_new(), session.take_kept(now));
        (session.tenant, session.tier) = (joins.tenant, joins.tier);
        let (thread, known) = session.begin_request(subagent, joins.names, joins.tokens, now, &mut forgotten);
        for name in &forgotten {
            self.directory.forget_name(id, name);
        }
        if let Some(name) = subagent {
            self.directory.name(id, name);
        }
        Some(Joined { of: SessionRef { session: id, thread }, kept_block_us, known, is_first, no_line })
    }

    /// Whether the session that a request has joined becomes active if it fits.
    pub(crate) fn may_begin(&self, joined: Joined) -> bool {
        joined.no_line && !self.is_active(joined.of)
    }

    /// Lets a request that has joined a session enter the queue, or wait for the session's turn. Returns whether it waits. The session becomes
    /// active if it [may begin](Self::may_begin) and fits into `free` blocks with the active ones. The first request of a session whose context
    /// has at most `short` blocks never waits.
    pub(crate) fn enter(&mut self, joins: &Joins<'_>, joined: Joined, (free, short): (u32, u32), now: Time, kv: &mut Kv) -> bool {
        let id = joined.of.session;
        let fits = self.may_begin(joined) && self.load() + self.directory[id].blocks() <= free;
        let session = &mut self.directory[id];
        if fits {
            session.state = State::Active { since: now };
            kv.rank_owner(session.owner, EvictionClass::Active);
        }
        let enters = session.is_active() || joins.started || joined.is_first && session.blocks() <= short;
        if enters {
            session.enter_queue();
        } else {
            let known = (u64::from(joined.known) * u64::from(joins.tokens) / joins.names.len().max(1) as u64) as u32;
            session.wait_for_turn(Wait { seq: joins.seq, known, arrived: joins.arrived, due: joins.due, forks: 0 });
            if session.waiting().len() == 1 {
                kv.rank_owner(session.owner, EvictionClass::ParkedWaiting);
                if joined.no_line {
                    self.line.begin(now);
                }
            }
        }
        self.add_to_orders(id);
        !enters
    }

    /// Records another answer to a request of a session, the `parent`.
    pub(crate) fn fork(&mut self, of: SessionRef, parent: SeqId) {
        self.change(of.session, |session| session.fork_request(of.thread, parent));
    }

    /// Records that a fork that waits for its `parent` is about to [leave](Self::leave).
    pub(crate) fn release_fork(&mut self, of: SessionRef, parent: SeqId) {
        self.change(of.session, |session| session.release_fork(parent));
    }

    /// Ends a request in the queue. `context` has the names of its full blocks and its tokens, if it has run; `answer` is the name of the
    /// last block, if that has a token of the answer.
    pub(crate) fn leave(
        &mut self,
        of: SessionRef,
        context: Option<(&[BlockHash], u32)>,
        answer: Option<BlockHash>,
        now: Time,
        kv: &mut Kv,
    ) {
        self.change(of.session, |session| session.end_request(of.thread, context, now));
        let session = &self.directory[of.session];
        match session.state {
            State::Active { .. } => kv.rank_owner(session.owner, EvictionClass::Active),
            State::Parked if session.waiting().is_empty() => kv.rank_owner(session.owner, EvictionClass::Parked),
            // It has had its place since the first of them waits.
            State::Parked => {}
        }
        if let Some(end) = answer {
            self.answers.add(session.user, end, Some(of.session));
        }
        self.forget_if_ended(of.session, kv);
    }

    /// Ends a request that waited for its session's turn.
    pub(crate) fn leave_line(&mut self, of: SessionRef, seq: SeqId, now: Time, kv: &mut Kv) {
        self.change(of.session, |session| session.cancel_wait(of.thread, seq, now));
        let session = &self.directory[of.session];
        if session.waiting().is_empty() {
            kv.rank_owner(session.owner, EvictionClass::Parked);
        }
        self.forget_if_ended(of.session, kv);
    }

    /// Records what a tenant says of a session. Returns whether the session is known.
    pub(crate) fn note(&mut self, user: User, name: &Arc<str>, event: SessionEvent, kv: &mut Kv) -> bool {
        let Some(id) = self.directory.named(user, name) else { return false };
        let is_main = self.directory[id].name.as_ref() == Some(name);
        match event {
            SessionEvent::AwaitsUser if is_main => self.change(id, |session| session.awaits_user = true),
            SessionEvent::AwaitsUser => {}
            SessionEvent::Ended if is_main => {
                self.change(id, |session| session.ended = true);
                self.forget_if_ended(id, kv);
            }
            SessionEvent::Ended => {
                self.change(id, |session| session.end_subagent(name));
                self.directory.forget_name(id, name);
            }
        }
        true
    }

    /// Remembers an answer of a request without a session.
    pub(crate) fn remember_answer(&mut self, user: User, end: BlockHash) {
        self.answers.add(user, end, None);
    }

    /// Whether a session was not forgotten.
    pub(crate) fn knows(&self, of: SessionRef) -> bool {
        self.directory.contains(of.session)
    }

    /// The owner of the blocks of a session's requests.
    pub(crate) fn owner(&self, of: SessionRef) -> CacheOwner {
        self.directory[of.session].owner
    }

    /// The session of a request and its subagent's name, which are added if they are new.
    fn find<'a>(&mut self, joins: &Joins<'a>, kv: &mut Kv) -> Option<(SessionId, Option<&'a Arc<str>>)> {
        let Joins { user, tenant, session, parent, .. } = *joins;
        let Some(name) = session else {
            let answer = joins.by_prompt.then(|| self.answers.continued(user, joins.names))??;
            let known = answer.session.filter(|&id| self.directory.contains(id));
            return Some((known.unwrap_or_else(|| self.open(user, tenant, None, kv)), None));
        };
        if let Some(id) = self.directory.named(user, name) {
            let is_subagent = self.directory[id].name.as_ref() != Some(name);
            return Some((id, is_subagent.then_some(name)));
        }
        let Some(parent) = parent.filter(|&parent| parent != name) else {
            return Some((self.open(user, tenant, Some(Arc::clone(name)), kv), None));
        };
        let main = self.directory.named(user, parent).unwrap_or_else(|| self.open(user, tenant, Some(Arc::clone(parent)), kv));
        Some((main, Some(name)))
    }

    fn open(&mut self, user: User, tenant: u32, name: Option<Arc<str>>, kv: &mut Kv) -> SessionId {
        let owner = kv.open_owner(user);
        let id = self.directory.add(Session::new(user, tenant, name, owner));
        while let Some(excess) = self.directory.excess().filter(|&excess| excess != id) {
            self.forget(excess, kv);
        }
        id
    }

    /// Forgets a session without requests.
    fn forget(&mut self, id: SessionId, kv: &mut Kv) {
        self.remove_from_orders(id);
        let session = self.directory.remove(id);
        kv.end_owner(session.owner);
    }

    fn forget_if_ended(&mut self, id: SessionId, kv: &mut Kv) {
        if self.directory[id].ended && self.directory[id].is_quiet() {
            self.forget(id, kv);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{BlockHasher, Grant, KvSizes, SeqBlocks};

    #[test]
    fn a_session_keeps_its_place_among_waiting_ones_when_its_earlier_request_ends() {
        let (hasher, user) = (BlockHasher::new(0), User::new(1));
        let mut kv = Kv::new(KvSizes { blocks: 3, block_size: 1, ..KvSizes::default() }, true, hasher);
        let mut sessions = Sessions::new(false);
        let send = |sessions: &mut Sessions, kv: &mut Kv, number: u32| {
            let (name, names) = (number.to_string().into(), hasher.names(&Arc::default(), &[number], 1));
            let (session, parent, names) = (Some(&name), None, &names[..]);
            let (seq, tier, by_prompt, started) = (SeqId::default(), Tier::Default, false, false);
            let (arrived, due, tenant, tokens) = (0, Time::MAX, 0, 1);
            let joins = Joins { seq, user, tenant, tier, session, parent, by_prompt, names, tokens, started, arrived, due };
            let joined = sessions.join(&joins, 0, kv).expect("it is named");
            (sessions.enter(&joins, joined, (0, 2), 0, kv), joined.of)
        };
        let mut first = None;
        for number in [1, 2] {
            let (waits, of) = send(&mut sessions, &mut kv, number);
            assert!(!waits, "the first request is short");
            let (mut blocks, mut copies) = (SeqBlocks::new(Arc::default()), Vec::new());
            blocks.set_owner(sessions.owner(of));
            let cached = kv.find(&mut blocks, &[number], None, 0);
            kv.admit(&mut blocks, &[number], cached, Grant { blocks: 1, room: 1, step: 0 }, &mut copies).expect("a block");
            kv.seal(&mut blocks, &[number], 0, |_| {});
            kv.free_all(&mut blocks);
            assert!(send(&mut sessions, &mut kv, number).0, "further requests wait");
            first.get_or_insert(of);
        }
        sessions.leave(first.expect("two sessions"), None, None, 0, &mut kv);
        // Of those that wait, the one that has waited for the shortest time loses its blocks first.
        kv.restore("", &[3], |_| {});
        assert_eq!([1, 2].map(|number| kv.cached("", &[number])), [1, 0]);
    }
}
