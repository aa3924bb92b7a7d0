//! Requests that their caller prepares: they count as waiting, keep their place in the order of arrival, and do not run before.

use crate::lab::{Lab, ask, plenty};
use chairlift_core::{Config, Fcfs, FinishReason, Preparation, Rejected, Request, TimelineState};

fn prepared(tag: u64, preparation: Preparation) -> Request {
    Request { preparation: Some(preparation), ..ask(tag, 10, 2) }
}

#[test]
fn it_runs_when_it_is_prepared_and_keeps_its_place() {
    let mut lab = Lab::new(Config { max_num_seqs: 1, ..plenty(&Fcfs) });
    lab.add(prepared(1, Preparation::Grammar));
    assert!(lab.try_step().is_none());
    assert_eq!(lab.scheduler.wake_at(), None);
    (2..5).for_each(|tag| lab.add(ask(tag, 10, 2)));
    lab.step();
    assert_eq!(lab.started, [2]);
    lab.prepare(1, Some(Preparation::ReadCache));
    lab.step_until_started(3);
    lab.prepare(1, None);
    lab.finish();
    assert_eq!(lab.started, [2, 3, 1, 4]);
    let timeline = &lab.ended[&1];
    assert_eq!(timeline.states[TimelineState::Grammar as usize], 1000);
    assert_eq!(timeline.states[TimelineState::ReadCache as usize], 2000);
    assert_eq!(timeline.submitted, 3000, "its time in the queue begins when it can run");
    assert_eq!(timeline.states.iter().sum::<u64>(), timeline.ended - timeline.arrived);
}

#[test]
fn it_counts_in_the_limits_of_the_queue_and_is_shown() {
    let mut lab = Lab::new(Config { max_num_queued_reqs: 1, ..plenty(&Fcfs) });
    lab.add(prepared(1, Preparation::ReadCache));
    assert!(matches!(lab.try_add(ask(2, 10, 2)), Err(Rejected::QueueFull { queued: 2, limit: 1, .. })));
    let stats = lab.scheduler.stats();
    assert_eq!((stats.waiting, stats.queued_prompt_tokens), (1, 10));
    assert_eq!(stats.waiting_by_state[TimelineState::ReadCache as usize], 1);
    let snapshot = lab.scheduler.snapshot(0, 10, 10);
    assert_eq!(snapshot.waiting.iter().map(|seen| (seen.tag, seen.state)).collect::<Vec<_>>(), [(1, TimelineState::ReadCache)]);
    lab.abort(1);
    assert_eq!(lab.ended[&1].finish, Some(FinishReason::Abort));
    lab.serve(ask(2, 10, 2));
}

#[test]
fn its_deadline_ends_it_and_its_forks_are_prepared_themselves() {
    let mut lab = Lab::new(plenty(&Fcfs));
    lab.add(Request { deadline: Some(5000), ..prepared(1, Preparation::Grammar) });
    lab.add(prepared(2, Preparation::Grammar));
    lab.fork(2, 3);
    assert_eq!(lab.scheduler.wake_at(), Some(5000));
    lab.now = 5000;
    assert_eq!(lab.expire(), [1]);
    assert_eq!(lab.ended[&1].states[TimelineState::Grammar as usize], 5000);
    lab.abort(2);
    assert!(lab.try_step().is_none(), "the fork is not prepared");
    lab.prepare(3, None);
    lab.finish();
    assert_eq!(lab.ended[&3].finish, Some(FinishReason::Length));
}
