//! The times between tokens beside long prompts.

use super::*;

/// Machines with different costs per prompt token: low, high, and zero up to a point on a roofline.
fn machines() -> [(&'static str, Machine); 3] {
    let roofline = StepTime::new(vec![(0.0, 28_000.0), (140.0, 28_000.0), (1140.0, 228_000.0)], 0.0, 1.0, 0.1);
    [
        ("cheap", machine()),
        ("dear", Machine::new(StepTime::linear([10_000.0, 500.0, 1000.0, 2.0, 0.2]))),
        ("roofline", Machine::new(roofline.expect("a curve"))),
    ]
}

/// Sorted gaps between tokens: of streams alone, and of the same streams beside prompts of 4,000 tokens that arrive one
/// after another. Steps have up to 512 tokens.
fn beside_long_prompts(machine: &Machine, streams: u64, target_itl: impl Fn(Time) -> Time) -> (Vec<Time>, Vec<Time>) {
    let streams = (0..streams).map(|tag| job(tag * MS, tag, 1, 1500));
    let gaps = |report: Report| {
        let each = report.gaps.buckets().flat_map(|(gap, count)| std::iter::repeat_n(gap, count as usize));
        each.collect::<Vec<_>>()
    };
    let config = Config { max_num_batched_tokens: 512, ..config() };
    let alone = gaps(simulate(config, streams.clone(), machine).expect("a sound config"));
    let prompts = (0..4).map(|i| job((3 + 10 * i) * SECOND, 1000 + i, 4000, 1));
    let config = Config { target_itl: target_itl(percentile(&alone, 50)), ..config };
    let jobs = sorted(streams.chain(prompts).collect());
    (alone, gaps(simulate(config, jobs, machine).expect("a sound config")))
}

#[test]
fn beside_one_long_prompt_streams_are_at_most_three_times_as_slow_as_alone() {
    for (name, machine) in machines() {
        for streams in [4, 16] {
            let (alone, beside) = beside_long_prompts(&machine, streams, |_| 0);
            let (slowest, beside) = (percentile(&alone, 99), percentile(&beside, 99));
            println!("{name}, {streams} streams: p99 between tokens {slowest} µs alone, {beside} beside prompts");
            assert!(beside <= 3 * slowest, "{beside} against {slowest} alone");
        }
    }
}

#[test]
fn beside_one_long_prompt_steps_may_take_60_ms_where_three_times_alone_is_less() {
    // A small model. A step of one stream takes 4 ms, and a token of a prompt 1 ms.
    let machine = Machine::new(StepTime::linear([3500.0, 1000.0, 500.0, 0.0, 0.0]));
    for streams in [1, 4] {
        let measure = |target_itl| {
            let prompts = (1..9).map(|at| job(at * SECOND, 1000 + at, 400, 1));
            let jobs = sorted((0..streams).map(|tag| job(tag * MS, tag, 1, 1000)).chain(prompts).collect());
            let report = simulate(Config { target_itl, ..config() }, jobs, &machine).expect("a sound config");
            let gaps: Vec<Time> = report.gaps.buckets().flat_map(|(gap, count)| std::iter::repeat_n(gap, count as usize)).collect();
            (percentile(&report.ttft(|timeline| timeline.tag >= 1000), 50), percentile(&gaps, 99))
        };
        let ((default, gap), (three_times, _)) = (measure(0), measure(3 * (3500 + 500 * streams)));
        println!("{streams} streams: first token after {default} µs, {three_times} with three times of alone; p99 between tokens {gap}");
        assert!(gap <= 60_000, "{gap}");
        // Alone a prompt takes 407 ms.
        assert!(default < 460_000 && 5 * default < 4 * three_times, "{default} against {three_times}");
    }
}

#[test]
fn p99_of_the_time_between_tokens_is_at_most_a_tenth_above_the_target() {
    for (name, machine) in machines() {
        for (streams, times) in [(4, 2), (4, 3), (16, 2), (16, 3)] {
            let (alone, beside) = beside_long_prompts(&machine, streams, |alone| times * alone);
            let (target, p99) = (times * percentile(&alone, 50), percentile(&beside, 99));
            println!("{name}, {streams} streams: p99 {p99} µs between tokens, target {target}");
            assert!(10 * p99 <= 11 * target, "{p99} for {target}");
        }
    }
}
