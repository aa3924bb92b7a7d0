//! What background requests cost other requests, and what they get: the guarantees of docs/scheduling/policies.md, in virtual time.

mod jobs;

use chairlift_core::{BACKGROUND, Config, Load, Time, Timeline};
use chairlift_sim::{Job, Machine, Report, StepTime, percentile, simulate};
use jobs::{job, sorted};

const SECOND: Time = 1_000_000;

/// Machines where a row of a decoding sequence costs as much as the weights, less, and little.
fn slow_and_fast_rows() -> [(&'static str, Machine); 4] {
    let of = |coefficients| Machine::new(StepTime::linear(coefficients));
    [
        ("small CPU", of([8_000.0, 2_000.0, 8_000.0, 2.0, 0.1])),
        ("CPU", of([10_000.0, 500.0, 1_000.0, 2.0, 0.2])),
        ("GPU", of([20_000.0, 50.0, 200.0, 0.05, 0.001])),
        ("fast GPU", of([8_000.0, 20.0, 20.0, 0.01, 0.0005])),
    ]
}

/// Background requests that are all there at the beginning.
fn backlog(count: u64) -> impl Iterator<Item = Job> {
    (0..count).map(|tag| {
        let mut job = job(0, (1 << 32) + tag, 300, 150);
        (job.request.priority, job.request.tenant) = (BACKGROUND, "background".into());
        job
    })
}

fn config(background_slowdown: u32) -> Config {
    Config { num_kv_blocks: 2001, max_num_batched_tokens: 512, max_num_seqs: 64, watermark: 100, background_slowdown, ..Config::default() }
}

/// Times of the online requests of a run, in microseconds.
struct Online {
    ttft_p95: Time,
    ttft_most: Time,
    /// p95 of each request's longest time between two tokens.
    gap_p95: Time,
    gap_p50: Time,
    /// p99 of each request's mean time between two tokens.
    itl_p99: Time,
}

fn online_times(report: &Report) -> Online {
    let is_online = |timeline: &Timeline| timeline.priority != BACKGROUND;
    let (mut gaps, mut means) = (Vec::new(), Vec::new());
    for (timeline, &gap) in report.ended.iter().zip(&report.longest_gaps).filter(|(timeline, _)| is_online(timeline)) {
        gaps.push(gap);
        means.push((timeline.ended - timeline.first_token.expect("it has tokens")) / Time::from(timeline.output_tokens - 1));
    }
    gaps.sort_unstable();
    means.sort_unstable();
    let [ttft_p95, ttft_most] = [95, 100].map(|percent| percentile(&report.ttft(is_online), percent));
    Online { ttft_p95, ttft_most, gap_p95: percentile(&gaps, 95), gap_p50: percentile(&gaps, 50), itl_p99: percentile(&means, 99) }
}

#[test]
fn beside_a_backlog_of_background_requests_streams_are_at_most_three_times_as_slow_as_alone() {
    for (name, machine) in slow_and_fast_rows() {
        for (streams, slowdown) in [(1, 300), (4, 300), (1, 250), (4, 150)] {
            // Each stream's next request comes some time after the one before has ended, as in a conversation.
            let jobs = |tag| job(SECOND + (tag / streams) * 8 * SECOND + tag % streams, tag, 60, 40);
            let online: Vec<Job> = (0..80).map(jobs).collect();
            let run = |jobs| simulate(config(slowdown), jobs, &machine).expect("a sound config");
            let alone = online_times(&run(online.clone()));
            let report = run(sorted(backlog(500).chain(online).collect()));
            assert_eq!(report.completed(), 580, "the background ends too");
            let beside = online_times(&report);
            println!(
                "{name}, {streams} streams, {slowdown} %: TTFT {} µs alone, {} beside background requests, longest gap {}, {}, mean gap {}, {}",
                alone.ttft_p95, beside.ttft_p95, alone.gap_p50, beside.gap_p95, alone.itl_p99, beside.itl_p99
            );
            let at_most = |alone: Time| Time::from(slowdown) * alone / 100;
            assert!(beside.ttft_p95 <= 3 * alone.ttft_p95, "TTFT {} against {} alone", beside.ttft_p95, alone.ttft_p95);
            // The first one may come into the longest step of the background alone: ten times one with a single row.
            let step = 10 * machine.step.step(&Load { decode_seqs: 1, context_tokens: 300, ..Load::default() });
            assert!(beside.ttft_most <= 3 * alone.ttft_most + step, "TTFT {} against {} alone", beside.ttft_most, alone.ttft_most);
            // Not every step is as long as predicted.
            let longest = if slowdown == 300 { at_most(alone.gap_p50) } else { 11 * at_most(alone.gap_p50) / 10 };
            assert!(beside.gap_p95 <= longest, "gap {} against {} alone", beside.gap_p95, alone.gap_p50);
            assert!(beside.itl_p99 <= at_most(alone.itl_p99), "ITL {} against {} alone", beside.itl_p99, alone.itl_p99);
        }
    }
}

/// The time at which thirty background requests have ended, beside streams that take longer.
fn background_ended_at(machine: &Machine, slowdown: u32, streams: u64) -> f64 {
    let online = (0..streams).map(|tag| job(tag, tag, 60, 8000));
    let jobs = sorted(backlog(30).chain(online).collect());
    let report = simulate(config(slowdown), jobs, machine).expect("a sound config");
    let ended = |background: bool| {
        report.ended.iter().filter(move |timeline| (timeline.priority == BACKGROUND) == background).map(|timeline| timeline.ended)
    };
    let last = ended(true).max().expect("they ended");
    assert!(ended(false).all(|ended| ended > last), "the streams go on until then");
    last as f64
}

#[test]
fn background_requests_use_the_whole_machine_alone_and_progress_beside_streams() {
    for (name, machine) in slow_and_fast_rows() {
        let unlimited = background_ended_at(&machine, 0, 0);
        let speeds = [0, 1, 4].map(|streams| unlimited / background_ended_at(&machine, 300, streams));
        let [alone, beside_one, beside_four] = speeds;
        println!("{name}: {alone:.2} of the unlimited speed alone, {beside_one:.2} beside one stream, {beside_four:.2} beside four");
        assert!(alone >= 0.95 && beside_one >= 0.5 && beside_four >= 0.5, "{name}: {speeds:?}");
    }
}
