//! Forks share the blocks of their prompt.

use crate::lab::{Lab, ask, plenty};
use chairlift_core::{Config, Fcfs, TimelineState};

fn caching(prefix_caching: bool) -> Config {
    Config { enable_prefix_caching: prefix_caching, ..plenty(&Fcfs) }
}

#[test]
fn forks_share_full_blocks_and_copy_the_partly_filled_one() {
    for prefix_caching in [true, false] {
        let mut lab = Lab::new(caching(prefix_caching));
        // 40 tokens are two full blocks and half of a third.
        lab.add(ask(1, 40, 10));
        lab.fork(1, 2);
        lab.fork(1, 3);
        assert_eq!(lab.scheduler.stats().waiting_by_state[TimelineState::WaitFork as usize], 2);
        let step = lab.step();
        assert_eq!((step.chunks.as_slice(), lab.held()), (&[(1, 40)][..], 3), "they wait for the prompt");
        // Then each fork computes the prompt's last token in its own copy of the parent's third block.
        let step = lab.step();
        assert_eq!(step.chunks, [(1, 1), (2, 1), (3, 1)]);
        assert_eq!((step.copies.len(), lab.held()), (2, 2 + 3));
        let (from, to): (Vec<_>, Vec<_>) = step.copies.into_iter().unzip();
        assert!(from[0] == from[1] && to[0] != to[1] && !to.contains(&from[0]));
        lab.finish();
        assert_eq!([1, 2, 3].map(|tag| lab.ended[&tag].computed_tokens), [49, 10, 10]);
        assert_eq!([1, 2, 3].map(|tag| lab.ended[&tag].states[TimelineState::WaitFork as usize]), [0, 1000, 1000]);
    }
}

#[test]
fn a_prompt_of_whole_blocks_is_shared_but_for_the_last() {
    for (prefix_caching, shared) in [(true, 1), (false, 1)] {
        let mut lab = Lab::new(caching(prefix_caching));
        lab.add(ask(1, 32, 10));
        lab.fork(1, 2);
        lab.step();
        let step = lab.step();
        // The parent has a third block for its first token. The fork computes the prompt's last token in a copy of that block.
        assert_eq!((step.chunks.as_slice(), step.copies.len()), (&[(1, 1), (2, 1)][..], 1));
        assert_eq!(lab.held(), 3 + 2 - shared);
        lab.finish();
        assert_eq!(lab.ended[&2].computed_tokens, 10);
    }
}

#[test]
fn a_prompt_one_token_longer_than_a_block_is_shared_without_a_copy() {
    for prefix_caching in [true, false] {
        let mut lab = Lab::new(caching(prefix_caching));
        lab.add(ask(1, 33, 10));
        lab.fork(1, 2);
        lab.step();
        let step = lab.step();
        assert_eq!((step.chunks.as_slice(), step.copies.len()), (&[(1, 1), (2, 1)][..], 0));
        assert_eq!(lab.held(), 2 + 1 + 1);
        lab.finish();
    }
}

#[test]
fn forks_wait_while_the_prompt_is_computed_in_pieces() {
    let mut lab = Lab::new(Config { max_num_batched_tokens: 20, max_num_seqs: 20, ..caching(true) });
    lab.add(ask(1, 50, 3));
    lab.fork(1, 2);
    assert_eq!(lab.step().chunks, [(1, 20)]);
    assert_eq!(lab.step().chunks, [(1, 20)]);
    assert_eq!(lab.step().chunks, [(1, 10)]);
    assert_eq!(lab.step().chunks, [(1, 1), (2, 1)]);
    lab.finish();
    assert_eq!(lab.ended[&2].states[TimelineState::WaitFork as usize], 3000);
}

#[test]
fn if_the_parent_goes_before_its_prompt_is_done_the_forks_compute_it() {
    for prefix_caching in [true, false] {
        let mut lab = Lab::new(Config { max_num_batched_tokens: 20, max_num_seqs: 20, ..caching(prefix_caching) });
        lab.add(ask(1, 50, 3));
        lab.fork(1, 2);
        lab.fork(1, 3);
        lab.step();
        lab.abort(1);
        lab.finish();
        assert_eq!([2, 3].map(|tag| lab.ended[&tag].output_tokens), [3, 3]);
        // One block was cached at the first fork's start. The second waits until the first has computed the other two full
        // blocks. Without a cache, each computes the whole prompt.
        let computed = [2, 3].map(|tag| lab.ended[&tag].computed_tokens);
        assert_eq!(computed, if prefix_caching { [50 - 16 + 2, 50 - 48 + 2] } else { [52, 52] });
    }
}

#[test]
fn a_fork_that_comes_late_copies_nothing_of_what_was_generated() {
    for prefix_caching in [true, false] {
        let mut lab = Lab::new(caching(prefix_caching));
        lab.add(ask(1, 40, 30));
        // The third block is now full of prompt and output.
        lab.steps(12);
        lab.fork(1, 2);
        let step = lab.step();
        assert_eq!((step.chunks.as_slice(), step.copies.len()), (&[(1, 1), (2, 1)][..], 1));
        lab.finish();
        assert_eq!((lab.ended[&2].output_tokens, lab.ended[&2].computed_tokens), (30, 30));
    }
}

#[test]
fn a_fork_in_nobodys_way_is_aborted_while_it_waits() {
    let mut lab = Lab::new(caching(true));
    lab.add(ask(1, 40, 3));
    lab.fork(1, 2);
    lab.abort(2);
    lab.finish();
    assert_eq!(lab.ended[&1].output_tokens, 3);
}
