//! Sessions take turns when their contexts do not fit into the cache together.

use crate::lab::{Cost, Lab, ask, plenty};
use chairlift_core::{
    Config, Continues, Fair, Fcfs, Policy, Request, SessionEvent, SessionTurns, Taker, Tier, Time, Timeline, TimelineState, Token, Vtc,
};
use std::collections::HashMap;
use std::sync::Arc;

pub(crate) const SECOND: Time = 1_000_000;
/// Prompt tokens of a turn: 75 blocks with its output. Two contexts fit into the cache, and three do not.
pub(crate) const PROMPT: u32 = 1190;
const FOREVER: Time = 1 << 50;

pub(crate) fn config(policy: &'static dyn Policy) -> Config {
    Config { num_kv_blocks: 201, max_num_seqs: 8, max_session_wait: FOREVER, ..plenty(policy) }
}

/// A step takes a millisecond, and as much more for each prompt token: a context takes 1.2 s.
pub(crate) fn lab(config: Config) -> Lab {
    Lab::taught(config, Cost(1000, 1000, 10))
}

/// A turn of the session with this number, whose prompt is the same in each turn.
pub(crate) fn turn(tag: u64, session: u64) -> Request {
    let prompt = (0..PROMPT).map(|at| if at == 0 { 3_000_000 + session as Token } else { 10 }).collect();
    Request { prompt, session: Some(session.to_string().into()), ..ask(tag, 1, 10) }
}

fn waited(lab: &Lab, tag: u64) -> Time {
    lab.explain(tag).states[TimelineState::WaitSession as usize]
}

/// Runs until all requests but those of parked sessions have ended.
pub(crate) fn run(lab: &mut Lab) {
    while lab.try_step().is_some() {}
}

/// Each session's first turn, one after the other.
pub(crate) fn first_turns(lab: &mut Lab, sessions: u64) {
    for session in 1..=sessions {
        lab.add(turn(session, session));
        run(lab);
    }
}

/// Sessions 1 and 2 are active and quiet, and session 3 was not served. The next tag is 4.
fn two_of_three(config: Config) -> Lab {
    let mut lab = lab(config);
    first_turns(&mut lab, 3);
    assert_eq!([1, 2, 3].map(|tag| lab.ended.contains_key(&tag)), [true, true, false]);
    lab
}

#[test]
fn active_sessions_find_their_contexts_while_a_parked_one_waits() {
    let mut lab = two_of_three(config(&Fcfs));
    for tag in 4..14 {
        lab.add(turn(tag, 1 + tag % 2));
        run(&mut lab);
        assert!(lab.ended[&tag].cached_tokens >= PROMPT - 16, "{:?}", lab.ended[&tag]);
    }
    assert_eq!(lab.scheduler.stats().waiting_by_state[TimelineState::WaitSession as usize], 1);
    lab.finish();
    assert!(waited(&lab, 3) > 0);
    // Without turns, each prompt evicts what the next one needs.
    let mut lab = self::lab(Config { session_turns: SessionTurns::Off, ..config(&Fcfs) });
    first_turns(&mut lab, 3);
    for tag in 4..14 {
        lab.add(turn(tag, 1 + (tag - 4) % 3));
        run(&mut lab);
        assert!(lab.ended[&tag].cached_tokens < PROMPT - 300, "{:?}", lab.ended[&tag]);
    }
}

#[test]
fn a_session_that_was_active_for_five_reloads_makes_room() {
    let mut lab = two_of_three(config(&Fcfs));
    let (began, reload) = (lab.ended[&1].arrived, 1_200_000);
    lab.finish();
    let came_in = lab.ended[&3].started.expect("it was served");
    assert!((5 * reload..7 * reload).contains(&(came_in - began)), "{}", came_in - began);
    // Session 1 made room. Its next turn computes its context again, once session 2 has made room for it.
    lab.add(turn(4, 2));
    lab.step();
    lab.serve(turn(5, 1));
    assert!(lab.ended[&4].cached_tokens > 0 && waited(&lab, 4) == 0);
    assert!(lab.ended[&5].cached_tokens < lab.ended[&4].cached_tokens && waited(&lab, 5) > 0);
}

#[test]
fn turns_last_by_what_prompts_take_at_another_server() {
    let mut lab = lab(config(&Fcfs));
    // Three times as long as here.
    lab.scheduler.set_upstream_token_time(3_000_000, lab.now);
    first_turns(&mut lab, 3);
    lab.finish();
    let turn = lab.ended[&3].started.expect("it was served") - lab.ended[&1].arrived;
    assert!((5 * 3_600_000..6 * 3_600_000).contains(&turn), "{turn}");
}

#[test]
fn a_reload_longer_than_the_saved_time_gets_in() {
    // A context takes 120 s, and at most 60 s may be saved up.
    let mut lab = Lab::taught(config(&Fcfs), Cost(1000, 100_000, 10));
    for round in 0..3 {
        for session in 1..4 {
            lab.add(turn(10 * round + session, session));
        }
        lab.finish();
    }
    assert_eq!(lab.ended.len(), 9);
    assert!((21..24).any(|tag| lab.ended[&tag].cached_tokens < PROMPT - 300 && waited(&lab, tag) > 0), "one was parked");
}

#[test]
fn a_request_waits_for_its_turn_no_longer_than_the_limit_and_half_of_its_deadline() {
    for (limit, deadline, longest) in [(30 * SECOND, None, 30 * SECOND), (FOREVER, Some(20 * SECOND), 10 * SECOND)] {
        // Reloads take so long that no session makes room before.
        let mut lab = Lab::taught(Config { max_session_wait: limit, ..config(&Fcfs) }, Cost(1000, 10_000, 10));
        first_turns(&mut lab, 2);
        let came = lab.now;
        lab.add(Request { ttft_deadline: deadline.map(|within| came + within), ..turn(3, 3) });
        while !lab.started.contains(&3) {
            // The active sessions go on.
            let tag = 4 + lab.started.len() as u64;
            if lab.scheduler.stats().running == 0 {
                lab.add(turn(tag, 1 + tag % 2));
            }
            lab.step_or_wait();
        }
        let waited = waited(&lab, 3);
        assert!((longest..longest + SECOND).contains(&waited), "{waited} of {longest}");
    }
}

#[test]
fn a_session_with_few_requests_comes_in_before_one_with_many() {
    for (requests, first) in [(1, 5), (20, 6)] {
        let mut lab = lab(Config { max_session_wait: 64 * SECOND, ..config(&Fcfs) });
        for tag in 0..requests {
            lab.add(turn(100 + tag, 3));
            run(&mut lab);
        }
        for session in 1..3 {
            lab.add(turn(session, session));
            lab.finish();
        }
        // Session 3 has made room. Its next request comes two seconds before that of a session that is new. Each request counts as one.
        lab.add(turn(5, 3));
        lab.now += 2 * SECOND;
        lab.add(turn(6, 4));
        lab.finish();
        let came_in = lab.started.iter().copied().find(|&tag| tag == 5 || tag == 6);
        assert_eq!(came_in, Some(first), "after {requests} requests");
    }
}

#[test]
fn a_more_urgent_tier_takes_the_place_of_a_less_urgent_one() {
    let mut lab = two_of_three(config(&Fcfs));
    lab.add(Request { tier: Tier::Priority, ..turn(4, 4) });
    lab.step();
    assert!(lab.started.contains(&4) && !lab.started.contains(&3));
}

#[test]
fn tenants_with_less_service_come_in_first_where_tenants_take_turns() {
    let of = |tag, session, tenant: &str| Request { tenant: tenant.into(), ..turn(tag, session) };
    for (policy, first) in [(&Fcfs as &dyn Policy, 3), (&Fair, 4)] {
        let mut lab = lab(config(policy));
        for session in 1..4 {
            lab.add(of(session, session, "a"));
            run(&mut lab);
        }
        lab.serve(of(4, 4, "b"));
        let started: Vec<_> = lab.started.iter().copied().filter(|&tag| tag > 2).collect();
        assert_eq!(started[0], first, "{policy:?}");
    }
}

#[test]
fn equal_names_of_two_tenants_are_two_sessions() {
    let mut lab = two_of_three(config(&Fcfs));
    lab.add(Request { tenant: "stranger".into(), ..turn(4, 1) });
    assert!(lab.try_step().is_none(), "another tenant's session of that name is active");
    lab.add(turn(5, 1));
    lab.step();
    assert!(lab.started.contains(&5));
    assert!(!lab.scheduler.note_session("stranger", &"2".into(), SessionEvent::Ended, lab.now), "it is unknown to this tenant");
    run(&mut lab);
    assert!(!lab.started.contains(&3));
}

#[test]
fn the_session_that_was_quiet_for_the_longest_time_makes_room_and_users_count_for_a_minute() {
    for (between, makes_room) in [(50, 2), (70, 1)] {
        let mut lab = lab(config(&Fcfs));
        lab.serve(turn(1, 1));
        lab.now += between * SECOND;
        lab.serve(turn(2, 2));
        assert!(lab.scheduler.note_session("", &"2".into(), SessionEvent::AwaitsUser, lab.now));
        lab.now += 70 * SECOND;
        lab.serve(turn(3, 3));
        for (tag, session) in [(4, 3 - makes_room), (5, makes_room)] {
            lab.add(turn(tag, session));
            lab.step();
        }
        assert_eq!((waited(&lab, 3), waited(&lab, 4), waited(&lab, 5) > 0), (0, 0, true), "after {between} s");
        lab.finish();
        assert!(lab.ended[&4].cached_tokens >= PROMPT - 16, "after {between} s: {:?}", lab.ended[&4]);
    }
}

#[test]
fn a_context_that_grows_takes_the_room_of_the_session_whose_turn_began_first() {
    let mut lab = lab(config(&Fcfs));
    let long = |tag, session, blocks: u32| {
        let request = turn(tag, session);
        let last = *request.prompt.last().expect("a prompt");
        let mut prompt = request.prompt[..request.prompt.len().min(16 * blocks as usize)].to_vec();
        prompt.resize(16 * blocks as usize, last);
        Request { prompt, ..request }
    };
    for session in 1..4 {
        lab.serve(long(session, session, 50));
    }
    // 50 + 50 + 110 blocks are more than there are.
    lab.serve(long(4, 3, 110));
    for (tag, session) in [(5, 2), (6, 1)] {
        lab.add(long(tag, session, 50));
        lab.step();
    }
    assert_eq!([5, 6].map(|tag| waited(&lab, tag) > 0), [false, true]);
    lab.finish();
}

#[test]
fn a_session_that_has_ended_makes_room() {
    let mut lab = two_of_three(config(&Fcfs));
    assert!(lab.scheduler.note_session("", &"2".into(), SessionEvent::Ended, lab.now));
    lab.step();
    assert!(lab.started.contains(&3));
    assert!(!lab.scheduler.note_session("", &"2".into(), SessionEvent::AwaitsUser, lab.now), "it was forgotten");
}

#[test]
fn a_session_that_ended_before_its_last_request_leaves_its_blocks_to_nobody() {
    let mut lab = lab(config(&Fcfs));
    lab.add(turn(1, 1));
    lab.step();
    assert!(lab.scheduler.note_session("", &"1".into(), SessionEvent::Ended, lab.now));
    lab.step_until_ended(1);
    // The new session may get the number of the old one as an owner of blocks.
    lab.add(turn(2, 2));
    lab.step_until_ended(2);
    lab.finish();
}

#[test]
fn subagents_share_the_turn_of_the_session_that_began_them() {
    let mut lab = two_of_three(config(&Fcfs));
    for tag in 4..12 {
        // They begin as the main agent's prompt does, so eight of them need few blocks more.
        let subagent = Some(format!("1.{tag}").into());
        let mut request = Request { session: subagent, parent_session: Some("1".into()), ..turn(tag, 1) };
        request.prompt.truncate(800);
        request.prompt.push(tag as Token);
        lab.add(request);
    }
    run(&mut lab);
    assert!((4..12).all(|tag| lab.ended[&tag].cached_tokens == 800));
    lab.add(turn(12, 2));
    run(&mut lab);
    assert!(lab.ended[&12].cached_tokens > 0, "session 2 kept its turn");
}

#[test]
fn a_prompt_that_continues_an_answer_belongs_to_its_session() {
    for (turns, waits) in [(SessionTurns::All, true), (SessionTurns::Named, false)] {
        let mut lab = lab(Config { session_turns: turns, ..config(&Fcfs) });
        // The answer of 30 tokens fills a block of its own.
        let first = Request { session: None, max_new_tokens: 30, ..turn(7, 7) };
        let continued = [first.prompt.clone(), vec![7; 30], vec![9; 5]].concat();
        lab.add(first);
        run(&mut lab);
        first_turns(&mut lab, 2);
        lab.add(Request { prompt: continued, session: None, ..turn(8, 7) });
        run(&mut lab);
        assert_eq!(lab.started.contains(&8), !waits);
        lab.finish();
    }
}

#[test]
fn loads_without_sessions_decide_as_without_turns() {
    let decisions = |turns| {
        let mut lab = lab(Config { num_kv_blocks: 60, session_turns: turns, ..config(&Fcfs) });
        let mut steps = Vec::new();
        for tag in 0..200 {
            let prompt = 20 + tag as u32 * 37 % 400;
            lab.add(Request { prompt: turn(tag, tag % 5).prompt[..prompt as usize].to_vec(), ..ask(tag, 1, 1 + tag as u32 % 9) });
            steps.extend((0..tag % 3).filter_map(|_| lab.try_step()).map(|step| (step.chunks, step.preempted)));
        }
        lab.finish();
        (steps, lab.scheduler.stats().counters)
    };
    let off = decisions(SessionTurns::Off);
    assert!(decisions(SessionTurns::Named) == off);
}

#[test]
fn the_expected_wait_is_what_those_before_took_and_never_more_than_the_limit() {
    let mut lab = two_of_three(Config { max_session_wait: 30 * SECOND, ..config(&Fcfs) });
    lab.add(turn(4, 4));
    let waits = |lab: &Lab| [3, 4].map(|tag| lab.scheduler.session_wait(lab.scheduler.live(tag).expect("it lives")));
    let [first, second] = waits(&lab).map(|wait| wait.expect("it waits"));
    // A reload of 1.2 s may take 15 % of the time: one session in 8 s.
    assert!((7 * SECOND..9 * SECOND).contains(&first.expected), "{first:?}");
    assert!((15 * SECOND..18 * SECOND).contains(&second.expected), "{second:?}");
    assert_eq!(second.longest, lab.explain(4).arrived + 30 * SECOND - lab.now);
    while !lab.ended.contains_key(&3) {
        lab.step_or_wait();
    }
    // Session 3 waited for less than that, and the next one is expected to take as long.
    lab.add(turn(5, 5));
    let wait = lab.scheduler.session_wait(lab.scheduler.live(5).expect("it lives")).expect("it waits");
    assert_eq!(lab.scheduler.session_wait(lab.scheduler.live(1).unwrap_or_default()), None, "it has ended");
    let took = waited(&lab, 3);
    assert!(took < first.expected && (took / 2..2 * took).contains(&wait.expected), "{} after {took}", wait.expected);
}

#[test]
fn evicted_blocks_are_counted_by_whom_they_were_evicted_for() {
    let stranger = |tag, session| Request { tenant: "stranger".into(), ..turn(tag, session) };
    let without = |tag| Request { session: None, ..turn(tag, 90 + tag) };
    for (taker, other) in [(Taker::SameTenant, turn(2, 2)), (Taker::OtherTenant, stranger(2, 2)), (Taker::NoSession, without(2))] {
        // A context takes 75 of 100 blocks, so that one evicts the other.
        let mut lab = lab(Config { num_kv_blocks: 101, max_session_wait: 0, ..config(&Fcfs) });
        for request in [turn(1, 1), other, turn(3, 1)] {
            lab.serve(request);
        }
        assert_eq!(lab.ended[&1].evicted_for, [0; 4]);
        let mut expected = [0; 4];
        expected[taker as usize] = PROMPT / 16 * 16 - lab.ended[&3].cached_tokens / 16 * 16;
        assert_eq!(lab.ended[&3].evicted_for, expected, "{taker:?}");
    }
    // A subagent of the session.
    let mut lab = lab(Config { num_kv_blocks: 101, max_session_wait: 0, ..config(&Fcfs) });
    let subagent = Request { session: Some("1.1".into()), parent_session: Some("1".into()), ..turn(2, 92) };
    for request in [turn(1, 1), subagent, turn(3, 1)] {
        lab.serve(request);
    }
    let evicted = lab.ended[&3].evicted_for;
    assert!(evicted[Taker::SameSession as usize] >= PROMPT - 16 - lab.ended[&3].cached_tokens, "{evicted:?}");
}

/// The service of a request: a unit for each prompt token that was computed, and two for each token of the answer.
fn service(timeline: &Timeline) -> u64 {
    u64::from(timeline.prompt_tokens - timeline.cached_tokens + 2 * timeline.output_tokens)
}

#[test]
fn a_reload_is_charged_once_to_the_tenant_whose_admission_computes_it() {
    for policy in [&Fair as &dyn Policy, &Vtc] {
        let mut lab = lab(config(policy));
        let of = |tag, session, tenant: &str| Request { tenant: tenant.into(), ..turn(tag, session) };
        // Session 1 of tenant a loses its turn to one of tenant b, and computes its context again.
        for (tag, session, tenant) in [(1, 1, "a"), (2, 2, "a"), (3, 3, "b"), (4, 1, "a"), (5, 1, "a")] {
            lab.serve(of(tag, session, tenant));
        }
        let computed = [1, 2, 3, 4, 5].map(|tag| lab.ended[&tag].computed_tokens);
        assert!(lab.ended[&4].cached_tokens < PROMPT - 300 && lab.ended[&5].cached_tokens >= PROMPT - 16, "{computed:?}");
        let owed = |tags: &[u64]| tags.iter().map(|tag| service(&lab.ended[tag])).sum::<u64>() as f64;
        let (a, b) = (owed(&[1, 2, 4, 5]), owed(&[3]));
        let charged: HashMap<_, _> = lab.scheduler.take_service().into_iter().collect();
        let charged = charged["a"] as f64 / charged["b"] as f64;
        assert!((charged / (a / b) - 1.0).abs() < 1e-3, "{charged} for {a} and {b}");
    }
}

#[test]
fn service_follows_weights_while_sessions_take_turns() {
    for policy in [&Fair as &dyn Policy, &Vtc] {
        let mut lab = Lab::taught(config(policy), Cost(20_000, 1000, 10));
        lab.check_every = 100;
        let (mut tag, mut served) = (0, HashMap::new());
        // Tenant a has five sessions, and tenant b, of twice the weight, has three. Each always has a request.
        let sessions: Vec<_> = (1..9).map(|session| (session, if session < 6 { ("a", 1) } else { ("b", 2) })).collect();
        let mut busy: HashMap<u64, u64> = HashMap::new();
        for _ in 0..20_000 {
            for &(session, (tenant, weight)) in &sessions {
                if busy.get(&session).is_none_or(|tag| lab.ended.contains_key(tag)) {
                    tag += 1;
                    busy.insert(session, tag);
                    lab.add(Request { tenant: tenant.into(), weight, ..turn(tag, session) });
                }
            }
            lab.step_or_wait();
        }
        for timeline in lab.ended.values() {
            *served.entry(&*timeline.tenant).or_insert(0) += service(timeline);
        }
        let ratio = served["b"] as f64 / served["a"] as f64;
        assert!((1.9..2.1).contains(&ratio), "{ratio} {policy:?}");
        let cached: u64 = lab.ended.values().map(|timeline| u64::from(timeline.cached_tokens)).sum();
        let prompt: u64 = lab.ended.values().map(|timeline| u64::from(timeline.prompt_tokens)).sum();
        assert!(2 * cached > prompt, "sessions keep their contexts: {cached} of {prompt}");
    }
}

#[test]
fn a_more_urgent_tier_does_not_wait_for_the_answers_of_others() {
    let mut lab = lab(config(&Fcfs));
    for session in 1..3 {
        lab.add(Request { max_new_tokens: 100, ..turn(session, session) });
    }
    (0..5).for_each(|_| drop(lab.step()));
    lab.add(Request { tier: Tier::Priority, ..turn(3, 3) });
    lab.step();
    assert_eq!(waited(&lab, 3), 0);
    lab.step_until_ended(3);
    assert_eq!(lab.ended.len(), 1, "it came first");
    lab.finish();
}

#[test]
fn contexts_of_active_sessions_are_in_use_between_requests() {
    let mut lab = lab(config(&Fcfs));
    for session in 1..3 {
        lab.serve(turn(session, session));
    }
    let used = lab.scheduler.blocks_used();
    assert_eq!(used.held, 0);
    assert!((148..=160).contains(&used.wanted), "{used:?}");
    lab.serve(Request { session: None, ..turn(3, 3) });
    assert!(lab.scheduler.note_session("", &"1".into(), SessionEvent::Ended, lab.now));
    assert!(lab.scheduler.blocks_used().wanted <= 100, "a context without its session is not in use");
}

#[test]
fn a_held_sequence_without_a_session_counts_and_makes_room_when_it_was_quiet_for_long() {
    let mut lab = lab(config(&Fcfs));
    let held = lab.scheduler.open(&"".into(), &Arc::default(), lab.now);
    lab.add(Request { session: None, continues: Some(Continues { held, tokens: 0 }), ..turn(9, 9) });
    run(&mut lab);
    for session in 1..3 {
        lab.add(turn(session, session));
        lab.finish_requests();
    }
    // Only one of the sessions fits beside the held sequence.
    assert_eq!((waited(&lab, 1), waited(&lab, 2) > 0, lab.scheduler.held()), (0, true, (1, 75)));
    lab.now += 61 * SECOND;
    lab.add(Request { max_new_tokens: 100, ..turn(3, 2) });
    lab.step();
    lab.add(turn(4, 1));
    lab.step();
    assert_eq!((waited(&lab, 4), lab.scheduler.held()), (0, (1, 0)));
    assert!(lab.scheduler.drop_held(held, lab.now));
    lab.finish();
}

#[test]
fn the_held_sequence_of_a_session_makes_room_with_it() {
    let mut lab = lab(config(&Fcfs));
    let held = lab.scheduler.open(&"".into(), &Arc::default(), lab.now);
    lab.add(Request { continues: Some(Continues { held, tokens: 0 }), ..turn(1, 1) });
    lab.finish_requests();
    lab.add(turn(2, 2));
    lab.finish_requests();
    assert_eq!((waited(&lab, 2), lab.scheduler.held()), (0, (1, 75)), "its blocks are those of its session");
    lab.add(turn(3, 3));
    lab.finish_requests();
    assert_eq!((waited(&lab, 3) > 0, lab.scheduler.held()), (true, (1, 0)), "it was parked with its session");
    assert!(lab.scheduler.drop_held(held, lab.now));
    lab.finish();
}

#[test]
fn a_session_that_always_has_requests_makes_room_when_its_turn_is_over() {
    let mut lab = two_of_three(config(&Fcfs));
    let (mut tags, mut next) = ([4, 5], 6);
    for (tag, session) in tags.iter().zip(1..) {
        lab.add(Request { max_new_tokens: 100, ..turn(*tag, session) });
    }
    while !lab.ended.contains_key(&3) {
        assert!(lab.now < 60 * SECOND, "it starves");
        lab.step();
        for (tag, session) in tags.iter_mut().zip(1..) {
            // A second request comes before the first one has ended.
            if lab.ended.contains_key(tag) || lab.explain(*tag).output_tokens == 50 {
                *tag = next;
                lab.add(Request { max_new_tokens: 100, ..turn(next, session) });
                next += 1;
            }
        }
    }
}

#[test]
fn blocks_that_a_session_keeps_between_requests_are_billed_to_the_next_one() {
    let billed = |gap: Time, named: bool| {
        let mut lab = lab(config(&Fcfs));
        for tag in 1..3 {
            let request = turn(tag, 1);
            lab.add(Request { session: request.session.clone().filter(|_| named), ..request });
            run(&mut lab);
            lab.now += gap;
        }
        lab.ended[&2].block_us
    };
    assert_eq!(billed(5 * SECOND, true) - billed(0, true), 75 * 5 * SECOND);
    assert_eq!(billed(5 * SECOND, false), billed(0, false), "no session keeps them");
}

#[test]
fn blocks_of_a_parked_session_are_not_billed() {
    let mut lab = two_of_three(config(&Fcfs));
    // A minute and more without a request: session 1 makes room for session 3.
    lab.now += 70 * SECOND;
    run(&mut lab);
    let parked_at = lab.ended[&3].submitted + waited(&lab, 3);
    lab.now += 100 * SECOND;
    lab.add(turn(4, 1));
    run(&mut lab);
    let quiet = parked_at - lab.ended[&1].ended;
    assert!((70 * SECOND..75 * SECOND).contains(&quiet), "{quiet}");
    let billed = lab.ended[&4].block_us - 75 * quiet;
    assert!(billed < 75 * 2 * SECOND, "{billed} beside what its own computing took");
}

#[test]
fn blocks_are_not_billed_to_a_session_whose_held_sequence_is() {
    let billed = |gap: Time| {
        let mut lab = lab(config(&Fcfs));
        let held = lab.scheduler.open(&"".into(), &Arc::default(), lab.now);
        let first = turn(1, 1);
        let continues = Continues { held, tokens: 0 };
        lab.add(Request { continues: Some(continues), ..first });
        lab.finish_requests();
        lab.now += gap;
        lab.add(turn(2, 1));
        lab.finish_requests();
        lab.ended[&2].block_us
    };
    assert_eq!(billed(5 * SECOND), billed(0));
}

#[test]
fn nothing_is_kept_after_the_cache_was_evicted() {
    let mut lab = lab(config(&Fcfs));
    lab.add(turn(1, 1));
    run(&mut lab);
    lab.scheduler.evict_cached(lab.now);
    lab.now += 5 * SECOND;
    lab.add(turn(2, 1));
    run(&mut lab);
    assert_eq!(lab.ended[&2].cached_tokens, 0);
    assert!(lab.ended[&2].block_us < 75 * 2 * SECOND, "{}", lab.ended[&2].block_us);
}
