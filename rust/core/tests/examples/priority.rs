//! Lower classes go first at every limit: slots, blocks and tokens.

use crate::lab::{Lab, ask, plenty};
use chairlift_core::{Config, Priority, Request, TimelineState};

fn urgent(tag: u64, prompt: u32, new: u32) -> Request {
    Request { priority: 0, ..ask(tag, prompt, new) }
}

fn patient(tag: u64, prompt: u32, new: u32) -> Request {
    Request { priority: 5, ..ask(tag, prompt, new) }
}

fn with_rows(max_seqs: u32) -> Config {
    Config { max_num_seqs: max_seqs, ..plenty(&Priority) }
}

#[test]
fn lower_classes_start_first_and_equals_as_they_came() {
    let mut lab = Lab::new(with_rows(1));
    for (tag, priority) in [(1, 3), (2, -1), (3, 3), (4, 0), (5, -1)] {
        lab.add(Request { priority, ..ask(tag, 10, 2) });
    }
    lab.finish();
    assert_eq!(lab.started, [2, 5, 4, 1, 3]);
}

#[test]
fn an_urgent_request_takes_the_row_of_the_less_urgent_one_that_loses_least() {
    let mut lab = Lab::new(with_rows(2));
    lab.add(patient(1, 100, 50));
    lab.add(patient(2, 20, 50));
    lab.step();
    lab.add(urgent(3, 30, 2));
    // Both are of one class. The sequence with 20 computed tokens is preempted, not the one with 100.
    let step = lab.step();
    assert_eq!((step.preempted, step.admitted), (vec![2], vec![3]));
    assert_eq!(step.chunks, [(1, 1), (3, 30)]);
    // It gets the slot back when the urgent request has its two tokens. It then recomputes its prompt and its one output token.
    lab.step();
    let step = lab.step();
    assert_eq!((step.preempted, step.admitted), (vec![], vec![2]));
    // One block of its prompt is still cached: 21 - 16.
    assert_eq!(step.chunks, [(1, 1), (2, 5)]);
    let timeline = lab.explain(2);
    assert_eq!((timeline.preemptions, timeline.preempted_by.as_slice()), (1, &[3][..]));
    assert_eq!(timeline.preempted_for, [0, 1, 0, 0], "for its class, not for want of blocks");
    assert_eq!(lab.scheduler.stats().counters.preemptions_by_reason, [0, 1, 0, 0]);
    assert_eq!(timeline.states[TimelineState::Preempted as usize], 2000);
    assert_eq!(timeline.recomputed_tokens, 20 - 16);
}

#[test]
fn of_two_less_urgent_classes_the_least_urgent_loses_its_row() {
    let mut lab = Lab::new(with_rows(2));
    lab.add(Request { priority: 7, ..ask(1, 300, 50) });
    lab.add(Request { priority: 2, ..ask(2, 20, 50) });
    lab.step();
    lab.add(urgent(3, 30, 2));
    // The first sequence loses far more, but it has the least urgent class.
    assert_eq!(lab.step().preempted, [1]);
}

#[test]
fn an_urgent_request_takes_blocks_as_well() {
    // Ten blocks: five for 76 tokens, four for 60, one free. The urgent request needs three.
    let mut lab = Lab::new(Config { num_kv_blocks: 11, ..with_rows(8) });
    lab.add(patient(1, 76, 4));
    lab.add(patient(2, 60, 4));
    lab.step();
    assert_eq!(lab.held(), 9);
    lab.add(urgent(3, 40, 2));
    let step = lab.step();
    assert_eq!((step.preempted, step.admitted), (vec![2], vec![3]));
    assert_eq!(lab.held(), 8);
}

#[test]
fn nobody_is_preempted_for_one_who_could_not_start_then_either() {
    // Ten blocks. The urgent request needs nine. The less urgent one has four and the other urgent one two: 10 - 2 < 9.
    let mut lab = Lab::new(Config { num_kv_blocks: 11, ..with_rows(8) });
    lab.add(patient(1, 60, 4));
    lab.add(urgent(2, 30, 2));
    lab.step();
    lab.add(urgent(3, 140, 2));
    let step = lab.step();
    assert_eq!((step.preempted.len(), step.admitted.len()), (0, 0));
    // After the other urgent request has ended, preemption makes enough room.
    let step = lab.step();
    assert_eq!((step.preempted, step.admitted), (vec![1], vec![3]));
}

#[test]
fn others_are_preempted_for_a_request_that_becomes_more_urgent() {
    // Ten blocks: six of class 2, two of class 5, two free. The request needs seven.
    let mut lab = Lab::new(Config { num_kv_blocks: 11, ..with_rows(8) });
    lab.add(Request { priority: 2, ..ask(1, 90, 4) });
    lab.add(Request { priority: 5, ..ask(2, 30, 4) });
    lab.step();
    lab.add(Request { priority: 3, ..ask(3, 100, 2) });
    assert_eq!(lab.step().preempted, []);
    lab.set_priority(3, 1);
    assert_eq!(lab.step().preempted, [2, 1]);
}

#[test]
fn an_urgent_prompt_goes_ahead_of_one_that_has_begun() {
    let mut lab = Lab::new(Config { max_num_batched_tokens: 1000, ..plenty(&Priority) });
    lab.add(patient(1, 3000, 2));
    assert_eq!(lab.step().chunks, [(1, 1000)]);
    lab.add(urgent(2, 600, 5));
    lab.add(urgent(3, 1200, 5));
    // 600 + 400 of 1200, then 1 + 800 and the rest. No sequence was preempted.
    assert_eq!(lab.step().chunks, [(2, 600), (3, 400)]);
    assert_eq!(lab.step().chunks, [(2, 1), (3, 800), (1, 199)]);
    assert_eq!(lab.scheduler.stats().counters.preemptions_recompute, 0);
    lab.finish();
    assert_eq!(lab.ended[&1].states[TimelineState::Stalled as usize], 1000, "it had a row, and no tokens in one step");
}

#[test]
fn a_prompt_in_progress_that_changes_its_class_goes_where_the_new_class_goes() {
    let mut lab = Lab::new(Config { max_num_batched_tokens: 1000, ..plenty(&Priority) });
    lab.add(patient(1, 5000, 2));
    lab.step();
    lab.add(urgent(2, 5000, 2));
    assert_eq!(lab.step().chunks, [(2, 1000)]);
    lab.set_priority(1, -1);
    assert_eq!(lab.step().chunks, [(1, 1000)], "it goes before another prompt in progress");
    lab.set_priority(1, 9);
    lab.set_priority(2, 9);
    lab.add(Request { priority: 7, ..ask(3, 1000, 2) });
    assert_eq!(lab.step().chunks, [(3, 1000)], "a request that waits goes before both");
}

#[test]
fn equals_are_never_preempted() {
    let mut lab = Lab::new(with_rows(1));
    lab.add(urgent(1, 10, 20));
    lab.step();
    lab.add(urgent(2, 10, 2));
    for _ in 0..19 {
        assert_eq!(lab.step().chunks, [(1, 1)]);
    }
    assert_eq!(lab.step().admitted, [2]);
}

#[test]
fn after_two_preemptions_no_urgent_request_takes_the_slot_and_it_has_blocks_to_grow_by() {
    let mut lab = Lab::new(with_rows(1));
    lab.add(patient(1, 16, 300));
    lab.steps(2);
    for tag in [2, 3] {
        assert_eq!(lab.scheduler.stats().held_kv_slots, 2 * 16);
        lab.add(urgent(tag, 10, 1));
        let step = lab.step();
        assert_eq!((step.preempted, step.admitted), (vec![1], vec![tag]));
        assert_eq!(lab.step().admitted, [1]);
    }
    // Blocks for its 20 tokens, and 8 more blocks.
    assert_eq!(lab.scheduler.stats().held_kv_slots, 10 * 16);
    lab.add(urgent(4, 10, 1));
    let step = lab.step();
    assert_eq!((step.preempted, step.chunks), (vec![], vec![(1, 1)]));
    lab.finish();
    assert_eq!((lab.ended[&1].preemptions, lab.ended[&1].preempted_by.as_slice()), (2, &[2, 3][..]));
    assert!(lab.ended[&4].started > Some(lab.ended[&1].ended - 1));
}

/// Keeps three urgent requests of five steps each waiting.
fn flood(lab: &mut Lab, tag: &mut u64) {
    while lab.scheduler.classes().find(|(class, _)| **class == 0).is_none_or(|(_, usage)| usage.waiting < 3) {
        *tag += 1;
        lab.add(urgent(*tag, 8, 5));
    }
}

#[test]
fn the_lowest_class_starts_within_its_ageing_bound_and_ends_though_urgent_ones_keep_coming() {
    let mut lab = Lab::new(Config { queue_ageing: 50_000, ..with_rows(1) });
    let mut tag = 100;
    lab.add(urgent(50, 8, 5));
    lab.step();
    lab.add(patient(1, 8, 20));
    while !lab.ended.contains_key(&1) {
        flood(&mut lab, &mut tag);
        lab.step();
        assert!(lab.now < 1_000_000, "never ends: {:?}", lab.explain(1));
    }
    // A slot becomes free every fifth step, or every five milliseconds.
    let queued = lab.ended[&1].queued();
    assert!((50_000..=56_000).contains(&queued), "{queued}");
    assert!(lab.ended[&1].preemptions <= 2);
    // At most two preemptions, each for the five steps of one urgent request.
    assert!(lab.ended[&1].ended < 56_000 + 20_000 + 2 * 10_000, "{:?}", lab.ended[&1]);
}

#[test]
fn one_aged_request_at_a_time_goes_before_urgent_ones() {
    let mut lab = Lab::new(Config { queue_ageing: 10_000, ..with_rows(3) });
    let mut tag = 100;
    flood(&mut lab, &mut tag);
    lab.step();
    (1..=4).for_each(|aged| lab.add(patient(aged, 8, 12)));
    while (1..=4).any(|aged| !lab.ended.contains_key(&aged)) {
        flood(&mut lab, &mut tag);
        let step = lab.step();
        let aged = step.chunks.iter().filter(|(tag, _)| *tag <= 4).count();
        assert!(aged <= 1, "{step:?}");
        assert!(lab.now < 1_000_000, "some never end");
    }
}

#[test]
fn nobody_is_preempted_where_there_is_room() {
    // Twenty blocks. Eight sequences hold one each and need no more for some steps. Six of the other blocks are for the
    // urgent request.
    let mut lab = Lab::new(Config { num_kv_blocks: 21, ..with_rows(16) });
    (1..=8).for_each(|tag| lab.add(patient(tag, 4, 10)));
    lab.step();
    lab.add(urgent(9, 6 * 16, 1));
    let step = lab.step();
    assert_eq!((step.preempted, step.admitted), (vec![], vec![9]));
}

#[test]
fn an_urgent_request_leaves_blocks_free_for_those_that_run() {
    // Twenty blocks: ten and four are in use and two must stay free. Four more fit, five do not.
    for (prompt, preempted) in [(4 * 16, vec![]), (5 * 16, vec![2])] {
        let mut lab = Lab::new(Config { num_kv_blocks: 21, watermark: 2, ..with_rows(8) });
        lab.add(patient(1, 150, 9));
        lab.add(patient(2, 60, 4));
        lab.step();
        lab.add(urgent(3, prompt, 2));
        let step = lab.step();
        assert_eq!((step.preempted, step.admitted), (preempted, vec![3]), "with a prompt of {prompt}");
    }
}

#[test]
fn a_prompt_that_has_begun_goes_on_within_its_ageing_bound() {
    // Urgent prompts take all hundred tokens of each step: prompts in progress, new prompts and aged prompts.
    for (prompt, waiting) in [(100, 3), (150, 3), (1000, 3), (100, 12)] {
        let mut lab = Lab::new(Config { max_num_batched_tokens: 100, queue_ageing: 5000, ..plenty(&Priority) });
        lab.add(patient(1, 300, 1));
        lab.step();
        let mut tag = 100;
        while !lab.ended.contains_key(&1) {
            while lab.scheduler.stats().waiting < waiting {
                tag += 1;
                lab.add(urgent(tag, prompt, 1));
            }
            lab.step();
            assert!(lab.now < 100_000, "never goes on");
        }
        // Two more pieces: each waits for the first step that begins more than five milliseconds after it was stalled.
        let timeline = &lab.ended[&1];
        assert_eq!(timeline.states[TimelineState::Stalled as usize], 2 * 6000, "beside {waiting} prompts of {prompt}");
        assert_eq!(timeline.first_token, Some(1000 + 2 * 7000));
    }
}
