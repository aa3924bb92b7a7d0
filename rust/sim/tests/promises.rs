//! The guarantees of docs/scheduling.md, measured in virtual time.
//!
//! The machine reads its weights in 20 ms per step. A prompt token adds 0.05 ms and a decoding sequence 0.2 ms.

mod jobs;
#[path = "promises/token_intervals.rs"]
mod token_intervals;

use chairlift_core::{
    BACKGROUND, Config, Deadline, Fair, Fcfs, POLICIES, Policy, Prefix, Priority, STOP, Shortest, Tier, Time, Timeline, Token, Vtc,
};
use chairlift_sim::{Job, Machine, Report, StepTime, percentile, simulate};
use jobs::{job, sorted};

const MS: Time = 1000;
const SECOND: Time = 1_000_000;

fn machine() -> Machine {
    Machine::new(StepTime::linear([20_000.0, 50.0, 200.0, 0.0, 0.0]))
}

fn config() -> Config {
    Config {
        num_kv_blocks: 2001,
        max_num_batched_tokens: 256,
        max_num_seqs: 32,
        max_model_len: 200_000,
        watermark: 100,
        ..Config::default()
    }
}

/// Pseudorandom numbers from 0 to 1, the same in every run.
struct Dice(u64);

impl Dice {
    fn roll(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// A gap between arrivals of a Poisson process, `mean` on average.
    fn gap(&mut self, mean: Time) -> Time {
        (-(1.0 - self.roll()).ln() * mean as f64) as Time
    }

    fn between(&mut self, low: u32, high: u32) -> u32 {
        low + (self.roll() * f64::from(high - low + 1)) as u32
    }
}

fn run(config: Config, jobs: &[Job]) -> Report {
    let report = simulate(config, jobs.iter().cloned(), &machine()).expect("a sound config");
    assert_eq!(report.ended.len() + report.refused.len(), jobs.len(), "every request ends");
    for timeline in &report.ended {
        assert_eq!(timeline.states.iter().sum::<Time>(), timeline.ended - timeline.arrived);
        assert!(timeline.preemptions <= 8, "preempted more often than promised");
    }
    report
}

/// Requests of one kind for `span`, one per `every` on average.
fn stream(dice: &mut Dice, tags: u64, span: Time, every: Time, make: impl Fn(&mut Dice, Time, u64) -> Job) -> Vec<Job> {
    let (mut time, mut jobs) = (0, Vec::new());
    loop {
        time += dice.gap(every);
        if time >= span {
            return jobs;
        }
        let tag = tags + jobs.len() as u64;
        jobs.push(make(dice, time, tag));
    }
}

#[test]
fn at_four_times_overload_the_high_class_waits_at_most_half_as_long_again_as_alone() {
    // 100 prompt tokens take 5 ms and 40 steps of 26 ms on one slot of 32 take another 33, so the machine serves 26
    // such requests per second. The high class uses half of that and the low class more than three times as much.
    let mut dice = Dice(1);
    let high = stream(&mut dice, 0, 60 * SECOND, 76 * MS, |_, time, tag| {
        let mut job = job(time, tag, 100, 40);
        job.request.priority = -1;
        job
    });
    let low = stream(&mut dice, 1 << 32, 60 * SECOND, 11 * MS, |_, time, tag| job(time, tag, 100, 40));
    let config = Config { scheduling_policy: &Priority, ..config() };
    let solo = percentile(&run(config, &high).ttft(|_| true), 99);
    let both = run(config, &sorted([high, low].concat()));
    let beside = percentile(&both.ttft(|timeline| timeline.priority < 0), 99);
    println!("high class p99 TTFT: {solo} µs alone, {beside} beside the low class");
    assert!(2 * beside <= 3 * solo, "{beside} against {solo} alone");
    assert_eq!(both.completed(), both.ended.len(), "the low class ends too");
}

#[test]
fn background_requests_delay_others_by_at_most_half_under_every_policy() {
    // The requests use half of what the machine can carry. The background has more than enough for the whole machine.
    let mut dice = Dice(7);
    let online = stream(&mut dice, 0, 60 * SECOND, 76 * MS, |_, time, tag| job(time, tag, 100, 40));
    let background = (0..600).map(|tag| {
        let mut job = job(0, (1 << 32) + tag, 200, 150);
        job.request.priority = BACKGROUND;
        job
    });
    let jobs = sorted([online.clone(), background.collect()].concat());
    for policy in POLICIES {
        let name = policy.name();
        let config = Config { scheduling_policy: policy, ..config() };
        let solo = percentile(&run(config, &online).ttft(|_| true), 99);
        let report = simulate(config, jobs.iter().cloned(), &machine()).expect("a sound config");
        let beside = percentile(&report.ttft(|timeline| timeline.priority != BACKGROUND), 99);
        let tokens: u32 =
            report.ended.iter().filter(|timeline| timeline.priority == BACKGROUND).map(|timeline| timeline.output_tokens).sum();
        println!("{name}: p99 TTFT {solo} µs alone, {beside} beside background requests");
        assert!(2 * beside <= 3 * solo, "{name}: {beside} against {solo} alone");
        let preempted = report.ended.iter().filter(|timeline| timeline.priority != BACKGROUND && timeline.preemptions > 0).count();
        assert_eq!(preempted, 0, "{name}: preempted for the background");
        assert_eq!((report.completed(), tokens), (jobs.len(), 600 * 150), "{name}: the background ends too");
    }
}

#[test]
fn at_four_times_overload_the_priority_tier_waits_as_alone_and_flex_ends_under_every_policy_without_turns() {
    // As in the first test: the priority tier uses half of the capacity. The others have more than three times as much.
    let mut dice = Dice(11);
    let of = |mut job: Job, tier: Tier| {
        job.request.tier = tier;
        job
    };
    let priority = stream(&mut dice, 0, 60 * SECOND, 76 * MS, |_, time, tag| of(job(time, tag, 100, 40), Tier::Priority));
    let others = stream(&mut dice, 1 << 32, 60 * SECOND, 11 * MS, |dice, time, tag| {
        of(job(time, tag, 100, 40), if dice.roll() < 0.5 { Tier::Flex } else { Tier::Default })
    });
    let jobs = sorted([priority.clone(), others].concat());
    for policy in POLICIES.into_iter().filter(|policy| !policy.rules().takes_turns()) {
        let name = policy.name();
        let config = Config { scheduling_policy: policy, ..config() };
        let solo = percentile(&run(config, &priority).ttft(|_| true), 99);
        let report = run(config, &jobs);
        let p99 = |tier: Tier| percentile(&report.ttft(|timeline| timeline.tier == tier), 99);
        let preempted = |tier: Tier| report.ended.iter().filter(|timeline| timeline.tier == tier && timeline.preemptions > 0).count();
        println!(
            "{name}: p99 TTFT {solo} µs alone, {} beside the others, {} default, {} flex; preempted {:?}",
            p99(Tier::Priority),
            p99(Tier::Default),
            p99(Tier::Flex),
            [Tier::Priority, Tier::Default, Tier::Flex].map(preempted),
        );
        assert!(2 * p99(Tier::Priority) <= 3 * solo, "{name}: {} against {solo} alone", p99(Tier::Priority));
        assert_eq!(report.completed(), jobs.len(), "{name}: default and flex requests end too");
    }
}

#[test]
fn a_flex_request_starts_after_the_ageing_while_more_urgent_ones_flood() {
    let mut dice = Dice(12);
    let flood = stream(&mut dice, 1 << 32, 60 * SECOND, 20 * MS, |_, time, tag| job(time, tag, 100, 40));
    let mut flex = job(SECOND, 0, 100, 40);
    flex.request.tier = Tier::Flex;
    let jobs = sorted([flood, vec![flex]].concat());
    for policy in POLICIES.into_iter().filter(|policy| !policy.rules().takes_turns()) {
        let name = policy.name();
        let config = Config { scheduling_policy: policy, queue_ageing: 5 * SECOND, ..config() };
        let report = run(config, &jobs);
        let flex = report.ended.iter().find(|timeline| timeline.tier == Tier::Flex).expect("it ended");
        println!("{name}: a flex request waits for {} µs, and ends after {}", flex.queued(), flex.ended - flex.arrived);
        assert!((5 * SECOND..7 * SECOND).contains(&flex.queued()), "{name}: {}", flex.queued());
        assert!(flex.ended - flex.arrived < 30 * SECOND, "{name}: {}", flex.ended - flex.arrived);
    }
}

#[test]
fn a_tenant_that_floods_does_not_delay_one_that_asks_once_a_second() {
    let whose = |mut job: Job, tenant: &str| {
        job.request.tenant = tenant.into();
        job
    };
    let mut dice = Dice(2);
    // Its prompts take two steps. Beside the flood it waits for one more step, and each step takes half as long again.
    let few: Vec<Job> = (1..60).map(|i| whose(job(i * SECOND + Time::from(dice.between(0, 99)) * MS, i, 700, 20), "few")).collect();
    let flood = stream(&mut dice, 1 << 32, 60 * SECOND, 20 * MS, |_, time, tag| whose(job(time, tag, 100, 150), "flood"));
    let config = Config { scheduling_policy: &Fair, max_num_batched_tokens: 512, ..config() };
    let solo = percentile(&run(config, &few).ttft(|_| true), 99);
    let jobs = sorted([few, flood].concat());
    let beside = percentile(&run(config, &jobs).ttft(|timeline| &*timeline.tenant == "few"), 99);
    let fcfs = percentile(&run(Config { scheduling_policy: &Fcfs, ..config }, &jobs).ttft(|timeline| &*timeline.tenant == "few"), 99);
    println!("one request a second, p99 TTFT: {solo} µs alone, {beside} beside the flood, {fcfs} under fcfs");
    assert!(beside <= 2 * solo, "{beside} against {solo} alone");
    assert!(fcfs > 10 * solo, "the flood is one: {fcfs}");
}

#[test]
fn tenants_that_flood_share_by_their_weights() {
    let mut dice = Dice(3);
    let mut jobs = Vec::new();
    for (tags, weight) in [(0, 1), (1 << 32, 2), (2 << 32, 3)] {
        jobs.extend(stream(&mut dice, tags, 60 * SECOND, 25 * MS, |dice, time, tag| {
            let mut job = job(time, tag, dice.between(50, 300), dice.between(20, 100));
            (job.request.tenant, job.request.weight) = (format!("{weight}").into(), weight);
            job
        }));
    }
    let report = run(Config { scheduling_policy: &Fair, ..config() }, &sorted(jobs));
    // Service as VTC counts it, for requests served while all three tenants had requests waiting.
    let mut service = [0.0; 3];
    for timeline in report.ended.iter().filter(|timeline| timeline.ended < 60 * SECOND) {
        let weight: usize = timeline.tenant.parse().unwrap();
        service[weight - 1] += f64::from(timeline.prompt_tokens - timeline.cached_tokens) + 2.0 * f64::from(timeline.output_tokens);
    }
    let total: f64 = service.iter().sum();
    println!("service by weight 1, 2, 3: {service:?}");
    for (i, served) in service.iter().enumerate() {
        let (share, due) = (served / total, (i + 1) as f64 / 6.0);
        assert!((share - due).abs() <= 0.05 * due, "weight {} has {share:.3} of the service, {due:.3} is due", i + 1);
    }
}

#[test]
fn a_prompt_of_100_k_tokens_neither_holds_up_short_ones_nor_waits_without_bound() {
    // 100 k tokens need 6,252 of 6,600 blocks, or 95 % of the cache. 50 short requests run before it, and others keep arriving.
    let config = Config { num_kv_blocks: 6601, watermark: 330, max_num_batched_tokens: 512, queue_ageing: 5 * SECOND, ..config() };
    let long = job(10 * MS, 0, 100_000, 20);
    let later = stream(&mut Dice(4), 1 << 20, 60 * SECOND, 400 * MS, |_, time, tag| job(time, tag, 200, 60));
    for burst in [0, 50] {
        let shorts = sorted((1..=burst).map(|tag| job(0, tag, 200, 60)).chain(later.iter().cloned()).collect());
        let (without, with) = (run(config, &shorts), run(config, &sorted([shorts, vec![long.clone()]].concat())));
        let p99 = |report: &Report| percentile(&report.ttft(|timeline| timeline.tag != 0), 99);
        let started = with.ended.iter().find(|timeline| timeline.tag == 0).and_then(|timeline| timeline.started).unwrap();
        let (without, with) = (p99(&without), p99(&with));
        println!("short p99 TTFT, {burst} there before: {without} µs without the long one, {with} with it, which started at {started}");
        assert!(with <= 2 * without, "{with} against {without}");
        // The ageing bound: bypassed for 5 s, plus the sequences running then (60 steps of at most 0.1 s).
        assert!(started <= 11 * SECOND, "{started}");
    }
}

#[test]
fn with_too_little_memory_little_is_computed_again() {
    let mut dice = Dice(5);
    let jobs: Vec<Job> = (0..600).map(|tag| job(0, tag, dice.between(100, 500), dice.between(50, 250))).collect();
    // 32 requests of 450 tokens on average need 900 blocks.
    for (share, most) in [(12, 5), (10, 10), (8, 15)] {
        let blocks = 900 * share / 10;
        let report = run(Config { num_kv_blocks: blocks + 1, watermark: blocks / 20, ..config() }, &jobs);
        let counters = report.stats.unwrap().counters;
        let (again, all) = (counters.recomputed_tokens, counters.computed_tokens);
        println!("KV at {share}/10 of demand: {again} of {all} tokens computed again, {} preemptions", counters.preemptions_recompute);
        assert!(again * 100 <= all * most, "{again} of {all}");
    }
}

#[test]
fn at_twice_what_it_can_do_deadlines_are_met_half_as_often_again() {
    let mut dice = Dice(6);
    let jobs = stream(&mut dice, 0, 60 * SECOND, 28 * MS, |dice, time, tag| {
        let mut job = job(time, tag, dice.between(50, 200), dice.between(20, 80));
        // From 1.5 to 4 times the duration of the request alone on a full machine.
        let alone = Time::from(job.request.max_new_tokens) * 30 * MS;
        job.request.deadline = Some(time + alone * Time::from(dice.between(15, 40)) / 10);
        job.request.predicted_tokens = Some(job.output.len() as u32);
        job
    });
    let met = |policy: &'static dyn Policy| run(Config { scheduling_policy: policy, ..config() }, &jobs).completed();
    let (deadline, fcfs) = (met(&Deadline), met(&Fcfs));
    // An engine without deadlines computes requests whose callers have left long ago.
    let mut untold = jobs.clone();
    for job in &mut untold {
        job.request.deadline = None;
    }
    let blind = run(config(), &untold);
    let in_time = |timeline: &&Timeline| Some(timeline.ended) <= jobs[timeline.tag as usize].request.deadline;
    let blind = blind.ended.iter().filter(in_time).count();
    println!("of {} requests {deadline} met their deadlines, {fcfs} under fcfs, {blind} if it is not told of them", jobs.len());
    assert!(2 * deadline >= 3 * fcfs.max(blind), "{deadline} against {fcfs}, {blind}");
}

#[test]
fn shortest_first_and_prefix_first_pay() {
    let mut dice = Dice(7);
    let jobs = stream(&mut dice, 0, 60 * SECOND, 60 * MS, |dice, time, tag| {
        let output = if dice.roll() < 0.2 { 400 } else { 20 };
        job(time, tag, 100, output)
    });
    let mean = |policy: &'static dyn Policy| {
        let report = run(Config { scheduling_policy: policy, max_num_seqs: 8, ..config() }, &jobs);
        report.ended.iter().map(|timeline| timeline.ended - timeline.arrived).sum::<Time>() / report.ended.len() as Time
    };
    let (shortest, fcfs) = (mean(&Shortest), mean(&Fcfs));
    println!("mean time to the end: {shortest} µs shortest first, {fcfs} first come first served");
    assert!(2 * shortest < fcfs);

    // 40 documents of 800 tokens with questions in random order. The cache holds a few of them at a time.
    let mut dice = Dice(8);
    let jobs = stream(&mut dice, 0, 20 * SECOND, 10 * MS, |dice, time, tag| {
        let mut job = job(time, tag, 32, 20);
        let document = u64::from(dice.between(0, 39));
        job.request.prompt.splice(0..0, (0..800).map(|i| 2_000_000 + (document * 1000 + i) as Token));
        job
    });
    let hits = |policy: &'static dyn Policy| {
        let counters =
            run(Config { scheduling_policy: policy, num_kv_blocks: 701, watermark: 10, ..config() }, &jobs).stats.unwrap().counters;
        counters.prefix_hits as f64 / counters.prefix_queries as f64
    };
    let (prefix, fcfs) = (hits(&Prefix), hits(&Fcfs));
    println!("prefix hits: {prefix:.3} of tokens, {fcfs:.3} under fcfs");
    assert!(1.0 - prefix < 0.6 * (1.0 - fcfs));
}

#[test]
fn requests_that_await_a_running_prompt_do_not_delay_others() {
    // The document takes 63 steps. The questions on it need its blocks and the other request does not.
    let config = Config { scheduling_policy: &Prefix, ..config() };
    let question = |tag: u64| {
        let mut job = job(0, tag, 50, 5);
        job.request.prompt.splice(0..0, (0..16_000).map(|i| 2_000_000 + i as Token));
        job
    };
    let ttft = |waiting: u64| {
        let jobs = (1..=1 + waiting).map(question).chain([job(SECOND, 0, 100, 5)]).collect();
        let report = run(config, &sorted(jobs));
        let cached = report.ended.iter().filter(|timeline| timeline.cached_tokens >= 16_000).count() as u64;
        assert_eq!(cached, waiting, "all but one find the document in the cache");
        report.ttft(|timeline| timeline.tag == 0)[0]
    };
    let alone = ttft(0);
    for waiting in [10, 100, 400] {
        let beside = ttft(waiting);
        println!("TTFT beside a prompt of 16,000 tokens: {alone} µs, {beside} while {waiting} requests await its blocks");
        assert!(2 * beside <= 3 * alone, "{beside} against {alone}");
    }
}

#[test]
fn a_batch_that_waits_for_its_last_wastes_most_of_the_machine() {
    let mut dice = Dice(9);
    let jobs: Vec<Job> = (0..400).map(|tag| job(0, tag, 50, if dice.roll() < 0.1 { 300 } else { dice.between(5, 40) })).collect();
    let time = |batching| run(Config { batching, ..config() }, &jobs).ended_at;
    let continuous = time(chairlift_core::Batching::Continuous);
    let fixed = time(chairlift_core::Batching::Static { size: 32 });
    println!("continuous {continuous} µs, static {fixed}");
    assert!(fixed > 2 * continuous);
}

#[test]
fn open_ended_requests_take_no_longer_than_ones_with_an_exact_limit() {
    let mut most_preemptions = 0;
    let mut time = |limit: u32, blocks: u32, watermark: u32| {
        let mut dice = Dice(3);
        let open_ended = |tag: u64| {
            let mut job = job(tag * 50 * MS, tag, dice.between(50, 150), dice.between(300, 400));
            (job.request.max_new_tokens, job.request.stop) = (limit.max(job.len), vec![STOP]);
            job
        };
        let config =
            Config { num_kv_blocks: blocks + 1, watermark, max_num_batched_tokens: 512, max_num_seqs: 64, max_model_len: 8192, ..config() };
        let report = run(config, &(0..600).map(open_ended).collect::<Vec<_>>());
        let (preemptions, batch) = (report.stats.unwrap().counters.preemptions_recompute, report.chunks / report.steps);
        most_preemptions = report.ended.iter().map(|timeline| timeline.preemptions).fold(most_preemptions, u32::max);
        println!(
            "{blocks} blocks, {watermark} free, max_tokens {limit}: {} µs, {preemptions} preemptions, mean batch {batch}",
            report.ended_at
        );
        report.ended_at
    };
    for (blocks, watermark) in [(600, 30), (600, 0), (300, 0), (150, 7)] {
        let exact = time(0, blocks, watermark);
        for limit in [2000, 8000].into_iter().filter(|limit| limit + 150 < 16 * blocks) {
            assert!(10 * time(limit, blocks, watermark) <= 11 * exact, "with max_tokens {limit} on {blocks} blocks");
        }
    }
    assert_eq!(most_preemptions, 8, "some were preempted as often as they may be");
}

#[test]
fn a_long_prompt_among_short_ones_takes_a_bounded_multiple_of_its_time_alone() {
    let config = Config { num_kv_blocks: 20_001, max_num_batched_tokens: 128, max_num_seqs: 64, watermark: 1000, ..config() };
    let long = job(2 * SECOND, 0, 4000, 1);
    let alone = run(config, std::slice::from_ref(&long)).ttft(|_| true)[0];
    for policy in [&Fcfs as &dyn Policy, &Fair, &Prefix] {
        for load in [70, 90, 100, 120] {
            // A step of 128 tokens, including 8 decodes, takes 28 ms.
            let every = 28 * MS * 300 * 100 / (120 * load);
            let shorts: Vec<Job> = (0..300 * SECOND / every).map(|i| job(i * every, i + 1, 300, 8)).collect();
            let without = percentile(&run(Config { scheduling_policy: policy, ..config }, &shorts).ttft(|_| true), 50);
            let report = run(Config { scheduling_policy: policy, ..config }, &sorted([shorts, vec![long.clone()]].concat()));
            let with = report.ttft(|timeline| timeline.tag == 0)[0];
            let short = percentile(&report.ttft(|timeline| timeline.tag != 0), 50);
            println!("{} load {load}: long TTFT {with} µs, {alone} alone; shorts p50 {short}, {without} without it", policy.name());
            assert!(with <= 5 * alone, "{with} against {alone} alone at load {load}");
        }
    }
}

#[test]
fn preemption_for_fairness_costs_little_and_vtc_does_none() {
    // 27 tenants send requests at rates of 1, 1/2, 1/3 and so on, in total more than the machine can serve. A prompt of
    // 1,000 tokens takes 200 ms, so it is expensive to recompute one.
    let mut dice = Dice(11);
    let rates: f64 = (1..=27).map(|tenant| 1.0 / f64::from(tenant)).sum();
    let jobs = stream(&mut dice, 0, 600 * SECOND, 900 * MS, |dice, time, tag| {
        let mut left = dice.roll() * rates;
        let tenant = (1..27).find(|&tenant| {
            left -= 1.0 / f64::from(tenant);
            left < 0.0
        });
        let mut job = job(time, tag, dice.between(100, 2000), dice.between(50, 400));
        job.request.tenant = tenant.unwrap_or(27).to_string().into();
        job
    });
    let machine = Machine::new(StepTime::linear([28_000.0, 200.0, 0.0, 1.0, 0.1]));
    let run = |policy: &'static dyn Policy| {
        let config = Config {
            scheduling_policy: policy,
            num_kv_blocks: 1101,
            watermark: 55,
            max_num_batched_tokens: 512,
            max_num_seqs: 64,
            ..config()
        };
        let report = simulate(config, jobs.iter().cloned(), &machine).expect("a sound config");
        let counters = report.stats.unwrap().counters;
        let (preemptions, again, ttft) = (counters.preemptions_recompute, counters.recomputed_tokens, report.ttft(|_| true));
        println!(
            "{}: {} µs, {preemptions} preemptions, {again} tokens again, p50 TTFT {}",
            policy.name(),
            report.ended_at,
            percentile(&ttft, 50)
        );
        report.ended_at
    };
    let [fcfs, vtc, fair] = [&Fcfs as &dyn Policy, &Vtc, &Fair].map(run);
    assert!(100 * vtc <= 101 * fcfs, "{vtc} against {fcfs}");
    assert!(100 * fair <= 103 * vtc, "{fair} against {vtc}");
}

/// Saturation in thousandths at `time`, the maximum queue length in the ten seconds before, and the minimum in the last two.
fn seen_at(report: &Report, time: Time) -> (u32, usize, usize) {
    let samples = report.utilization.samples();
    let upto = |time: Time| samples.partition_point(|sample| sample.time <= time);
    let most = |from: Time, to: Time| samples[upto(from)..upto(to)].iter().map(|sample| sample.waiting).max().unwrap_or(0);
    let least = |from: Time, to: Time| samples[upto(from)..upto(to)].iter().map(|sample| sample.waiting).min().unwrap_or(0);
    (samples[upto(time) - 1].saturation, most(time - 10 * SECOND, time - 9 * SECOND), least(time - 2 * SECOND, time))
}

#[test]
fn saturation_is_what_is_asked_over_what_can_be_served_on_a_ramp_of_load() {
    // Prompts that use up the steps' tokens, outputs that use up the slots, both with a KV cache that fills up first,
    // and prompts that all have slots and blocks but wait for the steps' tokens.
    let kinds =
        [("prompts", 2000, 5, 2001, 32), ("outputs", 100, 200, 2001, 32), ("blocks", 900, 100, 601, 32), ("stalled", 2000, 5, 60_001, 500)];
    for (name, prompt, output, num_blocks, max_seqs) in kinds {
        let config = Config {
            num_kv_blocks: num_blocks,
            max_num_seqs: max_seqs,
            max_num_batched_tokens: max_seqs.max(256),
            watermark: 0,
            max_model_len: 4000,
            ..config()
        };
        let all: Vec<Job> = (0..400).map(|tag| job(0, tag, prompt, output)).collect();
        let each = run(config, &all).ended_at / 400;
        let (mut dice, mut jobs, levels) = (Dice(11), Vec::new(), [3, 5, 7, 9, 12, 16]);
        let stretch = 60 * SECOND;
        for (level, at) in levels.into_iter().zip(0..) {
            let part =
                stream(&mut dice, at << 32, stretch, each * 10 / level, |_, time, tag| job(time + at * stretch, tag, prompt, output));
            jobs.extend(part);
        }
        let report = run(config, &jobs);
        for at in 0..levels.len() as Time {
            let (from, to) = (at * stretch + 20 * SECOND, (at + 1) * stretch);
            let asked = jobs.iter().filter(|job| (from..to).contains(&job.time)).count() as u64 * each * 1000 / (to - from);
            let seen: Vec<_> = (from / SECOND..to / SECOND).map(|second| seen_at(&report, second * SECOND)).collect();
            let mean = seen.iter().map(|one| u64::from(one.0)).sum::<u64>() / seen.len() as u64;
            println!("{name}: {asked} ‰ asked, saturation {mean} ‰");
            for (saturation, before, now) in seen {
                // Samples are thinned, so a queue that was empty for a moment may seem to grow by one.
                assert!(now <= before + 1 || saturation >= 1000, "{name} at {asked} ‰: {saturation} while {before} became {now}");
            }
            assert!(mean.abs_diff(asked) <= 120, "{name}: {mean} for {asked}");
            assert!(asked < 1100 || mean >= 1000, "{name}: {mean} for {asked}");
        }
    }
}
