//! The guarantees of docs/several-models.md, measured in virtual time.

mod jobs;

use chairlift_core::{Config, Fair, FinishReason, MAX_WAIT, Routing, Time, Timeline};
use chairlift_sim::{Job, Machine, Report, SharedModel, StepTime, percentile, simulate, simulate_fleet, simulate_models};
use std::sync::Arc;

const MS: Time = 1000;
const SECOND: Time = 1_000_000;
const SLOTS: u32 = 8;

/// A model whose steps take `step` milliseconds, and 0.1 ms for each prompt token.
fn model(step: u32, weight: u32, itl: Option<Time>) -> SharedModel {
    let config =
        Config { num_kv_blocks: 4001, max_num_batched_tokens: 1024, max_num_seqs: SLOTS, max_model_len: 4096, ..Config::default() };
    let step = StepTime::linear([f64::from(step) * 1000.0, 100.0, 0.0, 0.0, 0.0]);
    SharedModel { config, machine: Machine::new(step), weight, itl }
}

fn job(model: usize, time: Time, tag: u64, prompt: u32, output: u32) -> Job {
    Job { model, ..jobs::job(time, tag, prompt, output) }
}

/// More requests than a model has slots. They arrive at the start and end at `until`.
fn overload(model: usize, tags: u64, until: Time) -> impl Iterator<Item = Job> {
    (tags..tags + 4 * u64::from(SLOTS)).map(move |tag| Job { cancelled_at: Some(until), ..job(model, 0, tag, 10, 4000) })
}

fn run(models: &[SharedModel], jobs: impl IntoIterator<Item = Job>) -> Vec<Report> {
    let jobs = jobs::sorted(jobs.into_iter().collect());
    let reports = simulate_models(models, jobs.iter().cloned(), || true).expect("sound configs");
    for (model, report) in reports.iter().enumerate() {
        assert_eq!(report.ended.len(), jobs.iter().filter(|job| job.model == model).count(), "every request ends at its model");
        assert_eq!(report.utilization.sums().busy, report.stats.unwrap().counters.step_us, "a model is busy during its own steps");
    }
    reports
}

fn busy(report: &Report) -> f64 {
    report.utilization.sums().busy as f64
}

#[test]
fn overloaded_models_share_the_time_by_weight() {
    for steps in [[20, 20], [50, 10], [10, 50]] {
        let models = [model(steps[0], 1, None), model(steps[1], 3, None)];
        let reports = run(&models, overload(0, 0, 30 * SECOND).chain(overload(1, 1000, 30 * SECOND)));
        let ratio = busy(&reports[1]) / busy(&reports[0]);
        assert!((2.85..=3.15).contains(&ratio), "{ratio} with steps of {steps:?} ms");
        let sum = busy(&reports[0]) + busy(&reports[1]);
        assert!((30.0 * SECOND as f64..30.06 * SECOND as f64).contains(&sum), "one step at a time and no idle time: {sum}");
    }
}

#[test]
fn no_model_starves() {
    let models = [model(40, 1000, None), model(40, 1, None), model(40, 1, None)];
    let few = (1..3).map(|model| job(model, SECOND, model as u64, 10, 20));
    let reports = run(&models, overload(0, 1000, 100 * SECOND).chain(few));
    for report in &reports[1..] {
        let one = &report.ended[0];
        let bound = MAX_WAIT + 3 * 40 * MS + 2 * MS;
        assert_eq!((one.finish, one.output_tokens), (Some(FinishReason::Length), 20));
        assert!(one.first_token.unwrap() - one.arrived <= bound && report.longest_gaps[0] <= bound, "{one:?}");
        assert!(report.longest_gaps[0] > MAX_WAIT / 2, "the weights alone would let it wait for longer");
    }
}

#[test]
fn one_request_keeps_its_itl_target_beside_an_overloaded_model() {
    let longest = |itl| {
        // The prompt's step takes 65 ms. By weight alone the other model has the next 520 ms.
        let models = [model(40, 8, None), model(5, 1, itl)];
        let reports = run(&models, overload(0, 1000, 20 * SECOND).chain([job(1, SECOND, 0, 600, 100)]));
        reports[1].longest_gaps[0]
    };
    let (with, without) = (longest(Some(200 * MS)), longest(None));
    assert!(with <= 200 * MS, "{with}");
    assert!(without > 400 * MS, "{without}");
}

#[test]
fn a_light_model_waits_for_steps_and_not_for_requests() {
    // A request alone takes 200 ms at model 1. In a queue behind model 0's requests it would wait for seconds.
    let models = [model(20, 1, None), model(20, 1, None)];
    let light = (0..20).map(|at| job(1, SECOND + at * SECOND, at, 10, 10));
    let reports = run(&models, overload(0, 1000, 30 * SECOND).chain(light));
    let ttft = reports[1].ttft(|_| true);
    assert_eq!(ttft.len(), 20);
    assert!(percentile(&ttft, 95) <= 43 * MS, "{ttft:?}");
}

#[test]
fn a_short_step_waits_for_one_step_in_a_burst() {
    // Every four seconds three requests for model 0, one for model 1 and one for the embedder arrive at the same moment.
    let models = [model(20, 1, None), model(20, 1, None), model(2, 1, None)];
    let ask = |burst: u64, at: u64, model, prompt, output| job(model, burst * 4 * SECOND, burst * 5 + at, prompt, output);
    let jobs = (0..20).flat_map(|burst| {
        let chat = [0, 2, 3].map(|at| ask(burst, at, 0, 500, 30));
        chat.into_iter().chain([ask(burst, 1, 1, 900, 30), ask(burst, 4, 2, 60, 1)])
    });
    let reports = run(&models, jobs);
    let ttft: Vec<_> = reports.iter().map(|report| report.ttft(|timeline| timeline.arrived > 0)).collect();
    // The steps of the prompts take 8, 122 and 110 ms. The chat model answers two requests with its first one.
    assert!(ttft[2].iter().all(|&time| time == 8 * MS), "{:?}", ttft[2]);
    assert!(percentile(&ttft[0], 50) <= 131 * MS, "{:?}", ttft[0]);
}

#[test]
fn tenants_have_one_share_of_all_models() {
    let fair = |weight| SharedModel { config: Config { scheduling_policy: &Fair, ..model(20, 1, None).config }, ..model(20, weight, None) };
    let until = 60 * SECOND;
    // Both tenants want all of model 0, and one of them has model 1 for itself.
    let jobs = |model: usize, tags: u64, tenant: &'static str| {
        (tags..tags + 2000).map(move |tag| {
            let mut job = Job { cancelled_at: Some(until), ..job(model, 0, tag, 10, 20) };
            job.request.tenant = Arc::from(tenant);
            job
        })
    };
    let served = |reports: &[Report], tenant: &str| {
        let of = |one: &Timeline| if &*one.tenant == tenant { u64::from(one.output_tokens) } else { 0 };
        reports[0].ended.iter().map(of).sum::<u64>() as f64
    };
    let share = |reports: &[Report]| served(reports, "modest") / (served(reports, "modest") + served(reports, "greedy"));
    let both = || jobs(0, 0, "greedy").chain(jobs(0, 10_000, "modest"));
    let alone = share(&run(&[fair(1), fair(1)], both()));
    let beside = share(&run(&[fair(1), fair(1)], both().chain(jobs(1, 20_000, "greedy"))));
    assert!((0.48..0.52).contains(&alone), "{alone}");
    assert!(beside > 0.8, "{beside}");
}

#[test]
fn one_model_is_served_as_without_others() {
    let jobs = || (0..200).map(|tag| job(0, tag * 30 * MS, tag, 10 + 37 * (tag as u32 % 11), 1 + 13 * (tag as u32 % 7)));
    let one = model(20, 1, None);
    let single = simulate(one.config, jobs(), &one.machine).unwrap();
    let others = run(&[model(20, 5, None), one], jobs().map(|job| Job { model: 1, ..job }));
    assert_eq!(format!("{:?}", others[1].ended), format!("{:?}", single.ended));
    assert_eq!((others[1].steps, busy(&others[1])), (single.steps, busy(&single)));
    assert_eq!((others[0].steps, others[0].ended.len()), (0, 0));
}

#[test]
fn a_simulation_ends_soon_when_its_caller_says_so() {
    let jobs = || (0..100).map(|tag| job(0, 0, tag, 10, 500));
    let shared = model(20, 1, None);
    let model = SharedModel { config: Config { scheduling_policy: &Fair, ..shared.config }, ..shared };
    let mut asked = 0;
    let mut stops = || {
        asked += 1;
        false
    };
    let engines = simulate_fleet(model.config, jobs(), &model.machine, 2, Routing::RoundRobin, &mut stops).unwrap();
    let models = simulate_models(&[model], jobs(), &mut stops).unwrap();
    assert!(engines.iter().chain(&models).all(|report| report.ended.is_empty() && (1..256).contains(&report.steps)));
    assert_eq!(asked, 2);
}

#[test]
fn results_are_the_same_in_every_run() {
    let models = [model(20, 1, None), model(7, 2, Some(50 * MS)), model(33, 1, None)];
    let jobs =
        || (0..600).map(|tag| job(tag as usize * 7 % 3, tag * 15 * MS, tag, 10 + (tag as u32 * 31 % 300), 1 + (tag as u32 * 17 % 60)));
    let ended = || run(&models, jobs()).iter().map(|report| format!("{:?}", report.ended)).collect::<Vec<_>>();
    assert_eq!(ended(), ended());
}

#[test]
fn an_engine_that_waits_for_its_batch_lets_others_run_and_wakes() {
    let dynamic = Config { batching: chairlift_core::Batching::Dynamic { size: SLOTS, timeout: SECOND }, ..model(20, 1, None).config };
    let models = [SharedModel { config: dynamic, ..model(20, 1, None) }, model(20, 1, None)];
    let reports = run(&models, [job(0, 0, 0, 10, 2), job(1, 0, 1, 10, 10)]);
    let first = |report: &Report| report.ended[0].first_token.unwrap();
    assert_eq!(first(&reports[1]), 21 * MS);
    assert_eq!(first(&reports[0]), SECOND + 21 * MS);
}
