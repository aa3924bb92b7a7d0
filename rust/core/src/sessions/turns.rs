//! Which sessions are active, and which one makes room for another.
//!
//! The contexts of active sessions fit into the cache together. The others are parked: their requests wait in line, and their blocks are
//! evicted first. A parked session comes in when there is room, or when an active one makes room: because
//! it has been active for [`MIN_TURN`](parking::MIN_TURN) times the time to bring its context back, and the bucket for such reloads is not
//! empty; or because it has been quiet for [`LONG_QUIET`](parking::LONG_QUIET). One that is quiet goes before one with requests, whose further
//! requests wait. A session of a less urgent tier makes room at once, and does not count while it has requests. Where tenants take turns,
//! tiers do not count, and a turn ends only for a tenant without more service. A request that is due is served in any case. A
//! session that has been quiet for [`QUIET`](parking::QUIET) is parked even if no other waits.

use super::answers::Answers;
use super::directory::Directory;
use super::line::{Key, Line, SessionWait};
use super::reloads::{self, Reload, Reloads};
use super::session::{Session, SessionId, SessionRef, State, Wait};
use crate::memory::{EvictionClass, Kv};
use crate::request::{SeqId, Tier, Time};
use crate::step_time::StepModel;
use std::collections::BTreeSet;

mod parking;

pub(crate) use parking::is_long_quiet;

/// A session that waits for its user counts as quiet for so many microseconds longer, because users take longer than tools.
const USERS_TAKE: Time = 60_000_000;

/// The machine's state at the time of a decision.
#[derive(Clone, Copy)]
pub(crate) struct Machine<'a> {
    pub(crate) now: Time,
    /// Blocks that contexts of active sessions may take.
    pub(crate) blocks: u32,
    /// The service of a tenant, where tenants take turns.
    pub(crate) service: &'a dyn Fn(u32) -> u64,
    pub(crate) model: &'a StepModel,
}

/// All sessions.
#[derive(Debug)]
pub(crate) struct Sessions {
    pub(super) directory: Directory,
    pub(super) answers: Answers,
    /// Whether the line goes by tenant.
    by_tenant: bool,
    /// Blocks of the contexts of active sessions, by tier.
    loads: [u32; Tier::COUNT],
    /// Active sessions without requests, the one that is expected to stay quiet for the longest time at the front.
    quiet: BTreeSet<(Time, SessionId)>,
    /// Active sessions without requests, and those with requests, by the beginning of their turn.
    turns: BTreeSet<(Time, SessionId)>,
    busy: BTreeSet<(Time, SessionId)>,
    /// Blocks of the contexts of parked sessions with requests in the queue or running.
    leaving: u32,
    /// Forks of requests that wait for turns.
    forks_in_line: u32,
    pub(super) line: Line,
    reloads: Reloads,
}

impl Sessions {
    /// No sessions. `by_tenant` is set if tenants take turns.
    pub(crate) fn new(by_tenant: bool) -> Self {
        Self {
            directory: Directory::default(),
            answers: Answers::default(),
            by_tenant,
            loads: [0; Tier::COUNT],
            quiet: BTreeSet::new(),
            turns: BTreeSet::new(),
            busy: BTreeSet::new(),
            leaving: 0,
            forks_in_line: 0,
            line: Line::default(),
            reloads: Reloads::default(),
        }
    }

    /// Number of sessions.
    pub(crate) fn len(&self) -> usize {
        self.directory.len()
    }

    /// Number of forks of requests that wait for turns.
    pub(crate) fn forks_in_line(&self) -> usize {
        self.forks_in_line as usize
    }

    /// Blocks of the contexts of active sessions.
    pub(crate) fn load(&self) -> u32 {
        self.loads.iter().sum()
    }

    /// The parked session that comes in next, and whether it comes in whatever happens. `service` is that of a tenant.
    pub(crate) fn next(&self, now: Time, service: impl Fn(u32) -> u64) -> Option<(SessionId, bool)> {
        if let Some((due, id)) = self.line.next_due()
            && due <= now
        {
            return Some((id, true));
        }
        self.line.next(service).map(|id| (id, false))
    }

    /// How long a request of a parked session still waits for its turn. None unless it waits.
    pub(crate) fn wait(&self, of: SessionRef, seq: SeqId, model: &StepModel, now: Time) -> Option<SessionWait> {
        let key = self.line_key(of.session)?;
        let session = &self.directory[of.session];
        // Another request of the session may be due before, but it may also end before.
        let own = session.waiting().iter().find(|wait| wait.seq == seq)?.due;
        let expected = self.line.expected(key, self.reload(of.session, model) / reloads::SHARE, now);
        let [expected, longest] = [(expected as Time).min(session.due().saturating_sub(now)), own.saturating_sub(now)];
        Some(SessionWait { expected, longest })
    }

    /// Microseconds for which a session that is not active is expected to wait for its turn, if its request comes now.
    pub(crate) fn wait_of_next(&self, model: &StepModel, now: Time) -> f64 {
        self.line.first().map_or(0.0, |first| self.line.expected_last(self.reload(first, model) / reloads::SHARE, now))
    }

    /// The requests of a session that wait for its turn.
    pub(crate) fn waiting(&self, id: SessionId) -> &[Wait] {
        self.directory[id].waiting()
    }

    /// Whether a parked session fits beside the active ones, if their contexts may take `blocks`.
    pub(crate) fn fits(&self, id: SessionId, blocks: u32) -> bool {
        self.load() + self.directory[id].blocks() <= blocks
    }

    /// Begins the turn of a parked session with its `reload`, and returns its requests.
    pub(crate) fn activate(&mut self, id: SessionId, reload: Reload, now: Time, kv: &mut Kv) -> Vec<Wait> {
        self.reloads.begin(reload);
        if !self.directory[id].waiting().is_empty() {
            self.line.advance(now);
        }
        kv.rank_owner(self.directory[id].owner, EvictionClass::Active);
        self.change(id, |session| {
            session.state = State::Active { since: now };
            session.take_waiting()
        })
    }

    /// Microseconds that a reload is expected to take by what the latest ones took, if computing takes `computing`.
    pub(crate) fn expected_reload(&self, computing: f64) -> f64 {
        self.reloads.expected(computing)
    }

    /// See [`Reloads::reads_pay`].
    pub(crate) fn reads_pay(&self) -> bool {
        self.reloads.reads_pay()
    }

    /// See [`Reloads::spread`].
    pub(crate) fn spread_reloads(&mut self) {
        self.reloads.spread();
    }

    /// See [`Reloads::end_read`].
    pub(crate) fn end_read(&mut self, expected: Reload, takes: f64) {
        self.reloads.end_read(expected, takes);
    }

    /// When the first session comes in whatever happens.
    pub(crate) fn next_due(&self) -> Option<Time> {
        self.line.next_due().map(|(due, _)| due)
    }

    /// Whether a session is active.
    pub(crate) fn is_active(&self, of: SessionRef) -> bool {
        self.knows(of) && self.directory[of.session].is_active()
    }

    fn park(&mut self, id: SessionId, now: Time, kv: &mut Kv) {
        self.change(id, |session| session.park(now));
        kv.rank_owner(self.directory[id].owner, EvictionClass::Parked);
    }

    /// A session's tier. Where tenants take turns, tiers only order the requests of a tenant.
    fn tier(&self, id: SessionId) -> Tier {
        if self.by_tenant { Tier::Default } else { self.directory[id].tier }
    }

    /// Expected microseconds to bring a session's contexts back.
    fn reload(&self, id: SessionId, model: &StepModel) -> f64 {
        self.reloads.expected(self.directory[id].contexts().map(|tokens| model.prefill(0.0, tokens.into())).sum())
    }

    /// Changes a session and its places in the orders.
    pub(super) fn change<R>(&mut self, id: SessionId, change: impl FnOnce(&mut Session) -> R) -> R {
        self.remove_from_orders(id);
        let result = change(&mut self.directory[id]);
        self.add_to_orders(id);
        result
    }

    /// Adds a session to the orders that its state puts it into.
    pub(super) fn add_to_orders(&mut self, id: SessionId) {
        let session = &self.directory[id];
        match session.state {
            State::Active { since } => {
                self.loads[session.tier as usize] += session.blocks();
                if session.is_quiet() {
                    self.quiet.insert(quiet_key(id, session));
                    self.turns.insert((since, id));
                } else {
                    self.busy.insert((since, id));
                }
            }
            State::Parked => {
                self.leaving += session.leaving();
                self.forks_in_line += session.waiting_forks();
                if let Some(key) = self.line_key(id) {
                    self.line.add(key, session.due());
                }
            }
        }
    }

    /// Removes a session from its orders, before it changes.
    pub(super) fn remove_from_orders(&mut self, id: SessionId) {
        let session = &self.directory[id];
        match session.state {
            State::Active { since } => {
                self.loads[session.tier as usize] -= session.blocks();
                if session.is_quiet() {
                    self.quiet.remove(&quiet_key(id, session));
                    self.turns.remove(&(since, id));
                } else {
                    self.busy.remove(&(since, id));
                }
            }
            State::Parked => {
                self.leaving -= session.leaving();
                self.forks_in_line -= session.waiting_forks();
                let due = session.due();
                if let Some(key) = self.line_key(id) {
                    self.line.remove(key, due);
                }
            }
        }
    }

    /// A parked session's key in the line, if requests wait.
    fn line_key(&self, id: SessionId) -> Option<Key> {
        let session = &self.directory[id];
        Some((if self.by_tenant { session.tenant } else { 0 }, session.tier, session.place_in_line()?, id))
    }

    /// Panics unless the orders agree with the sessions. `requests` is the number of requests that wait for turns.
    pub(crate) fn check(&self, requests: usize) {
        let (mut loads, mut quiet, mut busy, mut leaving, mut line, mut waiting, mut forks) = ([0; Tier::COUNT], 0, 0, 0, 0, 0, 0);
        for (id, session) in self.directory.iter() {
            session.check();
            waiting += session.waiting().len();
            forks += session.waiting_forks();
            match session.state {
                State::Active { since } => {
                    loads[session.tier as usize] += session.blocks();
                    if session.is_quiet() {
                        quiet += 1;
                        assert!(self.turns.contains(&(since, id)) && self.quiet.contains(&quiet_key(id, session)), "orders of turns");
                    } else {
                        busy += 1;
                        assert!(self.busy.contains(&(since, id)), "order of busy sessions");
                    }
                }
                State::Parked => {
                    leaving += session.leaving();
                    if let Some(key) = self.line_key(id) {
                        line += 1;
                        assert!(self.line.has(key, session.due()), "the line");
                    }
                }
            }
        }
        assert_eq!(
            (loads, leaving, waiting, forks),
            (self.loads, self.leaving, requests, self.forks_in_line),
            "blocks of active sessions, and requests that wait for turns"
        );
        assert_eq!((quiet, quiet, busy), (self.quiet.len(), self.turns.len(), self.busy.len()), "lengths of orders");
        self.line.check(line);
    }
}

/// The key of an active session without requests among such sessions. Among tools, and among users, the one that has taken the longest time
/// so far is expected to take the longest time from now on.
fn quiet_key(id: SessionId, session: &Session) -> (Time, SessionId) {
    (session.quiet_since().saturating_sub(if session.awaits_user { USERS_TAKE } else { 0 }), id)
}
