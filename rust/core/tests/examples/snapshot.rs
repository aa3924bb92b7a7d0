//! The contents of a snapshot.

use crate::lab::{Lab, ask, plenty, stem};
use chairlift_core::{Config, Fcfs, Request, Snapshot, Tier, TimelineState};

/// Ten blocks and two slots.
fn small() -> Config {
    Config { num_kv_blocks: 11, max_num_seqs: 2, max_num_batched_tokens: 32, watermark: 0, ..plenty(&Fcfs) }
}

fn look(lab: &mut Lab) -> Snapshot {
    lab.scheduler.snapshot(lab.now, 64, 4096)
}

#[test]
fn rows_and_those_who_wait_are_there_with_what_they_wait_for() {
    let mut lab = Lab::new(small());
    lab.add(Request { tenant: "a".into(), priority: 3, ..ask(1, 16, 5) });
    lab.add(ask(2, 40, 5));
    lab.add(ask(3, 8, 5));
    lab.step();
    lab.now += 500;
    lab.add(Request { tier: Tier::Flex, ..ask(4, 9, 5) });
    let seen = look(&mut lab);
    let slots: Vec<_> =
        seen.slots.iter().map(|row| (row.tag, row.state, row.prompt_tokens, row.computed_tokens, row.blocks, row.age)).collect();
    assert_eq!(slots, [(1, TimelineState::Decode, 16, 16, 1, 1500), (2, TimelineState::Prefill, 40, 16, 3, 1500)]);
    assert_eq!((&*seen.slots[0].tenant, seen.slots[0].priority, seen.slots[0].output_tokens), ("a", 3, 1));
    assert_ne!(seen.slots[0].slot, seen.slots[1].slot);
    let waiting: Vec<_> = seen.waiting.iter().map(|one| (one.tag, one.state, one.prompt_tokens, one.waited)).collect();
    assert_eq!(waiting, [(3, TimelineState::WaitSlots, 8, 1500), (4, TimelineState::WaitStep, 9, 0)]);
    let bounded = lab.scheduler.snapshot(lab.now, 1, 1);
    assert_eq!((bounded.waiting.len(), bounded.waiting_by_tier), (1, [0, 1, 1, 0]));
}

#[test]
fn one_who_lost_its_row_waits_for_what_became_of_it() {
    let mut lab = Lab::new(Config { num_kv_blocks: 8, max_num_batched_tokens: 1024, ..small() });
    lab.add(ask(1, 64, 20));
    lab.add(ask(2, 40, 20));
    lab.step();
    look(&mut lab);
    assert_eq!(lab.step().preempted, [2]);
    let seen = look(&mut lab);
    assert_eq!(
        seen.waiting.iter().map(|one| (one.tag, one.state, one.output_tokens, one.waited)).collect::<Vec<_>>(),
        [(2, TimelineState::Preempted, 1, 1000)]
    );
    assert_eq!((seen.steps[0].preempted.as_slice(), seen.steps[0].waiting), (&[2][..], 1));
}

#[test]
fn every_block_is_free_cached_shared_or_somebodys() {
    let mut lab = Lab::new(Config { max_num_batched_tokens: 1024, max_num_seqs: 4, ..small() });
    lab.serve(stem(7, 1, 32, 40, 3));
    lab.add(stem(7, 2, 32, 40, 9));
    lab.add(stem(7, 3, 32, 40, 9));
    lab.step();
    let seen = look(&mut lab);
    let count = |kind: u32| seen.cells.iter().filter(|&&cell| cell == kind).count();
    let row = |tag: u64| Snapshot::HELD + seen.slots.iter().find(|row| row.tag == tag).expect("it runs").slot;
    // Both sequences hold two blocks of the stem, and each has a third block of its own. The first sequence's third
    // block was not named.
    assert_eq!((count(Snapshot::SHARED), count(row(2)), count(row(3))), (2, 1, 1));
    assert_eq!((count(Snapshot::CACHED), count(Snapshot::FREE), seen.blocks_per_cell), (0, 6, 1));
    lab.finish();
    let seen = look(&mut lab);
    assert_eq!((seen.cells.iter().filter(|&&cell| cell == Snapshot::CACHED).count(), seen.cells.len()), (2 + 2, 10));
    // Four blocks per cell, and two in the last. A cell shows the most frequent value.
    let seen = lab.scheduler.snapshot(lab.now, 64, 3);
    assert_eq!((seen.cells.len(), seen.blocks_per_cell), (3, 4));
}

#[test]
fn steps_are_noted_while_somebody_looks() {
    let mut lab = Lab::new(small());
    lab.now = 1;
    lab.add(ask(1, 16, 9));
    lab.step();
    assert!(look(&mut lab).steps.is_empty(), "nobody had looked before");
    lab.add(ask(2, 60, 3));
    lab.steps(3);
    let seen = look(&mut lab);
    let of = |tag: u64| seen.slots.iter().find(|row| row.tag == tag).expect("it runs").slot;
    let (first, second) = (of(1) as usize, of(2) as usize);
    let reported: Vec<_> = seen.steps.iter().map(|step| (step.step, step.tokens, step.slots[first], step.slots[second])).collect();
    assert_eq!(reported, [(1, 32, b'd', b'p'), (2, 30, b'd', b'p'), (3, 2, b'd', b'd')]);
    assert_eq!(seen.steps[0].admitted, [(second as u32, 2)]);
    assert!(look(&mut lab).steps.is_empty(), "each is told once");
    lab.steps(2);
    assert_eq!(look(&mut lab).steps[1].slots[second], b' ', "its row is free again");
    lab.now += 4_000_000;
    lab.step();
    assert!(look(&mut lab).steps.is_empty(), "nobody had looked for long");
}

#[test]
fn a_row_without_tokens_and_work_done_again_are_told_apart() {
    let mut lab = Lab::new(Config { num_kv_blocks: 8, max_num_batched_tokens: 1024, ..small() });
    lab.now = 1;
    look(&mut lab);
    lab.add(ask(1, 64, 20));
    lab.add(ask(2, 40, 20));
    while lab.ended.len() < 2 {
        lab.step();
    }
    let kinds: String = look(&mut lab).steps.iter().flat_map(|step| step.slots.iter()).map(|&kind| char::from(kind)).collect();
    assert!(kinds.contains('r') && kinds.contains('p') && kinds.contains('d'), "{kinds}");
}

#[test]
fn who_ran_while_one_waited_is_named_by_tenant() {
    let mut lab = Lab::new(Config { max_num_seqs: 1, ..small() });
    lab.add(Request { tenant: "a".into(), ..ask(1, 16, 4) });
    lab.add(Request { tenant: "b".into(), ..ask(2, 16, 2) });
    lab.add(Request { tenant: "c".into(), ..ask(3, 16, 1) });
    lab.steps(5);
    let ahead = |lab: &Lab, tag| {
        let timeline = lab.scheduler.explain(tag).expect("it is known");
        lab.scheduler.ahead(&timeline).iter().map(|(tenant, time)| (tenant.to_string(), *time)).collect::<Vec<_>>()
    };
    // Request 3 still waits: four steps of the first request and one of the second.
    assert_eq!(ahead(&lab, 3), [("a".to_owned(), 4000), ("b".to_owned(), 1000)]);
    lab.finish();
    assert_eq!(ahead(&lab, 3), [("a".to_owned(), 4000), ("b".to_owned(), 2000)]);
    assert!(ahead(&lab, 1).is_empty());
}
