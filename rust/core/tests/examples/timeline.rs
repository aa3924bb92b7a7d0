//! Timelines, and usage by tenant and class.

use crate::lab::{Cost, Lab, ask, plenty};
use chairlift_core::{Batching, Config, Fcfs, FinishReason, POLICIES, Priority, Request, Time, Timeline, TimelineState};
use std::collections::HashMap;

fn time(timeline: &Timeline, states: &[TimelineState]) -> Time {
    states.iter().map(|&cause| timeline.states[cause as usize]).sum()
}

#[test]
fn blocks_are_billed_for_the_time_they_are_held() {
    let mut lab = Lab::new(plenty(&Fcfs));
    lab.add(ask(1, 16, 3));
    lab.add(ask(2, 20, 3));
    lab.finish();
    // One block for a millisecond and a second one for the next two milliseconds; two blocks for three milliseconds.
    assert_eq!((lab.ended[&1].block_us, lab.ended[&2].block_us), (1000 + 2 * 2000, 2 * 3000));
}

#[test]
fn a_timeline_has_the_time_in_each_state() {
    let mut lab = Lab::new(Config { max_num_seqs: 1, ..plenty(&Fcfs) });
    lab.cost = Cost(1000, 10, 0);
    lab.add(ask(1, 100, 3));
    lab.step();
    lab.now += 300;
    lab.add(ask(2, 50, 2));
    lab.now += 200;
    lab.finish();
    // Prompt alone: 1000 + 100 * 10. Until the next plan: 500. Then two tokens of 1000.
    let first = &lab.ended[&1];
    assert_eq!(time(first, &[TimelineState::Prefill]), 2000);
    assert_eq!(time(first, &[TimelineState::Decode, TimelineState::DecodeShared]), 500 + 2000);
    assert_eq!((first.arrived, first.started, first.first_token, first.ended), (0, Some(0), Some(2000), 4500));
    // 200 until the next plan, then two steps waiting for the slot, a prompt of 1500, and the second token.
    let second = &lab.ended[&2];
    assert_eq!(time(second, &[TimelineState::WaitStep]), 200);
    assert_eq!(time(second, &[TimelineState::WaitSlots]), 2000);
    assert_eq!(time(second, &[TimelineState::Prefill]), 1500);
    assert_eq!(time(second, &[TimelineState::Decode]), 1000);
    assert_eq!((second.limit(), second.queued()), (Some(TimelineState::WaitSlots), 2200));
    assert_eq!(first.limit(), None);
}

#[test]
fn what_was_done_with_a_request_before_it_was_added_is_a_part_of_its_time_and_not_of_the_queue_s() {
    let mut lab = Lab::new(plenty(&Fcfs));
    lab.now = 10_000;
    let id = lab.scheduler.add(ask(1, 10, 2), 10_000).expect("it fits");
    lab.scheduler.prepared(id, &[(TimelineState::Receive, 3000), (TimelineState::Tokenize, 1000), (TimelineState::Grammar, 1_000_000)]);
    let seen = lab.scheduler.explain(1).expect("it waits");
    // The clock started at zero, so no more time fits.
    assert_eq!(
        [TimelineState::Receive, TimelineState::Tokenize, TimelineState::Grammar].map(|cause| time(&seen, &[cause])),
        [3000, 1000, 6000]
    );
    assert_eq!((seen.arrived, seen.submitted, seen.queued()), (0, 10_000, 0));
    assert_eq!(seen.states.iter().sum::<Time>(), seen.ended - seen.arrived);
    assert_eq!(seen.limit(), None);
}

#[test]
fn steps_that_others_share_are_told_apart() {
    let mut lab = Lab::new(plenty(&Fcfs));
    lab.add(ask(1, 10, 4));
    lab.step();
    lab.serve(ask(2, 10, 2));
    // Its prompt alone, one decode beside the other's prompt, and two more decodes beside the other's decode or alone.
    assert_eq!(time(&lab.ended[&1], &[TimelineState::Prefill]), 1000);
    assert_eq!(time(&lab.ended[&1], &[TimelineState::DecodeShared]), 1000);
    assert_eq!(time(&lab.ended[&1], &[TimelineState::Decode]), 2000);
    assert_eq!(time(&lab.ended[&2], &[TimelineState::PrefillShared]), 1000);
}

#[test]
fn a_step_s_time_is_divided_among_its_sequences_by_what_they_cost() {
    let mut lab = Lab::new(plenty(&Fcfs));
    lab.add(ask(1, 10, 4));
    lab.add(ask(2, 30, 4));
    lab.finish();
    // The first step is divided by tokens, because no step has been observed: 250 of 1000 us. In the next three steps the
    // contexts are the only difference.
    let [short, long] = [1, 2].map(|tag| lab.ended[&tag].compute_ns);
    assert_eq!(short + long, 4_000_000);
    assert!((1_250_000..1_750_000).contains(&short), "{short}");
    assert_eq!(lab.scheduler.stats().counters.step_us, 4000);
}

#[test]
fn the_meter_s_energy_is_divided_by_time_and_the_rest_is_idle() {
    let mut lab = Lab::new(plenty(&Fcfs));
    lab.scheduler.read_meter(0, 0);
    lab.add(ask(1, 10, 2));
    lab.add(ask(2, 10, 2));
    lab.now += 2000;
    lab.step();
    // 2000 us without a step, and two steps of 1000 us.
    lab.scheduler.read_meter(4000, lab.now + 1000);
    lab.step();
    let energy = [1, 2].map(|tag| lab.ended[&tag].energy_uj.expect("metered"));
    // Parts are rounded down.
    assert_eq!(energy, [999, 1000]);
    let counters = lab.scheduler.stats().counters;
    assert_eq!((counters.energy_uj, counters.idle_energy_uj), (Some(4000), Some(2001)));
}

#[test]
fn the_limit_that_binds_is_named() {
    // Tokens: the first step has none left. Half of the next step is for waiting requests.
    let mut lab = Lab::new(Config { max_num_batched_tokens: 10, max_num_seqs: 10, ..plenty(&Fcfs) });
    lab.add(ask(1, 100, 1));
    lab.add(ask(2, 10, 1));
    lab.step();
    assert_eq!(lab.scheduler.stats().waiting_by_state[TimelineState::WaitBudget as usize], 1);
    lab.finish();
    assert_eq!((lab.ended[&2].limit(), time(&lab.ended[&2], &[TimelineState::WaitBudget])), (Some(TimelineState::WaitBudget), 1000));
    // Blocks: ten, six of which the first request holds.
    let mut lab = Lab::new(Config { num_kv_blocks: 11, ..plenty(&Fcfs) });
    lab.add(ask(1, 90, 6));
    lab.add(ask(2, 70, 1));
    lab.step();
    assert_eq!(lab.scheduler.stats().waiting_by_state[TimelineState::WaitBlocks as usize], 1);
    lab.finish();
    assert_eq!((lab.ended[&2].limit(), time(&lab.ended[&2], &[TimelineState::WaitBlocks])), (Some(TimelineState::WaitBlocks), 6000));
    // Policy: of two classes, the lower one has the turn for the slot and the other waits for the policy's order.
    let mut lab = Lab::new(Config { max_num_seqs: 1, ..plenty(&Priority) });
    lab.add(ask(1, 10, 5));
    lab.step();
    lab.add(Request { priority: 1, ..ask(2, 10, 1) });
    lab.add(ask(3, 10, 5));
    lab.step();
    let waiting = lab.scheduler.stats().waiting_by_state;
    assert_eq!((waiting[TimelineState::WaitSlots as usize], waiting[TimelineState::WaitPolicy as usize]), (1, 1));
    lab.finish();
    // Request 2 waits four steps while the third request has the turn, and five steps with its own turn while the third runs.
    assert_eq!((time(&lab.ended[&2], &[TimelineState::WaitPolicy]), time(&lab.ended[&2], &[TimelineState::WaitSlots])), (4000, 5000));
    assert_eq!((time(&lab.ended[&3], &[TimelineState::WaitPolicy]), time(&lab.ended[&3], &[TimelineState::WaitSlots])), (0, 4000));
}

#[test]
fn use_adds_up_by_tenant_and_by_class() {
    let mut lab = Lab::new(Config { max_num_seqs: 2, ..plenty(&Fcfs) });
    for tag in 1..=6 {
        let tenant = if tag % 3 == 0 { "x" } else { "y" };
        lab.add(Request { tenant: tenant.into(), priority: (tag % 2) as i32, ..ask(tag, 10 * tag as u32, tag as u32) });
    }
    lab.step();
    let now: Vec<_> = lab.scheduler.tenants().map(|(name, usage)| (name.to_string(), usage.running, usage.waiting)).collect();
    // The first two requests run, both of tenant y.
    assert!(now.contains(&("y".into(), 1, 2)) || now.contains(&("y".into(), 2, 2)), "{now:?}");
    lab.finish();
    let of = |tags: &[u64], value: fn(&Timeline) -> u64| -> u64 { tags.iter().map(|tag| value(&lab.ended[tag])).sum() };
    for (name, tags) in [("x", &[3, 6][..]), ("y", &[1, 2, 4, 5])] {
        let (_, usage) = lab.scheduler.tenants().find(|(tenant, _)| &***tenant == name).expect("known");
        assert_eq!((usage.requests, usage.running, usage.waiting), (tags.len() as u64, 0, 0));
        assert_eq!((usage.prompt_tokens, usage.output_tokens), (10 * tags.iter().sum::<u64>(), tags.iter().sum()));
        assert_eq!(usage.block_us, of(tags, |timeline| timeline.block_us));
        assert_eq!(usage.compute_ns, of(tags, |timeline| timeline.compute_ns));
        assert_eq!(usage.computed_tokens, of(tags, |timeline| timeline.computed_tokens));
        assert_eq!(usage.queued, of(tags, Timeline::queued));
    }
    for (class, tags) in [(0, [2, 4, 6]), (1, [1, 3, 5])] {
        let (_, usage) = lab.scheduler.classes().find(|(priority, _)| **priority == class).expect("known");
        assert_eq!((usage.requests, usage.output_tokens), (3, tags.iter().sum()));
    }
}

#[test]
fn the_last_ten_thousand_are_explained_and_those_that_live() {
    let mut lab = Lab::new(plenty(&Fcfs));
    for tag in 0..10_001 {
        lab.add(ask(tag, 1, 1));
        lab.abort(tag);
    }
    assert_eq!(lab.scheduler.explain(0), None);
    assert_eq!(lab.explain(1).finish, Some(FinishReason::Abort));
    lab.add(ask(50_000, 10, 2));
    lab.step();
    let timeline = lab.explain(50_000);
    assert_eq!((timeline.finish, timeline.output_tokens, time(&timeline, &[TimelineState::Prefill])), (None, 1, 1000));
}

/// Pseudorandom numbers: xorshift (Marsaglia, 2003).
struct Dice(u64);

impl Dice {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }
}

/// A request as the test observed it.
#[derive(Clone, Copy, Default)]
struct Seen {
    arrived: Time,
    /// Time since the request has had no slot.
    off_since: Time,
    /// Total time without a slot after the start.
    off: Time,
    started: bool,
    running: bool,
}

/// Runs random requests, keeps independent accounts and compares them with every timeline.
fn keep_books(config: Config, requests: u64, dice: &mut Dice) -> HashMap<u64, Timeline> {
    let mut lab = Lab::new(config);
    lab.check_every = 64;
    lab.cost = Cost(300, 7, 13);
    let mut seen: HashMap<u64, Seen> = HashMap::new();
    let mut next = 0;
    while next < requests || !lab.scheduler.is_idle() {
        if next < requests && dice.below(3) > 0 && lab.scheduler.stats().waiting < 40 {
            lab.now += dice.below(50);
            let (prompt, new) = (1 + dice.below(120) as u32, 1 + dice.below(30) as u32);
            let within = |dice: &mut Dice, of: u64| (dice.below(6) == 0).then(|| lab.now + dice.below(of));
            let request = Request {
                priority: dice.below(3) as i32,
                tenant: ["a", "b", "c"][dice.below(3) as usize].into(),
                weight: 1 + dice.below(2) as u32,
                deadline: within(dice, 60_000),
                ttft_deadline: within(dice, 30_000),
                predicted_tokens: (dice.below(2) == 0).then_some(new),
                session: (dice.below(2) == 0).then(|| dice.below(8).to_string().into()),
                ..ask(next, prompt, new)
            };
            // Some requests arrived during a step.
            let came = lab.now - if dice.below(3) == 0 { dice.below(300) } else { 0 }.min(lab.now);
            lab.try_add_at(came, request).expect("it fits");
            for fork in 0..if dice.below(5) == 0 { 1 + dice.below(2) } else { 0 } {
                lab.fork(next, next + 1 + fork);
                seen.insert(next + 1 + fork, Seen { arrived: lab.now, ..Seen::default() });
            }
            seen.insert(next, Seen { arrived: came, ..Seen::default() });
            next = 1 + *seen.keys().max().expect("one at least");
        }
        if dice.below(40) == 0 {
            let mut live: Vec<u64> = seen.keys().copied().filter(|tag| !lab.ended.contains_key(tag)).collect();
            live.sort_unstable();
            if !live.is_empty() {
                lab.abort(live[dice.below(live.len() as u64) as usize]);
            }
        }
        lab.now += dice.below(30);
        let planned = lab.now;
        let Some(step) = lab.try_step() else {
            lab.now = lab.scheduler.wake_at().unwrap_or(lab.now).max(lab.now);
            continue;
        };
        for tag in &step.preempted {
            let seen = seen.get_mut(tag).expect("known");
            (seen.running, seen.off_since) = (false, planned);
        }
        for tag in &step.admitted {
            let seen = seen.get_mut(tag).expect("known");
            if seen.started {
                seen.off += planned - seen.off_since;
            } else {
                assert_eq!(lab.scheduler.explain(*tag).map(|timeline| timeline.started), Some(Some(planned)));
            }
            (seen.running, seen.started) = (true, true);
        }
    }
    assert!(seen.len() as u64 >= requests && lab.ended.len() == seen.len());
    for (tag, timeline) in &lab.ended {
        compare(timeline, &seen[tag]);
    }
    lab.ended
}

fn compare(timeline: &Timeline, seen: &Seen) {
    let waits: Vec<TimelineState> =
        TimelineState::NAMES.iter().map(|&(cause, _)| cause).filter(|&cause| cause <= TimelineState::WaitSession).collect();
    assert_eq!(timeline.states.iter().sum::<Time>(), timeline.ended - timeline.arrived, "{timeline:?}");
    assert_eq!(timeline.arrived, seen.arrived);
    assert_eq!(timeline.started.is_some(), seen.started);
    assert_eq!(time(timeline, &waits), timeline.queued(), "{timeline:?}");
    // A request that ended without a slot had none since then.
    let off = seen.off + if seen.started && !seen.running { timeline.ended - seen.off_since } else { 0 };
    assert_eq!(time(timeline, &[TimelineState::Preempted, TimelineState::Swapped]), off, "{timeline:?}");
    if timeline.preemptions == 0
        && let Some(first) = timeline.first_token
    {
        let started = timeline.started.expect("it has a token");
        assert_eq!(time(timeline, &[TimelineState::Decode, TimelineState::DecodeShared]), timeline.ended - first, "{timeline:?}");
        assert_eq!(
            time(timeline, &[TimelineState::Prefill, TimelineState::PrefillShared, TimelineState::Stalled]),
            first - started,
            "{timeline:?}"
        );
    }
}

#[test]
fn ten_thousand_accounts_are_right_to_the_microsecond() {
    let mut dice = Dice(0x2545_F491_4F6C_DD1D);
    let mut all = Vec::new();
    let batchings =
        [(Batching::Continuous, 1100), (Batching::Static { size: 6 }, 300), (Batching::Dynamic { size: 6, timeout: 2000 }, 300)];
    for policy in POLICIES {
        for (batching, requests) in batchings {
            let config = Config {
                num_kv_blocks: 40,
                max_num_batched_tokens: 100,
                max_num_seqs: 12,
                max_model_len: 400,
                scheduling_policy: policy,
                batching,
                queue_ageing: 20_000,
                host_blocks: 24,
                swap_ns_per_block: 30_000,
                ..Config::default()
            };
            all.extend(keep_books(config, requests, &mut dice).into_values());
        }
    }
    assert!(all.len() >= 10_000);
    // Every state that the scheduler sets must occur, or the comparison proves little.
    for (cause, name) in TimelineState::NAMES.into_iter().filter(|&(cause, _)| cause < TimelineState::Pace) {
        assert!(all.iter().any(|timeline| timeline.states[cause as usize] > 0), "nothing of {name}");
    }
    for reason in [FinishReason::Length, FinishReason::Abort, FinishReason::Deadline] {
        assert!(all.iter().any(|timeline| timeline.finish == Some(reason)), "nobody ended by {reason:?}");
    }
}
