//! One session: its threads, its requests and whether it takes part in the turns.

use super::marks::Marks;
use crate::memory::{BlockHash, CacheOwner, User};
use crate::request::{SeqId, Tier, Time};
use slotmap::new_key_type;
use std::sync::Arc;

new_key_type! {
    /// Handle of a session.
    pub(crate) struct SessionId;
}

/// Maximum number of a session's threads. Another one takes the place of the one that has been quiet for the longest time.
const MAX_THREADS: usize = 16;
/// Maximum number of threads with requests. Further requests share them: the work of a request grows with the square of this number.
const MAX_BUSY: usize = 64;
/// Microseconds after which a thread that has been quiet is over, if another one of its session goes on.
const GIVEN_UP: Time = 600_000_000;

/// Requests after which a session goes no further behind others in the line.
const MANY_REQUESTS: u32 = 64;

/// A session and a thread of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SessionRef {
    pub(crate) session: SessionId,
    pub(super) thread: u32,
}

/// Whether a session takes part in the turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// Its context counts against the cache, and its requests are served.
    Active {
        /// When its turn began.
        since: Time,
    },
    /// Its requests wait, and its blocks are evicted before others.
    Parked,
}

/// A request that waits for its session's turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Wait {
    pub(crate) seq: SeqId,
    /// Leading tokens of the prompt that the session had computed before.
    pub(crate) known: u32,
    /// When the request arrived.
    pub(super) arrived: Time,
    /// When it no longer waits for the turn.
    pub(super) due: Time,
    /// Forks of the request. They wait for it, and hold no blocks.
    pub(super) forks: u32,
}

/// A chain of requests of which each continues the one before. A subagent is a thread of the session that began it.
#[derive(Debug, Default)]
pub(super) struct Thread {
    /// The subagent's name.
    pub(super) name: Option<Arc<str>>,
    /// Its latest context.
    marks: Marks,
    tokens: u32,
    /// The context before its requests, and its tokens, until one of them has run.
    before: Option<(Marks, u32)>,
    /// Requests that wait or run.
    requests: u32,
    quiet_since: Time,
}

impl Thread {
    fn is_vacant(&self) -> bool {
        self.requests == 0 && self.tokens == 0
    }
}

/// A session.
#[derive(Debug)]
pub(crate) struct Session {
    pub(super) user: User,
    /// Number of the tenant among those that have requests.
    pub(super) tenant: u32,
    /// The tier of its latest request.
    pub(super) tier: Tier,
    pub(super) name: Option<Arc<str>>,
    pub(super) owner: CacheOwner,
    threads: Vec<Thread>,
    /// Blocks of the contexts of all threads. Those in common beginnings count once.
    blocks: u32,
    pub(super) state: State,
    /// Requests that wait for the session's turn, in the order of arrival.
    waiting: Vec<Wait>,
    /// When the first of them is due.
    due: Time,
    /// Forks of all of them.
    forks: u32,
    /// Requests in the queue or running.
    requests: u32,
    /// Requests that have begun, `MANY_REQUESTS` at most.
    begun: u32,
    quiet_since: Time,
    /// Blocks multiplied by the microseconds that they were kept, since the latest request and until the session was parked.
    kept_block_us: u64,
    /// Whether the latest answer called no tool, so that the user goes on.
    pub(super) awaits_user: bool,
    /// Whether the tenant has said that it sends no more requests of the session.
    pub(super) ended: bool,
    /// Number of its latest use, and of the one by which the order of use has it.
    pub(super) used: u64,
    pub(super) placed: u64,
}

impl Session {
    pub(super) fn new(user: User, tenant: u32, name: Option<Arc<str>>, owner: CacheOwner) -> Self {
        Self {
            user,
            tenant,
            tier: Tier::default(),
            name,
            owner,
            threads: Vec::new(),
            blocks: 0,
            state: State::Parked,
            waiting: Vec::new(),
            due: Time::MAX,
            forks: 0,
            requests: 0,
            begun: 0,
            quiet_since: 0,
            kept_block_us: 0,
            awaits_user: false,
            ended: false,
            used: 0,
            placed: 0,
        }
    }

    /// Blocks of the contexts of all threads.
    pub(crate) fn blocks(&self) -> u32 {
        self.blocks
    }

    /// Blocks of the contexts of a parked session, if it has requests in the queue or running.
    pub(super) fn leaving(&self) -> u32 {
        if self.requests > 0 { self.blocks } else { 0 }
    }

    /// Whether no request waits or runs.
    pub(super) fn is_quiet(&self) -> bool {
        self.requests == 0 && self.waiting.is_empty()
    }

    /// Whether the session has had no request.
    pub(super) fn is_new(&self) -> bool {
        self.threads.iter().all(Thread::is_vacant)
    }

    pub(super) fn is_active(&self) -> bool {
        matches!(self.state, State::Active { .. })
    }

    /// When the latest request ended.
    pub(super) fn quiet_since(&self) -> Time {
        self.quiet_since
    }

    /// Ends the session's turn. Its blocks are no longer kept.
    pub(super) fn park(&mut self, now: Time) {
        self.kept_block_us = self.take_kept(now);
        self.state = State::Parked;
    }

    /// Blocks multiplied by the microseconds that they were kept without a request, since the last call. Call it before the next request.
    pub(super) fn take_kept(&mut self, now: Time) -> u64 {
        let kept = match self.state {
            State::Active { since } if self.is_quiet() => u64::from(self.blocks) * now.saturating_sub(since.max(self.quiet_since)),
            _ => 0,
        };
        std::mem::take(&mut self.kept_block_us) + kept
    }

    /// Tokens of each thread's context.
    pub(super) fn contexts(&self) -> impl Iterator<Item = u32> + '_ {
        self.threads.iter().map(|thread| thread.tokens)
    }

    /// Names of its subagents.
    pub(super) fn subagents(&self) -> impl Iterator<Item = &Arc<str>> + '_ {
        self.threads.iter().filter_map(|thread| thread.name.as_ref())
    }

    /// The thread of a request with a context of `tokens` tokens, whose full blocks have these names. Returns its number and
    /// the leading blocks that the thread has computed before. Adds names that no longer belong to a thread to `forgotten`.
    pub(super) fn begin_request(
        &mut self,
        subagent: Option<&Arc<str>>,
        names: &[BlockHash],
        tokens: u32,
        now: Time,
        forgotten: &mut Vec<Arc<str>>,
    ) -> (u32, u32) {
        // A main agent goes on when its subagents have ended. A context without a request for `GIVEN_UP` is over.
        let is_over = |thread: &Thread| {
            thread.requests == 0
                && (subagent.is_none() && thread.name.is_some() || now.saturating_sub(thread.quiet_since) > GIVEN_UP)
                && !thread.marks.begins(names)
        };
        for thread in self.threads.iter_mut().filter(|thread| is_over(thread)) {
            forgotten.extend(std::mem::take(thread).name);
        }
        let known = self.threads.iter().map(|thread| thread.marks.common(names)).max().unwrap_or(0);
        let own = self.threads.iter().enumerate().filter(|(_, thread)| thread.name.as_ref() == subagent && !thread.is_vacant());
        let continued = own.clone().find(|(_, thread)| thread.requests == 0 && thread.marks.begins(names));
        // A client that changes the end of the history goes on with the rest of it.
        let goes_on = |thread: &Thread| thread.requests == 0 && 2 * thread.marks.common(names) >= thread.marks.depth().max(1);
        let changed = || own.filter(|(_, thread)| goes_on(thread)).max_by_key(|(_, thread)| thread.marks.common(names));
        let at = continued.or_else(changed).map(|(at, _)| at);
        let at = at.unwrap_or_else(|| self.free_thread());
        let thread = &mut self.threads[at];
        if thread.name.as_ref() != subagent {
            forgotten.extend(thread.name.take());
            thread.name = subagent.cloned();
        }
        let before = (std::mem::replace(&mut thread.marks, Marks::of(names)), std::mem::replace(&mut thread.tokens, tokens));
        if thread.requests == 0 {
            thread.before = Some(before);
        }
        thread.requests += 1;
        self.count_blocks();
        self.begun = (self.begun + 1).min(MANY_REQUESTS);
        (self.awaits_user, self.ended) = (false, false);
        (at as u32, known)
    }

    /// Counts a request that joins the queue.
    pub(super) fn enter_queue(&mut self) {
        self.requests += 1;
    }

    /// The requests that wait for the session's turn.
    pub(super) fn waiting(&self) -> &[Wait] {
        &self.waiting
    }

    /// The time by which waiting sessions are ordered: the arrival of the first request, and later the more requests the session has had,
    /// so that a short session need not wait for long ones. One with `MANY_REQUESTS` goes behind all that arrive before its request is due.
    pub(super) fn place_in_line(&self) -> Option<Time> {
        let first = self.waiting.first()?;
        let per_request = (first.due - first.arrived) / Time::from(MANY_REQUESTS);
        Some(first.arrived.saturating_add(per_request.saturating_mul(self.begun.into())))
    }

    /// When a request comes in whatever happens, if any waits for the session's turn.
    pub(super) fn due(&self) -> Time {
        self.due
    }

    /// Forks of the requests that wait for the session's turn.
    pub(super) fn waiting_forks(&self) -> u32 {
        self.forks
    }

    /// Adds a request that waits for the session's turn.
    pub(super) fn wait_for_turn(&mut self, wait: Wait) {
        self.due = self.due.min(wait.due);
        self.waiting.push(wait);
    }

    /// Takes the requests that wait for the session's turn. They and their forks join the queue.
    pub(super) fn take_waiting(&mut self) -> Vec<Wait> {
        let waiting = std::mem::take(&mut self.waiting);
        self.due = Time::MAX;
        self.requests += waiting.len() as u32 + std::mem::take(&mut self.forks);
        waiting
    }

    /// Records another answer to a request of a thread, the `parent`.
    pub(super) fn fork_request(&mut self, thread: u32, parent: SeqId) {
        self.threads[thread as usize].requests += 1;
        match self.waiting.iter_mut().find(|wait| wait.seq == parent) {
            Some(wait) => {
                wait.forks += 1;
                self.forks += 1;
            }
            None => self.requests += 1,
        }
    }

    /// Counts a fork of a request that waits for the session's turn as one in the queue, because it ends.
    pub(super) fn release_fork(&mut self, parent: SeqId) {
        if let Some(wait) = self.waiting.iter_mut().find(|wait| wait.seq == parent) {
            wait.forks -= 1;
            self.forks -= 1;
            self.requests += 1;
        }
    }

    /// Ends a request of a thread in the queue. `context` has the names of its full blocks and its tokens, if it has run.
    pub(super) fn end_request(&mut self, thread: u32, context: Option<(&[BlockHash], u32)>, now: Time) {
        self.requests -= 1;
        self.leave_thread(thread, context, now);
    }

    /// Ends a request that waited for the session's turn. Its forks join the queue.
    pub(super) fn cancel_wait(&mut self, thread: u32, seq: SeqId, now: Time) {
        let at = self.waiting.iter().position(|wait| wait.seq == seq).expect("it waits");
        let Wait { forks, .. } = self.waiting.remove(at);
        self.forks -= forks;
        self.requests += forks;
        self.due = self.least_due();
        self.leave_thread(thread, None, now);
    }

    /// Ends a request of a thread, which leaves its `context` if it has run. Otherwise a thread without another request has its context
    /// from before.
    fn leave_thread(&mut self, thread: u32, context: Option<(&[BlockHash], u32)>, now: Time) {
        self.quiet_since = now;
        let thread = &mut self.threads[thread as usize];
        thread.requests -= 1;
        thread.quiet_since = now;
        if let Some((names, tokens)) = context {
            thread.before = None;
            thread.tokens = tokens;
            if !thread.marks.is_of(names) {
                thread.marks = Marks::of(names);
                self.count_blocks();
            }
        } else if thread.requests == 0
            && let Some(before) = thread.before.take()
        {
            (thread.marks, thread.tokens) = before;
            self.count_blocks();
        }
    }

    /// Ends the threads of a subagent that have no requests.
    pub(super) fn end_subagent(&mut self, name: &Arc<str>) {
        for thread in self.threads.iter_mut().filter(|thread| thread.name.as_ref() == Some(name) && thread.requests == 0) {
            *thread = Thread::default();
        }
        self.count_blocks();
    }

    /// A thread for a new context: one without a context, a new one, or the one that has been quiet for the longest time. If too many have
    /// requests, the one with the fewest.
    fn free_thread(&mut self) -> usize {
        if let Some(vacant) = self.threads.iter().position(Thread::is_vacant) {
            return vacant;
        }
        let quiet = self.threads.iter().enumerate().filter(|(_, thread)| thread.requests == 0);
        match quiet.min_by_key(|(_, thread)| thread.quiet_since) {
            Some((at, _)) if self.threads.len() >= MAX_THREADS => at,
            None if self.threads.len() >= MAX_BUSY => {
                let fewest = self.threads.iter().enumerate().min_by_key(|(_, thread)| thread.requests);
                fewest.expect("there are many").0
            }
            _ => {
                self.threads.push(Thread::default());
                self.threads.len() - 1
            }
        }
    }

    fn least_due(&self) -> Time {
        self.waiting.iter().map(|wait| wait.due).min().unwrap_or(Time::MAX)
    }

    fn count_blocks(&mut self) {
        let mut blocks = 0;
        for (at, thread) in self.threads.iter().enumerate() {
            let common = self.threads[..at].iter().map(|other| thread.marks.common_with(&other.marks)).max().unwrap_or(0);
            // The last block may be partly filled.
            blocks += thread.marks.depth() - common + u32::from(thread.tokens > 0);
        }
        self.blocks = blocks;
    }

    /// Panics unless the counts agree with the threads.
    pub(super) fn check(&self) {
        let requests: u32 = self.threads.iter().map(|thread| thread.requests).sum();
        let forks: u32 = self.waiting.iter().map(|wait| wait.forks).sum();
        let waiting = self.waiting.len() as u32 + forks;
        assert_eq!((requests, forks), (self.requests + waiting, self.forks), "requests of a session, and forks of those that wait");
        assert_eq!(self.due, self.least_due(), "when a session's first request is due");
        assert!(self.waiting.is_empty() || !self.is_active(), "a request waits for the turn of an active session");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::{BlockHasher, Kv, KvSizes};
    use crate::request::CacheScope;

    #[test]
    fn many_requests_at_once_share_threads() {
        let hasher = BlockHasher::new(0);
        let mut kv = Kv::new(KvSizes { blocks: 2, block_size: 1, ..KvSizes::default() }, true, hasher);
        let mut session = Session::new(User::new(1), 0, None, kv.open_owner(User::new(1)));
        let begin = |session: &mut Session, number: u32| {
            let names = hasher.names(&CacheScope::default(), &[number, 0, 0], 1);
            let (thread, _) = session.begin_request(None, &names, 3, 0, &mut Vec::new());
            session.enter_queue();
            (thread, names)
        };
        let requests: Vec<_> = (0..200).map(|number| begin(&mut session, number)).collect();
        assert_eq!(session.threads.len(), MAX_BUSY);
        assert!(session.threads.iter().all(|thread| (3..=4).contains(&thread.requests)));
        session.check();
        for (thread, names) in requests {
            session.end_request(thread, Some((&names, 3)), 1);
        }
        session.check();
        assert!(session.is_quiet());
        // A quiet thread is free for a new context again.
        begin(&mut session, 999);
        assert_eq!(session.threads.len(), MAX_BUSY);
    }
}
