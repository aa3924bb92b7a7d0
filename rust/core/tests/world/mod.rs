//! A scheduler beside a fake model that knows the expected tokens of every request.
//!
//! The property test and the fuzz target share it. They differ in the source of the calls.

mod fake_model;
mod held;
mod op;
mod steps;
mod used_prefixes;

use chairlift_core::{
    BACKGROUND, BlockHash, BlockHasher, CacheScope, Config, DraftSource, Drafter, FinishReason, HeldId, Outputs, ParsedJournal,
    Preparation, Recorder, Rejected, Request, Reservation, Restored, Resumed, Scheduler, SeqId, SessionEvent, SessionTurns, StepPlan, Tier,
    TimelineState, Token,
};
use rustc_hash::{FxHashMap, FxHashSet};
use std::collections::VecDeque;

pub(crate) use self::fake_model::VOCABULARY;
use self::fake_model::{FakeModel, POISON, cell, oracle, origin};
use self::held::Held;
pub(crate) use self::op::{GROUP, Op};
use self::op::{group_of, scope_of, session_name, tenant_name};
use self::used_prefixes::UsedPrefixes;

/// Appends up to `most` tokens to a prompt, as an engine that ended had answered it.
fn answer(prompt: &mut Vec<Token>, salt: u8, most: u32, stop: &[Token], came: u64) -> Resumed {
    let mut answered = 0;
    while answered < most {
        let token = oracle(salt, prompt);
        if stop.contains(&token) {
            break;
        }
        prompt.push(token);
        answered += 1;
    }
    let ago = |time: u64| came.saturating_sub(time);
    Resumed {
        answered,
        cached_tokens: 0,
        own_cached_tokens: 0,
        submitted: ago(9),
        started: ago(6),
        first_token: (answered > 0).then_some(ago(3)),
    }
}

/// A request from the test's view.
#[derive(Clone)]
struct Live {
    seq: SeqId,
    salt: u8,
    context: Vec<Token>,
    left: u32,
    stop: Option<Token>,
    priority: i32,
    tier: Tier,
    tenant: std::sync::Arc<str>,
    /// Tag of the first request of the family, or its own tag.
    family: u64,
    /// Whether the request may fail, because its cells were invalid or it may have shared the blocks of a failed request.
    exposed: bool,
    /// Tokens that the planned steps have room for, from those that its tenant is told of. `None` before the admission.
    paid: Option<usize>,
    /// The held sequence that the request continues.
    continues: Option<HeldId>,
}

/// The scheduler, the model, and the requests from the caller's view.
pub(crate) struct World {
    scheduler: Recorder,
    drafter: Option<Drafter>,
    model: FakeModel,
    in_flight: VecDeque<(Box<StepPlan>, Vec<i32>)>,
    live: FxHashMap<u64, Live>,
    held: Vec<Held>,
    /// First requests of families that wait for a preparation, with that and whether they belong to a session. The prefix of a session's
    /// request is not read if that takes longer than computing.
    unprepared: FxHashMap<u64, (Preparation, bool)>,
    /// Requests whose prefixes are read from storage, as the scheduler has said.
    reads: FxHashSet<u64>,
    /// Names of the cached blocks, as the scheduler reports them.
    reported: FxHashSet<BlockHash>,
    /// The prefixes that each tenant has sent or received.
    used: UsedPrefixes,
    outputs: Outputs,
    next_tag: u64,
    now: u64,
    ended: Vec<(u64, Option<FinishReason>)>,
    /// What the meter has counted.
    energy: u64,
}

impl World {
    pub(crate) fn new(config: Config, journal: bool) -> Self {
        let scheduler = Scheduler::new(config).unwrap();
        let mut scheduler = if journal { Recorder::on(scheduler) } else { Recorder::off(scheduler) };
        scheduler.record_cache_changes();
        scheduler.remember_users();
        Self {
            reported: FxHashSet::default(),
            scheduler,
            drafter: None,
            ended: Vec::new(),
            energy: 0,
            model: FakeModel::new(config),
            in_flight: VecDeque::new(),
            live: FxHashMap::default(),
            held: Vec::new(),
            unprepared: FxHashMap::default(),
            reads: FxHashSet::default(),
            used: UsedPrefixes::new(config.block_size),
            outputs: Outputs::default(),
            next_tag: 0,
            now: 0,
        }
    }

    /// Drafts up to `tokens` tokens per sequence and step, also from `corpus` tokens of finished texts.
    pub(crate) fn drafting(self, tokens: usize, corpus: usize) -> Self {
        Self { drafter: (tokens > 0).then(|| Drafter::new(tokens, corpus)), ..self }
    }

    pub(crate) fn apply(&mut self, op: Op) {
        self.now += 1;
        let held = self.scheduler.occupancy().blocks;
        match op {
            Op::Add {
                mut prompt,
                new,
                stop,
                salt,
                forks,
                priority,
                tier,
                tenant,
                patience,
                predicted,
                ago,
                resumed,
                preparation,
                session,
            } => {
                let came = self.now.saturating_sub(ago);
                let stop: Vec<Token> = stop.then_some(VOCABULARY - 1).into_iter().collect();
                let resumed = resumed.map(|most| answer(&mut prompt, salt, most.min(new - 1), &stop, came));
                let request = Request {
                    tag: self.next_tag,
                    prompt,
                    max_new_tokens: new,
                    stop,
                    scope: scope_of(salt),
                    priority,
                    tier,
                    tenant: tenant_name(tenant),
                    weight: 1 + u32::from(tenant),
                    deadline: patience.map(|patience| came + 2 * patience),
                    ttft_deadline: patience.map(|patience| came + patience),
                    predicted_tokens: predicted,
                    user_turn_end: predicted, // any position will do
                    session: session.map(session_name),
                    parent_session: session.and_then(|(main, subagent)| subagent.map(|_| session_name((main, None)))),
                    preparation,
                    resumed,
                    ..Request::default()
                };
                let tag = request.tag;
                self.add(request, salt, came);
                for _ in 0..forks {
                    self.fork(tag);
                }
            }
            Op::Prepare { which, next } => _ = self.prepare(which, next),
            Op::Fork(which) => {
                if let Some(tag) = self.pick(which) {
                    self.fork(tag);
                }
            }
            Op::Open { salt, tenant } => self.open(salt, tenant),
            Op::ForkHeld(which) => _ = self.pick_held(which).map(|held| self.fork_held(held)),
            Op::DropHeld(which) => _ = self.pick_held(which).map(|held| self.drop_held(held)),
            Op::Continue { which, less, more, new, stop } => self.continue_held(which, less, &more, new, stop),
            Op::Restore { grouped, tokens } => self.restore(if grouped { GROUP } else { 0 }, &tokens),
            Op::SetPriority(which, priority) => {
                if let Some(tag) = self.pick(which) {
                    self.set_priority(tag, priority);
                }
            }
            Op::NoteSession { tenant, session, ended } => self.note_session(tenant, session, ended),
            Op::ShareService { tenant, us } => self.share_service(tenant, us),
            Op::SetBlockLimit(blocks) => self.set_block_limit(blocks),
            Op::EvictCached => self.evict_cached(),
            Op::SetUpstreamTokenTime(ns) => self.scheduler.set_upstream_token_time(ns, self.now),
            Op::CloseQueue(closed) => self.scheduler.close_queue(closed, self.now),
            Op::Wait(time) => self.now += time,
            Op::Abort(which) => _ = self.pick(which).map(|tag| self.end(tag, FinishReason::Abort)),
            Op::Stop(which) => _ = self.pick(which).map(|tag| self.end(tag, FinishReason::Stop)),
            Op::Draft { which, right, wrong } => {
                if let Some(tag) = self.pick(which) {
                    self.draft(tag, right, wrong);
                }
            }
            Op::Step { lag, poison, lost } => {
                let [poison, lost] = [poison, lost].map(|which| which.and_then(|which| self.pick(which)));
                self.run_step(poison, lost);
                while self.in_flight.len() > lag {
                    self.commit();
                }
            }
        }
        self.scheduler.check();
        self.check_stored();
        self.check_reported();
        self.check_reads();
        if self.now.is_multiple_of(16) {
            self.read_reports();
        }
        let most = held.max(self.scheduler.stats().total_blocks);
        assert!(self.scheduler.occupancy().blocks <= most, "blocks were given beyond the limit");
    }

    fn set_priority(&mut self, tag: u64, priority: i32) {
        let live = self.live.get_mut(&tag).expect("picked");
        let moves = live.priority != BACKGROUND;
        assert_eq!(self.scheduler.set_priority(live.seq, priority, self.now), moves);
        live.priority = if moves { priority } else { BACKGROUND };
    }

    /// Ends a request for a caller's reason.
    fn end(&mut self, tag: u64, reason: FinishReason) {
        let seq = self.live[&tag].seq;
        assert!(self.scheduler.end(seq, reason, self.now));
        assert!(!self.scheduler.end(seq, reason, self.now), "ended twice");
        let timeline = self.scheduler.explain(tag).expect("one of the last that ended");
        assert_eq!(timeline.finish, Some(reason));
        self.settle(&timeline);
    }

    /// Reads what operators and clients ask for.
    fn read_reports(&mut self) {
        let snapshot = self.scheduler.snapshot(self.now, 100, 10);
        let stats = self.scheduler.stats();
        assert_eq!(snapshot.slots.len(), stats.running);
        assert_eq!(snapshot.waiting_by_tier.iter().sum::<usize>(), stats.waiting + stats.swapped);
        assert_eq!(stats.waiting_by_state.iter().sum::<usize>(), stats.waiting + stats.swapped, "{stats:?}");
        assert!(self.scheduler.blocks_used().held as usize <= stats.total_blocks.max(self.scheduler.occupancy().blocks));
        self.scheduler.next_step();
        self.scheduler.prefill_backlog();
        for &tag in self.live.keys() {
            let timeline = self.scheduler.explain(tag).expect("it lives");
            assert_eq!(timeline.states.iter().sum::<u64>(), timeline.ended - timeline.arrived, "{timeline:?}");
            self.scheduler.served_before(&timeline);
            self.scheduler.ahead(&timeline);
        }
    }

    /// Says that a session waits for its user, or has ended.
    fn note_session(&mut self, tenant: u8, session: (u8, Option<u8>), ended: bool) {
        let event = if ended { SessionEvent::Ended } else { SessionEvent::AwaitsUser };
        self.scheduler.note_session(&tenant_name(tenant), &session_name(session), event, self.now);
    }

    /// Charges a tenant for external service, and takes the service here.
    fn share_service(&mut self, tenant: u8, us: u64) {
        self.scheduler.charge_external(&tenant_name(tenant), us);
        let service = self.scheduler.take_service();
        assert!(service.is_empty() || self.scheduler.rules().takes_turns());
        assert!(self.scheduler.take_service().is_empty(), "reported twice");
    }

    /// Sets the limit of blocks. It is never below the least that can serve every request, nor above all blocks.
    fn set_block_limit(&mut self, blocks: u32) {
        let config = *self.scheduler.config();
        let limit = self.scheduler.set_block_limit(blocks, self.now);
        assert_eq!(limit as usize, self.scheduler.stats().total_blocks);
        assert!((config.least_blocks()..=config.usable_blocks()).contains(&limit));
        assert!(
            limit == blocks
                || !(config.least_blocks()..=config.usable_blocks()).contains(&blocks)
                || config.kv_reservation == Reservation::MaxTokens
        );
        for id in self.scheduler.take_given_back() {
            self.model.block_mut(id.0).fill(POISON);
        }
        assert!(self.scheduler.take_given_back().is_empty());
    }

    /// Evicts what is cached. Free blocks have no content afterwards.
    fn evict_cached(&mut self) {
        let total = self.scheduler.stats().total_blocks;
        self.scheduler.evict_cached(self.now);
        let stats = self.scheduler.stats();
        assert_eq!(stats.total_blocks, total);
        // Held blocks may be more than a lower limit.
        assert!(stats.free_blocks == 0 || self.scheduler.blocks_used().kept as usize == total - stats.free_blocks);
        for id in self.scheduler.take_given_back() {
            self.model.block_mut(id.0).fill(POISON);
        }
    }

    /// Writes the cells of restored blocks. All stored blocks have the right cells, and no other block is lost.
    fn restore(&mut self, salt: u8, tokens: &[Token]) {
        let group = group_of(salt);
        let size = self.scheduler.config().block_size as usize;
        let (free, known) = (self.scheduler.stats().free_blocks, self.scheduler.cached_blocks(group, tokens));
        let Restored { cached: found, blocks: restored, state } = self.scheduler.restore(group, tokens, self.now);
        self.used.add("storage", salt, tokens);
        let has_states = self.scheduler.config().state_slots > 0;
        assert!(found == known || has_states && found > known, "blocks are of use up to a saved state");
        assert_eq!(self.scheduler.stats().free_blocks, free, "restored blocks are free");
        let whole = if self.scheduler.config().enable_prefix_caching { tokens.len() / size } else { 0 };
        assert!(found + restored.len() == whole || restored.len() <= free);
        if !has_states {
            assert_eq!(self.scheduler.cached_blocks(group, tokens), found + restored.len());
        }
        let mut before = origin(salt);
        for (at, block) in tokens.chunks_exact(size).take(found + restored.len()).enumerate() {
            for (offset, token) in block.iter().enumerate() {
                before = cell(before, *token);
                if let Some(id) = at.checked_sub(found).map(|new| restored[new]) {
                    self.model.block_mut(id.0)[offset] = before;
                }
            }
        }
        if let Some(slot) = state {
            assert!(self.in_flight.is_empty() && found + restored.len() == whole);
            assert_eq!(self.scheduler.cached_blocks(group, tokens), whole);
            self.model.set_state(slot, before, whole * size);
        }
    }

    /// Every stored block has the cells of its tokens after those of the block before it, and every stored state is that after its block.
    fn check_stored(&self) {
        if self.live.values().any(|live| live.exposed) || !self.in_flight.is_empty() {
            return;
        }
        let size = self.scheduler.config().block_size as usize;
        // The last cell of each stored block, and the number of tokens up to there.
        let mut ends = FxHashMap::default();
        for block in self.scheduler.stored_blocks(0) {
            let root = origin(if block.group.is_empty() { 0 } else { GROUP });
            let (mut last, before) = if block.parent == 0 { (root, 0) } else { ends[&block.parent] };
            for (token, &found) in block.tokens.iter().zip(self.model.block(block.id.0)) {
                last = cell(last, *token);
                assert_eq!(found, last, "block {block:?}");
            }
            ends.insert(block.content, (last, before + size));
        }
        for (content, slot) in self.scheduler.stored_states() {
            // Blocks with a salt are not stored.
            if let Some(end) = ends.get(&content) {
                assert_eq!(self.model.state(slot), *end, "{slot:?}");
            }
        }
    }

    /// What a request without a salt would find is reported, and no more blocks are reported than there are.
    fn check_reported(&mut self) {
        let changes = self.scheduler.take_cache_changes();
        changes.dropped.iter().for_each(|name| assert!(!changes.added.contains(name), "{name:?} is both"));
        self.reported.retain(|name| !changes.dropped.contains(name));
        self.reported.extend(changes.added);
        let config = *self.scheduler.config();
        let most = if config.state_slots > 0 { config.state_slots } else { config.usable_blocks() };
        assert!(self.reported.len() <= most as usize);
        for live in self.live.values() {
            let found = self.scheduler.cached_blocks(group_of(live.salt), &live.context);
            if found == 0 {
                continue;
            }
            let scope = CacheScope::of_group(group_of(live.salt));
            let names = BlockHasher::new(0).names(&scope, &live.context, config.block_size as usize);
            let has = |name: &BlockHash| self.reported.contains(name);
            let reported = if config.state_slots > 0 {
                names.iter().rposition(has).map_or(0, |last| last + 1)
            } else {
                names.iter().take_while(|name| has(name)).count()
            };
            assert!(found <= reported, "{found} blocks are found, and {reported} were reported");
        }
    }

    /// Drafts `right` tokens that the model will choose, then `wrong` ones that it will not.
    fn draft(&mut self, tag: u64, right: usize, wrong: usize) {
        let live = &self.live[&tag];
        let mut context = live.context.clone();
        for i in 0..right + wrong {
            let next = oracle(live.salt, &context);
            context.push(if i < right { next } else { (next + 1) % VOCABULARY });
        }
        self.scheduler.draft(live.seq, &context[live.context.len()..], DraftSource::Text(3));
    }

    fn pick(&self, which: usize) -> Option<u64> {
        let mut tags: Vec<u64> = self.live.keys().copied().collect();
        tags.sort_unstable();
        (!tags.is_empty()).then(|| tags[which % tags.len()])
    }

    fn add(&mut self, request: Request, salt: u8, came: u64) {
        let config = *self.scheduler.config();
        let tag = self.next_tag;
        self.next_tag += 1;
        let busy = request.continues.is_some_and(|continues| self.live.values().any(|live| live.continues == Some(continues.held)));
        // A resumed request reports only the cached tokens that the other engine reported.
        let paid = request.resumed.map(|_| 0);
        let answered = request.resumed.map_or(0, |resumed| resumed.answered);
        let longest = request.prompt.len() as u32 - answered + request.max_new_tokens;
        let fits = longest <= config.max_model_len && (longest - 1).div_ceil(config.block_size) < config.num_kv_blocks;
        match self.scheduler.add(request.clone(), came) {
            Ok(seq) => {
                assert!(fits && !busy);
                let Request { prompt: context, max_new_tokens, priority, tier, tenant, stop, continues, preparation, session, .. } =
                    request;
                let tier = if priority == BACKGROUND { Tier::Background } else { tier };
                let left = max_new_tokens - answered;
                let (stop, continues) = (stop.first().copied(), continues.map(|continues| continues.held));
                // It may share blocks of a request that shares blocks of a poisoned one.
                let exposed = self.live.values().any(|live| live.exposed && live.salt == salt);
                let live = Live { seq, salt, context, left, stop, priority, tier, tenant, family: tag, exposed, paid, continues };
                let has_session = session.is_some() || config.session_turns == SessionTurns::All;
                if let Some(preparation) = preparation {
                    self.unprepared.insert(tag, (preparation, has_session));
                }
                self.live.insert(tag, live);
                self.watch(seq);
            }
            Err(Rejected::HeldBusy) => assert!(fits && busy),
            Err(Rejected::QueueFull { queued, limit, .. }) => assert!(fits && queued > limit && request.resumed.is_none()),
            Err(error) => assert!(!fits, "{error:?}"),
        }
    }

    /// Adds a fork of a request. It starts with the same prompt.
    fn fork(&mut self, of: u64) {
        let Some(parent) = self.live.get(&of) else { return };
        let (tokens, prompt_len) = self.scheduler.tokens(parent.seq).unwrap();
        let context = tokens[..prompt_len].to_vec();
        let left = parent.left + (tokens.len() - prompt_len) as u32;
        let mut live = Live { context, left, continues: None, ..parent.clone() };
        live.seq = self.scheduler.fork(live.seq, self.next_tag, self.now).expect("the parent lives");
        self.watch(live.seq);
        self.live.insert(self.next_tag, live);
        self.next_tag += 1;
    }

    fn watch(&mut self, seq: SeqId) {
        if let Some(drafter) = &mut self.drafter {
            drafter.watch(seq, &mut self.scheduler);
        }
    }

    /// The scheduler says once of each request that its prefix is read from now on.
    fn check_reads(&mut self) {
        for tag in self.scheduler.take_reads() {
            assert!(self.live.contains_key(&tag) && self.reads.insert(tag), "request {tag} is read twice or has ended");
        }
        assert_eq!(self.scheduler.stats().waiting_by_state[TimelineState::ReadCache as usize], self.reads.len());
    }

    /// Ends the preparation of a request, if there is one. It counts as waiting before and after. Returns whether there was one.
    fn prepare(&mut self, which: usize, next: Option<Preparation>) -> bool {
        let Some(tag) = self.pick(which) else { return false };
        let live = &self.live[&tag];
        let before = self.scheduler.stats();
        let waits = self.scheduler.prepare(live.seq, next, self.now);
        let after = self.scheduler.stats();
        assert_eq!((before.waiting, before.queued_prompt_tokens), (after.waiting, after.queued_prompt_tokens));
        if waits && next.is_none() {
            assert!(!self.scheduler.prepare(live.seq, next, self.now), "request {tag} was prepared twice");
            self.unprepared.remove(&live.family);
        }
        if waits {
            self.reads.remove(&tag);
            if let (Some(next), Some(pending)) = (next, self.unprepared.get_mut(&live.family)) {
                pending.0 = next;
            }
        }
        waits
    }

    /// Ends all preparations. Returns whether there was one.
    fn prepare_all(&mut self) -> bool {
        (0..self.live.len()).filter(|&which| self.prepare(which, None)).count() > 0
    }

    /// Runs until every request has ended, with at most one step in flight.
    pub(crate) fn drain(&mut self) {
        while !self.in_flight.is_empty() {
            self.commit();
        }
        for _ in 0..20_000 {
            self.now += 1;
            if self.step(None, None).is_some() {
                self.commit();
            } else if self.prepare_all() {
                self.check_reads();
            } else if let Some(at) = self.scheduler.wake_at() {
                self.now = self.now.max(at);
            } else {
                break;
            }
        }
        while !self.held.is_empty() {
            self.apply(Op::DropHeld(0));
        }
        assert!(self.scheduler.is_idle() && self.live.is_empty(), "requests that never end: {:?}", self.scheduler.stats());
        let stats = self.scheduler.stats();
        assert_eq!((stats.free_blocks, stats.running, stats.waiting, stats.swapped), (stats.total_blocks, 0, 0, 0));
        assert_eq!(stats.free_host_blocks, stats.host_blocks);
        assert_eq!(stats.counters.energy_uj.unwrap_or(0), self.energy);
        self.scheduler.check();
    }

    /// Replays the journal of all calls. It must repeat every decision.
    pub(crate) fn replay(&mut self) {
        let mut journal = Vec::new();
        self.scheduler.take_journal(&mut journal);
        let journal = ParsedJournal::read(&journal).expect("a sound journal");
        assert!(!journal.truncated);
        let replayed = journal.replay().expect("a sound config");
        assert_eq!(replayed.differs_at, None);
        assert_eq!(replayed.steps, self.scheduler.stats().counters.steps);
        assert_eq!(replayed.ended.iter().map(|timeline| (timeline.tag, timeline.finish)).collect::<Vec<_>>(), self.ended);
    }
}
