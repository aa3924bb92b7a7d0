//! Longest cached prefix first, and no sequence computes blocks that another is about to compute.

use crate::lab::{Lab, ask, plenty, stem};
use chairlift_core::{
    BACKGROUND, CacheScope, Config, Fair, Fcfs, Outputs, POLICIES, Policy, Prefix, Request, StepPlan, TimelineState, Token, Vtc,
};

/// Maximum number of block names looked up by a plan without admissions: 2 log2 of the blocks for each reordered sequence.
const LOOKUPS: u64 = 16 * 16;

#[test]
fn who_has_least_left_to_compute_goes_first() {
    let mut lab = Lab::new(Config { max_num_seqs: 1, ..plenty(&Prefix) });
    lab.serve(stem(1, 1, 64, 64, 1));
    lab.add(ask(2, 10, 5));
    lab.step();
    // 0, 32 and 64 tokens are cached, of 64, 64 and 80.
    lab.add(ask(3, 64, 2));
    lab.add(stem(1, 4, 32, 64, 2));
    lab.add(stem(1, 5, 64, 80, 2));
    lab.finish();
    assert_eq!(lab.started, [1, 2, 5, 4, 3]);
    assert_eq!([3, 4, 5].map(|tag| lab.ended[&tag].cached_tokens), [0, 32, 64]);
    assert_eq!([3, 4, 5].map(|tag| lab.ended[&tag].computed_tokens), [65, 33, 17]);
}

#[test]
fn a_request_waits_for_blocks_that_another_computes_and_finds_them_then() {
    for policy in [&Fcfs as &dyn Policy, &Fair, &Vtc, &Prefix] {
        let mut lab = Lab::new(Config { max_num_batched_tokens: 100, ..plenty(policy) });
        lab.add(stem(1, 1, 256, 256, 9));
        assert_eq!(lab.step().chunks, [(1, 100)]);
        lab.add(stem(1, 2, 256, 300, 9));
        assert_eq!(lab.step().chunks, [(1, 100)]);
        // Half of each step was available to request 2, but most of its prompt is being computed by request 1. Then 44
        // tokens are left.
        assert_eq!(lab.step().chunks, [(1, 56)]);
        assert_eq!(lab.step().chunks, [(1, 1), (2, 44)]);
        let state = if policy.name() == "prefix" { TimelineState::WaitPolicy } else { TimelineState::WaitBudget };
        assert_eq!((lab.explain(2).cached_tokens, lab.explain(2).states[state as usize]), (256, 2000), "{policy:?}");
    }
}

#[test]
fn two_equal_prompts_admitted_in_one_step_compute_it_once() {
    let mut lab = Lab::new(plenty(&Prefix));
    lab.add(stem(1, 1, 100, 100, 3));
    lab.add(stem(1, 2, 100, 100, 3));
    // Six blocks of 16 tokens are shared.
    assert_eq!(lab.step().chunks, [(1, 100), (2, 4)]);
}

#[test]
fn the_order_follows_what_is_computed_meanwhile() {
    let mut lab = Lab::new(Config { max_num_batched_tokens: 32, max_num_seqs: 1, ..plenty(&Prefix) });
    lab.add(stem(1, 1, 112, 112, 3));
    lab.step();
    // At arrival, 32 of the third request's 128 tokens are cached, so it has 96 tokens to compute and the second has
    // 64. Once the first has computed its prompt, 96 are cached and 32 are left.
    lab.add(ask(2, 64, 1));
    lab.add(stem(1, 3, 96, 128, 1));
    lab.finish();
    assert_eq!(lab.started, [1, 3, 2]);
    assert_eq!(lab.ended[&3].cached_tokens, 96);
}

#[test]
fn another_salt_finds_nothing() {
    let mut lab = Lab::new(plenty(&Prefix));
    lab.serve(stem(1, 1, 64, 64, 1));
    lab.serve(Request { scope: CacheScope::salted(&[9]).into(), ..stem(1, 2, 64, 64, 1) });
    assert_eq!((lab.ended[&2].cached_tokens, lab.ended[&2].computed_tokens), (0, 64));
}

#[test]
fn another_group_finds_nothing_and_a_group_shares_among_its_tenants() {
    let mut lab = Lab::new(plenty(&Prefix));
    let requests = [("alice", "team"), ("bob", "team"), ("carol", "=carol"), ("dave", "")];
    for (tag, (tenant, group)) in (1..).zip(requests) {
        lab.serve(Request { tenant: tenant.into(), scope: CacheScope::of_group(group).into(), ..stem(1, tag, 64, 64, 1) });
    }
    assert_eq!([1, 2, 3, 4].map(|tag| lab.ended[&tag].cached_tokens), [0, 63, 0, 0]);
    assert_eq!([1, 2, 3, 4].map(|tag| lab.ended[&tag].own_cached_tokens), [0; 4]);
}

/// The cached tokens of a request of `tenant` whose first `shared` of 80 tokens are those of the other requests, and how
/// many of them the tenant is told of.
fn cached(lab: &mut Lab, tag: u64, tenant: &str, shared: u32) -> (u32, u32) {
    lab.serve(Request { tenant: tenant.into(), ..stem(1, tag, shared, 80, 1) });
    let timeline = &lab.ended[&tag];
    assert_eq!(timeline.computed_tokens, u64::from(80 - timeline.cached_tokens), "the cache saves the work whoever filled it");
    (timeline.cached_tokens, timeline.own_cached_tokens)
}

#[test]
fn a_tenant_is_told_only_of_cached_tokens_that_it_used_before() {
    let mut lab = Lab::new(plenty(&Fcfs));
    assert_eq!(cached(&mut lab, 1, "alice", 64), (0, 0));
    // Bob's first guess is right for 64 tokens, and he is told what he is told after a wrong one.
    assert_eq!(cached(&mut lab, 2, "bob", 64), (64, 0));
    assert_eq!(cached(&mut lab, 3, "bob", 64), (64, 64), "now his own request held the blocks");
    assert_eq!(cached(&mut lab, 4, "alice", 48), (48, 48));
    assert_eq!(cached(&mut lab, 5, "carol", 32), (32, 0));
    assert_eq!(cached(&mut lab, 6, "carol", 64), (64, 32), "of the first 32 tokens only");
    let told = lab.scheduler.tenants().map(|(tenant, usage)| (tenant.to_string(), usage.cached_tokens)).collect::<Vec<_>>();
    assert_eq!(told, [("alice".into(), 48), ("bob".into(), 64), ("carol".into(), 32)]);
    assert_eq!(lab.scheduler.stats().counters.prefix_hits, 64 + 64 + 48 + 32 + 64, "the operator sees all hits");
}

/// What bob is told of his second request of a prompt, whose first one was ended after `steps` steps. Alice has sent the prompt
/// whose stem is 1. Another request of bob leaves 20 tokens of the first step.
fn told_after_a_cancelled_guess(guess: Token, steps: u32, is_planned: bool) -> u32 {
    let mut lab = Lab::new(Config { max_num_batched_tokens: 100, ..plenty(&Fcfs) });
    lab.serve(Request { tenant: "alice".into(), ..stem(1, 1, 160, 200, 1) });
    let bobs = |tag| Request { tenant: "bob".into(), ..stem(guess, tag, 160, 200, 1) };
    lab.add(Request { tenant: "bob".into(), ..ask(2, 80, 9) });
    lab.add(bobs(3));
    lab.steps(steps);
    let plan = is_planned.then(|| lab.scheduler.plan(lab.now).expect("there is work"));
    lab.abort(3);
    if let Some(plan) = plan {
        commit(&mut lab, plan);
    }
    lab.serve(bobs(4));
    lab.ended[&4].own_cached_tokens
}

fn commit(lab: &mut Lab, plan: Box<StepPlan>) {
    let sampled = vec![7; plan.chunks.iter().filter(|chunk| chunk.samples).count()];
    lab.scheduler.commit(plan, &sampled, lab.now, &mut Outputs::default());
}

#[test]
fn a_request_that_is_cancelled_tells_nothing_of_others_blocks() {
    for (steps, is_planned, told) in [(0, false, 0), (0, true, 0), (1, false, 16)] {
        let [right, wrong] = [1, 2].map(|guess| told_after_a_cancelled_guess(guess, steps, is_planned));
        assert_eq!((right, wrong), (told, told), "{steps} steps, planned: {is_planned}");
    }
}

#[test]
fn a_request_that_was_preempted_and_is_cancelled_takes_nothing_from_another_of_its_tenant() {
    for is_cached in [false, true] {
        let mut lab = Lab::new(Config { max_num_seqs: 1, ..plenty(&Fcfs) });
        if is_cached {
            cached(&mut lab, 1, "alice", 64);
        }
        let bobs = |tag| Request { tenant: "bob".into(), ..stem(1, tag, 64, 80, 1) };
        lab.add(Request { priority: BACKGROUND, ..bobs(2) });
        let first = lab.scheduler.plan(lab.now).expect("there is work");
        lab.add(bobs(3));
        let second = lab.scheduler.plan(lab.now).expect("there is work");
        assert_eq!(second.preempted, [2]);
        lab.abort(2);
        for plan in [first, second] {
            commit(&mut lab, plan);
        }
        lab.finish();
        assert_eq!(cached(&mut lab, 4, "bob", 64), (64, 64), "cached: {is_cached}");
    }
}

#[test]
fn a_request_that_is_cancelled_takes_nothing_from_blocks_that_its_tenant_computes_again() {
    let mut lab = Lab::new(plenty(&Fcfs));
    let mut plans = Vec::new();
    for (tag, tenant, cancelled) in [(1, "alice", None), (2, "bob", Some(1)), (3, "bob", Some(2))] {
        lab.add(Request { tenant: tenant.into(), ..stem(1, tag, 64, 80, 1) });
        plans.push(lab.scheduler.plan(lab.now).expect("there is work"));
        // Nobody finds the blocks of alice's lost request, which bob's first request shares.
        if let Some(tag) = cancelled {
            lab.abort(tag);
        }
    }
    assert_eq!(plans[1].admitted[0].cached_tokens, 64);
    assert_eq!(plans[2].admitted[0].cached_tokens, 0);
    for plan in plans {
        commit(&mut lab, plan);
    }
    lab.finish();
    assert_eq!(cached(&mut lab, 4, "bob", 64), (64, 64));
}

#[test]
fn a_request_that_fails_tells_nothing_of_others_blocks() {
    let told = [1, 2].map(|guess| {
        let mut lab = Lab::new(plenty(&Fcfs));
        lab.serve(Request { tenant: "alice".into(), ..stem(1, 1, 160, 200, 1) });
        for tag in 2..4 {
            lab.add(Request { tenant: "bob".into(), ..stem(guess, tag, 160, 200, 1) });
            if tag == 2 {
                lab.fail_next(tag);
            }
            lab.finish();
        }
        lab.ended[&3].own_cached_tokens
    });
    assert_eq!(told, [0, 0]);
}

#[test]
fn two_equal_requests_at_once_tell_nothing_of_others_blocks() {
    let told = [1, 2].map(|guess| {
        let mut lab = Lab::new(Config { max_num_batched_tokens: 100, ..plenty(&Fcfs) });
        lab.serve(Request { tenant: "alice".into(), ..stem(1, 1, 160, 200, 1) });
        (2..=3).for_each(|tag| lab.add(Request { tenant: "bob".into(), ..stem(guess, tag, 160, 200, 1) }));
        lab.finish();
        [2, 3].map(|tag| lab.ended[&tag].own_cached_tokens)
    });
    assert_eq!(told, [[0, 160]; 2]);
}

#[test]
fn an_evicted_block_is_nobodys_when_another_tenant_computes_it_again() {
    let mut lab = Lab::new(Config { num_kv_blocks: 12, ..plenty(&Fcfs) });
    assert_eq!(cached(&mut lab, 1, "alice", 64), (0, 0));
    lab.serve(Request { tenant: "carol".into(), ..ask(2, 170, 1) });
    assert_eq!(cached(&mut lab, 3, "bob", 64), (0, 0));
    assert_eq!(cached(&mut lab, 4, "alice", 64), (64, 0));
}

#[test]
fn equal_content_that_two_tenants_compute_at_once_belongs_to_both() {
    let mut lab = Lab::new(Config { max_num_batched_tokens: 160, ..plenty(&Fcfs) });
    for (tag, tenant) in [(1, "alice"), (2, "bob")] {
        lab.add(Request { tenant: tenant.into(), ..stem(1, tag, 64, 80, 1) });
    }
    lab.finish();
    for (tag, tenant) in [(3, "alice"), (4, "bob")] {
        let (found, own) = cached(&mut lab, tag, tenant, 64);
        assert_eq!((found, own), (64, 64), "{tenant}");
    }
}

#[test]
fn a_long_uncached_prompt_starts_within_its_ageing_bound() {
    let mut lab = Lab::new(Config { max_num_seqs: 1, queue_ageing: 50_000, ..plenty(&Prefix) });
    lab.add(stem(1, 50, 64, 64, 5));
    lab.step();
    lab.add(ask(1, 500, 5));
    let mut tag = 100;
    while !lab.started.contains(&1) {
        while lab.scheduler.stats().waiting < 4 {
            tag += 1;
            lab.add(stem(1, tag, 64, 70, 5));
        }
        lab.step();
    }
    let queued = lab.explain(1).queued();
    assert!((50_000..=56_000).contains(&queued), "{queued}");
}

#[test]
fn without_a_cache_nobody_waits_for_what_another_computes() {
    let mut lab = Lab::new(Config { max_num_batched_tokens: 100, enable_prefix_caching: false, ..plenty(&Prefix) });
    lab.add(stem(1, 1, 256, 256, 9));
    lab.step();
    lab.add(stem(1, 2, 256, 300, 9));
    assert_eq!(lab.step().chunks, [(2, 50), (1, 50)]);
}

#[test]
fn requests_that_await_a_long_shared_prefix_cost_a_plan_next_to_nothing() {
    // 200 blocks are being computed, 16 per step. All other requests wait for them or, under other policies, for a slot.
    for policy in POLICIES {
        let mut lab = Lab::new(Config { max_num_batched_tokens: 256, max_num_seqs: 8, num_kv_blocks: 8193, ..plenty(policy) });
        lab.check_every = 100;
        lab.add(stem(1, 1, 3200, 3200, 1));
        lab.step();
        for tag in 2..1002 {
            lab.add(stem(1, tag, 3200, 3250, 1));
        }
        while lab.ended.len() < 1001 {
            let before = lab.scheduler.block_lookups();
            let step = lab.step();
            let lookups = lab.scheduler.block_lookups() - before;
            // An admitted request gets 200 blocks one by one.
            let most = LOOKUPS + 204 * step.admitted.len() as u64;
            assert!(lookups <= most, "{policy:?}: {lookups} lookups in a plan that admits {}", step.admitted.len());
        }
        if !policy.rules().orders_prompts {
            assert!((2..1002).all(|tag| lab.ended[&tag].cached_tokens == 3200), "all but the first find the prefix in the cache");
        }
    }
}

#[test]
fn requests_that_do_not_fit_are_not_looked_up_in_every_plan() {
    for policy in POLICIES {
        // 200 blocks that all requests share are cached and held. The 300 other blocks of a request do not fit while
        // the first runs.
        let mut lab = Lab::new(Config { num_kv_blocks: 601, max_model_len: 10_000, queue_ageing: 1 << 40, ..plenty(policy) });
        lab.check_every = 100;
        lab.add(stem(1, 1, 3200, 4800, 400));
        (0..6).for_each(|_| drop(lab.step()));
        for tag in 2..1002 {
            lab.add(stem(1, tag, 3200, 8000, 1));
        }
        lab.step();
        for _ in 0..16 {
            let before = lab.scheduler.block_lookups();
            let step = lab.step();
            let lookups = lab.scheduler.block_lookups() - before;
            assert!(step.admitted.is_empty());
            // Each plan measures one request of 64 again.
            assert!(lookups <= LOOKUPS + 202, "{policy:?}: {lookups} lookups");
        }
    }
}

#[test]
fn a_request_that_awaits_a_prompt_is_admitted_when_that_prompt_is_aborted() {
    let mut lab = Lab::new(Config { max_num_batched_tokens: 64, ..plenty(&Prefix) });
    lab.add(stem(1, 1, 640, 640, 9));
    lab.step();
    lab.add(stem(1, 2, 640, 700, 9));
    assert_eq!(lab.step().chunks, [(1, 64)]);
    lab.abort(1);
    // The committed part of the first prompt is cached.
    assert_eq!(lab.step().chunks, [(2, 64)]);
    assert_eq!(lab.explain(2).cached_tokens, 128);
}

#[test]
fn requests_that_arrive_together_compute_their_prefix_once() {
    for policy in [&Fcfs as &dyn Policy, &Fair, &Vtc, &Prefix] {
        let mut lab = Lab::new(Config { max_num_batched_tokens: 128, max_num_seqs: 64, ..plenty(policy) });
        (1..=64).for_each(|tag| lab.add(stem(1, tag, 1024, 1088, 1)));
        let mut computed = 0;
        while lab.ended.len() < 64 {
            computed += lab.step().chunks.iter().map(|&(_, tokens)| tokens).sum::<u32>();
        }
        assert_eq!(computed, 1024 + 64 * 64, "{policy:?}");
    }
}

#[test]
fn nobody_waits_for_the_prefix_of_a_prompt_that_gets_no_tokens() {
    // The oldest prompt has a guaranteed quarter of each step, and a shorter one gets the rest.
    let mut lab = Lab::new(Config { max_num_batched_tokens: 64, ..plenty(&Fcfs) });
    lab.add(stem(1, 1, 0, 4000, 1));
    lab.step();
    lab.add(stem(2, 2, 640, 700, 1));
    assert_eq!(lab.step().chunks, [(2, 32), (1, 32)]);
    lab.add(stem(3, 3, 0, 300, 1));
    assert_eq!(lab.step().chunks, [(3, 32), (2, 16), (1, 16)]);
    lab.add(stem(2, 4, 640, 700, 1));
    assert_eq!(lab.step().chunks, [(3, 48), (1, 16)], "the second prompt has computed some blocks of the fourth");
    assert_eq!(lab.step().chunks[0], (4, 32));
}
