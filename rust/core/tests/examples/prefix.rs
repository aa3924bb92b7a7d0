//! Longest cached prefix first, and nobody computes what another is about to.

use crate::lab::{Lab, ask, plenty, stem};
use chairlift_core::{Cause, Config, Policy, Request};

#[test]
fn who_has_least_left_to_compute_goes_first() {
    let mut lab = Lab::new(Config { max_seqs: 1, ..plenty(Policy::Prefix) });
    lab.add(stem(1, 1, 64, 64, 1));
    lab.finish();
    lab.add(ask(2, 10, 5));
    lab.step();
    // Of 64, 64 and 80 tokens, 0, 32 and 64 are in the cache.
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
    let mut lab = Lab::new(Config { max_tokens: 100, ..plenty(Policy::Prefix) });
    lab.add(stem(1, 1, 256, 256, 9));
    assert_eq!(lab.step().chunks, [(1, 100)]);
    lab.add(stem(1, 2, 256, 300, 9));
    assert_eq!(lab.step().chunks, [(1, 100)]);
    // Half of each step was there for it, but most of what it needs is just being computed. Then it has 44 left.
    assert_eq!(lab.step().chunks, [(1, 56)]);
    assert_eq!(lab.step().chunks, [(1, 1), (2, 44)]);
    assert_eq!((lab.explain(2).cached_tokens, lab.explain(2).causes[Cause::WaitOrder as usize]), (256, 2000));
    // First come, first served would have had it compute 156 of them itself: only a hundred were there.
    let mut lab = Lab::new(Config { max_tokens: 100, ..plenty(Policy::Fcfs) });
    lab.add(stem(1, 1, 256, 256, 9));
    lab.step();
    lab.add(stem(1, 2, 256, 300, 9));
    assert_eq!(lab.step().chunks, [(2, 50), (1, 50)]);
}

#[test]
fn two_equal_prompts_admitted_in_one_step_compute_it_once() {
    let mut lab = Lab::new(plenty(Policy::Prefix));
    lab.add(stem(1, 1, 100, 100, 3));
    lab.add(stem(1, 2, 100, 100, 3));
    // Six blocks of 16 are shared.
    assert_eq!(lab.step().chunks, [(1, 100), (2, 4)]);
}

#[test]
fn the_order_follows_what_is_computed_meanwhile() {
    let mut lab = Lab::new(Config { max_tokens: 32, max_seqs: 1, ..plenty(Policy::Prefix) });
    lab.add(stem(1, 1, 112, 112, 3));
    lab.step();
    // When they come, 32 of the third's 128 tokens are there, and so it has 96 to compute against 64; at the end 96 and 32.
    lab.add(ask(2, 64, 1));
    lab.add(stem(1, 3, 96, 128, 1));
    lab.finish();
    assert_eq!(lab.started, [1, 3, 2]);
    assert_eq!(lab.ended[&3].cached_tokens, 96);
}

#[test]
fn another_salt_finds_nothing() {
    let mut lab = Lab::new(plenty(Policy::Prefix));
    lab.add(stem(1, 1, 64, 64, 1));
    lab.finish();
    lab.add(Request { salt: [9].into(), ..stem(1, 2, 64, 64, 1) });
    lab.finish();
    assert_eq!((lab.ended[&2].cached_tokens, lab.ended[&2].computed_tokens), (0, 64));
}

#[test]
fn a_long_uncached_prompt_starts_within_its_ageing_bound() {
    let mut lab = Lab::new(Config { max_seqs: 1, ageing: 50_000, ..plenty(Policy::Prefix) });
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
    let mut lab = Lab::new(Config { max_tokens: 100, prefix_caching: false, ..plenty(Policy::Prefix) });
    lab.add(stem(1, 1, 256, 256, 9));
    lab.step();
    lab.add(stem(1, 2, 256, 300, 9));
    assert_eq!(lab.step().chunks, [(2, 50), (1, 50)]);
}
