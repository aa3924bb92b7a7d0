//! Who was served before a request, and by which rule.

use crate::lab::{Lab, ask, plenty, stem};
use chairlift_core::{Config, Fcfs, Policy, Prefix, Priority, Request, Rule, Shortest, Tier, Vtc};

/// The requests served before `tag` with their rules, and the counts by rule must match.
fn before(lab: &Lab, tag: u64) -> Vec<(u64, &'static str)> {
    let served = lab.scheduler.served_before(&lab.explain(tag));
    let named: Vec<_> = served.first.iter().map(|&(tag, _, rule)| (tag, rule.name())).collect();
    if named.len() < 16 {
        for (rule, name) in Rule::NAMES {
            assert_eq!(served.counts[rule as usize] as usize, named.iter().filter(|&&(_, named)| named == name).count(), "{name}");
        }
    }
    named
}

fn one_slot(policy: &'static dyn Policy) -> Config {
    Config { max_num_seqs: 1, queue_ageing: 50_000, ..plenty(policy) }
}

#[test]
fn the_first_to_arrive_was_served_first() {
    let mut lab = Lab::new(one_slot(&Fcfs));
    (1..=4).for_each(|tag| lab.add(ask(tag, 10, 2)));
    lab.step_until_started(2);
    // The third request waits, and the list is the same when it has ended.
    assert_eq!(before(&lab, 3), [(1, "arrival"), (2, "arrival")]);
    lab.finish();
    assert_eq!(before(&lab, 3), [(1, "arrival"), (2, "arrival")]);
    assert!(before(&lab, 1).is_empty());
}

#[test]
fn tiers_and_classes_are_told_apart() {
    let mut lab = Lab::new(one_slot(&Priority));
    lab.add(Request { tier: Tier::Flex, ..ask(1, 10, 2) });
    lab.add(ask(2, 10, 2));
    lab.add(Request { priority: -1, ..ask(3, 10, 2) });
    lab.add(Request { tier: Tier::Priority, priority: 9, ..ask(4, 10, 2) });
    lab.finish();
    assert_eq!(before(&lab, 1), [(4, "tier"), (3, "tier"), (2, "tier")]);
    assert_eq!(before(&lab, 2), [(4, "tier"), (3, "priority")]);
}

#[test]
fn less_work_is_the_policy_and_a_long_wait_is_ageing() {
    let mut lab = Lab::new(Config { queue_ageing: 20_000, ..one_slot(&Shortest) });
    lab.add(ask(1, 10, 4));
    lab.step();
    lab.add(ask(2, 10, 500));
    for tag in 3..13 {
        lab.add(ask(tag, 10, 4));
        lab.steps(4);
    }
    assert!(lab.started.contains(&2));
    assert!(before(&lab, 2).iter().all(|&(_, rule)| rule == "policy"));
    lab.finish();
    let passed: Vec<u64> = (3..13).filter(|&tag| before(&lab, tag).contains(&(2, "ageing"))).collect();
    assert_eq!(passed.len(), 1, "the one that waited when it started: {passed:?}");
}

#[test]
fn a_tenant_with_less_service_goes_first_by_fairness() {
    let mut lab = Lab::new(one_slot(&Vtc));
    let of = |tenant: &str, request: Request| Request { tenant: tenant.into(), ..request };
    lab.add(of("a", ask(1, 10, 20)));
    lab.add(of("a", ask(2, 10, 2)));
    lab.step();
    lab.serve(of("b", ask(3, 10, 2)));
    assert_eq!(before(&lab, 2), [(1, "arrival"), (3, "fairness")]);
    // Within a tenant, only the tier moves a later request forward.
    let mut lab = Lab::new(one_slot(&Vtc));
    lab.now = 100_000;
    lab.add(ask(1, 10, 2));
    lab.add(Request { tier: Tier::Priority, ..ask(2, 10, 2) });
    lab.finish();
    assert_eq!(before(&lab, 1), [(2, "tier")]);
}

#[test]
fn a_request_that_fits_passes_one_that_does_not() {
    // Twenty blocks: the first request holds eleven and the second needs sixteen.
    let mut lab = Lab::new(Config { num_kv_blocks: 21, watermark: 0, ..plenty(&Fcfs) });
    lab.add(ask(1, 160, 10));
    lab.step();
    lab.add(ask(2, 240, 2));
    lab.add(ask(3, 10, 2));
    lab.finish();
    assert_eq!(before(&lab, 2), [(3, "fit")]);
}

#[test]
fn others_pass_a_request_that_waits_for_a_shared_prompt() {
    let mut lab = Lab::new(Config { max_num_batched_tokens: 100, ..plenty(&Prefix) });
    lab.add(stem(1, 1, 320, 400, 2));
    lab.step();
    lab.add(stem(1, 2, 320, 400, 2));
    lab.add(ask(3, 10, 2));
    lab.finish();
    assert_eq!(before(&lab, 2), [(3, "changed")]);
}

#[test]
fn only_the_first_are_named_and_all_are_counted() {
    let mut lab = Lab::new(one_slot(&Fcfs));
    (1..=40).for_each(|tag| lab.add(ask(tag, 10, 1)));
    lab.finish();
    let served = lab.scheduler.served_before(&lab.explain(40));
    assert_eq!((served.first.len(), served.counts[Rule::Arrival as usize]), (16, 39));
    assert_eq!(served.first[0].0, 1);
}
