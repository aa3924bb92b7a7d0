//! Limits of the queue, and which waiting requests the scheduler considers.

use crate::lab::{Cost, Lab, ask, plenty, stem};
use chairlift_core::{Config, ConfigError, Fcfs, Outputs, Priority, Rejected, Request, Scheduler, TimelineState};

#[test]
fn a_step_has_a_token_for_every_sequence() {
    let config = |max_seqs| Config { max_num_batched_tokens: 4, max_num_seqs: max_seqs, ..plenty(&Fcfs) };
    assert!(Scheduler::new(config(4)).is_ok());
    assert_eq!(Scheduler::new(config(5)).err(), Some(ConfigError::TooManySeqs { max_num_seqs: 5, max_num_batched_tokens: 4 }));
}

/// Twenty blocks of 16 tokens. Request 1 has filled ten of them and ended, so they are cached and free.
fn half_full(config: Config) -> Lab {
    let mut lab = Lab::new(Config { num_kv_blocks: 21, ..config });
    lab.add(ask(1, 150, 1));
    // A running request would grow. Request 1 generates one token and ends with this step.
    lab.step();
    lab
}

#[test]
fn the_queue_holds_as_many_requests_as_it_may_and_not_one_more() {
    let mut lab = Lab::new(Config { max_num_queued_reqs: 3, max_num_seqs: 1, ..plenty(&Fcfs) });
    (1..=3).for_each(|tag| lab.add(ask(tag, 10, 5)));
    for tag in 4..=5 {
        let full = Rejected::QueueFull { what: "requests", queued: 4, limit: 3, retry_after: 0 };
        assert_eq!(lab.try_add(ask(tag, 10, 5)), Err(full));
    }
    // One request starts and one leaves, so two more may wait.
    lab.step();
    lab.abort(3);
    lab.add(ask(6, 10, 5));
    lab.add(ask(7, 10, 5));
    assert!(lab.try_add(ask(8, 10, 5)).is_err());
    // Forks do not count as requests.
    (20..25).for_each(|tag| lab.fork(2, tag));
    assert_eq!(lab.scheduler.stats().counters.rejected_queue_full, 3);
    lab.abort(7);
    lab.add(ask(9, 10, 5));
    assert!(lab.try_add(ask(10, 10, 5)).is_err());
    lab.finish();
}

#[test]
fn the_queue_holds_as_many_prompt_tokens_as_it_may_and_not_one_more() {
    let mut lab = Lab::new(Config { max_num_queued_tokens: 100, max_num_batched_tokens: 50, max_num_seqs: 1, ..plenty(&Fcfs) });
    lab.add(ask(1, 60, 5));
    let full = |queued| Err(Rejected::QueueFull { what: "prompt tokens", queued, limit: 100, retry_after: 0 });
    assert_eq!(lab.try_add(ask(2, 41, 5)), full(101));
    lab.add(ask(3, 40, 5));
    assert_eq!(lab.try_add(ask(4, 1, 5)), full(101));
    assert_eq!(lab.scheduler.stats().queued_prompt_tokens, 100);
    // Request 1 has started, although only 50 of its 60 tokens are computed.
    lab.step();
    assert_eq!(lab.scheduler.stats().queued_prompt_tokens, 40);
    lab.fork(3, 5);
    lab.add(ask(6, 60, 5));
    assert_eq!(lab.try_add(ask(7, 1, 5)), full(101));
    lab.finish();
    assert_eq!(lab.scheduler.stats().queued_prompt_tokens, 0);
}

#[test]
fn who_was_preempted_takes_nobodys_place_in_the_queue() {
    let mut lab = Lab::new(Config { max_num_queued_reqs: 1, max_num_seqs: 1, ..plenty(&Priority) });
    lab.add(Request { priority: 1, ..ask(1, 10, 50) });
    lab.step();
    lab.add(ask(2, 10, 5));
    assert_eq!(lab.step().preempted, [1]);
    lab.add(ask(3, 10, 5));
    assert!(lab.try_add(ask(4, 10, 5)).is_err());
    lab.finish();
}

#[test]
fn a_refused_request_hears_how_long_those_before_it_will_take() {
    let mut lab = Lab::taught(Config { max_num_queued_reqs: 10, max_num_seqs: 1, ..plenty(&Fcfs) }, Cost(1000, 0, 0));
    for tag in 1..=200 {
        lab.add(ask(tag, 10, 20));
        lab.step_until_ended(tag);
    }
    (301..=310).for_each(|tag| lab.add(ask(tag, 10, 20)));
    let Err(Rejected::QueueFull { retry_after, .. }) = lab.try_add(ask(311, 10, 20)) else { panic!("there was room") };
    // Ten requests of twenty steps, one millisecond per step.
    assert!((190_000..=220_000).contains(&retry_after), "{retry_after}");
    assert_eq!(lab.scheduler.stats().predicted_wait, retry_after);
}

#[test]
fn the_predicted_wait_knows_how_far_those_that_run_have_come() {
    let mut lab = Lab::taught(Config { max_num_seqs: 2, ..plenty(&Fcfs) }, Cost(1000, 0, 0));
    for tag in 1..=200 {
        lab.add(ask(tag, 10, 20));
        lab.step_until_ended(tag);
    }
    let wait = |lab: &Lab| lab.scheduler.stats().predicted_wait;
    (301..=302).for_each(|tag| lab.add(ask(tag, 10, 500)));
    for _ in 0..5 {
        lab.step();
    }
    // Outputs have twenty tokens. The two running requests have five each. The next request waits for one of them, and
    // the third for another.
    assert!((14_000..=17_000).contains(&wait(&lab)), "{}", wait(&lab));
    (303..=304).for_each(|tag| lab.add(ask(tag, 10, 500)));
    assert!((33_000..=38_000).contains(&wait(&lab)), "{}", wait(&lab));
}

#[test]
fn the_next_step_is_predicted_with_the_prompts_that_it_begins() {
    let mut lab = Lab::new(Config { max_num_seqs: 4, max_num_batched_tokens: 300, ..plenty(&Fcfs) });
    lab.cost = Cost(1000, 10, 100);
    lab.add(ask(1, 100, 1));
    assert_eq!(lab.scheduler.next_step(), None, "nothing is known yet");
    for tag in 2..200 {
        lab.add(ask(tag, 20 + tag as u32 % 60, 6));
        lab.steps(2 + tag as u32 % 4);
    }
    lab.finish_requests();
    let mut check = |requests: &[(u64, u32)], begins| {
        for &(tag, prompt) in requests {
            lab.add(ask(tag, prompt, 500));
        }
        let (predicted, begun) = lab.scheduler.next_step().expect("steps were observed");
        let before = lab.now;
        let admitted = lab.step().admitted.len();
        let took = lab.now - before;
        assert!(predicted.abs_diff(took) <= took / 5, "{predicted} instead of {took} us");
        assert_eq!((begun, admitted), (begins, begins as usize));
    };
    check(&[(501, 40)], 1);
    check(&[], 0);
    check(&[(502, 80), (503, 80)], 2);
    // There is one slot left.
    check(&[(504, 60), (505, 60)], 1);
    check(&[], 0);
}

#[test]
fn before_any_output_has_ended_it_is_taken_to_be_as_long_as_it_may() {
    let mut lab = Lab::new(Config { max_num_seqs: 1, ..plenty(&Fcfs) });
    lab.add(ask(1, 10, 120));
    for _ in 0..100 {
        lab.step();
    }
    let wait = lab.scheduler.stats().predicted_wait;
    assert!((18_000..=22_000).contains(&wait), "{wait}");
}

#[test]
fn a_request_that_could_never_run_is_refused_with_what_would_fit() {
    let mut lab = Lab::new(Config { num_kv_blocks: 11, max_model_len: 1000, ..plenty(&Fcfs) });
    // Ten blocks hold 160 tokens, and the last token needs no KV.
    assert_eq!(lab.try_add(ask(1, 100, 62)), Err(Rejected::NeverFits { needed: 11, have: 10, fits: 161 }));
    lab.add(ask(1, 100, 61));
    assert_eq!(lab.try_add(ask(2, 940, 61)), Err(Rejected::TooLong { prompt: 940, new: 61, limit: 1000 }));
    lab.finish();
}

#[test]
fn blocks_stay_free_for_those_that_run() {
    // Of twenty blocks, the first request has ten and two must stay free. Eight are left for the second request.
    for (prompt, starts) in [(8 * 16, true), (8 * 16 + 1, false)] {
        let mut lab = Lab::new(Config { num_kv_blocks: 21, watermark: 2, ..plenty(&Fcfs) });
        lab.add(ask(1, 160, 9));
        lab.add(ask(2, prompt, 9));
        assert_eq!(lab.step().admitted.contains(&2), starts, "with a prompt of {prompt}");
    }
    // A request that runs alone may use all blocks.
    let mut lab = Lab::new(Config { num_kv_blocks: 21, watermark: 2, ..plenty(&Fcfs) });
    lab.add(ask(1, 320, 1));
    assert_eq!(lab.step().admitted, [1]);
}

/// Request 1 holds 10 of 20 blocks for 60 steps and request 2 needs 15. 600 requests of one block and one step follow.
fn blocked_head(ageing: u64) -> Lab {
    let mut lab = Lab::new(Config { num_kv_blocks: 21, queue_ageing: ageing, enable_prefix_caching: false, ..plenty(&Fcfs) });
    lab.add(ask(1, 100, 60));
    lab.step();
    lab.add(ask(2, 240, 3));
    (1000..1600).for_each(|tag| lab.add(ask(tag, 8, 1)));
    lab
}

#[test]
fn a_request_that_does_not_fit_lets_256_others_pass() {
    let mut lab = blocked_head(10_000_000);
    lab.step_until_started(2);
    // Request 2 started when request 1 ended, in step 61, although small requests could have bypassed it all the time.
    let before = lab.started.iter().take_while(|tag| **tag != 2).filter(|tag| **tag >= 1000).count();
    assert!(lab.ended.contains_key(&1));
    assert_eq!(before, 256);
    assert_eq!(lab.explain(2).limit(), Some(TimelineState::WaitBlocks));
    lab.finish();
}

#[test]
fn a_request_that_does_not_fit_lets_others_pass_for_its_ageing_bound() {
    let mut lab = blocked_head(10_000);
    let from = lab.now;
    let mut last = 0;
    while !lab.started.contains(&2) {
        let now = lab.now;
        let admitted = lab.step().admitted;
        if !admitted.contains(&2) && !admitted.is_empty() {
            last = now;
        }
    }
    // From the first step that begins more than 10 ms after its first rejection, no request bypasses it.
    assert_eq!(last, from + 10_000);
    lab.finish();
}

#[test]
fn sixty_four_that_do_not_fit_are_looked_past_and_no_more() {
    for (large, starts) in [(63, true), (64, false)] {
        let mut lab = half_full(plenty(&Fcfs));
        lab.add(ask(2, 150, 30));
        lab.step();
        (100..100 + large).for_each(|tag| lab.add(ask(tag, 240, 3)));
        lab.add(ask(3, 8, 1));
        assert_eq!(lab.step().admitted.contains(&3), starts, "behind {large}");
    }
}

#[test]
fn prompts_are_cut_to_what_the_target_leaves() {
    // 0.88 of 3000 us: 1000 for the step and 500 for five decodes leave 1140, or 114 prompt tokens of 10 us.
    let mut lab = Lab::taught(Config { target_itl: 3000, ..plenty(&Fcfs) }, Cost(1000, 10, 100));
    (1..=5).for_each(|tag| lab.add(ask(tag, 10, 50)));
    lab.steps(2);
    lab.add(ask(6, 5000, 1));
    for _ in 0..5 {
        let step = lab.step();
        let (tag, piece) = step.chunks[5];
        assert!(tag == 6 && (108..=120).contains(&piece), "{piece}");
    }
    let predicted = lab.scheduler.stats().predicted_step;
    assert!((2540..=2660).contains(&predicted), "{predicted}");
    assert_eq!(lab.scheduler.next_step(), Some((3000, 0)));
}

#[test]
fn a_draft_in_flight_is_no_prompt() {
    let mut lab = Lab::taught(plenty(&Fcfs), Cost(1000, 10, 100));
    lab.add(ask(1, 10, 50));
    lab.steps(2);
    let before = lab.scheduler.next_step().expect("steps were observed").0;
    lab.draft(1, 4);
    let plan = lab.scheduler.plan(lab.now).expect("it decodes");
    let (after, _) = lab.scheduler.next_step().expect("steps were observed");
    assert_eq!((lab.scheduler.prefill_backlog(), after.abs_diff(before) < 100), (0, true), "{before} and {after}");
    lab.scheduler.commit(plan, &[7; 5], lab.now, &mut Outputs::default());
}

#[test]
fn a_target_too_low_for_anything_leaves_prompts_a_part_of_the_step() {
    let mut lab = Lab::taught(Config { target_itl: 100, ..plenty(&Fcfs) }, Cost(1000, 10, 100));
    lab.add(ask(1, 100, 1));
    // 0.15 of the 1000 us that a step takes without prompts.
    let chunks = lab.step().chunks;
    assert!(chunks.len() == 1 && (14..=16).contains(&chunks[0].1), "{chunks:?}");
    // The model of a new machine is unknown, so prompts start with 64 tokens.
    let mut lab = Lab::new(Config { target_itl: 100, ..plenty(&Fcfs) });
    lab.add(ask(1, 100, 1));
    assert_eq!(lab.step().chunks, [(1, 64)]);
}

#[test]
fn what_a_request_needs_is_measured_anew_as_the_cache_fills() {
    // Thirty blocks of 128 tokens, so that no sequence grows in a hundred steps.
    let mut lab = Lab::new(Config { num_kv_blocks: 31, block_size: 128, max_num_batched_tokens: 4096, ..plenty(&Fcfs) });
    // Ten and six blocks are in use. Request 3 needs 19. Request 4 shares the first ten blocks, needs one more and
    // bypasses request 3.
    lab.add(ask(1, 1153, 120));
    lab.add(ask(2, 760, 5));
    lab.step();
    lab.add(stem(1, 3, 1280, 19 * 128, 1));
    lab.add(stem(1, 4, 1280, 1281, 120));
    assert_eq!(lab.step().admitted, [4]);
    // When request 2 has ended, nine blocks are free: enough for the uncached part of request 3.
    lab.step_until_started(3);
    assert_eq!((lab.explain(3).cached_tokens, lab.explain(1).finish, lab.explain(4).finish), (1280, None, None));
    // The request is not measured in every step, because measuring takes time proportional to its prompt. It is
    // measured in one step of 64.
    assert!(lab.now <= 5000 + 65_000, "{}", lab.now);
}

#[test]
fn a_closed_queue_admits_nothing_while_others_run() {
    for policy in [&Fcfs as &dyn chairlift_core::Policy, &Priority] {
        let mut lab = Lab::new(Config { queue_ageing: 1000, max_num_seqs: 2, ..plenty(policy) });
        lab.scheduler.close_queue(true, lab.now);
        lab.add(ask(1, 10, 9));
        lab.add(Request { priority: -1, ..ask(2, 10, 3) });
        lab.add(Request { priority: -1, ..ask(3, 10, 3) });
        // Nothing runs, so the queue is not closed yet. A request is neither admitted for its age nor for its priority.
        let first = lab.step().admitted;
        assert_eq!(first.len(), 1, "{}", policy.name());
        for _ in 0..2 {
            let step = lab.step();
            assert_eq!((step.admitted, step.preempted), (vec![], vec![]), "{}", policy.name());
        }
        lab.scheduler.close_queue(false, lab.now);
        assert!(!lab.step().admitted.is_empty(), "{}", policy.name());
        lab.scheduler.close_queue(true, lab.now);
        lab.finish();
        assert_eq!(lab.ended.len(), 3, "{}", policy.name());
    }
}
