//! Any interleaving of calls keeps every invariant, and every request ends
//! with exactly the tokens that a model without cache, batching, chunks or
//! overlap would give it.

use chairlift_core::{Config, FinishReason, Outputs, Request, Scheduler, SeqId, StepBuffers, StepPlan, Token};
use proptest::prelude::*;
use std::cell::Cell;
use std::collections::{HashMap, VecDeque};

const VOCABULARY: u32 = 3;
/// A cell computed from a broken one is broken too, as with NaN.
const POISON: u32 = 0xDEAD_DEAD;

#[derive(Clone, Debug)]
enum Op {
    Add {
        prompt: Vec<Token>,
        new: u32,
        stop: bool,
        salt: u8,
    },
    Abort(usize),
    Draft {
        which: usize,
        right: usize,
        wrong: usize,
    },
    /// Plans and runs a step; leaves up to `lag` steps uncommitted.
    Step {
        lag: usize,
        poison: Option<usize>,
    },
}

fn op() -> impl Strategy<Value = Op> {
    let prompt = (0..2u32, 0..30usize, prop::collection::vec(0..VOCABULARY, 0..8)).prop_filter_map("empty", |(stem, len, tail)| {
        let prompt: Vec<_> = (0..len as u32).map(|i| (i * i + stem * (i / 5)) % VOCABULARY).chain(tail).collect();
        (!prompt.is_empty()).then_some(prompt)
    });
    prop_oneof![
        4 => (prompt, 1..12u32, any::<bool>(), 0..2u8).prop_map(|(prompt, new, stop, salt)| Op::Add { prompt, new, stop, salt }),
        1 => (0..30usize).prop_map(Op::Abort),
        2 => (0..30usize, 0..4usize, 0..3usize).prop_map(|(which, right, wrong)| Op::Draft { which, right, wrong }),
        10 => (0..4usize).prop_map(|lag| Op::Step { lag: lag.saturating_sub(1), poison: None }),
        1 => (0..3usize, 0..30usize).prop_map(|(lag, which)| Op::Step { lag, poison: Some(which) }),
    ]
}

/// The key and value of one position: like the real ones, a function of the
/// token there and of everything before it.
fn cell(before: u32, token: Token) -> u32 {
    if before == POISON { POISON } else { (before ^ token).wrapping_mul(0x9E37_79B1).rotate_left(9) }
}

/// What stands before position 0. It depends on the salt, so that a block
/// shared across salts shows.
fn origin(salt: u8) -> u32 {
    1 + u32::from(salt)
}

fn sample(last: u32) -> i32 {
    if last == POISON { -1 } else { (last % VOCABULARY) as i32 }
}

fn oracle(salt: u8, context: &[Token]) -> Token {
    sample(context.iter().fold(origin(salt), |before, token| cell(before, *token))) as Token
}

/// A request as the test knows it.
#[derive(Clone)]
struct Live {
    seq: SeqId,
    salt: u8,
    context: Vec<Token>,
    left: u32,
    stop: Option<Token>,
    /// Its cells were broken, or it may have shared the blocks of a request that failed: it may fail.
    exposed: bool,
}

struct World {
    scheduler: Scheduler,
    cache: Vec<u32>,
    tables: Vec<i32>,
    last_token: Vec<i32>,
    row_salt: Vec<u8>,
    row_tag: Vec<u64>,
    in_flight: VecDeque<(StepPlan, Vec<i32>)>,
    live: HashMap<u64, Live>,
    outputs: Outputs,
    next_tag: u64,
    now: u64,
}

impl World {
    fn new(config: Config) -> Self {
        let rows = config.max_seqs as usize;
        Self {
            scheduler: Scheduler::new(config).unwrap(),
            cache: vec![7; (config.num_blocks * config.block_size) as usize],
            tables: vec![0; rows * config.max_blocks_per_seq() as usize],
            last_token: vec![-99; rows],
            row_salt: vec![0; rows],
            row_tag: vec![0; rows],
            in_flight: VecDeque::new(),
            live: HashMap::new(),
            outputs: Outputs::default(),
            next_tag: 0,
            now: 0,
        }
    }

    fn apply(&mut self, op: Op) {
        self.now += 1;
        match op {
            Op::Add { prompt, new, stop, salt } => self.add(prompt, new, stop, salt),
            Op::Abort(which) => {
                let Some(tag) = self.pick(which) else { return };
                let live = self.live.remove(&tag).unwrap();
                if live.exposed {
                    self.live.values_mut().for_each(|other| other.exposed = true);
                }
                assert!(self.scheduler.abort(live.seq, self.now));
                assert!(!self.scheduler.abort(live.seq, self.now), "aborted twice");
            }
            Op::Draft { which, right, wrong } => {
                let Some(tag) = self.pick(which) else { return };
                let live = &self.live[&tag];
                let mut context = live.context.clone();
                for i in 0..right + wrong {
                    let next = oracle(live.salt, &context);
                    context.push(if i < right { next } else { (next + 1) % VOCABULARY });
                }
                self.scheduler.draft(live.seq, &context[live.context.len()..]);
            }
            Op::Step { lag, poison } => {
                let poison = poison.and_then(|which| self.pick(which));
                poison.inspect(|tag| self.live.get_mut(tag).unwrap().exposed = true);
                self.step(poison);
                while self.in_flight.len() > lag {
                    self.commit();
                }
            }
        }
        self.scheduler.check();
    }

    fn pick(&self, which: usize) -> Option<u64> {
        let mut tags: Vec<u64> = self.live.keys().copied().collect();
        tags.sort_unstable();
        (!tags.is_empty()).then(|| tags[which % tags.len()])
    }

    fn add(&mut self, prompt: Vec<Token>, new: u32, stop: bool, salt: u8) {
        let config = *self.scheduler.config();
        let stop = stop.then_some(VOCABULARY - 1);
        let request = Request {
            tag: self.next_tag,
            prompt: prompt.clone(),
            max_new_tokens: new,
            stop: stop.into_iter().collect(),
            salt: vec![salt; usize::from(salt)].into(),
        };
        let longest = prompt.len() as u32 + new;
        let fits = longest <= config.max_model_len && (longest - 1).div_ceil(config.block_size) < config.num_blocks;
        let added = self.scheduler.add(request, self.now);
        assert_eq!(added.is_ok(), fits, "{added:?}");
        if let Ok(seq) = added {
            self.live.insert(self.next_tag, Live { seq, salt, context: prompt, left: new, stop, exposed: false });
        }
        self.next_tag += 1;
    }

    /// Plans a step and runs it on the fake model. False if there was nothing to run.
    fn step(&mut self, poison: Option<u64>) -> bool {
        let config = *self.scheduler.config();
        let Some(plan) = self.scheduler.plan(self.now) else { return false };
        let (max_tokens, max_seqs, max_blocks) =
            (config.max_tokens as usize, config.max_seqs as usize, config.max_blocks_per_seq() as usize);
        for seated in &plan.seated {
            self.row_tag[seated.row as usize] = seated.tag;
            self.row_salt[seated.row as usize] = self.live[&seated.tag].salt;
        }
        assert!(plan.preempted.is_empty() || plan.seated.is_empty(), "admitted in a step that preempted");
        let (mut ids, mut positions, mut slots) = (vec![0; max_tokens], vec![0; max_tokens], vec![0; max_tokens]);
        let (mut starts, mut lens, mut rows) = (vec![0; max_seqs + 1], vec![0; max_seqs], vec![0; max_seqs]);
        let (mut sample_at, mut sample_rows, mut copies) = (vec![0; max_tokens], vec![0; max_tokens], vec![0; 2 * max_seqs]);
        let n = plan.fill(
            &self.scheduler,
            &StepBuffers {
                input_ids: cells(&mut ids),
                positions: cells(&mut positions),
                slots: cells(&mut slots),
                query_starts: cells(&mut starts),
                context_lens: cells(&mut lens),
                rows: cells(&mut rows),
                sample_at: cells(&mut sample_at),
                sample_rows: cells(&mut sample_rows),
                copies: cells(&mut copies),
                block_tables: cells(&mut self.tables),
                max_blocks,
            },
        );
        assert!(0 < n.tokens && n.tokens <= max_tokens && n.seqs <= max_seqs, "{n:?}");

        let size = config.block_size as usize;
        for pair in copies.chunks(2).take(n.copies) {
            let (from, to) = (pair[0] as usize * size, pair[1] as usize * size);
            self.cache.copy_within(from..from + size, to);
        }
        for i in 0..n.seqs {
            let (row, from, to) = (rows[i] as usize, starts[i] as usize, starts[i + 1] as usize);
            assert!(from < to, "an empty chunk");
            let slot = |position: usize| self.tables[row * max_blocks + position / size] as usize * size + position % size;
            assert_eq!(lens[i], positions[to - 1] + 1);
            if let Some(live) = self.live.get(&self.row_tag[row]) {
                let limit = live.context.len() + live.left as usize;
                assert!((lens[i] as usize) < limit + usize::from(limit == 1), "planned past the last token that can matter");
            }
            for at in from..to {
                let position = positions[at] as usize;
                assert_eq!(slots[at] as usize, slot(position));
                assert!(slots[at] as usize >= size, "wrote the scratch block");
                let before = if position == 0 { origin(self.row_salt[row]) } else { self.cache[slot(position - 1)] };
                let token = if ids[at] < 0 { self.last_token[(-ids[at] - 1) as usize] } else { ids[at] };
                // A row whose request failed in the step before has no token; it is dropped at the commit.
                let broken = (poison == Some(self.row_tag[row]) && plan.chunks[i].samples) || token < 0;
                self.cache[slots[at] as usize] = if broken { POISON } else { cell(before, token as Token) };
            }
        }
        self.check_writes(&plan, &starts, &positions, &slots);
        let sampled: Vec<i32> = (0..n.samples).map(|i| sample(self.cache[slots[sample_at[i] as usize] as usize])).collect();
        for (i, &token) in sampled.iter().enumerate() {
            self.last_token[sample_rows[i] as usize] = token;
        }
        self.in_flight.push_back((plan, sampled));
        true
    }

    /// No step writes a cell that another sequence had before the step.
    fn check_writes(&self, plan: &StepPlan, starts: &[i32], positions: &[i32], slots: &[i32]) {
        let config = self.scheduler.config();
        let (size, max_blocks) = (config.block_size as usize, config.max_blocks_per_seq() as usize);
        for (reader, chunk) in plan.chunks.iter().enumerate() {
            if plan.seated.iter().any(|seated| seated.seq == chunk.seq) {
                continue; // what it found may be completed in this very step
            }
            let (row, start) = (chunk.row as usize, positions[starts[reader] as usize] as usize);
            let had: Vec<usize> = (0..start).map(|p| self.tables[row * max_blocks + p / size] as usize * size + p % size).collect();
            let written = &slots[..*starts[..=plan.chunks.len()].last().unwrap() as usize];
            assert!(written.iter().all(|&slot| !had.contains(&(slot as usize))), "wrote into a cell that row {row} reads");
        }
    }

    fn commit(&mut self) {
        let (plan, sampled) = self.in_flight.pop_front().unwrap();
        let mut outputs = std::mem::take(&mut self.outputs);
        self.scheduler.commit(plan, &sampled, self.now, &mut outputs);
        for output in &outputs.tokens {
            let live = self.live.get_mut(&output.tag).expect("output of a request that is over");
            if output.finish == Some(FinishReason::Error) {
                assert!(live.exposed, "request {} failed for another's fault", output.tag);
                self.live.remove(&output.tag);
                self.live.values_mut().for_each(|live| live.exposed = true);
                continue;
            }
            assert_eq!(output.token, oracle(live.salt, &live.context), "request {}", output.tag);
            live.context.push(output.token);
            live.left -= 1;
            let expected = match () {
                () if live.stop == Some(output.token) => Some(FinishReason::Stop),
                () if live.left == 0 => Some(FinishReason::Length),
                () => None,
            };
            assert_eq!(output.finish, expected);
            if expected.is_some() {
                self.live.remove(&output.tag);
            }
        }
        let finished = outputs.tokens.iter().filter(|output| output.finish.is_some()).count();
        assert_eq!(outputs.ended.len(), finished);
        self.outputs = outputs;
        self.scheduler.check();
    }

    /// Runs until every request has ended, one step in flight at most.
    fn drain(&mut self) {
        while !self.in_flight.is_empty() {
            self.commit();
        }
        for _ in 0..20_000 {
            if !self.step(None) {
                break;
            }
            self.commit();
        }
        assert!(self.scheduler.is_idle() && self.live.is_empty(), "requests that never end: {:?}", self.scheduler.stats());
        let stats = self.scheduler.stats();
        assert_eq!((stats.free_blocks, stats.running, stats.waiting), (stats.total_blocks, 0, 0));
        self.scheduler.check();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 20_000, ..ProptestConfig::default() })]
    #[test]
    fn any_interleaving(
        ops in prop::collection::vec(op(), 1..150),
        num_blocks in 6..40u32, block_size in 1..6u32, max_tokens in 1..24u32, max_seqs in 1..6u32,
        watermark in 0..4u32, prefix_caching in prop::bool::weighted(0.9),
    ) {
        let mut world = World::new(Config { num_blocks, block_size, max_tokens, max_seqs, max_model_len: 44, prefix_caching, watermark });
        for op in ops {
            world.apply(op);
        }
        world.drain();
    }
}

fn cells(array: &mut [i32]) -> &[Cell<i32>] {
    Cell::from_mut(array).as_slice_of_cells()
}
