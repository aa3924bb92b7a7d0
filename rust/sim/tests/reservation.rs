//! The guarantees of admission by reservation, measured in virtual time on the machine of promises.rs.

use chairlift_core::{Config, POLICIES, Request, Reservation, Time, Token};
use chairlift_sim::{Job, Machine, Report, StepTime, simulate};

/// Requests that all wait from the start. Each allows `most` times the tokens it generates.
fn jobs(most: u32) -> Vec<Job> {
    let job = |tag: u32| {
        let (prompt, output) = (100 + tag * 37 % 400, 50 + tag * 61 % 200);
        let request = Request {
            tag: tag.into(),
            prompt: (0..prompt).map(|at| 1 + (tag * 7919 + at) % 1_000_003).collect::<Vec<Token>>(),
            max_new_tokens: output * most,
            stop: vec![0],
            ..Request::default()
        };
        Job { request, len: output, ..Job::default() }
    };
    (0..600).map(job).collect()
}

fn config(kv_reservation: Reservation) -> Config {
    // 32 requests of 450 tokens need 900 blocks.
    let limits = Config { num_kv_blocks: 721, max_num_batched_tokens: 256, max_num_seqs: 32, max_model_len: 8192, ..Config::default() };
    Config { kv_reservation, ..limits }
}

fn run(config: Config, jobs: Vec<Job>) -> Report {
    let machine = Machine::new(StepTime::linear([20_000.0, 50.0, 200.0, 0.0, 0.0]));
    let report = simulate(config, jobs, &machine).expect("a sound config");
    assert_eq!(report.completed(), 600);
    report
}

/// Number of preemptions, number of recomputed tokens, and the time at which all requests had ended.
fn printed(name: &str, report: &Report) -> (u64, u64, Time) {
    let counters = report.stats.expect("it ran").counters;
    println!(
        "{name}: {} preemptions, {} tokens computed again, {} µs",
        counters.preemptions_recompute, counters.recomputed_tokens, report.ended_at
    );
    (counters.preemptions_recompute, counters.recomputed_tokens, report.ended_at)
}

#[test]
fn nobody_is_preempted_where_max_tokens_are_reserved() {
    for most in [1, 4] {
        let (without, ..) = printed("no watermark", &run(config(Reservation::Watermark), jobs(most)));
        assert!(without > 50, "memory is short: {without}");
        let (preemptions, again, _) = printed("max-tokens", &run(config(Reservation::MaxTokens), jobs(most)));
        assert_eq!((preemptions, again), (0, 0), "allowed {most} times what they generate");
    }
}

#[test]
fn the_estimated_peak_admits_more_and_little_is_computed_again_where_lengths_are_known() {
    printed("watermark 5 %", &run(Config { watermark: 36, ..config(Reservation::Watermark) }, jobs(1)));
    let (_, again, peak) = printed("peak", &run(config(Reservation::Peak), jobs(1)));
    let (.., whole) = printed("max-tokens", &run(config(Reservation::MaxTokens), jobs(1)));
    // The peak is not a strict bound, because a sequence whose prompt is in progress runs longer than assumed. The test
    // allows 2 % of all tokens.
    assert!(again * 50 <= 270_000, "{again}");
    assert!(peak < whole, "those that end early make room for others: {peak} against {whole}");
    // If the output lengths are not given by `max_tokens`, predictions serve equally well.
    let mut told_apart = jobs(4);
    for job in &mut told_apart {
        job.request.predicted_tokens = Some(job.len);
    }
    let (_, again, predicted) = printed("peak, predicted", &run(config(Reservation::Peak), told_apart));
    assert!(again * 50 <= 270_000, "{again}");
    assert!(predicted * 100 <= peak * 101, "{predicted} against {peak}");
}

#[test]
fn a_reservation_holds_under_every_policy() {
    for policy in POLICIES {
        let mut jobs = jobs(2);
        for (job, at) in jobs.iter_mut().zip(0..) {
            (job.request.priority, job.request.tenant) = (at % 3, format!("{}", at % 5).into());
        }
        let config = Config { scheduling_policy: policy, ..config(Reservation::MaxTokens) };
        let counters = run(config, jobs).stats.expect("it ran").counters;
        assert_eq!((counters.preemptions_recompute, counters.preemptions_swap), (0, 0), "{policy:?}");
    }
}
