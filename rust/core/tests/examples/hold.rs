//! Held sequences keep their blocks between two requests.

use crate::lab::{Lab, ask, plenty};
use chairlift_core::{Config, Continues, Fcfs, HeldId, Priority, Rejected, Request};

fn caching(prefix_caching: bool) -> Config {
    Config { enable_prefix_caching: prefix_caching, ..plenty(&Fcfs) }
}

/// A held sequence whose 40 tokens are computed but for the last. They are two full blocks and seven tokens of a third.
fn held(lab: &mut Lab) -> HeldId {
    let held = lab.scheduler.open(&"".into(), &std::sync::Arc::default(), lab.now);
    lab.add(continues(held, 1, 39, 0, 1));
    lab.step();
    held
}

/// A request that continues the first `known` tokens of a held sequence.
fn continues(held: HeldId, tag: u64, prompt: u32, known: u32, new: u32) -> Request {
    let mut prompt = ask(1, prompt, new).prompt;
    prompt.iter_mut().skip(40).for_each(|token| *token += tag as u32);
    Request { tag, prompt, continues: Some(Continues { held, tokens: known }), ..ask(tag, 1, new) }
}

#[test]
fn forks_share_all_blocks_and_copy_the_last_one_when_they_go_on() {
    for prefix_caching in [true, false] {
        let mut lab = Lab::new(caching(prefix_caching));
        let first = held(&mut lab);
        assert_eq!((lab.held(), lab.scheduler.held()), (3, (1, 3)));
        let second = lab.scheduler.fork_held(first, lab.now).expect("it is held");
        assert_eq!((lab.held(), lab.scheduler.held()), (3, (2, 6)), "a fork takes no block");
        // Each computes the last token and the ten appended ones, in its own copy of the third block and in a fourth.
        lab.add(continues(first, 2, 50, 40, 5));
        lab.add(continues(second, 3, 50, 40, 5));
        let step = lab.step();
        assert_eq!((step.chunks.as_slice(), step.copies.len()), (&[(2, 11), (3, 11)][..], 2));
        assert_eq!(lab.held(), 3 + 2 + 2);
        lab.finish_requests();
        assert_eq!([2, 3].map(|tag| (lab.ended[&tag].cached_tokens, lab.ended[&tag].computed_tokens)), [(39, 15); 2]);
        // The old third block is free. Each sequence now has 54 computed tokens.
        assert_eq!((lab.held(), lab.scheduler.held()), (2 + 2 + 2, (2, 8)));
        assert!(lab.scheduler.drop_held(first, lab.now));
        assert_eq!(lab.held(), 4, "dropped blocks are free for the next step");
        assert!(lab.scheduler.drop_held(second, lab.now));
        lab.finish();
    }
}

#[test]
fn one_request_at_a_time_continues_a_held_sequence_and_an_aborted_one_leaves_it_as_it_was() {
    let mut lab = Lab::new(caching(true));
    let first = held(&mut lab);
    lab.add(continues(first, 2, 50, 40, 5));
    assert_eq!(lab.try_add(continues(first, 3, 50, 40, 5)), Err(Rejected::HeldBusy));
    lab.step();
    lab.abort(2);
    assert_eq!(lab.held(), 3);
    lab.add(continues(first, 4, 45, 40, 5));
    // The held sequence may be dropped while its request runs.
    lab.step();
    assert!(lab.scheduler.drop_held(first, lab.now));
    lab.finish();
    assert_eq!((lab.ended[&4].cached_tokens, lab.ended[&4].output_tokens), (39, 5));
    assert_eq!(lab.try_add(continues(first, 5, 50, 40, 5)), Err(Rejected::NotHeld));
    assert_eq!(lab.scheduler.fork_held(first, lab.now), None);
}

#[test]
fn held_sequences_lose_their_blocks_first_and_are_computed_again() {
    for prefix_caching in [true, false] {
        // Eight usable blocks. The held sequence has three of them, and the next request fills all.
        let mut lab = Lab::new(Config { num_kv_blocks: 9, watermark: 0, ..caching(prefix_caching) });
        let first = held(&mut lab);
        lab.add(ask(2, 60, 68));
        lab.step_until_ended(2);
        assert_eq!((lab.ended[&2].preemptions, lab.scheduler.held()), (0, (1, 0)));
        lab.add(continues(first, 3, 50, 40, 5));
        lab.finish_requests();
        assert_eq!((lab.ended[&3].cached_tokens, lab.ended[&3].output_tokens), (0, 5));
        assert_eq!(lab.scheduler.held(), (1, 4));
        lab.scheduler.drop_held(first, lab.now);
        lab.finish();
    }
}

#[test]
fn blocks_of_held_sequences_count_for_their_tenant() {
    let mut lab = Lab::new(caching(true));
    let first = held(&mut lab);
    lab.now += 5_000;
    assert!(lab.scheduler.drop_held(first, lab.now));
    let (_, usage) = lab.scheduler.tenants().next().expect("one tenant");
    assert_eq!((usage.held, usage.held_block_us), (0, 3 * 5_000));
}

#[test]
fn a_request_that_gets_more_urgent_goes_first() {
    let mut lab = Lab::new(Config { max_num_seqs: 1, ..plenty(&Priority) });
    (1..=3).for_each(|tag| lab.add(Request { priority: 5, ..ask(tag, 10, 5) }));
    lab.step();
    lab.set_priority(3, 0);
    assert_eq!(lab.step().preempted, [1], "the running request is now less urgent");
    lab.set_priority(3, 9);
    lab.finish();
    assert_eq!(lab.ended.values().filter(|timeline| timeline.priority == 9).count(), 1);
    assert!(lab.ended[&3].ended > lab.ended[&2].ended);
}

#[test]
fn blocks_that_a_preempted_request_shared_with_a_held_sequence_become_free() {
    // Eight usable blocks and one slot. The running request shares two blocks with the held sequence, which has a third.
    let mut lab = Lab::new(Config { num_kv_blocks: 9, watermark: 0, max_num_seqs: 1, enable_prefix_caching: false, ..plenty(&Priority) });
    let first = held(&mut lab);
    lab.add(continues(first, 2, 41, 40, 20));
    lab.step();
    lab.add(Request { priority: -1, ..ask(3, 100, 20) });
    assert_eq!(lab.step().admitted, [3]);
    lab.finish_requests();
    lab.scheduler.drop_held(first, lab.now);
    lab.finish();
}
