//! What drafting costs: microseconds of [`Drafter::propose`] for each sequence and step, without a model.
//!
//! `cargo bench --bench drafter` prints one line a case: the number of sequences, and the microseconds
//! with each [`Text`], with a context of 2,000 tokens; the best of three runs. `-- 256` runs one number of sequences, and
//! `-- 256 chance` one text of it too: for callgrind, with `--toggle-collect='*Drafter::propose*'`.

use chairlift_core::{Config, Drafter, Outputs, Recorder, Request, Scheduler};
use std::collections::HashMap;
use std::time::{Duration, Instant};

const CONTEXT: u32 = 2000;
const MAX_MODEL_LEN: u32 = 8192;
const BLOCK_SIZE: u32 = 16;
/// Steps that are timed, after as many that are not.
const STEPS: u32 = 256;
const DRAFT_TOKENS: usize = 8;
/// Length of the part that repeats.
const PERIOD: u32 = 100;

/// Number of different tokens in a text of chance.
const WORDS: u32 = 12;

/// What the sequences consist of.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Text {
    /// All tokens differ: nothing is found.
    New,
    /// It repeats itself: what is found is right.
    Repeated,
    /// Few tokens in an order of chance: what is found is wrong mostly.
    Chance,
}

const TEXTS: [(&str, Text); 3] = [("new", Text::New), ("repeated", Text::Repeated), ("chance", Text::Chance)];

/// The token of a sequence at a position.
fn token(seq: u32, position: u32, text: Text) -> u32 {
    let mixed = |at: u32| (seq * 7919 + at).wrapping_mul(0x9E37_79B1);
    match text {
        Text::New => mixed(position) >> 15,
        Text::Repeated => mixed(position % PERIOD) >> 15,
        Text::Chance => ((mixed(position) ^ mixed(position) >> 15).wrapping_mul(0x85EB_CA6B) >> 16) % WORDS,
    }
}

/// Time of all proposals divided by the steps and sequences.
fn run(seqs: u32, text: Text) -> Duration {
    let config = Config {
        num_kv_blocks: seqs * (MAX_MODEL_LEN / BLOCK_SIZE) + 1,
        block_size: BLOCK_SIZE,
        max_num_batched_tokens: 8192,
        max_num_seqs: seqs,
        max_model_len: MAX_MODEL_LEN,
        ..Config::default()
    };
    let mut core = Recorder::off(Scheduler::new(config).expect("a sound config"));
    let mut drafter = Drafter::new(DRAFT_TOKENS, 0);
    let mut numbers = HashMap::new();
    for seq in 0..seqs {
        let prompt = (0..CONTEXT).map(|position| token(seq, position, text)).collect();
        let request = Request { tag: seq.into(), prompt, max_new_tokens: MAX_MODEL_LEN - CONTEXT, ..Request::default() };
        let id = core.add(request, 0).expect("a request that fits");
        drafter.watch(id, &mut core);
        numbers.insert(id, seq);
    }
    let (mut outputs, mut now, mut took, mut steps) = (Outputs::default(), 0, Duration::ZERO, 0);
    while steps < 2 * STEPS {
        let start = Instant::now();
        drafter.propose(&mut core, None);
        let proposed = start.elapsed();
        let plan = core.plan(now).expect("something to run");
        if plan.load.prefill_tokens == 0 {
            steps += 1;
            took += if steps > STEPS { proposed } else { Duration::ZERO };
        }
        let tokens = plan.chunks.iter().filter(|chunk| chunk.samples).flat_map(|chunk| {
            let (seq, end) = (numbers[&chunk.seq], chunk.start + chunk.len);
            (end - chunk.drafted..=end).map(move |position| token(seq, position, text) as i32)
        });
        let sampled: Vec<i32> = tokens.collect();
        now += 10_000 + 10 * u64::from(plan.load.tokens());
        drafter.observe(&plan, &sampled);
        core.commit(plan, &sampled, now, &mut outputs);
    }
    took / (STEPS * seqs)
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let only = arguments.first().and_then(|seqs| seqs.parse().ok());
    let texts = TEXTS.iter().filter(|(name, _)| arguments.get(1).is_none_or(|only| only == name));
    for seqs in [1, 16, 64, 256].into_iter().filter(|seqs| only.is_none_or(|only: u32| only == *seqs)) {
        let found = texts.clone().map(|&(_, text)| {
            let best = (0..3).map(|_| run(seqs, text)).min().expect("three runs");
            format!(" {:.3}", best.as_secs_f64() * 1e6)
        });
        println!("{seqs}{}", found.collect::<String>());
    }
}
