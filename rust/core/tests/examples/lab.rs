//! A scheduler on a machine with configured step times.

use chairlift_core::{
    CacheScope, Config, FinishReason, Load, Outputs, Policy, Preparation, Rejected, Request, Scheduler, SeqId, SessionTurns, StepPlan,
    Time, Timeline, Token,
};
use std::collections::{HashMap, HashSet};

/// Token sampled by every request that continues. The next constant is the stop token.
const GOES_ON: i32 = 7;
const STOPS: i32 = 0;

/// Microseconds per step, per prompt token, and per decoding sequence or drafted token.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cost(pub(crate) Time, pub(crate) Time, pub(crate) Time);

impl Cost {
    fn of(self, load: &Load) -> Time {
        self.0 + self.1 * Time::from(load.prefill_tokens) + self.2 * Time::from(load.decode_seqs + load.drafted_tokens)
    }
}

/// The effects of a step, with requests by tag.
#[derive(Debug, Default)]
pub(crate) struct Step {
    /// Computed tokens of each request, in batch order.
    pub(crate) chunks: Vec<(u64, u32)>,
    pub(crate) rows: HashMap<u64, u32>,
    pub(crate) admitted: Vec<u64>,
    pub(crate) preempted: Vec<u64>,
    /// (device, host), (host, device) and (from, to).
    pub(crate) swap_out: Vec<(u32, u32)>,
    pub(crate) swap_in: Vec<(u32, u32)>,
    pub(crate) copies: Vec<(u32, u32)>,
    pub(crate) state_copies: Vec<(u32, u32)>,
    /// The requests whose states are saved, each with the number of tokens before the state.
    pub(crate) saves: Vec<(u64, u32)>,
}

pub(crate) struct Lab {
    pub(crate) scheduler: Scheduler,
    pub(crate) now: Time,
    pub(crate) cost: Cost,
    /// Timelines of ended requests, by tag.
    pub(crate) ended: HashMap<u64, Timeline>,
    /// All requests, in the order of their first admission.
    pub(crate) started: Vec<u64>,
    ids: HashMap<u64, SeqId>,
    tags: HashMap<SeqId, u64>,
    admitted: HashSet<u64>,
    stopping: HashSet<u64>,
    failing: HashSet<u64>,
    /// Steps between two checks of all invariants.
    pub(crate) check_every: u64,
    planned: u32,
    outputs: Outputs,
}

/// A configuration with ample limits. Each test reduces the limit it is about. With `SESSION_TURNS=all` sessions are known by their
/// prompts: what holds for requests without sessions holds then too.
pub(crate) fn plenty(policy: &'static dyn Policy) -> Config {
    let session_turns = std::env::var("SESSION_TURNS").map_or(SessionTurns::Named, |name| SessionTurns::from_name(&name).expect("a name"));
    let limits = Config { num_kv_blocks: 4097, max_num_batched_tokens: 1024, max_model_len: 16_384, ..Config::default() };
    Config { scheduling_policy: policy, session_turns, ..limits }
}

/// A request whose prompt no other request has.
pub(crate) fn ask(tag: u64, prompt: u32, new: u32) -> Request {
    let mut request = shares(tag, 0, prompt, new);
    request.prompt[0] = 1_000_000 + tag as Token;
    request
}

/// A request whose first `common` prompt tokens are the same for all requests of the same `stem`.
pub(crate) fn stem(stem: Token, tag: u64, common: u32, prompt: u32, new: u32) -> Request {
    let mut request = shares(tag, common, prompt, new);
    request.prompt[0] = 2_000_000 + stem;
    request
}

fn shares(tag: u64, common: u32, prompt: u32, new: u32) -> Request {
    let own = |at: u32| if at < common { 10 } else { 1000 + tag as Token };
    let prompt = (0..prompt).map(own).collect();
    Request { tag, prompt, max_new_tokens: new, stop: vec![STOPS as Token], ..Request::default() }
}

impl Lab {
    /// Each step takes a millisecond.
    pub(crate) fn new(config: Config) -> Self {
        Self {
            scheduler: Scheduler::new(config).expect("a sound config"),
            now: 0,
            cost: Cost(1000, 0, 0),
            ended: HashMap::new(),
            started: Vec::new(),
            ids: HashMap::new(),
            tags: HashMap::new(),
            admitted: HashSet::new(),
            stopping: HashSet::new(),
            failing: HashSet::new(),
            check_every: 1,
            planned: 0,
            outputs: Outputs::default(),
        }
    }

    /// A scheduler whose step-time model is learned from sixty requests, run one after another.
    pub(crate) fn taught(config: Config, cost: Cost) -> Self {
        let mut lab = Self { cost, ..Self::new(config) };
        let room = lab.scheduler.config().usable_blocks() * lab.scheduler.config().block_size;
        for i in 0..60 {
            // The salt prevents other requests from sharing these blocks.
            let tag = 900_000 + u64::from(i);
            lab.serve(Request { scope: CacheScope::salted(&[1]).into(), ..ask(tag, (1 + i * 37 % 200).min(room / 2), 1 + i % 7) });
        }
        lab.started.clear();
        lab.ended.clear();
        lab
    }

    pub(crate) fn add(&mut self, request: Request) {
        self.try_add(request).expect("it fits");
    }

    pub(crate) fn try_add(&mut self, request: Request) -> Result<(), Rejected> {
        self.try_add_at(self.now, request)
    }

    /// Adds a request that arrived at `time`.
    pub(crate) fn try_add_at(&mut self, time: Time, request: Request) -> Result<(), Rejected> {
        let tag = request.tag;
        let id = self.scheduler.add(request, time)?;
        self.enter(tag, id);
        Ok(())
    }

    pub(crate) fn fork(&mut self, parent: u64, tag: u64) {
        let id = self.scheduler.fork(self.ids[&parent], tag, self.now).expect("the parent lives");
        self.enter(tag, id);
    }

    /// Ends a request's preparation.
    pub(crate) fn prepare(&mut self, tag: u64, next: Option<Preparation>) {
        assert!(self.scheduler.prepare(self.ids[&tag], next, self.now));
        self.check();
    }

    pub(crate) fn set_priority(&mut self, tag: u64, priority: i32) {
        assert!(self.scheduler.set_priority(self.ids[&tag], priority, self.now));
        self.check();
    }

    pub(crate) fn abort(&mut self, tag: u64) {
        assert!(self.scheduler.end(self.ids[&tag], FinishReason::Abort, self.now));
        let timeline = self.scheduler.explain(tag).expect("it ended just now");
        self.ended.insert(tag, timeline);
        self.check();
    }

    /// Drafts tokens of a request that will be accepted.
    pub(crate) fn draft(&mut self, tag: u64, count: usize) {
        self.draft_tokens(tag, &vec![GOES_ON as Token; count]);
    }

    /// Drafts tokens of a request.
    pub(crate) fn draft_tokens(&mut self, tag: u64, tokens: &[Token]) {
        assert!(self.scheduler.draft(self.ids[&tag], tokens));
    }

    /// Makes the next sampled token of a request its last.
    pub(crate) fn stop(&mut self, tag: u64) {
        self.stopping.insert(tag);
    }

    /// Makes the next sample of a request none.
    pub(crate) fn fail_next(&mut self, tag: u64) {
        self.failing.insert(tag);
    }

    /// Drops requests past their deadline, then plans and runs a step.
    pub(crate) fn step(&mut self) -> Step {
        self.try_step().unwrap_or_else(|| panic!("nothing to run: {:?}", self.scheduler.stats()))
    }

    pub(crate) fn try_step(&mut self) -> Option<Step> {
        self.planned += 1;
        assert!(self.planned < 100_000, "this never ends: {:?}", self.scheduler.stats());
        self.expire();
        let plan = self.scheduler.plan(self.now)?;
        self.check();
        let step = self.read(&plan);
        self.started.extend(step.admitted.iter().filter(|&&tag| self.admitted.insert(tag)));
        self.now += self.cost.of(&plan.load);
        let chunks = plan.chunks.iter().filter(|chunk| chunk.samples);
        let sampled = chunks.flat_map(|chunk| {
            let tag = &self.tags[&chunk.seq];
            let token = if self.stopping.contains(tag) { STOPS } else { GOES_ON };
            let token = if self.failing.contains(tag) { -1 } else { token };
            std::iter::repeat_n(token, 1 + chunk.drafted as usize)
        });
        let sampled: Vec<i32> = sampled.collect();
        self.scheduler.commit(plan, &sampled, self.now, &mut self.outputs);
        self.ended.extend(self.outputs.ended.drain(..).map(|timeline| (timeline.tag, timeline)));
        self.check();
        Some(step)
    }

    /// Runs a step, or waits until one may run.
    pub(crate) fn step_or_wait(&mut self) {
        if self.try_step().is_none() && !self.scheduler.is_idle() {
            self.now = self.scheduler.wake_at().expect("a request waits for a time");
        }
    }

    pub(crate) fn steps(&mut self, count: u32) {
        for _ in 0..count {
            self.step();
        }
    }

    /// Runs until a request is first admitted.
    pub(crate) fn step_until_started(&mut self, tag: u64) {
        while !self.started.contains(&tag) {
            self.step();
        }
    }

    pub(crate) fn step_until_ended(&mut self, tag: u64) {
        while !self.ended.contains_key(&tag) {
            self.step();
        }
    }

    /// Runs until all requests have ended.
    pub(crate) fn finish_requests(&mut self) {
        while !self.scheduler.is_idle() {
            self.step_or_wait();
        }
    }

    /// Runs until all requests have ended. Then all blocks must be free.
    pub(crate) fn finish(&mut self) {
        self.finish_requests();
        let stats = self.scheduler.stats();
        assert_eq!((stats.free_blocks, stats.free_host_blocks), (stats.total_blocks, stats.host_blocks));
    }

    /// Adds a request, and finishes it and all others.
    pub(crate) fn serve(&mut self, request: Request) {
        self.add(request);
        self.finish();
    }

    /// Number of blocks held by sequences.
    pub(crate) fn held(&self) -> usize {
        let stats = self.scheduler.stats();
        stats.total_blocks - stats.free_blocks
    }

    /// The timeline of a live or ended request.
    pub(crate) fn explain(&self, tag: u64) -> Timeline {
        self.scheduler.explain(tag).expect("known")
    }

    pub(crate) fn expire(&mut self) -> Vec<u64> {
        let mut late = Vec::new();
        self.scheduler.expire(self.now, &mut late);
        self.check();
        let tags = late.iter().map(|timeline| timeline.tag).collect();
        self.ended.extend(late.into_iter().map(|timeline| (timeline.tag, timeline)));
        tags
    }

    fn check(&self) {
        if self.scheduler.stats().counters.steps.is_multiple_of(self.check_every) {
            self.scheduler.check();
        }
    }

    fn enter(&mut self, tag: u64, id: SeqId) {
        self.ids.insert(tag, id);
        self.tags.insert(id, tag);
    }

    fn read(&self, plan: &StepPlan) -> Step {
        Step {
            chunks: plan.chunks.iter().map(|chunk| (self.tags[&chunk.seq], chunk.len)).collect(),
            rows: plan.chunks.iter().map(|chunk| (self.tags[&chunk.seq], chunk.slot)).collect(),
            admitted: plan.admitted.iter().map(|admitted| admitted.tag).collect(),
            preempted: plan.preempted.clone(),
            swap_out: plan.swap_out.iter().map(|&(block, host)| (block.0, host)).collect(),
            swap_in: plan.swap_in.iter().map(|&(host, block)| (host, block.0)).collect(),
            copies: plan.copies.iter().map(|&(from, to)| (from.0, to.0)).collect(),
            state_copies: plan.states.copies.iter().map(|&(from, to)| (from.0, to.0)).collect(),
            saves: plan.states.saves.iter().map(|save| (self.tags[&plan.chunks[save.chunk as usize].seq], save.position)).collect(),
        }
    }
}
