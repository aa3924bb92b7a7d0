//! Requests in the line, and what requests that end early, share a name or have forks leave in their sessions.

use crate::lab::{Cost, Lab, ask};
use crate::sessions::{SECOND, config, first_turns, lab, run, turn};
use chairlift_core::{Config, Fcfs, Preparation, Request, SessionEvent, SessionTurns, Tier, Token};

/// Two active sessions fill the cache.
fn two_active(config: Config) -> Lab {
    let mut lab = lab(config);
    first_turns(&mut lab, 2);
    lab
}

#[test]
fn forks_of_a_request_in_the_line_keep_no_session_from_coming_in() {
    // Sessions 1 and 2 always have a request. When does session 3 come in?
    let comes_in = |forks: &[(u64, u64)]| {
        let mut lab = two_active(config(&Fcfs));
        lab.check_every = 50;
        let (start, mut tag, mut open) = (lab.now, 10, Vec::new());
        for round in 0.. {
            open.retain(|(_, tag)| !lab.ended.contains_key(tag));
            for session in 1..3 {
                let count = open.iter().filter(|(of, _)| *of == session).count();
                if count == 0 || count == 1 && round % 5 == 0 {
                    tag += 1;
                    lab.add(turn(tag, session));
                    open.push((session, tag));
                }
            }
            if round == 20 {
                lab.add(turn(3, 3));
                lab.add(turn(4, 4));
                for &(parent, fork) in forks {
                    lab.fork(parent, fork);
                }
            }
            assert!(lab.now < start + 60 * SECOND, "{forks:?} keep it waiting");
            lab.step_or_wait();
            if lab.started.contains(&3) {
                break;
            }
        }
        lab.now - start
    };
    let alone = comes_in(&[]);
    // Forks of its own request, of another one that waits, and a fork of a fork.
    for forks in [vec![(3, 1003)], vec![(4, 1004)], vec![(3, 1003), (1003, 2003)]] {
        assert_eq!(comes_in(&forks), alone, "{forks:?}");
    }
}

#[test]
fn forks_in_the_line_run_when_their_parent_was_cancelled_and_leave_nothing_when_they_were() {
    for cancelled in [3, 1003] {
        let mut lab = two_active(config(&Fcfs));
        lab.add(turn(3, 3));
        lab.fork(3, 1003);
        lab.fork(1003, 2003);
        lab.abort(cancelled);
        lab.finish();
        let ended = [3, 1003, 2003].map(|tag| lab.ended[&tag].output_tokens);
        assert_eq!(ended, [3, 1003, 2003].map(|tag| if tag == cancelled { 0 } else { 10 }));
    }
}

#[test]
fn another_tenants_equal_answer_takes_no_session() {
    let mut lab = lab(Config { session_turns: SessionTurns::All, ..config(&Fcfs) });
    let first = Request { session: None, max_new_tokens: 30, ..turn(7, 7) };
    let continued = [first.prompt.clone(), vec![7; 30], vec![9; 5]].concat();
    lab.add(first.clone());
    run(&mut lab);
    lab.add(Request { tag: 70, tenant: "stranger".into(), ..first });
    run(&mut lab);
    first_turns(&mut lab, 2);
    lab.add(Request { prompt: continued, session: None, ..turn(8, 7) });
    run(&mut lab);
    assert!(!lab.started.contains(&8), "it waits for its session's turn");
    lab.finish();
}

/// A turn whose prompt takes 182 blocks and begins as no other does.
fn long_turn(tag: u64, session: u64) -> Request {
    Request { prompt: (0..2900).map(|at| 5_000_000 + at).collect(), ..turn(tag, session) }
}

/// A turn of 25 blocks.
fn short_turn(tag: u64, session: u64) -> Request {
    let mut request = turn(tag, session);
    request.prompt.truncate(400);
    request
}

#[test]
fn a_prompt_that_was_cancelled_in_the_line_keeps_no_later_one_waiting() {
    let mut lab = two_active(config(&Fcfs));
    lab.add(long_turn(3, 3));
    run(&mut lab);
    assert!(!lab.started.contains(&3));
    lab.abort(3);
    lab.add(short_turn(4, 3));
    run(&mut lab);
    assert!(lab.started.contains(&4), "it fits beside the active sessions");
    lab.finish();
}

#[test]
fn a_prompt_that_was_cancelled_in_the_line_takes_nobodys_turn() {
    let mut lab = two_active(config(&Fcfs));
    // Somebody waits.
    lab.add(turn(3, 3));
    run(&mut lab);
    let urgent = |request| Request { tier: Tier::Priority, ..request };
    lab.add(urgent(long_turn(4, 4)));
    lab.abort(4);
    lab.add(urgent(short_turn(5, 4)));
    for (tag, session) in [(6, 1), (7, 2)] {
        run(&mut lab);
        lab.add(turn(tag, session));
    }
    run(&mut lab);
    assert_eq!([5, 6, 7].map(|tag| lab.started.contains(&tag)), [true; 3]);
    lab.finish();
}

#[test]
fn a_session_has_its_context_again_when_the_prompt_that_continued_it_was_cancelled_in_the_line() {
    // Session 1 loses its turn to session 3, and sends a prompt that goes on for long.
    let mut lab = two_active(config(&Fcfs));
    lab.serve(turn(3, 3));
    let first = turn(4, 1);
    lab.add(Request { prompt: [first.prompt.clone(), (0..1500).collect()].concat(), ..first });
    run(&mut lab);
    assert!(!lab.started.contains(&4));
    lab.abort(4);
    assert!(lab.scheduler.note_session("", &"3".into(), SessionEvent::Ended, lab.now));
    for (tag, session) in [(5, 1), (6, 2)] {
        lab.add(turn(tag, session));
        run(&mut lab);
        assert!(lab.started.contains(&tag), "session 1 takes the place of session 3, and not that of session 2");
    }
    lab.finish();
}

/// A prompt of subagent `s` of session 1.
fn of_subagent(tag: u64, new: u32) -> Request {
    let prompt = [vec![77], vec![tag as Token; 300]].concat();
    Request { prompt, session: Some("s".into()), parent_session: Some("1".into()), max_new_tokens: new, ..turn(tag, 1) }
}

fn knows(lab: &mut Lab, name: &str) -> bool {
    lab.scheduler.note_session("", &name.into(), SessionEvent::AwaitsUser, lab.now)
}

#[test]
fn a_subagents_name_is_known_while_it_has_a_request() {
    let mut lab = two_active(config(&Fcfs));
    lab.add(of_subagent(3, 5));
    lab.add(of_subagent(4, 200));
    lab.step_until_ended(3);
    // The main agent goes on, so that the subagent's other thread is over.
    lab.add(turn(5, 1));
    lab.step();
    assert!(!lab.ended.contains_key(&4) && knows(&mut lab, "s"));
    // A request that does not name the main agent is one of the subagent, and no session of its own.
    lab.add(Request { parent_session: None, ..of_subagent(6, 5) });
    lab.step_until_ended(6);
    assert!(lab.scheduler.note_session("", &"1".into(), SessionEvent::Ended, lab.now));
    run(&mut lab);
    assert!(!knows(&mut lab, "s"), "it ended with its session");
}

#[test]
fn all_threads_of_a_subagent_end_with_it() {
    let mut lab = two_active(config(&Fcfs));
    let before = lab.scheduler.blocks_used().wanted;
    lab.add(of_subagent(3, 5));
    lab.add(of_subagent(4, 5));
    run(&mut lab);
    assert!(lab.scheduler.blocks_used().wanted > before);
    assert!(lab.scheduler.note_session("", &"s".into(), SessionEvent::Ended, lab.now));
    assert_eq!((lab.scheduler.blocks_used().wanted, knows(&mut lab, "s")), (before, false));
}

#[test]
fn requests_in_the_line_are_no_queued_work() {
    let predicted = |line: u64| {
        let mut lab = two_active(Config { gather: 10 * SECOND, max_num_seqs: 2, ..config(&Fcfs) });
        lab.cost = Cost(1000, 200, 10);
        for session in 10..10 + line {
            lab.add(turn(session, session));
            lab.fork(session, 1000 + session);
        }
        run(&mut lab);
        // Nothing runs: a request with a deadline waits for others, and for none in the line.
        lab.add(Request { ttft_deadline: Some(lab.now + 2 * SECOND), ..ask(5, 100, 300) });
        assert!(lab.try_step().is_none(), "{line} in the line");
        lab.now += SECOND;
        lab.step();
        assert_eq!(lab.started, [1, 2, 5], "{line} in the line");
        let next = lab.scheduler.next_step();
        lab.add(ask(6, 100, 300));
        lab.step();
        // Both slots are taken.
        lab.add(ask(7, 10, 300));
        lab.step();
        (lab.scheduler.predicted_wait(), next)
    };
    let alone = predicted(0);
    assert!(alone.0 > 0);
    assert_eq!(predicted(20), alone);
}

#[test]
fn forks_of_a_request_whose_grammar_is_compiled_belong_to_its_session() {
    let mut lab = lab(config(&Fcfs));
    lab.add(Request { preparation: Some(Preparation::Grammar), max_new_tokens: 200, ..turn(1, 1) });
    lab.fork(1, 1001);
    lab.fork(1001, 2001);
    lab.prepare(1, None);
    while !lab.started.contains(&2001) {
        lab.step();
    }
    // The three answers share the blocks of the prompt, so that the context of another session fits.
    lab.add(turn(2, 2));
    lab.step();
    assert!(lab.started.contains(&2), "{:?}", lab.explain(2));
    lab.finish();
}

#[test]
fn forks_wait_for_their_session_s_turn_after_their_grammar_is_compiled() {
    for cancelled in [3, 1003] {
        let mut lab = two_active(config(&Fcfs));
        lab.add(Request { preparation: Some(Preparation::Grammar), ..turn(3, 3) });
        lab.fork(3, 1003);
        lab.fork(1003, 2003);
        lab.prepare(3, None);
        assert!(lab.try_step().is_none(), "they wait for the turn");
        lab.abort(cancelled);
        lab.finish();
        let ended = [3, 1003, 2003].map(|tag| lab.ended[&tag].output_tokens);
        assert_eq!(ended, [3, 1003, 2003].map(|tag| if tag == cancelled { 0 } else { 10 }));
    }
}

#[test]
fn forks_wait_for_their_session_s_turn_if_their_request_is_cancelled_while_its_grammar_is_compiled() {
    let mut lab = two_active(config(&Fcfs));
    lab.add(Request { preparation: Some(Preparation::Grammar), ..turn(3, 3) });
    lab.fork(3, 1003);
    lab.fork(1003, 2003);
    lab.abort(3);
    for fork in [1003, 2003] {
        lab.prepare(fork, None);
        assert!(lab.try_step().is_none(), "{fork} waits for the turn");
    }
    lab.finish();
    assert_eq!([1003, 2003].map(|tag| lab.ended[&tag].output_tokens), [10, 10]);
}

#[test]
fn a_request_that_is_cancelled_in_the_queue_leaves_its_session_as_it_was() {
    for runs in [false, true] {
        let mut lab = lab(config(&Fcfs));
        lab.add(short_turn(1, 1));
        lab.finish();
        let mut long = long_turn(2, 1);
        long.prompt.truncate(2400);
        lab.add(long);
        if runs {
            lab.step();
        }
        lab.abort(2);
        lab.add(turn(3, 3));
        run(&mut lab);
        assert_eq!(lab.started.contains(&3), !runs, "150 blocks are in the cache only if the request ran");
    }
}
