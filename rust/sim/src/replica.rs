//! A simulated engine: a scheduler with a virtual clock.

use crate::drafts::Drafts;
use crate::goes_on::GoesOn;
use crate::job::Job;
use crate::live::Live;
use crate::machine::Machine;
use crate::report::Report;
use crate::step_time::StepTime;
use crate::storage::Storage;
use crate::utilization::Sample;
use crate::what_if::Input;
use chairlift_core::{
    Config, ConfigError, EngineView, FinishReason, Outputs, Preparation, Request, Scheduler, SeqId, StepPlan, Time, Timeline,
};
use slotmap::SecondaryMap;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

pub(crate) struct Replica {
    scheduler: Scheduler,
    machine: Machine,
    now: Time,
    live: SecondaryMap<SeqId, Live>,
    by_tag: HashMap<u64, SeqId>,
    /// Jobs that their callers cancel, by cancellation time.
    cancellations: BTreeSet<(Time, u64)>,
    drafts: Drafts,
    storage: Option<Storage>,
    /// Tags of the jobs whose prompts were computed, or that have ended, since `take_computed`.
    computed: Vec<u64>,
    report: Report,
    /// Lists used while a step runs, kept to reuse their memory.
    sampled: Vec<i32>,
    outputs: Outputs,
}

impl Replica {
    pub(crate) fn new(config: Config, machine: &Machine) -> Result<Self, ConfigError> {
        Ok(Self {
            scheduler: Scheduler::new(config)?,
            machine: machine.clone(),
            now: 0,
            live: SecondaryMap::new(),
            by_tag: HashMap::new(),
            cancellations: BTreeSet::new(),
            drafts: Drafts::new(machine.draft_tokens),
            storage: Storage::new(machine.read_ns_per_block, config.block_size),
            computed: Vec::new(),
            report: Report::default(),
            sampled: Vec::new(),
            outputs: Outputs::default(),
        })
    }

    /// Runs until `until`, until there is no work, or while `goes_on`. A step in flight at `until` is completed. Returns whether it can go
    /// on then without a new request.
    pub(crate) fn advance(&mut self, until: Time, goes_on: &mut GoesOn<'_>) -> bool {
        let mut can_go_on = true;
        while self.has_work(until) {
            if !goes_on.ask() {
                return false;
            }
            can_go_on = self.advance_a_step(until);
        }
        can_go_on && !self.scheduler.is_idle()
    }

    /// Whether the engine has a request and has not come to `until`.
    pub(crate) fn has_work(&self, until: Time) -> bool {
        self.now < until && !self.scheduler.is_idle()
    }

    /// Runs a step, or waits for at most until `until`. Returns whether it can go on then without a new request.
    pub(crate) fn advance_a_step(&mut self, until: Time) -> bool {
        if self.step(self.now).is_some() {
            return true;
        }
        let next = self.wakes_at();
        self.now = self.now.max(next.unwrap_or(until).min(until));
        next.is_some()
    }

    /// The engine's clock.
    pub(crate) fn now(&self) -> Time {
        self.now
    }

    /// Runs one step that starts at `now`, and returns its end. `None` if nothing can run yet.
    pub(crate) fn step(&mut self, now: Time) -> Option<Time> {
        self.now = self.now.max(now);
        self.go();
        self.read();
        self.drafts.propose(&mut self.scheduler, &self.live);
        let mut plan = self.scheduler.plan(self.now);
        while plan.is_none() && self.read() {
            plan = self.scheduler.plan(self.now);
        }
        if let Some(plan) = plan {
            self.run(plan);
            return Some(self.now);
        }
        self.rest();
        None
    }

    /// Records that no step of this engine runs now.
    pub(crate) fn rest(&mut self) {
        self.look(None);
    }

    /// After [`step`](Self::step) returned `None`, when it may run one without a new request.
    pub(crate) fn wakes_at(&self) -> Option<Time> {
        let read = self.storage.as_ref().and_then(Storage::next_end);
        let events = [self.scheduler.wake_at(), self.cancellations.first().map(|&(at, _)| at), read];
        events.into_iter().flatten().min()
    }

    /// The scheduler, for what engines tell each other.
    pub(crate) fn scheduler(&mut self) -> &mut Scheduler {
        &mut self.scheduler
    }

    /// Tags of the jobs whose prompts were computed, or that have ended, since the last call.
    pub(crate) fn take_computed(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.computed)
    }

    /// Takes what a journal has at `time`. Call `advance` to that time first.
    pub(crate) fn enter(&mut self, input: Input, time: Time) {
        match input {
            Input::Request(job) => self.arrive(*job),
            Input::Session(tenant, session, event) => _ = self.scheduler.note_session(&tenant, &session, event, time),
        }
    }

    /// Adds a request. Call `advance` to its arrival time first.
    pub(crate) fn arrive(&mut self, job: Job) {
        if self.scheduler.is_idle() {
            self.now = self.now.max(job.time);
        }
        let Job { time, request, len, output, drafts, fork_of, cancelled_at, .. } = job;
        let (tag, most) = (request.tag, request.max_new_tokens);
        let (tenant, prompt) = (Arc::clone(&request.tenant), request.prompt.len() as u32);
        let preparation = self.storage.is_some().then_some(Preparation::ReadCache);
        let id = match fork_of {
            Some(parent) => self.by_tag.get(&parent).and_then(|&id| self.scheduler.fork(id, tag, time)).ok_or("no_parent"),
            None => self.scheduler.add(Request { preparation, ..request }, time).map_err(|rejected| rejected.name()),
        };
        let id = match id {
            Ok(id) => id,
            Err(reason) => {
                self.report.refused.push((tag, reason));
                self.computed.push(tag);
                return;
            }
        };
        let live = Live { len, most, output, drafts, tag, made: 0, tenant, prompt, started: false, last: 0, longest: 0 };
        self.live.insert(id, live);
        self.by_tag.insert(tag, id);
        self.cancellations.extend(cancelled_at.map(|cancelled_at| (cancelled_at, tag)));
    }

    /// The results so far, without the scheduler's counters.
    pub(crate) fn report(&self) -> &Report {
        &self.report
    }

    /// The results since the last call.
    pub(crate) fn take_report(&mut self) -> Report {
        Report { stats: Some(self.scheduler.stats()), ..std::mem::take(&mut self.report) }
    }

    /// Sets the duration of the next steps.
    pub(crate) fn set_step_time(&mut self, step: StepTime) {
        self.machine.step = step;
    }

    /// Ends the jobs that are cancelled or past their deadline.
    fn go(&mut self) {
        while let Some(&(at, tag)) = self.cancellations.first().filter(|(at, _)| *at <= self.now) {
            self.cancellations.remove(&(at, tag));
            if let Some(&id) = self.by_tag.get(&tag) {
                self.scheduler.end(id, FinishReason::Abort, self.now);
                let timeline = self.scheduler.explain(tag).expect("one of the last that ended");
                self.end(timeline);
            }
        }
        let mut missed = Vec::new();
        self.scheduler.expire(self.now, &mut missed);
        for timeline in missed {
            self.end(timeline);
        }
    }

    /// Ends the reads from storage that are done, and begins those that the scheduler wants. Returns whether a request can run after it.
    fn read(&mut self) -> bool {
        let Some(storage) = &mut self.storage else { return false };
        let mut can_run = false;
        while let Some((id, tokens)) = storage.take_ended(self.now) {
            if let Some(prefix) = self.scheduler.tokens(id).map(|(all, _)| all[..tokens].to_vec()) {
                self.scheduler.restore("", &prefix, self.now);
                can_run |= self.scheduler.prepare(id, None, self.now);
            }
        }
        for tag in self.scheduler.take_reads() {
            let Some(&id) = self.by_tag.get(&tag) else { continue };
            // The last token is computed in any case.
            let prompt = self.scheduler.tokens(id).map(|(all, prompt)| all[..prompt - 1].to_vec()).unwrap_or_default();
            let cached = self.scheduler.cached_blocks("", &prompt);
            if !storage.begin(id, &prompt, cached, self.now) {
                can_run |= self.scheduler.prepare(id, None, self.now);
            }
        }
        can_run
    }

    fn run(&mut self, plan: Box<StepPlan>) {
        for admitted in &plan.admitted {
            let live = &mut self.live[admitted.seq];
            if !std::mem::replace(&mut live.started, true) {
                self.report.service.prompt(&live.tenant, self.now, live.prompt - admitted.cached_tokens);
            }
        }
        self.look(Some(&plan));
        let swaps = (plan.swap_out.len() + plan.swap_in.len()) as u64 * u64::from(self.scheduler.config().swap_ns_per_block) / 1000;
        let took = self.machine.step.step(&plan.load) + swaps;
        self.now += took;
        self.report.steps += 1;
        self.report.chunks += plan.chunks.len() as u64;
        self.report.step_times.add(took);
        self.sampled.clear();
        for chunk in plan.chunks.iter().filter(|chunk| chunk.samples) {
            let live = &mut self.live[chunk.seq];
            self.sampled.extend((0..=chunk.drafted).map(|ahead| live.token(ahead) as i32));
            let new = (1 + self.drafts.accepted(chunk)).min(live.len.saturating_sub(live.made)).max(1);
            for _ in 0..new {
                live.made += 1;
                if live.made == 1 {
                    self.computed.push(live.tag);
                } else {
                    let gap = self.now - live.last;
                    live.longest = live.longest.max(gap);
                    self.report.gaps.add(gap);
                }
                live.last = self.now;
                self.report.service.output(&live.tenant, self.now);
            }
        }
        self.scheduler.commit(plan, &self.sampled, self.now, &mut self.outputs);
        for timeline in std::mem::take(&mut self.outputs.ended) {
            self.end(timeline);
        }
        if self.scheduler.is_idle() {
            self.look(None);
        }
    }

    fn end(&mut self, timeline: Timeline) {
        self.computed.push(timeline.tag);
        let live = self.by_tag.remove(&timeline.tag).and_then(|id| self.live.remove(id));
        self.report.longest_gaps.push(live.map_or(0, |live| live.longest));
        self.report.ended_at = self.report.ended_at.max(timeline.ended);
        self.report.ended.push(timeline);
    }

    fn look(&mut self, step: Option<&StepPlan>) {
        self.report.utilization.add(Sample::of(self.now, &self.scheduler, step));
    }
}

/// An engine as the router sees it: its number among the engines, and its state.
pub(crate) struct Numbered<'a>(pub(crate) u32, pub(crate) &'a Replica);

impl EngineView for Numbered<'_> {
    fn number(&self) -> u32 {
        self.0
    }

    fn requests(&self) -> usize {
        self.1.by_tag.len()
    }

    fn predicted_wait(&self) -> Time {
        let scheduler = &self.1.scheduler;
        scheduler.predicted_wait() + scheduler.prefill_backlog() + scheduler.predicted_step()
    }

    fn prefill_time(&self, from: u32, tokens: u32) -> Time {
        self.1.scheduler.model().prefill(from.into(), tokens.into()) as Time
    }

    fn turn_wait(&self) -> Time {
        self.1.scheduler.predicted_turn_wait()
    }
}
