//! A request that an engine lost goes on in another one: its answer counts as output, and nothing counts twice.

use crate::lab::{Lab, ask, plenty};
use chairlift_core::{Config, Fair, Fcfs, FinishReason, Rejected, Request, Resumed, Time, TimelineState};

const ANSWERED: u32 = 5;

/// A request of 20 prompt tokens whose last 5 tokens are its answer so far.
fn lost(tag: u64, new: u32) -> Request {
    let resumed =
        Resumed { answered: ANSWERED, cached_tokens: 4, own_cached_tokens: 3, submitted: 1_000, started: 3_000, first_token: Some(5_000) };
    Request { resumed: Some(resumed), ..ask(tag, 20 + ANSWERED, new) }
}

fn at(now: Time, config: Config) -> Lab {
    let mut lab = Lab::new(config);
    lab.now = now;
    lab
}

#[test]
fn its_answer_is_output_and_its_first_events_are_those_of_the_first_engine() {
    let mut lab = at(50_000, plenty(&Fcfs));
    lab.serve(lost(1, 12));
    let timeline = &lab.ended[&1];
    assert_eq!((timeline.finish, timeline.prompt_tokens, timeline.output_tokens), (Some(FinishReason::Length), 20, 12));
    assert_eq!((timeline.submitted, timeline.started, timeline.first_token), (1_000, Some(3_000), Some(5_000)));
    assert_eq!((timeline.queued(), timeline.cached_tokens, timeline.own_cached_tokens), (2_000, 4, 3));
    assert_eq!((timeline.recomputed_tokens, timeline.states[TimelineState::Prefill as usize]), (25, 0));
    assert!(timeline.states[TimelineState::Recompute as usize] > 0);
}

#[test]
fn it_is_counted_once_and_not_charged_again() {
    let mut lab = at(50_000, plenty(&Fair));
    lab.add(lost(1, 12));
    lab.step();
    let counters = lab.scheduler.stats().counters;
    assert_eq!((counters.prompt_tokens, counters.prefix_queries, counters.recomputed_tokens), (0, 0, 25));
    lab.finish();
    assert_eq!(lab.scheduler.stats().counters.generated_tokens, 7);
}

#[test]
fn no_limit_of_the_queue_refuses_it() {
    let mut lab = at(50_000, Config { max_num_queued_reqs: 1, max_num_seqs: 1, ..plenty(&Fcfs) });
    lab.add(ask(1, 10, 5));
    lab.add(lost(2, 12));
    lab.add(lost(3, 12));
    assert!(matches!(lab.try_add(ask(4, 10, 5)), Err(Rejected::QueueFull { .. })));
    lab.finish();
    assert_eq!(lab.ended.len(), 3);
}

#[test]
fn a_deadline_for_the_first_token_was_met_already() {
    let mut lab = at(50_000, plenty(&Fcfs));
    lab.add(Request { ttft_deadline: Some(10_000), ..lost(1, 12) });
    assert!(lab.expire().is_empty());
    lab.add(Request { deadline: Some(10_000), ..lost(2, 12) });
    assert_eq!(lab.expire(), [2]);
}

#[test]
fn an_answer_that_is_complete_is_refused() {
    let mut lab = at(50_000, plenty(&Fcfs));
    assert!(matches!(lab.try_add(lost(1, ANSWERED)), Err(Rejected::NoNewTokens)));
    assert!(matches!(lab.try_add(Request { prompt: vec![1; 5], ..lost(1, 12) }), Err(Rejected::EmptyPrompt)));
}
