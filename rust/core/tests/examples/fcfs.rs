//! First come, first served, and the rules for a step's tokens under all policies.

use crate::lab::{Lab, ask, plenty};
use chairlift_core::{Config, Fcfs};
use std::collections::HashMap;

#[test]
fn prompts_fill_what_a_step_has_in_the_order_they_came() {
    let mut lab = Lab::new(plenty(&Fcfs));
    (1..=3).for_each(|tag| lab.add(ask(tag, 800, 9)));
    assert_eq!(lab.step().chunks, [(1, 800), (2, 224)]);
    // A decode leaves 1023 tokens. Waiting requests may use half, rounded down, and the prompt in progress gets the rest.
    assert_eq!(lab.step().chunks, [(1, 1), (3, 511), (2, 512)]);
    // 800 - 224 - 512 tokens are left of the second prompt and 800 - 511 of the third. The prompt nearest to its end goes first.
    assert_eq!(lab.step().chunks, [(1, 1), (2, 64), (3, 289)]);
    assert_eq!(lab.step().chunks, [(1, 1), (2, 1), (3, 1)]);
}

#[test]
fn a_prompt_alone_has_all_of_a_steps_tokens() {
    let mut lab = Lab::new(plenty(&Fcfs));
    lab.add(ask(1, 2000, 2));
    assert_eq!(lab.step().chunks, [(1, 1024)]);
    assert_eq!(lab.step().chunks, [(1, 976)]);
    assert_eq!(lab.step().chunks, [(1, 1)]);
    assert_eq!(lab.ended[&1].output_tokens, 2);
}

#[test]
fn a_long_prompt_does_not_block_the_queue_behind_it() {
    let mut lab = Lab::new(Config { max_num_batched_tokens: 100, ..plenty(&Fcfs) });
    lab.add(ask(1, 250, 1));
    assert_eq!(lab.step().chunks, [(1, 100)]);
    lab.add(ask(2, 10, 1));
    lab.add(ask(3, 70, 1));
    // Half of the step is for the two waiting requests, in order of arrival.
    assert_eq!(lab.step().chunks, [(2, 10), (3, 40), (1, 50)]);
    assert_eq!(lab.step().chunks, [(3, 30), (1, 70)]);
    assert_eq!(lab.step().chunks, [(1, 30)]);
}

#[test]
fn decodes_come_before_prompts() {
    let mut lab = Lab::new(Config { max_num_batched_tokens: 4, max_num_seqs: 4, ..plenty(&Fcfs) });
    lab.add(ask(1, 2, 5));
    lab.add(ask(2, 2, 5));
    lab.step();
    lab.add(ask(3, 100, 1));
    // Of four tokens, the prompt gets the two that no decode needs.
    for _ in 0..4 {
        assert_eq!(lab.step().chunks, [(1, 1), (2, 1), (3, 2)]);
    }
    assert_eq!(lab.step().chunks, [(3, 4)]);
}

#[test]
fn an_output_is_prompt_plus_new_less_one_computed_tokens() {
    let mut lab = Lab::new(plenty(&Fcfs));
    lab.add(ask(1, 100, 10));
    lab.add(ask(2, 50, 10));
    lab.steps(4);
    lab.stop(2);
    lab.finish();
    // The last token needs no KV. The second request stopped at its fifth token.
    assert_eq!((lab.ended[&1].computed_tokens, lab.ended[&1].output_tokens), (109, 10));
    assert_eq!((lab.ended[&2].computed_tokens, lab.ended[&2].output_tokens), (54, 5));
    assert_eq!(lab.scheduler.stats().counters.computed_tokens, 109 + 54);
}

#[test]
fn a_sequence_keeps_its_row_and_rows_are_used_again() {
    let mut lab = Lab::new(Config { max_num_seqs: 4, ..plenty(&Fcfs) });
    (1..=20).for_each(|tag| lab.add(ask(tag, 5, 1 + tag as u32 * 7 % 11)));
    let mut rows: HashMap<u64, u32> = HashMap::new();
    while let Some(step) = lab.try_step() {
        for (tag, row) in step.rows {
            assert_eq!(*rows.entry(tag).or_insert(row), row, "request {tag} changed its row");
            assert!(row < 4);
        }
    }
    assert_eq!(rows.len(), 20);
    assert_eq!(lab.started, (1..=20).collect::<Vec<_>>());
}
