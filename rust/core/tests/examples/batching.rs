//! Static and dynamic batching, as in classic model servers: no request joins a running batch.

use crate::lab::{Lab, ask, plenty};
use chairlift_core::{Batching, Config, Fcfs, Stall, TimelineState};

fn batches(batching: Batching) -> Config {
    Config { batching, ..plenty(&Fcfs) }
}

#[test]
fn nobody_joins_a_static_batch_that_runs() {
    let mut lab = Lab::new(batches(Batching::Static { size: 2 }));
    (1..=2).for_each(|tag| lab.add(ask(tag, 10, 1 + 2 * tag as u32)));
    assert_eq!(lab.step().admitted, [1, 2]);
    (3..=5).for_each(|tag| lab.add(ask(tag, 10, 2)));
    // The first request ends with its third token, the second with its fifth. Slots stay empty until then.
    assert_eq!(lab.step().chunks, [(1, 1), (2, 1)]);
    assert_eq!(lab.step().chunks, [(1, 1), (2, 1)]);
    assert_eq!(lab.step().chunks, [(2, 1)]);
    assert_eq!(lab.scheduler.stats().waiting_by_state[TimelineState::WaitBatch as usize], 3);
    assert_eq!(lab.step().chunks, [(2, 1)]);
    assert_eq!(lab.step().admitted, [3, 4]);
    assert!(lab.step().admitted.is_empty());
    // A static batch does not wait to be full.
    assert_eq!(lab.step().admitted, [5]);
    // From the second step to the sixth.
    assert_eq!(lab.ended[&3].states[TimelineState::WaitBatch as usize], 4000);
    assert_eq!(lab.ended[&3].limit(), Some(TimelineState::WaitBatch));
}

#[test]
fn a_batch_boards_over_several_steps_if_one_has_too_few_tokens() {
    let mut lab = Lab::new(Config { max_num_batched_tokens: 100, ..batches(Batching::Static { size: 3 }) });
    (1..=4).for_each(|tag| lab.add(ask(tag, 80, 9)));
    assert_eq!(lab.step().chunks, [(1, 80), (2, 20)]);
    // Half of the tokens that the decode leaves are for requests being admitted.
    assert_eq!(lab.step().chunks, [(1, 1), (3, 49), (2, 50)]);
    assert_eq!(lab.step().chunks, [(1, 1), (2, 10), (3, 31)], "three, and not four");
}

#[test]
fn a_dynamic_batch_departs_when_it_is_full_or_when_its_first_has_waited() {
    let config = batches(Batching::Dynamic { size: 3, timeout: 10_000 });
    let mut lab = Lab::new(config);
    lab.add(ask(1, 10, 1));
    assert!(lab.try_step().is_none());
    assert_eq!((lab.scheduler.stats().stall, lab.scheduler.wake_at()), (Some(Stall::Batch), Some(10_000)));
    lab.now = 4000;
    lab.add(ask(2, 10, 1));
    assert!(lab.try_step().is_none());
    assert_eq!(lab.scheduler.wake_at(), Some(10_000), "by the first's arrival");
    lab.now = 9999;
    assert!(lab.try_step().is_none());
    lab.now = 10_000;
    assert_eq!(lab.step().admitted, [1, 2]);
    assert_eq!((lab.scheduler.stats().stall, lab.scheduler.wake_at()), (None, None));

    let mut lab = Lab::new(config);
    (1..=4).for_each(|tag| lab.add(ask(tag, 10, 1)));
    assert_eq!(lab.step().admitted, [1, 2, 3]);
    assert!(lab.try_step().is_none());
}

#[test]
fn who_is_preempted_may_rejoin_its_batch() {
    // Eight blocks: 2 + 3 + 2 in use. In the second step each sequence needs one more. The third has computed as little
    // as the first but is younger, so it is preempted and its two blocks go to the others.
    let config = Config { num_kv_blocks: 9, ..batches(Batching::Static { size: 3 }) };
    let mut lab = Lab::new(config);
    lab.add(ask(1, 32, 4));
    lab.add(ask(2, 48, 30));
    lab.add(ask(3, 32, 8));
    lab.add(ask(4, 10, 5));
    assert_eq!(lab.step().admitted, [1, 2, 3]);
    assert_eq!(lab.step().preempted, [3]);
    lab.step_until_ended(1);
    // Request 3 resumes beside the second. Request 4 waits until both have ended.
    assert_eq!(lab.step().admitted, [3]);
    lab.step_until_ended(2);
    assert!(lab.ended.contains_key(&3) && !lab.started.contains(&4));
    assert_eq!(lab.step().admitted, [4]);
}

#[test]
fn what_runs_and_is_not_committed_is_named_as_the_cause_of_a_stall() {
    let mut lab = Lab::new(plenty(&Fcfs));
    let request = ask(1, 10, 1);
    lab.scheduler.add(request, 0).expect("it fits");
    let plan = lab.scheduler.plan(0).expect("a prompt");
    // The only token of the request is pending.
    assert!(lab.scheduler.plan(10).is_none());
    assert_eq!(lab.scheduler.stats().stall, Some(Stall::InFlight));
    lab.scheduler.commit(plan, &[7], 20, &mut chairlift_core::Outputs::default());
    assert!(lab.scheduler.plan(30).is_none());
    assert_eq!(lab.scheduler.stats().stall, None);
}
