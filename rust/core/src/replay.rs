//! The same calls again: a journal proves itself, or shows where it differs.

use crate::batch::{Output, Outputs, StepPlan};
use crate::cost::Load;
use crate::error::ConfigError;
use crate::journal::{digest, digest_seed};
use crate::ledger::Ledger;
use crate::parsed_journal::{Call, ParsedJournal, STOP, Sampled};
use crate::request::{SeqId, Ticket, Time};
use crate::scheduler::Scheduler;
use rustc_hash::FxHashMap;
use std::collections::VecDeque;

/// What came of replaying a journal.
#[derive(Debug)]
pub struct Replayed {
    /// Plans that were made, empty ones not counted.
    pub steps: u64,
    /// The hash of all decisions.
    pub hash: u64,
    /// The first plan whose hash is not the recorded one, counted with the empty ones.
    pub differs_at: Option<u64>,
    /// The accounts of the requests that ended, in that order.
    pub ended: Vec<Ledger>,
    /// What each step had to do, and how long it took.
    pub timings: Vec<Timing>,
    /// The scheduler as it was left.
    pub scheduler: Scheduler,
}

/// A step as it was recorded; times in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// What it had to do.
    pub load: Load,
    /// When it was planned.
    pub planned: Time,
    /// From then to its commit; `None` if it has none.
    pub took: Option<Time>,
    /// From its plan to the next; `None` if there was nothing to do in between, or is no next.
    pub cycle: Option<Time>,
}

/// What a recorded call did, made again.
#[derive(Debug)]
pub struct Event<'a> {
    /// When it was made.
    pub now: Time,
    /// The scheduler after it.
    pub scheduler: &'a Scheduler,
    /// Steps that were planned and not yet committed: the first is what the machine is at.
    pub in_flight: &'a VecDeque<StepPlan>,
    /// Whether it planned a step, which is then the last in flight.
    pub planned: bool,
    /// Whether it committed one.
    pub committed: bool,
    /// Tokens that it brought.
    pub tokens: &'a [Output],
    /// Requests that it ended.
    pub ended: &'a [Ledger],
}

/// The requests of a replay that live.
#[derive(Default)]
struct LiveIds {
    ids: Vec<SeqId>,
    by_id: FxHashMap<SeqId, (Ticket, u64)>,
}

impl ParsedJournal {
    /// Makes every recorded call again and compares every decision. Panics
    /// where the recorded scheduler would have.
    pub fn replay(&self) -> Result<Replayed, ConfigError> {
        self.replay_seen(|_| {})
    }

    /// The same, and `see` looks on after each call.
    pub fn replay_seen(&self, mut see: impl FnMut(Event<'_>)) -> Result<Replayed, ConfigError> {
        let mut scheduler = Scheduler::new(self.config)?;
        let mut live = LiveIds::default();
        let mut in_flight: VecDeque<StepPlan> = VecDeque::new();
        let mut outputs = Outputs::default();
        let (mut hash, mut plans, mut differs_at, mut ended) = (digest_seed(), 0, None, Vec::new());
        let (mut timings, mut committed, mut busy): (Vec<Timing>, usize, bool) = (Vec::new(), 0, false);
        for (now, call) in &self.calls {
            let now = *now;
            let (ended_before, committed_before, planned_before) = (ended.len(), committed, timings.len());
            outputs.tokens.clear();
            match call {
                Call::Add(arrival) => {
                    let id = scheduler.add(self.request(arrival), now);
                    // A queue too full then is too full now; it was not recorded.
                    live.enter(id.unwrap_or_default(), arrival.ticket, arrival.request.tag);
                }
                Call::Fork { parent, tag } => {
                    let ticket = live.ids.len() as Ticket;
                    let id = scheduler.fork(live.ids[*parent as usize], *tag, now).unwrap_or_default();
                    for (token, position) in scheduler.tokens_mut(id).unwrap_or_default().iter_mut().zip(0..) {
                        *token = self.token(ticket, position);
                    }
                    live.enter(id, ticket, *tag);
                }
                Call::End { ticket, reason } => {
                    let id = live.ids[*ticket as usize];
                    let tag = live.by_id.get(&id).map(|&(_, tag)| tag);
                    scheduler.end(id, *reason, now);
                    ended.extend(tag.and_then(|tag| scheduler.explain(tag)));
                }
                Call::Expire => scheduler.expire(now, &mut ended),
                Call::Plan(recorded) => {
                    let plan = scheduler.plan(now);
                    hash = digest(hash, plan.as_ref());
                    if let Some(last) = timings.last_mut().filter(|_| busy && plan.is_some()) {
                        last.cycle = Some(now.saturating_sub(last.planned));
                    }
                    busy = plan.is_some() || !in_flight.is_empty();
                    timings.extend(plan.iter().map(|plan| Timing { load: plan.load, planned: now, took: None, cycle: None }));
                    in_flight.extend(plan);
                    if hash != *recorded {
                        differs_at.get_or_insert(plans);
                    }
                    plans += 1;
                }
                Call::Draft { ticket, tokens, accepted } => {
                    let id = live.ids[*ticket as usize];
                    let len = scheduler.tokens(id).map_or(0, |(tokens, _)| tokens.len() as u32);
                    scheduler.draft(id, &self.draft(*ticket, len, *tokens, *accepted));
                }
                Call::Commit(recorded) => {
                    // Only a journal that differs already can lack a plan here.
                    let Some(plan) = in_flight.pop_front() else { break };
                    let sampled = self.sampled(&scheduler, &live, &plan, recorded);
                    scheduler.commit(plan, &sampled, now, &mut outputs);
                    ended.append(&mut outputs.ended);
                    timings[committed].took = Some(now.saturating_sub(timings[committed].planned));
                    committed += 1;
                    busy &= !scheduler.is_idle();
                }
            }
            see(Event {
                now,
                scheduler: &scheduler,
                in_flight: &in_flight,
                planned: timings.len() > planned_before,
                committed: committed > committed_before,
                tokens: &outputs.tokens,
                ended: &ended[ended_before..],
            });
        }
        Ok(Replayed { steps: scheduler.stats().counters.steps, hash, differs_at, ended, timings, scheduler })
    }

    /// Made-up tokens for a step's samples, with the stops, errors and accepted drafts that were recorded.
    fn sampled(&self, scheduler: &Scheduler, live: &LiveIds, plan: &StepPlan, recorded: &Sampled) -> Vec<i32> {
        let mut sampled = Vec::new();
        for chunk in plan.chunks.iter().filter(|chunk| chunk.samples) {
            let positions = sampled.len()..sampled.len() + 1 + chunk.drafted as usize;
            // Of one that has ended meanwhile nothing is read.
            sampled.resize(positions.end, 1);
            let (Some(&(ticket, tag)), Some((tokens, _))) = (live.by_id.get(&chunk.seq), scheduler.tokens(chunk.seq)) else { continue };
            let given = recorded.drafted.iter().find(|(drafted, _)| *drafted == ticket).map_or(1, |&(_, given)| given.max(1));
            for (at, place) in positions.clone().enumerate() {
                sampled[place] = self.token(ticket, tokens.len() as u32 + at as u32) as i32;
            }
            if let Some(&(_, failed)) = recorded.ended.iter().find(|(ended, _)| *ended == tag) {
                let last = (positions.start + given as usize - 1).min(positions.end - 1);
                sampled[last] = if failed { -1 } else { STOP as i32 };
            }
        }
        sampled
    }
}

impl LiveIds {
    fn enter(&mut self, id: SeqId, ticket: Ticket, tag: u64) {
        debug_assert_eq!(self.ids.len() as Ticket, ticket);
        self.ids.push(id);
        self.by_id.insert(id, (ticket, tag));
    }
}
