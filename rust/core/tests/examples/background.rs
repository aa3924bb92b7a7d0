//! Background requests yield to all others, under every policy.

use crate::lab::{Cost, Lab, ask, plenty};
use chairlift_core::{BACKGROUND, Config, Fair, POLICIES, Policy, Rejected, Request};

fn background(tag: u64, prompt: u32, new: u32) -> Request {
    Request { priority: BACKGROUND, ..ask(tag, prompt, new) }
}

fn each_policy(test: impl Fn(&'static dyn Policy)) {
    for policy in POLICIES {
        let name = policy.name();
        println!("policy {name}");
        test(policy);
    }
}

#[test]
fn they_start_only_when_no_other_request_waits() {
    each_policy(|policy| {
        let mut lab = Lab::new(Config { max_num_seqs: 2, ..plenty(policy) });
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
        let mut lab = Lab::new(Config { max_num_seqs: 4, ..plenty(policy) });
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
        let mut lab = Lab::new(Config { num_kv_blocks: 21, watermark: 0, max_num_seqs: 8, ..plenty(policy) });
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
        let mut lab = Lab::new(Config { max_num_batched_tokens: 60, max_num_seqs: 8, ..plenty(policy) });
        lab.add(background(1, 1000, 2));
        assert_eq!(lab.step().chunks, [(1, 60)]);
        lab.add(ask(2, 150, 2));
        let mut computed = 0;
        while computed < 150 {
            let chunks = lab.step().chunks;
            let own = chunks.iter().find(|&&(tag, _)| tag == 2).expect("it runs").1;
            computed += own;
            assert!(own == 60 || computed == 150, "{chunks:?}: a step of its prompt has room for nothing else");
        }
        lab.finish();
    });
}

/// A machine whose steps take as long as their tokens, so that a strict limit leaves no time for the background.
fn strict(policy: &'static dyn Policy, streams: u64) -> Lab {
    let config = Config { background_slowdown: 110, max_num_seqs: 16, ..plenty(policy) };
    let mut lab = Lab::taught(config, Cost(1000, 1000, 5000));
    (1..=streams).for_each(|tag| lab.add(ask(tag, 10, 4000)));
    (0..=streams).for_each(|_| drop(lab.step()));
    lab
}

/// The requests with tokens in each of the next steps.
fn next_steps(lab: &mut Lab, steps: u32) -> Vec<Vec<u64>> {
    (0..steps).map(|_| lab.step().chunks.iter().map(|&(tag, _)| tag).collect()).collect()
}

#[test]
fn beside_streams_they_get_a_token_in_every_sixteenth_step_at_least() {
    each_policy(|policy| {
        let mut lab = strict(policy, 2);
        lab.add(background(7, 20, 50));
        let steps = next_steps(&mut lab, 400);
        let at: Vec<usize> = (0..steps.len()).filter(|&at| steps[at].contains(&7)).collect();
        assert!((24..=26).contains(&at.len()), "{at:?}");
        assert!(at[0] <= 16 && at.windows(2).all(|pair| pair[1] - pair[0] <= 16), "{at:?}");
        assert!(steps.iter().all(|step| step.contains(&1) && step.contains(&2)), "a stream has a token in each step");
    });
}

#[test]
fn beside_a_stream_that_drafts_they_get_as_many_tokens_as_beside_another() {
    each_policy(|policy| {
        let [without, with, changing] = [|_| 0, |_| 4, |step: usize| step % 5].map(|drafted: fn(usize) -> usize| {
            let mut lab = Lab::taught(Config { max_num_seqs: 16, ..plenty(policy) }, Cost(9000, 300, 300));
            lab.add(background(7, 20, 4000));
            lab.add(ask(1, 10, 4000));
            lab.steps(4);
            let step = |at| {
                lab.draft(1, drafted(at));
                lab.step()
            };
            (0..200).map(step).filter(|step| step.chunks.iter().any(|&(tag, _)| tag == 7)).count()
        });
        assert!(without > 150 && with + 10 > without && changing + 20 > without, "{without}, {with}, {changing}");
    });
}

#[test]
fn their_sequences_take_turns_where_there_is_room_for_few() {
    each_policy(|policy| {
        // With the strict limit, only the token that is owed. With the other, two of five rows.
        for (slowdown, cost) in [(110, Cost(1000, 1000, 5000)), (230, Cost(1000, 100, 1000))] {
            let mut lab = Lab::taught(Config { background_slowdown: slowdown, max_num_seqs: 16, ..plenty(policy) }, cost);
            lab.now += 20_000_000; // no other request is expected
            (1..=5).for_each(|tag| lab.add(background(10 + tag, 20, 4000)));
            lab.step_until_started(15);
            lab.steps(20);
            lab.add(ask(1, 10, 4000));
            lab.steps(4);
            let steps = next_steps(&mut lab, 400);
            let counts: Vec<_> = (11..=15).map(|tag| steps.iter().filter(|step| step.contains(&tag)).count()).collect();
            assert!(counts.iter().all(|&count| count >= 4 && count + 1 >= counts[0]), "{slowdown} %: {counts:?}");
            assert!(steps.iter().all(|step| step.contains(&1) && step.len() < 5), "too few rows for all");
        }
    });
}

#[test]
fn beside_a_prompt_and_a_stream_they_get_less_and_their_prompts_nothing() {
    each_policy(|policy| {
        let mut lab = Lab::taught(Config { max_num_seqs: 16, ..plenty(policy) }, Cost(8000, 100, 100));
        (1..=4).for_each(|tag| lab.add(background(tag, 20, 4000)));
        lab.add(background(5, 8000, 1));
        lab.steps(8);
        lab.add(ask(6, 10, 500));
        lab.step();
        let beside_stream = next_steps(&mut lab, 12);
        assert!(beside_stream.iter().filter(|step| step.len() == 6).count() > 8, "rows and a prompt: {beside_stream:?}");
        lab.add(ask(7, 8000, 1));
        let beside_prompt = next_steps(&mut lab, 5);
        assert!(beside_prompt.iter().all(|step| step.contains(&7) && !step.contains(&5)), "{beside_prompt:?}");
    });
}

#[test]
fn they_have_no_place_in_the_queues_limits_and_no_share_of_a_tenant() {
    let mut lab = Lab::new(Config { max_num_seqs: 1, max_num_queued_reqs: 1, ..plenty(&Fair) });
    (1..=5).for_each(|tag| lab.add(background(tag, 10, 40)));
    lab.step();
    lab.add(ask(6, 10, 2));
    assert!(matches!(lab.try_add(ask(7, 10, 2)), Err(Rejected::QueueFull { .. })));
    lab.finish();
    // The tenant of the background requests used the machine, and is not behind another tenant for it.
    let other = |tag| Request { tenant: "other".into(), ..ask(tag, 10, 2) };
    lab.add(ask(8, 10, 2));
    lab.step();
    let mut lab = Lab::new(Config { max_num_seqs: 1, ..plenty(&Fair) });
    lab.serve(background(1, 100, 40));
    lab.add(ask(2, 10, 2));
    lab.add(other(3));
    lab.finish();
    assert_eq!(lab.started, [1, 2, 3]);
}
