//! More urgent tiers go first under every policy whose tenants take no turns, and flex requests lose their place first.

use crate::lab::{Lab, ask, plenty, stem};
use chairlift_core::{Config, Fair, Fcfs, POLICIES, Policy, Prefix, Request, Tier, Vtc};

fn of(tier: Tier, tag: u64, prompt: u32, new: u32) -> Request {
    Request { tier, ..ask(tag, prompt, new) }
}

fn each_policy(test: impl Fn(&'static dyn Policy)) {
    for policy in POLICIES.into_iter().filter(|policy| !policy.rules().takes_turns()) {
        let name = policy.name();
        println!("policy {name}");
        test(policy);
    }
}

#[test]
fn they_start_in_the_order_of_their_tiers_whatever_their_priority() {
    each_policy(|policy| {
        let mut lab = Lab::new(Config { max_num_seqs: 1, ..plenty(policy) });
        lab.add(Request { priority: -9, ..of(Tier::Flex, 1, 10, 2) });
        lab.add(of(Tier::Default, 2, 10, 2));
        lab.add(Request { priority: 9, ..of(Tier::Priority, 3, 10, 2) });
        lab.add(of(Tier::Flex, 4, 10, 2));
        lab.finish();
        assert_eq!(lab.started, [3, 2, 1, 4]);
    });
}

#[test]
fn a_more_urgent_request_takes_the_slot_of_the_least_urgent_tier() {
    each_policy(|policy| {
        let mut lab = Lab::new(Config { max_num_seqs: 2, ..plenty(policy) });
        lab.add(of(Tier::Default, 1, 10, 50));
        lab.step();
        // The flex request has computed more, and would be kept for that.
        lab.add(of(Tier::Flex, 2, 100, 50));
        lab.step();
        lab.add(of(Tier::Priority, 3, 10, 50));
        let step = lab.step();
        assert_eq!((step.preempted, step.admitted), (vec![2], vec![3]));
        lab.add(of(Tier::Priority, 4, 10, 50));
        let step = lab.step();
        assert_eq!((step.preempted, step.admitted), (vec![1], vec![4]));
        lab.finish();
        assert_eq!(lab.explain(2).preempted_for, [0, 1, 0, 0]);
        assert_eq!((lab.ended[&3].preemptions, lab.ended[&4].preemptions), (0, 0));
    });
}

#[test]
fn flex_requests_lose_their_blocks_before_any_other() {
    each_policy(|policy| {
        // 40 blocks of 16 tokens: about a third of what twelve requests need at their longest. The flex requests start first.
        let mut lab = Lab::new(Config { num_kv_blocks: 41, watermark: 0, max_num_seqs: 12, ..plenty(policy) });
        let tier = |tag: u64| if tag <= 4 { Tier::Flex } else { Tier::Default };
        (1..=4).for_each(|tag| lab.add(of(tier(tag), tag, 30, 100)));
        lab.step();
        (5..=36).for_each(|tag| lab.add(of(tier(tag), tag, 30, 100)));
        let mut running: Vec<u64> = (1..=4).collect();
        let mut preempted = [0, 0];
        while let Some(step) = lab.try_step() {
            for &lost in &step.preempted {
                running.retain(|&tag| tag != lost);
                preempted[usize::from(tier(lost) == Tier::Flex)] += 1;
                // Only the sequence that is never preempted may be left of the tier.
                let flex = running.iter().filter(|&&tag| tier(tag) == Tier::Flex && !lab.ended.contains_key(&tag)).count();
                assert!(tier(lost) == Tier::Flex || flex <= 1, "{lost} lost its blocks beside {flex} flex requests");
            }
            running.extend(step.admitted);
            running.retain(|tag| !lab.ended.contains_key(tag));
        }
        println!("preempted: {preempted:?}");
        assert!(preempted.iter().all(|&count| count > 0));
        assert_eq!(lab.ended.len(), 36);
        assert!(lab.ended.values().all(|timeline| timeline.preemptions <= 8));
    });
}

#[test]
fn a_flex_request_ages() {
    each_policy(|policy| {
        let mut lab = Lab::new(Config { max_num_seqs: 1, queue_ageing: 20_000, ..plenty(policy) });
        lab.add(of(Tier::Flex, 1, 10, 4));
        lab.add(ask(2, 10, 4));
        for tag in 3..60 {
            lab.add(ask(tag, 10, 4));
            lab.steps(4);
        }
        // Every request has four steps of a millisecond. The flex request starts after the one that runs then, and more
        // urgent ones preempt it twice.
        let waited = lab.explain(1).queued();
        assert!((20_000..=24_000).contains(&waited), "{waited}");
        lab.finish();
        assert_eq!(lab.started.len(), 59);
    });
}

#[test]
fn a_request_does_not_wait_for_the_prompt_of_a_less_urgent_one() {
    let mut lab = Lab::new(Config { max_num_batched_tokens: 100, ..plenty(&Prefix) });
    lab.add(Request { tier: Tier::Flex, ..stem(1, 1, 320, 400, 2) });
    lab.step();
    lab.add(stem(1, 2, 320, 400, 2));
    assert!(lab.step().admitted.contains(&2));
    lab.finish();
}

#[test]
fn where_tenants_take_turns_tiers_move_the_arrival_within_a_tenant() {
    for policy in [&Fair as &dyn Policy, &Vtc] {
        let mut lab = Lab::new(Config { max_num_seqs: 1, queue_ageing: 10_000, ..plenty(policy) });
        lab.now = 50_000;
        lab.add(of(Tier::Flex, 1, 10, 2));
        lab.add(of(Tier::Default, 2, 10, 2));
        lab.add(of(Tier::Priority, 3, 10, 2));
        lab.step();
        assert_eq!(lab.started, [3]);
        // The priority request is no more urgent than those of another tenant.
        lab.add(Request { tenant: "b".into(), ..of(Tier::Flex, 4, 10, 2) });
        lab.add(of(Tier::Priority, 5, 10, 2));
        // Twelve milliseconds later, a new request is behind the flex request.
        lab.steps(2);
        lab.now += 12_000;
        lab.serve(of(Tier::Default, 6, 10, 2));
        assert_eq!(lab.started, [3, 4, 5, 2, 1, 6]);
    }
}

#[test]
fn a_fork_has_the_tier_of_its_parent() {
    let mut lab = Lab::new(plenty(&Fcfs));
    lab.add(of(Tier::Flex, 1, 10, 4));
    lab.fork(1, 2);
    lab.finish();
    assert_eq!(lab.ended[&2].tier, Tier::Flex);
}
