//! Background requests yield to all others, under every policy.

use crate::lab::{Lab, ask, plenty};
use chairlift_core::{BACKGROUND, Config, Policy, Rejected, Request};

fn background(tag: u64, prompt: u32, new: u32) -> Request {
    Request { priority: BACKGROUND, ..ask(tag, prompt, new) }
}

fn each_policy(test: impl Fn(Policy)) {
    for (name, policy) in Policy::NAMES {
        println!("policy {name}");
        test(policy);
    }
}

#[test]
fn they_start_only_when_no_other_request_waits() {
    each_policy(|policy| {
        let mut lab = Lab::new(Config { max_seqs: 2, ..plenty(policy) });
        (1..=3).for_each(|tag| lab.add(background(tag, 10, 3)));
        (4..=9).for_each(|tag| lab.add(ask(tag, 10, 3)));
        lab.finish();
        let mut first = lab.started[..6].to_vec();
        first.sort_unstable();
        assert_eq!(first, [4, 5, 6, 7, 8, 9]);
        assert_eq!(lab.started[6..], [1, 2, 3], "in the order of arrival");
    });
}

#[test]
fn they_lose_their_slots_to_the_first_who_come() {
    each_policy(|policy| {
        let mut lab = Lab::new(Config { max_seqs: 4, ..plenty(policy) });
        (1..=4).for_each(|tag| lab.add(background(tag, 10, 50)));
        lab.step();
        lab.step();
        lab.add(ask(5, 10, 50));
        let step = lab.step();
        assert_eq!((step.preempted.len(), step.admitted), (1, vec![5]), "the next step starts it");
        // However often a background request was preempted, it is not protected.
        for tag in 6..20 {
            lab.add(ask(tag, 10, 2));
            assert_eq!(lab.step().admitted, [tag]);
            lab.step();
            lab.step();
        }
        assert!(lab.scheduler.stats().counters.preemptions_by_reason[1] > 8);
        lab.finish();
        assert_eq!(lab.ended[&1].output_tokens, 50);
    });
}

#[test]
fn they_lose_their_blocks_to_others_decodes_and_others_prompts() {
    each_policy(|policy| {
        // Twenty blocks: background requests hold sixteen.
        let mut lab = Lab::new(Config { num_blocks: 21, watermark: 0, max_seqs: 8, ..plenty(policy) });
        lab.add(background(1, 120, 60));
        lab.add(background(2, 120, 60));
        lab.step();
        lab.add(ask(3, 200, 40));
        assert_eq!(lab.step().admitted, [3]);
        // Until it has ended, it is never preempted.
        while !lab.ended.contains_key(&3) {
            assert!(!lab.step().preempted.contains(&3));
        }
        assert_eq!(lab.ended[&3].preemptions, 0);
        lab.finish();
        assert_eq!(lab.ended[&2].output_tokens, 60);
    });
}

#[test]
fn their_prompts_get_what_others_leave_of_a_step() {
    each_policy(|policy| {
        let mut lab = Lab::new(Config { max_tokens: 100, ..plenty(policy) });
        lab.add(background(1, 1000, 2));
        assert_eq!(lab.step().chunks, [(1, 100)]);
        lab.add(ask(2, 250, 2));
        let mut computed = 0;
        while computed < 250 {
            let chunks = lab.step().chunks;
            let own = chunks.iter().find(|&&(tag, _)| tag == 2).expect("it runs").1;
            computed += own;
            assert!(own == 100 || computed == 250, "{chunks:?}: a step of its prompt has room for nothing else");
        }
        lab.finish();
    });
}

#[test]
fn they_have_no_place_in_the_queues_limits_and_no_share_of_a_tenant() {
    let mut lab = Lab::new(Config { max_seqs: 1, max_queued_reqs: 1, ..plenty(Policy::Fair) });
    (1..=5).for_each(|tag| lab.add(background(tag, 10, 40)));
    lab.step();
    lab.add(ask(6, 10, 2));
    assert!(matches!(lab.try_add(ask(7, 10, 2)), Err(Rejected::QueueFull { .. })));
    lab.finish();
    // The tenant of the background requests used the machine, and is not behind another tenant for it.
    let other = |tag| Request { tenant: "other".into(), ..ask(tag, 10, 2) };
    lab.add(ask(8, 10, 2));
    lab.step();
    let mut lab = Lab::new(Config { max_seqs: 1, ..plenty(Policy::Fair) });
    lab.add(background(1, 100, 40));
    lab.finish();
    lab.add(ask(2, 10, 2));
    lab.add(other(3));
    lab.finish();
    assert_eq!(lab.started, [1, 2, 3]);
}
