//! Replays a journal and checks that every decision is the same.

use super::format::{SEED, digest};
use super::parsed::{ParsedJournal, STOP};
use super::record::{Call, Sampled};
use crate::batch::{Output, Outputs};
use crate::error::ConfigError;
use crate::ledger::Timeline;
use crate::request::{ArrivalNumber, Continues, HeldId, Request, SeqId, Time};
use crate::scheduler::Scheduler;
use crate::step::{StepPlan, VerifiedDraft};
use crate::step_time::Load;
use rustc_hash::FxHashMap;
use std::collections::VecDeque;
use std::sync::Arc;

/// The result of replaying a journal.
#[derive(Debug)]
pub struct Replayed {
    /// Number of steps planned, without empty plans.
    pub steps: u64,
    /// The hash of all decisions.
    pub hash: u64,
    /// The first plan whose hash differs from the recorded one, counting empty plans.
    pub differs_at: Option<u64>,
    /// Timelines of the requests that ended, in that order.
    pub ended: Vec<Timeline>,
    /// The work and the duration of each step.
    pub timings: Vec<Timing>,
    /// The drafts that steps verified, with the arrival numbers of their requests.
    pub drafts: Vec<(ArrivalNumber, VerifiedDraft)>,
    /// The scheduler after the last call.
    pub scheduler: Scheduler,
}

/// A recorded step. Times are in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// The step's work.
    pub load: Load,
    /// When the step was planned.
    pub planned: Time,
    /// Time from plan to commit. `None` if the step was not committed.
    pub took: Option<Time>,
    /// Time from this plan to the next. `None` if there was no work in between or no next plan.
    pub cycle: Option<Time>,
}

/// The effects of one replayed call.
#[derive(Debug)]
pub struct Event<'a> {
    /// The time of the call.
    pub now: Time,
    /// The scheduler after the call.
    pub scheduler: &'a Scheduler,
    /// Steps planned and not yet committed. The first is the one that the device runs.
    pub in_flight: &'a VecDeque<Box<StepPlan>>,
    /// Whether the call planned a step. That step is then the last in flight.
    pub planned: bool,
    /// Whether the call committed a step.
    pub committed: bool,
    /// Tokens that the call returned.
    pub tokens: &'a [Output],
    /// Requests that the call ended.
    pub ended: &'a [Timeline],
}

/// The live requests of a replay.
#[derive(Default)]
struct LiveIds {
    ids: Vec<SeqId>,
    by_id: FxHashMap<SeqId, (ArrivalNumber, u64)>,
    /// Held sequences, by number.
    held: Vec<HeldId>,
}

impl ParsedJournal {
    /// Repeats every recorded call and compares every decision. Panics where the recorded scheduler would have panicked.
    pub fn replay(&self) -> Result<Replayed, ConfigError> {
        self.replay_seen(|_| {})
    }

    /// Like [`replay`](Self::replay), and calls `see` after each call.
    pub fn replay_seen(&self, mut see: impl FnMut(Event<'_>)) -> Result<Replayed, ConfigError> {
        let mut replay = Replay::new(Scheduler::new(self.config)?);
        for (now, call) in &self.calls {
            let (ended, committed, planned) = (replay.ended.len(), replay.committed, replay.timings.len());
            replay.outputs.tokens.clear();
            if !replay.make(self, *now, call) {
                break;
            }
            see(Event {
                now: *now,
                scheduler: &replay.scheduler,
                in_flight: &replay.in_flight,
                planned: replay.timings.len() > planned,
                committed: replay.committed > committed,
                tokens: &replay.outputs.tokens,
                ended: &replay.ended[ended..],
            });
        }
        let Replay { scheduler, hash, differs_at, ended, timings, drafts, .. } = replay;
        Ok(Replayed { steps: scheduler.stats().counters.steps, hash, differs_at, ended, timings, drafts, scheduler })
    }

    /// Generates tokens for a step's samples, with the recorded stops, errors and accepted drafts.
    fn sampled(&self, scheduler: &Scheduler, live: &LiveIds, plan: &StepPlan, recorded: &Sampled) -> Vec<i32> {
        let mut sampled = Vec::new();
        for chunk in plan.chunks.iter().filter(|chunk| chunk.samples) {
            let positions = sampled.len()..sampled.len() + 1 + chunk.drafted as usize;
            // Samples of a sequence that has ended meanwhile are not read.
            sampled.resize(positions.end, 1);
            let (Some(&(arrival_number, tag)), Some((tokens, _))) = (live.by_id.get(&chunk.seq), scheduler.tokens(chunk.seq)) else {
                continue;
            };
            let given = recorded.drafted.iter().find(|(drafted, _)| *drafted == arrival_number).map_or(1, |&(_, given)| given.max(1));
            for (at, place) in positions.clone().enumerate() {
                sampled[place] = self.token(arrival_number, tokens.len() as u32 + at as u32) as i32;
            }
            if let Some(&(_, failed)) = recorded.ended.iter().find(|(ended, _)| *ended == tag) {
                let last = (positions.start + given as usize - 1).min(positions.end - 1);
                sampled[last] = if failed { -1 } else { STOP as i32 };
            }
        }
        sampled
    }
}

/// State of a replay.
struct Replay {
    scheduler: Scheduler,
    live: LiveIds,
    in_flight: VecDeque<Box<StepPlan>>,
    outputs: Outputs,
    hash: u64,
    /// Number of plans, including empty ones.
    plans: u64,
    differs_at: Option<u64>,
    ended: Vec<Timeline>,
    timings: Vec<Timing>,
    committed: usize,
    /// Drafts of the next step.
    proposed: FxHashMap<SeqId, (ArrivalNumber, VerifiedDraft)>,
    drafts: Vec<(ArrivalNumber, VerifiedDraft)>,
    /// Whether there was work since the last plan.
    busy: bool,
}

impl Replay {
    fn new(scheduler: Scheduler) -> Self {
        Self {
            scheduler,
            live: LiveIds::default(),
            in_flight: VecDeque::new(),
            outputs: Outputs::default(),
            hash: SEED,
            plans: 0,
            differs_at: None,
            ended: Vec::new(),
            timings: Vec::new(),
            committed: 0,
            proposed: FxHashMap::default(),
            drafts: Vec::new(),
            busy: false,
        }
    }

    /// Repeats a call. Returns false if the journal cannot continue like this.
    fn make(&mut self, journal: &ParsedJournal, now: Time, call: &Call) -> bool {
        match call {
            Call::Add(arrival) => {
                let continues = arrival.continues.map(|(held, tokens)| Continues { held: self.live.held[held as usize], tokens });
                let id = self.scheduler.add(Request { continues, ..journal.request(arrival) }, now);
                // Only accepted requests are recorded, so the queue can reject this one only if the replay already differs.
                self.live.enter(id.unwrap_or_default(), arrival.arrival_number, arrival.request.tag);
            }
            Call::Prepare { arrival_number, next } => {
                self.scheduler.prepare(self.live.ids[*arrival_number as usize], *next, now);
            }
            Call::Fork { parent, tag } => {
                let arrival_number = self.live.ids.len() as ArrivalNumber;
                let id = self.scheduler.fork(self.live.ids[*parent as usize], *tag, now).unwrap_or_default();
                for (token, position) in self.scheduler.tokens_mut(id).unwrap_or_default().iter_mut().zip(0..) {
                    *token = journal.token(arrival_number, position);
                }
                self.live.enter(id, arrival_number, *tag);
            }
            Call::End { arrival_number, reason } => {
                let id = self.live.ids[*arrival_number as usize];
                let tag = self.live.by_id.get(&id).map(|&(_, tag)| tag);
                self.scheduler.end(id, *reason, now);
                self.ended.extend(tag.and_then(|tag| self.scheduler.explain(tag)));
            }
            Call::Open(tenant) => self.live.held.push(self.scheduler.open(tenant, &Arc::default(), now)),
            Call::ForkHeld(number) => {
                let fork = self.scheduler.fork_held(self.live.held[*number as usize], now);
                self.live.held.push(fork.unwrap_or_default());
            }
            Call::DropHeld(number) => {
                self.scheduler.drop_held(self.live.held[*number as usize], now);
            }
            Call::Restore(names) => {
                self.scheduler.restore("", &journal.tokens_of(names), now);
            }
            Call::SetPriority { arrival_number, priority } => {
                self.scheduler.set_priority(self.live.ids[*arrival_number as usize], *priority, now);
            }
            Call::ChargeExternal { tenant, us } => self.scheduler.charge_external(tenant, *us),
            Call::NoteSession { tenant, session, event } => {
                self.scheduler.note_session(tenant, session, *event, now);
            }
            Call::SetBlockLimit(blocks) => {
                self.scheduler.set_block_limit(*blocks, now);
            }
            Call::SetUpstreamTokenTime(ns) => self.scheduler.set_upstream_token_time(*ns, now),
            Call::EvictCached => self.scheduler.evict_cached(now),
            Call::CloseQueue(closed) => self.scheduler.close_queue(*closed, now),
            Call::Expire => self.scheduler.expire(now, &mut self.ended),
            Call::Plan(recorded) => self.plan(now, *recorded),
            Call::Draft { arrival_number, tokens, accepted, source } => {
                let id = self.live.ids[*arrival_number as usize];
                let len = self.scheduler.tokens(id).map_or(0, |(tokens, _)| tokens.len() as u32);
                self.scheduler.draft(id, &journal.draft(*arrival_number, len, *tokens, *accepted));
                let draft = VerifiedDraft { source: *source, position: len, tokens: *tokens, accepted: *accepted };
                self.proposed.insert(id, (*arrival_number, draft));
            }
            // Only a journal that already differs can lack a plan here.
            Call::Commit(recorded) => return self.commit(journal, now, recorded),
        }
        true
    }

    /// Plans a step and compares the hash with the recorded one.
    fn plan(&mut self, now: Time, recorded: u64) {
        let plan = self.scheduler.plan(now);
        self.hash = digest(self.hash, plan.as_deref());
        if let Some(last) = self.timings.last_mut().filter(|_| self.busy && plan.is_some()) {
            last.cycle = Some(now.saturating_sub(last.planned));
        }
        self.busy = plan.is_some() || !self.in_flight.is_empty();
        for chunk in plan.iter().flat_map(|plan| &plan.chunks).filter(|chunk| chunk.drafted > 0) {
            // A step may have room for a part of a draft only.
            let verified = self.proposed.get(&chunk.seq);
            self.drafts.extend(verified.map(|&(arrival, draft)| (arrival, VerifiedDraft { tokens: chunk.drafted, ..draft })));
        }
        self.proposed.clear();
        self.timings.extend(plan.iter().map(|plan| Timing { load: plan.load, planned: now, took: None, cycle: None }));
        self.in_flight.extend(plan);
        if self.hash != recorded {
            self.differs_at.get_or_insert(self.plans);
        }
        self.plans += 1;
    }

    /// Commits the oldest step. Returns false if no step is in flight.
    fn commit(&mut self, journal: &ParsedJournal, now: Time, recorded: &Sampled) -> bool {
        let Some(plan) = self.in_flight.pop_front() else { return false };
        let sampled = journal.sampled(&self.scheduler, &self.live, &plan, recorded);
        self.scheduler.commit(plan, &sampled, now, &mut self.outputs);
        self.ended.append(&mut self.outputs.ended);
        let timing = &mut self.timings[self.committed];
        timing.took = Some(now.saturating_sub(timing.planned));
        self.committed += 1;
        self.busy &= !self.scheduler.is_idle();
        true
    }
}

impl LiveIds {
    fn enter(&mut self, id: SeqId, arrival_number: ArrivalNumber, tag: u64) {
        debug_assert_eq!(self.ids.len() as ArrivalNumber, arrival_number);
        self.ids.push(id);
        self.by_id.insert(id, (arrival_number, tag));
    }
}
