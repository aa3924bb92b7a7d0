//! Sessions: which request joins which session, and when the requests of parked sessions join the queue.

use super::Scheduler;
use crate::config::SessionTurns;
use crate::request::{FinishReason, SeqId, SessionEvent, Time};
use crate::sequence::{HeldSeq, Phase, Sequence};
use crate::sessions::{Joins, Machine, Reload, SessionId, SessionWait, Wait};
use std::sync::Arc;

/// Hundredths of the blocks that contexts of active sessions may take when one more becomes active, and as they grow.
const FILL: (usize, usize) = (98, 99);
/// Hundredths of the blocks that a short context takes at most.
const SHORT: usize = 5;
/// Number of a session's waiting requests whose contexts are looked up in each plan.
const LOOKED_UP: usize = 64;
/// Microseconds after which a plan without a step looks at parked sessions again.
const LOOKS_AGAIN: Time = 100_000;

impl Scheduler {
    /// Adds a new request to its session, if it has one and was not added before. Returns whether it waits for the session's turn.
    pub(super) fn join_session(&mut self, id: SeqId) -> bool {
        let seq = &self.seqs[id];
        if self.config.session_turns == SessionTurns::Off
            || !self.config.enable_prefix_caching
            || seq.is_background()
            // A fork joins with its parent. If that has ended before, the fork was prepared itself, and joins like any request.
            || seq.parent().is_some_and(|parent| self.seqs.contains_key(parent))
            || seq.session().is_some()
        {
            return false;
        }
        let by_prompt = self.config.session_turns == SessionTurns::All;
        if seq.request().session.is_none() && !by_prompt {
            return false;
        }
        let (blocks, tokens) = self.seqs[id].blocks_and_tokens();
        self.kv.name(blocks, tokens);
        let seq = &self.seqs[id];
        let (arrived, longest) = (seq.times().arrived, self.config.max_session_wait);
        let half = seq.times().check_at.map_or(Time::MAX, |due| due.saturating_sub(arrived) / 2);
        let joins = Joins {
            seq: id,
            user: self.accounts.user(seq.member().tenant),
            tenant: seq.member().tenant,
            tier: seq.request().tier,
            session: seq.request().session.as_ref(),
            parent: seq.request().parent_session.as_ref(),
            by_prompt,
            names: seq.blocks.names(),
            tokens: seq.len(),
            started: seq.has_started(),
            arrived,
            due: arrived.saturating_add(longest.min(half)),
        };
        let now = self.accounts.now();
        let Some(joined) = self.sessions.join(&joins, now, &mut self.kv) else { return false };
        // The sum over the slots is left out where it decides nothing.
        let room = if self.sessions.may_begin(joined) { self.session_blocks(FILL.0) } else { 0 };
        let short = self.kv.limit() * SHORT / 100;
        let waits = self.sessions.enter(&joins, joined, (room as u32, short as u32), now, &mut self.kv);
        let owner = self.sessions.owner(joined.of);
        // What held sequences keep is counted there.
        let holds = |seq: &HeldSeq| seq.session.is_some_and(|of| of.session == joined.of.session);
        let kept = if joined.kept_block_us > 0 && self.held.iter().any(holds) { 0 } else { joined.kept_block_us };
        let seq = &mut self.seqs[id];
        seq.set_session(joined.of, owner);
        seq.account.keep(kept);
        for fork in self.seqs[id].waiting_forks().to_vec() {
            if self.seqs.contains_key(fork) {
                self.join_parents_session(fork, id);
            }
        }
        waits
    }

    /// Adds a fork to the session of its parent.
    pub(super) fn join_parents_session(&mut self, id: SeqId, parent: SeqId) {
        if let Some(of) = self.seqs[parent].session() {
            self.sessions.fork(of, parent);
            let owner = self.sessions.owner(of);
            self.seqs[id].set_session(of, owner);
        }
    }

    /// Records what a tenant says of one of its sessions. Returns false, and does nothing, if the session is unknown.
    pub fn note_session(&mut self, tenant: &str, session: &Arc<str>, event: SessionEvent, now: Time) -> bool {
        self.accounts.tick(now);
        self.accounts.user_named(tenant).is_some_and(|user| self.sessions.note(user, session, event, &mut self.kv))
    }

    /// How long a request still waits for its session's turn. None unless it waits for it.
    pub fn session_wait(&self, id: SeqId) -> Option<SessionWait> {
        let of = self.seqs.get(id).filter(|seq| seq.waits_for_session())?.session()?;
        self.sessions.wait(of, id, &self.model, self.accounts.now())
    }

    /// Predicted microseconds for which a session that is not active waits for its turn, if its request arrives now: 0 if none waits.
    pub fn predicted_turn_wait(&self) -> Time {
        (self.sessions.wait_of_next(&self.model, self.accounts.now()) as Time).min(self.config.max_session_wait)
    }

    /// Lets parked sessions come in as far as they fit, and queues their requests.
    pub(super) fn take_turns(&mut self) {
        if self.sessions.len() == 0 {
            return;
        }
        let now = self.accounts.now();
        self.sessions.park_excess(self.session_blocks(FILL.1) as u32, now, &mut self.kv);
        while let Some((session, is_due)) = self.sessions.next(now, |tenant| self.waiting.shares().counter(tenant)) {
            let reload = self.session_reload(session);
            let blocks = self.session_blocks(FILL.0) as u32;
            if !self.sessions.fits(session, blocks) && self.evict_quiet_held(reload.takes) {
                continue;
            }
            let service = |tenant| self.waiting.shares().counter(tenant);
            let machine = Machine { now, blocks, service: &service, model: &self.model };
            if !self.sessions.make_room(session, reload, is_due, &machine, &mut self.kv) {
                break;
            }
            for wait in self.sessions.activate(session, reload, now, &mut self.kv) {
                self.end_wait_for_turn(wait, reload.reads);
            }
        }
        self.release_parked_held();
    }

    /// Has a request wait for its session's turn. `reads` is set if its prefix is read from storage then.
    pub(super) fn wait_for_turn(&mut self, id: SeqId, reads: bool) {
        self.enter(id, Phase::WaitSession { reads });
        self.waiting.begin_session_wait(&self.seqs[id]);
    }

    /// Moves a request whose session's turn has come into the queue, or has its prefix read if the session `reads`.
    fn end_wait_for_turn(&mut self, wait: Wait, reads: bool) {
        if reads && self.reads_at_turn(wait.seq) {
            self.begin_reload(wait);
        } else {
            self.enter(wait.seq, Phase::Queued);
            self.enqueue(wait.seq, false);
        }
        self.waiting.end_session_wait(&self.seqs[wait.seq]);
    }

    /// Removes a sequence that has ended from its session. Remembers the end of its answer. Call it when the blocks are released: a session
    /// that ends no longer owns any.
    pub(super) fn leave_session(&mut self, id: SeqId, seq: &Sequence, reason: FinishReason) {
        let (now, names) = (self.accounts.now(), seq.blocks.names());
        let has_answer = names.len() as u32 * self.config.block_size > seq.spec().prompt_len;
        let answered = matches!(reason, FinishReason::Stop | FinishReason::Length) && has_answer;
        let answer = names.last().copied().filter(|_| answered);
        let Some(of) = seq.session() else {
            if let Some(end) = answer.filter(|_| self.config.session_turns == SessionTurns::All) {
                self.sessions.remember_answer(self.accounts.user(seq.member().tenant), end);
            }
            return;
        };
        if seq.waits_for_session() {
            self.sessions.leave_line(of, id, now, &mut self.kv);
            return;
        }
        if seq.phase() == Phase::WaitingOnParent
            && let Some(parent) = seq.parent()
        {
            self.sessions.release_fork(of, parent);
        }
        let context = (seq.computed_in_all() > 0).then(|| (names, seq.len()));
        self.sessions.leave(of, context, answer, now, &mut self.kv);
    }

    /// When a plan without a step may let a parked session come in.
    pub(super) fn next_turn_at(&self) -> Option<Time> {
        let looks_again = self.accounts.now() + LOOKS_AGAIN;
        self.sessions.next_due().map(|due| due.clamp(self.accounts.now() + 1, looks_again))
    }

    /// Blocks that contexts of active sessions may take: a part of all blocks but those of other sequences that run or are held.
    fn session_blocks(&self, hundredths: usize) -> usize {
        (self.kv.limit() * hundredths / 100).saturating_sub(self.blocks_beside_sessions())
    }

    /// Blocks of sequences that run or are held, and do not belong to active sessions. O(slots + held sequences).
    fn blocks_beside_sessions(&self) -> usize {
        let held = self.held.iter().filter(|seq| seq.session.is_none_or(|of| !self.sessions.is_active(of)));
        let held = held.map(|seq| seq.blocks.held()).sum::<usize>();
        let running = self.running_blocks(false);
        // Forks of a held sequence share blocks.
        running + if held == 0 { 0 } else { held.min(self.kv.held().saturating_sub(running + self.running_blocks(true))) }
    }

    /// Blocks of running sequences that belong to active sessions, or of those that do not. A shared block counts once for each.
    fn running_blocks(&self, of_active: bool) -> usize {
        let seqs = self.running_seqs().filter(|seq| seq.session().is_some_and(|of| self.sessions.is_active(of)) == of_active);
        seqs.map(|seq| seq.blocks.held()).sum()
    }

    /// Blocks of running sequences and of the contexts of active sessions, as far as they are in the cache. O(slots).
    pub(super) fn blocks_in_use(&self) -> usize {
        (self.running_blocks(false) + self.sessions.load() as usize).min(self.kv.kept())
    }

    /// What the waiting requests of a session had computed before and is not on the device, as far as they are among the first
    /// [`LOOKED_UP`].
    fn session_reload(&mut self, session: SessionId) -> Reload {
        let mut reload = Reload::default();
        for at in 0..self.sessions.waiting(session).len().min(LOOKED_UP) {
            let wait = self.sessions.waiting(session)[at];
            reload.add(self.reload(wait));
        }
        reload
    }
}
