//! Deadline policy: least slack first, requests that cannot meet their deadline are dropped, and no request runs past
//! its deadline.

use crate::lab::{Cost, Lab, ask, plenty};
use chairlift_core::{Batching, Config, Deadline, Fair, Fcfs, FinishReason, POLICIES, Policy, Prefix, Priority, Request, Shortest, Time};

fn until(deadline: Time, request: Request) -> Request {
    Request { deadline: Some(deadline), ..request }
}

fn with_rows(max_seqs: u32) -> Config {
    Config { max_num_seqs: max_seqs, ..plenty(&Deadline) }
}

#[test]
fn least_slack_goes_first_within_a_class() {
    let mut lab = Lab::taught(with_rows(1), Cost(1000, 0, 0));
    let now = lab.now;
    lab.add(ask(1, 10, 5));
    lab.step();
    lab.add(ask(2, 10, 2));
    lab.add(until(now + 10_000_000, ask(3, 10, 2)));
    lab.add(until(now + 5_000_000, ask(4, 10, 2)));
    // This deadline is later than the previous one, but a thousand tokens take a second: it must start by 4.5 s.
    lab.add(until(now + 5_500_000, Request { predicted_tokens: Some(1000), ..ask(5, 10, 1000) }));
    lab.add(until(now + 60_000_000, Request { priority: -1, ..ask(6, 10, 2) }));
    lab.finish();
    assert_eq!(lab.started, [1, 6, 5, 4, 3, 2]);
}

#[test]
fn a_request_that_cannot_make_it_is_dropped_before_it_runs() {
    // A prompt token takes 100 us, so 5000 tokens take half a second.
    let mut lab = Lab::taught(with_rows(4), Cost(1000, 100, 0));
    lab.add(until(lab.now + 400_000, ask(1, 5000, 5)));
    lab.add(until(lab.now + 700_000, ask(2, 5000, 5)));
    assert_eq!(lab.expire(), [1]);
    let timeline = &lab.ended[&1];
    assert_eq!((timeline.finish, timeline.computed_tokens, timeline.started), (Some(FinishReason::Deadline), 0, None));
    lab.finish();
    assert_eq!(lab.ended[&2].finish, Some(FinishReason::Length));
    assert_eq!(lab.scheduler.stats().counters.expired, 1);
}

#[test]
fn what_it_predicts_counts_and_what_it_may_generate_does_not() {
    let mut lab = Lab::taught(with_rows(4), Cost(1000, 0, 0));
    // A hundred tokens take 100 ms. Without a prediction, only one token is certain.
    lab.add(until(lab.now + 50_000, Request { predicted_tokens: Some(100), ..ask(1, 10, 200) }));
    lab.add(until(lab.now + 50_000, ask(2, 10, 200)));
    assert_eq!(lab.expire(), [1]);
    lab.finish();
    // 50 steps of one millisecond. The last would have ended at the deadline and not before it.
    let timeline = &lab.ended[&2];
    assert_eq!(timeline.finish, Some(FinishReason::Deadline));
    assert!((47..=50).contains(&timeline.output_tokens), "{}", timeline.output_tokens);
    assert_eq!(timeline.computed_tokens, 10 + u64::from(timeline.output_tokens) - 1);
    let used = lab.scheduler.tenants().next().expect("all are of one tenant").1;
    assert!(used.output_tokens >= timeline.output_tokens.into(), "what was generated for it counts as used");
}

#[test]
fn without_deadline_policy_a_request_has_until_its_deadline() {
    for policy in [&Fcfs as &dyn Policy, &Priority, &Fair, &Shortest, &Prefix] {
        let mut lab = Lab::taught(plenty(policy), Cost(1000, 100, 0));
        let (from, deadline) = (lab.now, lab.now + 7500);
        lab.add(until(deadline, Request { predicted_tokens: Some(500), ..ask(1, 20, 500) }));
        // The prompt's step takes 3 ms and the next four steps 1 ms each. A fifth would begin at 7 ms and end too late.
        lab.finish();
        let timeline = &lab.ended[&1];
        assert_eq!((timeline.finish, timeline.output_tokens), (Some(FinishReason::Deadline), 6), "{policy:?}");
        assert_eq!(timeline.ended, from + 8000);
    }
}

#[test]
fn a_deadline_is_missed_when_it_has_come_and_not_before() {
    let mut lab = Lab::new(Config { batching: Batching::Dynamic { size: 2, timeout: 9000 }, ..plenty(&Fcfs) });
    lab.add(until(5000, ask(1, 10, 5)));
    // The batch is not full, so nothing runs. The deadline is the next event.
    assert!(lab.try_step().is_none());
    assert_eq!(lab.scheduler.wake_at(), Some(5000));
    lab.now = 4999;
    assert!(lab.expire().is_empty());
    lab.now = 5000;
    assert_eq!(lab.expire(), [1]);
    assert_eq!(lab.scheduler.wake_at(), Some(9000), "as the last plan said");
}

#[test]
fn a_deadline_for_the_first_token_is_over_once_it_is_there() {
    let mut lab = Lab::new(Config { max_num_seqs: 1, ..plenty(&Fcfs) });
    let soon = |request: Request| Request { ttft_deadline: Some(5000), ..request };
    lab.add(soon(ask(1, 10, 20)));
    lab.add(soon(ask(2, 10, 20)));
    lab.add(ask(3, 10, 20));
    lab.finish();
    // Request 2 waited for the slot until then.
    assert_eq!((lab.ended[&1].finish, lab.ended[&1].first_token), (Some(FinishReason::Length), Some(1000)));
    let late = &lab.ended[&2];
    assert_eq!((late.finish, late.ended, late.output_tokens, late.first_token), (Some(FinishReason::Deadline), 5000, 0, None));
    assert_eq!(lab.ended[&3].finish, Some(FinishReason::Length));
}

#[test]
fn deadline_policy_drops_for_the_first_token_as_well() {
    let mut lab = Lab::taught(with_rows(4), Cost(1000, 100, 0));
    // Half a second of prompt, with a TTFT deadline of 300 ms or 700 ms.
    lab.add(Request { ttft_deadline: Some(lab.now + 300_000), ..ask(1, 5000, 5) });
    lab.add(Request { ttft_deadline: Some(lab.now + 700_000), ..ask(2, 5000, 5) });
    assert_eq!(lab.expire(), [1]);
    lab.finish();
    assert_eq!(lab.ended[&2].finish, Some(FinishReason::Length));
}

#[test]
fn no_token_is_computed_after_a_deadline() {
    for policy in POLICIES {
        let name = policy.name();
        let mut lab = Lab::new(Config {
            max_num_batched_tokens: 100,
            max_num_seqs: 6,
            num_kv_blocks: 40,
            host_blocks: 8,
            max_model_len: 300,
            ..plenty(policy)
        });
        lab.cost = Cost(500, 20, 50);
        let deadline = |tag: u64| 1000 + tag * 7919 % 90_000;
        for tag in 0..200 {
            let tag_priority = (tag % 3) as i32;
            let request = ask(tag, 1 + (tag * 31 % 150) as u32, 1 + (tag * 17 % 40) as u32);
            lab.add(until(deadline(tag), Request { priority: tag_priority, tenant: ["a", "b"][tag as usize % 2].into(), ..request }));
        }
        while !lab.scheduler.is_idle() {
            let now = lab.now;
            match lab.try_step() {
                Some(step) => assert!(step.chunks.iter().all(|&(tag, _)| deadline(tag) > now), "{name}: {step:?} at {now}"),
                None => lab.now = lab.scheduler.wake_at().unwrap_or(lab.now),
            }
        }
        let made = lab.ended.values().filter(|timeline| timeline.finish == Some(FinishReason::Length)).count();
        let missed = lab.ended.values().filter(|timeline| timeline.finish == Some(FinishReason::Deadline)).count();
        assert!(made >= 2 && missed >= 50 && made + missed == 200, "{name}: {made} made it, {missed} did not");
    }
}
