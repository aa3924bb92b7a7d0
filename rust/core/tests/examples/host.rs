//! Evicted blocks of sessions go to host memory where that is cheaper than computing, and come back for the session's next turn.

use crate::lab::{Cost, Lab, Step, ask, plenty};
use chairlift_core::{Config, Fcfs, Request, SessionEvent, SessionTurns, Taker, Time, Token};

/// Prompt tokens of a turn: 75 blocks with its output, so that one context fits into the cache and two do not.
const PROMPT: u32 = 1190;
const WHOLE: u32 = PROMPT / 16 * 16;
const FOREVER: Time = 1 << 50;

/// A step takes a millisecond, and as much more for each prompt token. A block is computed in 16 ms, and copied in one.
fn lab(host_blocks: u32, swap_ns_per_block: u32) -> Lab {
    let config = Config { num_kv_blocks: 101, max_num_seqs: 8, max_session_wait: FOREVER, host_blocks, swap_ns_per_block, ..plenty(&Fcfs) };
    Lab::taught(config, Cost(1000, 1000, 10))
}

/// A turn of the session with this number, whose prompt is the same in each turn.
fn turn(tag: u64, session: u64) -> Request {
    let prompt = (0..PROMPT).map(|at| if at == 0 { 3_000_000 + session as Token } else { 10 }).collect();
    Request { prompt, session: Some(session.to_string().into()), ..ask(tag, 1, 10) }
}

/// Runs turns of these sessions one after another, and returns the cached tokens of each and the numbers of blocks copied to the host and
/// back.
fn run(lab: &mut Lab, sessions: &[u64]) -> (Vec<u32>, usize, usize) {
    let (mut cached, mut outs, mut ins) = (Vec::new(), 0, 0);
    let first = 1 + lab.ended.len() as u64;
    for (tag, &session) in (first..).zip(sessions) {
        lab.add(turn(tag, session));
        while !lab.scheduler.is_idle() {
            if let Some(step) = lab.try_step() {
                (outs, ins) = (outs + step.swap_out.len(), ins + step.swap_in.len());
            } else {
                lab.now = lab.scheduler.wake_at().expect("a turn comes");
            }
        }
        cached.push(lab.ended[&tag].cached_tokens);
    }
    (cached, outs, ins)
}

#[test]
fn a_parked_session_finds_its_evicted_blocks_in_host_memory() {
    let mut lab = lab(200, 1_000_000);
    let (cached, outs, ins) = run(&mut lab, &[1, 2, 1, 2, 1]);
    assert_eq!(cached, [0, 0, WHOLE, WHOLE, WHOLE]);
    // Each turn exchanges what does not fit beside the other context: some fifty of 75 blocks.
    assert!(outs >= 150 && (100..=outs).contains(&ins), "{outs} copied, {ins} read");
    assert_eq!(lab.scheduler.stats().counters.swapped_blocks, outs as u64);
    assert!((3..=5).all(|tag| lab.ended[&tag].evicted_for == [0; 4]), "nothing was lost");
    // Without host memory each turn computes them.
    let (cached, outs, _) = run(&mut self::lab(0, 0), &[1, 2, 1, 2]);
    assert!(cached[2..].iter().all(|&tokens| tokens < WHOLE / 2) && outs == 0, "{cached:?}");
}

#[test]
fn cheaper_reloads_make_turns_shorter() {
    let waits = |host_blocks| {
        let mut lab = lab(host_blocks, 1_000_000);
        let began = lab.now;
        run(&mut lab, &[1, 2, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2, 1, 2]);
        lab.now - began
    };
    let [computed, copied] = [0, 200].map(waits);
    assert!(3 * copied < computed, "{copied} and {computed} us");
}

#[test]
fn blocks_that_are_dearer_to_copy_than_to_compute_stay_out_of_host_memory() {
    let (cached, outs, ins) = run(&mut lab(200, 10_000_000), &[1, 2, 1]);
    assert!(cached[2] < WHOLE / 2 && (outs, ins) == (0, 0), "{cached:?}");
}

#[test]
fn a_session_that_has_ended_leaves_host_memory() {
    let mut lab = lab(200, 1_000_000);
    run(&mut lab, &[1, 2]);
    lab.scheduler.note_session("", &"1".into(), SessionEvent::Ended, lab.now);
    lab.scheduler.check();
    let (cached, _, ins) = run(&mut lab, &[1]);
    assert!(cached[0] < WHOLE / 2 && ins == 0, "{cached:?}");
}

#[test]
fn a_full_host_drops_the_session_that_was_parked_first_and_counts_for_whom() {
    // Room for the blocks of one session beside those on the device.
    let mut lab = lab(80, 1_000_000);
    let (cached, ..) = run(&mut lab, &[1, 2, 3, 2, 1]);
    assert_eq!(cached[3], WHOLE);
    assert!(cached[4] < WHOLE / 2, "{cached:?}");
    assert!(lab.ended[&5].evicted_for[Taker::SameTenant as usize] >= WHOLE / 2, "{:?}", lab.ended[&5].evicted_for);
}

#[test]
fn a_preempted_request_takes_host_memory_from_parked_sessions() {
    let mut lab = lab(80, 1_000_000);
    run(&mut lab, &[1, 2]);
    // Two requests outgrow the cache, and one of them is copied to host memory, which is full otherwise.
    for tag in 10..12 {
        lab.add(ask(tag, 600, 400));
    }
    lab.finish();
    assert!(lab.scheduler.stats().counters.preemptions_swap > 0);
}

#[test]
fn running_requests_go_on_while_a_step_reads_as_much_as_it_takes() {
    let mut lab = lab(200, 100_000);
    run(&mut lab, &[1, 2]);
    lab.add(ask(50, 10, 200));
    lab.step_until_started(50);
    lab.scheduler.note_session("", &"2".into(), SessionEvent::Ended, lab.now);
    lab.add(turn(51, 1));
    let mut steps: Vec<Step> = Vec::new();
    while !lab.started.contains(&51) {
        if let Some(step) = lab.try_step() {
            steps.push(step);
        }
    }
    let reads: Vec<usize> = steps.iter().map(|step| step.swap_in.len()).filter(|&reads| reads > 0).collect();
    // A decode takes a millisecond, and ten copies do.
    assert!(reads.len() >= 4 && reads.iter().all(|&reads| reads <= 15), "{reads:?}");
    assert!(steps.iter().all(|step| step.chunks[0].0 == 50), "the running request has its token in each step");
    lab.finish();
    assert_eq!(lab.ended[&51].cached_tokens, WHOLE);
}

#[test]
fn requests_without_a_session_are_not_kept() {
    let without = |tag, stem| Request { session: None, ..turn(tag, stem) };
    for turns in [SessionTurns::Named, SessionTurns::Off] {
        let Lab { scheduler, cost, .. } = lab(200, 1_000_000);
        let mut lab = Lab::taught(Config { session_turns: turns, ..*scheduler.config() }, cost);
        for tag in 1..7 {
            lab.add(without(tag, tag % 3));
            while !lab.scheduler.is_idle() {
                assert_eq!(lab.step().swap_out, []);
            }
        }
    }
}

#[test]
fn a_state_stays_on_the_device_and_is_found_when_its_block_comes_back() {
    let with_states = |host_blocks, state_slots| {
        let Lab { scheduler, cost, .. } = lab(host_blocks, 1_000_000);
        Lab::taught(Config { state_slots, ..*scheduler.config() }, cost)
    };
    let mut lab = with_states(200, 20);
    let (cached, outs, ins) = run(&mut lab, &[1, 2, 1, 2, 1]);
    assert_eq!(cached, [0, 0, WHOLE, WHOLE, WHOLE]);
    assert!(outs >= 150 && (100..=outs).contains(&ins), "{outs} copied, {ins} read");
    // Blocks in host memory are of no use once other states have taken the slots of theirs, and are not read.
    let sessions: Vec<u64> = (1..11).chain([1]).collect();
    let (cached, outs, ins) = run(&mut with_states(1000, 9), &sessions);
    assert!(cached[10] == 0 && outs >= 600 && ins == 0, "{cached:?}, {outs} copied, {ins} read");
}
