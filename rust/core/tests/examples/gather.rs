//! While nothing runs, requests wait for others within the deadlines of their first tokens.

use crate::lab::{Cost, Lab, ask, plenty};
use chairlift_core::{Config, Deadline, Fair, Fcfs, Policy, Request, Shortest, Time};
use proptest::prelude::*;

const COST: Cost = Cost(5000, 50, 500);

fn lab(policy: &'static dyn Policy, gather: Time) -> Lab {
    Lab::taught(Config { gather, ..plenty(policy) }, COST)
}

fn within(ttft: Time, now: Time, request: Request) -> Request {
    Request { ttft_deadline: Some(now + ttft), ..request }
}

#[test]
fn a_request_waits_for_half_of_its_time_and_others_join_it() {
    let mut lab = lab(&Fcfs, 1 << 40);
    let arrived = lab.now;
    lab.add(within(100_000, lab.now, ask(1, 10, 3)));
    assert!(lab.try_step().is_none());
    assert_eq!(lab.scheduler.wake_at(), Some(arrived + 50_000));
    lab.now += 20_000;
    lab.add(within(100_000, lab.now, ask(2, 10, 3)));
    assert!(lab.try_step().is_none());
    lab.now = arrived + 50_000;
    assert_eq!(lab.step().admitted, [1, 2]);
    // Something runs, so the next request joins it at once.
    lab.add(within(100_000, lab.now, ask(3, 10, 3)));
    assert_eq!(lab.step().admitted, [3]);
    lab.finish();
}

#[test]
fn nobody_waits_longer_than_the_setting_or_for_a_request_without_a_deadline() {
    let mut lab = lab(&Fcfs, 7000);
    let arrived = lab.now;
    lab.add(within(100_000, lab.now, ask(1, 10, 3)));
    assert!(lab.try_step().is_none());
    assert_eq!(lab.scheduler.wake_at(), Some(arrived + 7000));
    lab.add(ask(2, 10, 3));
    assert_eq!(lab.step().admitted, [1, 2]);
    lab.finish();
}

/// Runs requests that arrive at these times with these prompts. Returns the nanoseconds of all steps and the output tokens.
fn run(lab: &mut Lab, requests: &[(Time, u32, Time)]) -> (u64, u64) {
    let (began, before) = (lab.now, lab.scheduler.stats().counters);
    let mut next = requests.iter().enumerate().peekable();
    loop {
        while let Some((tag, &(_, prompt, ttft))) = next.next_if(|(_, (at, ..))| began + at <= lab.now) {
            let idle = lab.scheduler.stats().running == 0;
            let busy = !idle && lab.scheduler.stats().waiting == 0;
            lab.add(within(ttft, began + requests[tag].0, ask(1 + tag as u64, prompt, 5)));
            if busy {
                assert!(lab.step().admitted.contains(&(1 + tag as u64)), "it waited although it could join");
            }
        }
        if lab.try_step().is_none() {
            let arrival = next.peek().map(|(_, (at, ..))| began + at);
            let Some(at) = lab.scheduler.wake_at().into_iter().chain(arrival).min() else { break };
            lab.now = lab.now.max(at);
        }
    }
    let after = lab.scheduler.stats().counters;
    (after.step_us - before.step_us, after.generated_tokens - before.generated_tokens)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn no_request_misses_its_deadline_because_it_waited_for_others(
        gaps in prop::collection::vec((20_000..200_000u64, 1..40u32, 80_000..500_000u64), 1..30),
        policy in prop::sample::select(vec![&Fcfs as &dyn Policy, &Fair, &Deadline, &Shortest]),
    ) {
        let mut at = 0;
        let requests: Vec<_> = gaps.into_iter().map(|(gap, prompt, ttft)| { at += gap; (at, prompt, ttft) }).collect();
        let mut lab = lab(policy, 1 << 40);
        run(&mut lab, &requests);
        for (tag, &(_, _, ttft)) in requests.iter().enumerate() {
            let timeline = &lab.ended[&(1 + tag as u64)];
            let first = timeline.first_token.expect("it was answered");
            prop_assert!(first <= timeline.submitted + ttft);
        }
    }
}

#[test]
fn steps_carry_more_at_low_load() {
    let requests: Vec<_> = (0..200).map(|i| (i * 60_000 + i * i * 977 % 50_000, 20, 400_000)).collect();
    let per_second = [0, 1 << 40].map(|gather| {
        let (step_us, tokens) = run(&mut lab(&Fcfs, gather), &requests);
        tokens as f64 * 1e6 / step_us as f64
    });
    println!("output tokens per second of step time: {per_second:.1?}");
    assert!(per_second[1] > 1.5 * per_second[0], "{per_second:?}");
}
