//! Compares the routings between engines.

use chairlift_core::{Config, Request, Routing, Time, Token};
use chairlift_sim::{Job, Machine, StepTime, percentile, simulate_fleet};

const MS: Time = 1000;

fn job(time: Time, tag: u64, prompt: u32, output: u32) -> Job {
    let prompt = (0..prompt).map(|i| (tag as Token).wrapping_mul(0x9E37_79B1).wrapping_add(i) % 50_000 + 1).collect();
    let request = Request { tag, prompt, max_new_tokens: output, ..Request::default() };
    Job { time, request, len: output, ..Job::default() }
}

/// TTFT of prompts of 100 to 4,000 tokens that arrive at random at four engines.
fn ttft(routing: Routing) -> Vec<Time> {
    let config = Config { num_kv_blocks: 4001, max_num_batched_tokens: 512, max_num_seqs: 64, max_model_len: 8192, ..Config::default() };
    let machine = Machine::new(StepTime::linear([5000.0, 100.0, 100.0, 0.1, 0.01]));
    let (mut state, mut now) = (1_u64, 0);
    let mut random = |below: u64| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) % below
    };
    let jobs = (0..2000).map(|tag| {
        now += random(100 * MS);
        job(now, tag, if random(4) == 0 { 4000 } else { 100 }, 1 + random(40) as u32)
    });
    let jobs: Vec<Job> = jobs.collect();
    let reports = simulate_fleet(config, jobs, &machine, 4, routing, || true).expect("a sound config");
    let mut times: Vec<Time> = reports.iter().flat_map(|report| report.ttft(|_| true)).collect();
    times.sort_unstable();
    times
}

#[test]
fn predicted_routing_lets_prompts_wait_less_than_counting_requests() {
    let [turns, least, predicted] = [Routing::RoundRobin, Routing::LeastLoaded, Routing::Predicted].map(ttft);
    for percent in [50, 75, 90, 99] {
        let of = |times: &[Time]| percentile(times, percent);
        println!("p{percent} TTFT: {} µs in turns, {} least loaded, {} predicted", of(&turns), of(&least), of(&predicted));
    }
    let p99 = |times: &[Time]| percentile(times, 99);
    assert_eq!(predicted.len(), 2000);
    assert!(10 * p99(&predicted) <= 9 * p99(&least) && 10 * p99(&predicted) <= 9 * p99(&turns));
}
