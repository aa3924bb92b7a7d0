//! Preemption for lack of blocks: which sequence is preempted, and whether its KV is copied or recomputed.

use crate::lab::{Cost, Lab, Step, ask, plenty};
use chairlift_core::{Config, Fcfs, PreemptionReason, TimelineState};

/// Eight blocks. Two requests have 3 and 4 blocks for 48 and 64 tokens. The free block goes to the first sequence that
/// needs a fourth. Then the second needs a fifth.
fn crowded(host_blocks: u32, swap_ns_per_block: u32) -> Config {
    Config { num_kv_blocks: 9, enable_prefix_caching: false, host_blocks, swap_ns_per_block, ..plenty(&Fcfs) }
}

fn run_into_the_wall(lab: &mut Lab) -> Step {
    lab.add(ask(1, 64, 40));
    lab.add(ask(2, 48, 40));
    loop {
        let step = lab.step();
        if !step.preempted.is_empty() {
            return step;
        }
    }
}

#[test]
fn the_one_that_loses_least_goes_and_nobody_comes_in_that_step() {
    let mut lab = Lab::new(crowded(0, 0));
    lab.add(ask(3, 1, 1));
    lab.step();
    lab.add(ask(1, 64, 40));
    lab.add(ask(2, 48, 40));
    lab.step();
    // Both sequences need a block for their next token, and one is free.
    lab.add(ask(4, 1, 1));
    let step = lab.step();
    assert_eq!((step.preempted.as_slice(), step.admitted.len(), step.chunks.as_slice()), (&[2][..], 0, &[(1, 1)][..]));
    let timeline = lab.explain(2);
    assert_eq!((timeline.preempted_by.as_slice(), timeline.swaps), (&[][..], 0), "for its own want of room");
    assert_eq!(lab.step().admitted, [4], "its old place is before the fourth's, but it does not fit");
    lab.finish();
    assert_eq!([1, 2].map(|tag| lab.ended[&tag].output_tokens), [40, 40]);
    let counters = lab.scheduler.stats().counters;
    assert_eq!((counters.preemptions_recompute, counters.preemptions_swap, counters.recomputed_tokens), (1, 0, 48));
    // The 48 prompt tokens and the token of the first step are computed twice.
    assert_eq!(lab.ended[&2].computed_tokens, 48 + 48 + 39);
}

#[test]
fn who_needed_the_room_is_named() {
    // Seven blocks: four for 64 tokens and three for 40. The first sequence needs a fifth, and the second loses less.
    let mut lab = Lab::new(Config { num_kv_blocks: 8, ..crowded(0, 0) });
    lab.add(ask(1, 64, 20));
    lab.add(ask(2, 40, 20));
    lab.step();
    assert_eq!(lab.step().preempted, [2]);
    lab.finish();
    assert_eq!(lab.ended[&2].preempted_by, [1]);
    assert_eq!(lab.ended[&2].preempted_for[PreemptionReason::Blocks as usize], 1);
    // Request 2 was preempted after a millisecond and resumed when the first had its twenty tokens.
    assert_eq!(lab.ended[&2].states[TimelineState::Preempted as usize], 19_000);
}

#[test]
fn cheap_copies_are_swapped_out_and_in() {
    // A prompt token takes 100 us and a block copy 1 us.
    let mut lab = Lab::taught(crowded(6, 1000), Cost(1000, 100, 100));
    let step = run_into_the_wall(&mut lab);
    assert_eq!((step.preempted.as_slice(), step.swap_out.len(), step.swap_in.len()), (&[2][..], 3, 0));
    let stats = lab.scheduler.stats();
    assert_eq!((stats.swapped, stats.waiting, stats.running, stats.free_host_blocks), (1, 0, 1, 3));
    assert_eq!(stats.waiting_by_state[TimelineState::Swapped as usize], 1);
    let step = loop {
        let step = lab.step();
        if !step.admitted.is_empty() {
            break step;
        }
    };
    // The swapped KV comes back, and the next token is the first one computed.
    assert_eq!((step.admitted.as_slice(), step.chunks.as_slice()), (&[2][..], &[(2, 1)][..]));
    assert_eq!((step.swap_out.len(), step.swap_in.len()), (0, 3));
    assert_eq!(lab.scheduler.stats().free_host_blocks, 6);
    lab.finish();
    let timeline = &lab.ended[&2];
    assert_eq!((timeline.swaps, timeline.preemptions, timeline.recomputed_tokens, timeline.computed_tokens), (1, 1, 0, 48 + 39));
    assert!(timeline.states[TimelineState::Swapped as usize] > 0 && timeline.states[TimelineState::Preempted as usize] == 0);
    let counters = lab.scheduler.stats().counters;
    assert_eq!((counters.preemptions_swap, counters.preemptions_recompute, counters.swapped_blocks), (1, 0, 3));
}

#[test]
fn what_the_cache_still_has_is_not_copied_back() {
    let config = Config { enable_prefix_caching: true, ..crowded(6, 1000) };
    let mut lab = Lab::taught(config, Cost(1000, 100, 100));
    let step = run_into_the_wall(&mut lab);
    assert_eq!(step.swap_out.len(), 3);
    // Request 1 leaves before it has overwritten any of the blocks.
    lab.abort(1);
    let step = lab.step();
    assert_eq!((step.admitted.as_slice(), step.swap_in.len()), (&[2][..], 0));
    assert_eq!(lab.scheduler.stats().free_host_blocks, 6);
    lab.finish();
}

#[test]
fn dear_copies_are_computed_again_instead() {
    // One second per block copy.
    let mut lab = Lab::taught(crowded(6, 1_000_000_000), Cost(1000, 100, 100));
    let step = run_into_the_wall(&mut lab);
    assert_eq!((step.preempted.as_slice(), step.swap_out.len()), (&[2][..], 0));
    assert_eq!((lab.scheduler.stats().swapped, lab.scheduler.stats().free_host_blocks), (0, 6));
    lab.finish();
    assert_eq!((lab.ended[&2].swaps, lab.ended[&2].recomputed_tokens), (0, 48));
}

#[test]
fn a_copy_both_ways_is_weighed_against_the_prompt_computed_again() {
    // 48 tokens of 100 us take 4800 us. Three blocks, out and in, are six copies. The break-even is 800 us per copy.
    for (ns, swaps) in [(700_000, 1), (900_000, 0)] {
        let mut lab = Lab::taught(crowded(6, ns), Cost(1000, 100, 100));
        run_into_the_wall(&mut lab);
        assert_eq!(lab.explain(2).swaps, swaps, "at {ns} ns a block");
    }
}

#[test]
fn a_host_pool_too_small_for_a_sequence_takes_none_of_it() {
    let mut lab = Lab::taught(crowded(2, 1000), Cost(1000, 100, 100));
    let step = run_into_the_wall(&mut lab);
    assert_eq!((step.preempted.as_slice(), step.swap_out.len()), (&[2][..], 0));
    assert_eq!(lab.scheduler.stats().free_host_blocks, 2);
    lab.finish();
}

#[test]
fn a_swapped_request_that_is_aborted_gives_its_host_blocks_back() {
    let mut lab = Lab::taught(crowded(6, 1000), Cost(1000, 100, 100));
    run_into_the_wall(&mut lab);
    assert_eq!(lab.scheduler.stats().free_host_blocks, 3);
    lab.abort(2);
    assert_eq!((lab.scheduler.stats().free_host_blocks, lab.scheduler.stats().swapped), (6, 0));
    lab.finish();
}

#[test]
fn with_a_watermark_those_that_run_do_not_preempt_each_other() {
    // Forty blocks, and requests that grow from two to four blocks. With twenty blocks kept free, ten requests start.
    for (watermark, preempts) in [(0, true), (20, false)] {
        let mut lab = Lab::new(Config { num_kv_blocks: 41, watermark, max_num_seqs: 20, ..plenty(&Fcfs) });
        (1..=40).for_each(|tag| lab.add(ask(tag, 30, 30)));
        lab.finish();
        assert_eq!(lab.scheduler.stats().counters.preemptions_recompute > 0, preempts, "with {watermark} blocks of headroom");
    }
}
