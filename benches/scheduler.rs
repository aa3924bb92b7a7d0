//! What a scheduling decision costs: plan + fill + commit, without a model.
//!
//! `cargo bench` times the cases; with `-- --steps N CASE` the program runs N
//! steps of one case and exits, which is what `benches/scheduler.py` counts
//! instructions with; with `-- --waiting POLICY` it prints the median times of
//! a step while few and while many wait.

#[path = "../rust/core/tests/step_arrays/mod.rs"]
mod step_arrays;

use chairlift_core::{Config, Fcfs, Outputs, Policy, Request, Scheduler};
use criterion::{BenchmarkId, Criterion};
use std::hint::black_box;
use std::time::{Duration, Instant};
use step_arrays::StepArrays;

const BLOCK_SIZE: u32 = 16;
const CONTEXT: u32 = 500;
const MAX_TOKENS: u32 = 8192;
/// Steps before the contexts have grown so much that a world is made anew.
const STEPS: u64 = 256;
const MAX_MODEL_LEN: u32 = 2048;
/// Each has requests that run and requests that wait.
const TENANTS: [&str; 8] = ["a", "b", "c", "d", "e", "f", "g", "h"];
/// Conversations whose requests arrive by turns.
const CONVERSATIONS: u32 = 64;
/// Steps of a new world that are not timed.
const WARM_UP: u64 = 32;

/// What is running, what is coming and what is waiting while a step is timed.
#[derive(Clone, Copy)]
struct Case {
    running: u32,
    waiting: u32,
    policy: &'static dyn Policy,
    arrivals: Arrivals,
}

/// The request of one token that arrives in each step, is computed in it and ends.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Arrivals {
    No,
    /// 512 new tokens.
    New,
    /// The 512 tokens of one of 64 earlier requests, by turns.
    Repeated,
    /// The same, as requests of 64 sessions.
    OfSession,
}

struct World {
    scheduler: Scheduler,
    arrays: StepArrays,
    outputs: Outputs,
    sampled: Vec<i32>,
    tag: u64,
}

impl World {
    fn new(case: Case) -> Self {
        let max_seqs = case.running + u32::from(case.arrivals != Arrivals::No);
        // The contexts of all conversations fit.
        let conversations = if matches!(case.arrivals, Arrivals::Repeated | Arrivals::OfSession) { CONVERSATIONS } else { 0 };
        let blocks = MAX_MODEL_LEN / BLOCK_SIZE;
        let config = Config {
            num_kv_blocks: (max_seqs + conversations) * blocks + 1,
            block_size: BLOCK_SIZE,
            max_num_batched_tokens: MAX_TOKENS,
            max_num_seqs: max_seqs,
            max_model_len: MAX_MODEL_LEN,
            scheduling_policy: case.policy,
            ..Config::default()
        };
        let mut world = Self {
            scheduler: Scheduler::new(config).expect("a sound config"),
            arrays: StepArrays::new(&config),
            outputs: Outputs::default(),
            sampled: vec![7; MAX_TOKENS as usize],
            tag: 0,
        };
        for i in 0..case.running {
            // Lengths differ, so that blocks fill up in every step and not in every sixteenth.
            world.add(CONTEXT - i % BLOCK_SIZE, MAX_MODEL_LEN - CONTEXT);
        }
        while world.scheduler.stats().waiting > 0 || world.outputs.tokens.len() < case.running as usize {
            world.step();
        }
        for _ in 0..case.waiting {
            world.add(32, 32);
        }
        // What adding so many left in the processor's caches is not the step's affair.
        for _ in 0..WARM_UP {
            world.step();
        }
        world
    }

    fn add(&mut self, prompt: u32, new: u32) {
        let request = self.request(self.tag as u32, prompt, new);
        self.scheduler.add(request, 0).expect("a request that fits");
    }

    /// A request with a new tag, whose prompt and tenant depend on `of`.
    fn request(&mut self, of: u32, prompt: u32, new: u32) -> Request {
        self.tag += 1;
        let prompt = (0..prompt).map(|i| of.wrapping_mul(0x9E37_79B1).wrapping_add(i) % 50_000).collect();
        Request {
            tag: self.tag,
            prompt,
            max_new_tokens: new,
            stop: vec![50_000],
            tenant: TENANTS[of as usize % TENANTS.len()].into(),
            // Those that run are the nearest to their end, or they would have to make way.
            predicted_tokens: Some(if new > 32 { 1 } else { 32 }),
            ..Request::default()
        }
    }

    fn arrive(&mut self, arrivals: Arrivals) {
        let of = match arrivals {
            Arrivals::No => return,
            Arrivals::New => self.tag as u32,
            Arrivals::Repeated | Arrivals::OfSession => self.tag as u32 % CONVERSATIONS,
        };
        let request = self.request(of, 512, 1);
        let session = (arrivals == Arrivals::OfSession).then(|| of.to_string().into());
        self.scheduler.add(Request { session, ..request }, 0).expect("a request that fits");
    }

    fn step(&mut self) {
        let plan = self.scheduler.plan(0).expect("something to run");
        black_box(self.arrays.fill(&self.scheduler, &plan));
        self.scheduler.commit(plan, &self.sampled, 0, &mut self.outputs);
        black_box(&self.outputs);
    }
}

/// The time of `steps` steps, the making of worlds left out.
fn run(case: Case, steps: u64) -> Duration {
    let mut total = Duration::ZERO;
    let mut left = steps;
    while left > 0 {
        let mut world = World::new(case);
        for _ in 0..left.min(STEPS) {
            world.arrive(case.arrivals);
            let start = Instant::now();
            world.step();
            total += start.elapsed();
        }
        left -= left.min(STEPS);
    }
    total
}

fn cases() -> Vec<(&'static str, u32, Case)> {
    let case = |running, arrivals| Case { running, waiting: 0, policy: &Fcfs, arrivals };
    let decode = [1, 16, 64, 256, 1024].map(|running| ("decode", running, case(running, Arrivals::No)));
    let mixed = [16, 256].map(|running| ("mixed", running, case(running, Arrivals::New)));
    let repeated = [("repeated", Arrivals::Repeated), ("session", Arrivals::OfSession)];
    decode.into_iter().chain(mixed).chain(repeated.map(|(name, arrivals)| (name, 16, case(16, arrivals)))).collect()
}

/// The median times in microseconds of a step of 256 while ten wait and while a million do, measured by turns.
fn while_waiting(policy: &'static dyn Policy) -> [f64; 2] {
    let mut worlds = [10, 1_000_000].map(|waiting| World::new(Case { running: 256, waiting, policy, arrivals: Arrivals::No }));
    let mut times = [Vec::new(), Vec::new()];
    for turn in 0..32 {
        for (world, times) in worlds.iter_mut().zip(&mut times) {
            // The first steps of a turn find the other world in the processor's caches.
            for step in 0..24 {
                let start = Instant::now();
                world.step();
                if turn > 0 && step >= 8 {
                    times.push(start.elapsed().as_secs_f64() * 1e6);
                }
            }
        }
    }
    times.map(|mut times| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    })
}

/// The least that a decode step could cost: for each sequence a cache line of state is read and written, and its
/// entries in the step buffers and in the outputs are written.
fn floor(seqs: usize, steps: u64) -> Duration {
    let mut states = vec![[1_u32; 16]; seqs];
    let mut arrays = vec![vec![0_u32; seqs]; 8];
    let mut outputs = vec![(0_u64, 0_u32, 0_u32); seqs];
    let start = Instant::now();
    for _ in 0..steps {
        for (i, state) in states.iter_mut().enumerate() {
            state[0] += 1;
            state[8] += state[0];
            for (array, value) in arrays.iter_mut().zip(*state) {
                array[i] = value;
            }
            outputs[i] = (u64::from(state[9]), state[8], state[10]);
        }
        black_box((&mut states, &mut arrays, &mut outputs));
    }
    start.elapsed()
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    if let Some(at) = arguments.iter().position(|argument| argument == "--steps") {
        let (steps, name) = (arguments[at + 1].parse().expect("a number of steps"), &arguments[at + 2]);
        let (_, _, case) = *cases().iter().find(|(group, size, _)| format!("{group}/{size}") == *name).expect("a case, as in decode/256");
        run(case, steps);
        return;
    }
    if let Some(at) = arguments.iter().position(|argument| argument == "--waiting") {
        let [few, many] = while_waiting(<dyn Policy>::named(&arguments[at + 1]).expect("a policy, as in fair"));
        println!("{few:.3} {many:.3}");
        return;
    }
    let mut criterion = Criterion::default()
        .configure_from_args()
        .warm_up_time(Duration::from_secs(1))
        .measurement_time(Duration::from_secs(2))
        .sample_size(20);
    for (group, size, case) in cases() {
        let id = BenchmarkId::new(group, size);
        criterion.bench_with_input(id, &case, |bencher, &case| bencher.iter_custom(|steps| run(case, steps)));
    }
    for seqs in [1_usize, 16, 64, 256, 1024] {
        criterion
            .bench_with_input(BenchmarkId::new("floor", seqs), &seqs, |bencher, &seqs| bencher.iter_custom(|steps| floor(seqs, steps)));
    }
    criterion.final_summary();
}
