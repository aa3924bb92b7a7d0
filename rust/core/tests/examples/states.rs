//! A model with recurrent layers: a sequence shares a prefix only up to a block after which a state is saved.

use crate::lab::{Lab, ask, plenty, stem};
use chairlift_core::{Config, Continues, Fcfs, Outputs, Policy, Prefix, Request, Restored, Scheduler, Token};
use std::collections::VecDeque;

/// The token of every answer.
const ANSWER: Token = 7;

/// Four sequences, and slots for `saved` states beside theirs. A block has 16 tokens.
fn with_states(saved: u32) -> Config {
    Config { max_num_seqs: 4, state_slots: 4 + saved, ..plenty(&Fcfs) }
}

/// The turn after a request: its prompt, its answer, and `more` tokens.
fn next_turn(request: &Request, more: u32, tag: u64) -> Request {
    let answer = std::iter::repeat_n(ANSWER, request.max_new_tokens as usize);
    let more = (0..more).map(|at| 3_000_000 + at);
    Request { tag, prompt: request.prompt.iter().copied().chain(answer).chain(more).collect(), ..request.clone() }
}

#[test]
fn the_next_turn_resumes_from_the_end_of_the_answer() {
    let mut lab = Lab::new(with_states(8));
    let mut turn = ask(1, 40, 30);
    lab.add(turn.clone());
    let first = lab.step();
    assert_eq!((first.saves, first.state_copies), (vec![(1, 32)], vec![]));
    for tag in 2..6 {
        lab.finish();
        let before = turn.prompt.len() as u32 + turn.max_new_tokens;
        turn = next_turn(&turn, 10, tag);
        lab.add(turn.clone());
        let step = lab.step();
        assert_eq!(step.state_copies.len(), 1);
        // The last token of an answer is never computed. All full blocks before it are found.
        assert_eq!(lab.explain(tag).cached_tokens, (before - 1) / 16 * 16);
        assert_eq!(lab.explain(tag).lost_hit_tokens, 0);
    }
    lab.finish();
    assert_eq!(lab.scheduler.stats().counters.lost_hit_tokens, 0);
}

/// The text of a request that stops after `len` tokens, while as many steps as `lag` are planned ahead.
fn overlapped(scheduler: &mut Scheduler, request: Request, len: usize, lag: usize) -> Vec<Token> {
    let (mut text, mut planned, mut outputs) = (request.prompt.clone(), VecDeque::new(), Outputs::default());
    scheduler.add(request, 0).expect("it fits");
    loop {
        while planned.len() <= lag
            && let Some(plan) = scheduler.plan(0)
        {
            planned.push_back(plan);
        }
        let Some(plan) = planned.pop_front() else { return text };
        let token = if text.len() + 1 == len { 0 } else { ANSWER };
        scheduler.commit(plan, &[token as i32], 0, &mut outputs);
        text.extend(outputs.tokens.iter().map(|output| output.token));
        scheduler.check();
    }
}

#[test]
fn the_end_of_an_answer_is_found_though_steps_were_planned_beyond_it() {
    for (len, lag) in (41..82).flat_map(|len| [(len, 0), (len, 1), (len, 2)]) {
        let mut scheduler = Scheduler::new(with_states(8)).expect("a sound config");
        let mut prompt = overlapped(&mut scheduler, ask(1, 40, 100), len, lag);
        assert_eq!(prompt.len(), len);
        prompt.extend(3_000_000..3_000_010);
        scheduler.add(Request { tag: 2, prompt, ..ask(1, 1, 1) }, 0).expect("it fits");
        let plan = scheduler.plan(0).expect("it can run");
        assert_eq!(plan.admitted[0].cached_tokens as usize, (len - 1) / 16 * 16, "{len} tokens, {lag} steps ahead");
        scheduler.commit(plan, &[0], 0, &mut Outputs::default());
    }
}

#[test]
fn a_growing_answer_keeps_its_last_two_states() {
    let mut lab = Lab::new(with_states(8));
    lab.add(ask(1, 40, 100));
    let mut saves = Vec::new();
    while let Some(step) = lab.try_step() {
        saves.extend(step.saves);
        assert!(lab.scheduler.stats().saved_states <= 3);
    }
    assert_eq!(saves, [32, 48, 64, 80, 96, 112, 128].map(|position| (1, position)));
    assert_eq!(lab.scheduler.stats().saved_states, 3, "the end of the prompt, and two of the answer");
}

#[test]
fn the_same_prompt_resumes_before_its_last_token() {
    for (prompt, found) in [(63, 48), (64, 48), (65, 64), (16, 0), (1, 0)] {
        let mut lab = Lab::new(with_states(8));
        for tag in [1, 2] {
            lab.serve(Request { tag, ..ask(9, prompt, 1) });
        }
        assert_eq!(lab.ended[&2].cached_tokens, found, "{prompt} tokens");
    }
}

#[test]
fn where_prompts_part_the_second_loses_the_hit_and_saves_the_state_for_the_third() {
    let mut lab = Lab::new(with_states(8));
    lab.serve(stem(1, 1, 40, 100, 1));
    lab.add(stem(1, 2, 40, 100, 1));
    assert_eq!(lab.step().saves, [(2, 32), (2, 96)]);
    lab.finish();
    lab.serve(stem(1, 3, 40, 100, 1));
    assert_eq!([1, 2, 3].map(|tag| lab.ended[&tag].cached_tokens), [0, 0, 32]);
    assert_eq!([1, 2, 3].map(|tag| lab.ended[&tag].lost_hit_tokens), [0, 32, 0]);
    assert_eq!(lab.scheduler.stats().counters.lost_hit_tokens, 32);
}

#[test]
fn a_tenant_is_not_told_of_hits_on_what_others_sent() {
    let mut lab = Lab::new(with_states(8));
    for (tag, tenant) in [(1, "alice"), (2, "bob")] {
        lab.serve(Request { tenant: tenant.into(), ..stem(1, tag, 40, 100, 1) });
    }
    assert_eq!((lab.ended[&2].lost_hit_tokens, lab.scheduler.stats().counters.lost_hit_tokens), (0, 32));
}

#[test]
fn a_state_is_saved_at_the_end_of_the_users_turn() {
    let mut lab = Lab::new(with_states(8));
    lab.add(Request { user_turn_end: Some(50), ..stem(1, 1, 50, 100, 30) });
    // What follows may begin the answer in another way than the next prompt, by at most twelve tokens.
    assert_eq!(lab.step().saves, [(1, 48), (1, 80)]);
    lab.finish();
    // The template drops what followed.
    lab.serve(stem(1, 2, 50, 100, 1));
    assert_eq!((lab.ended[&2].cached_tokens, lab.ended[&2].lost_hit_tokens), (48, 0));
}

#[test]
fn a_request_that_waits_for_a_running_prompt_has_the_state_saved_where_both_part() {
    for policy in [&Fcfs as &'static dyn Policy, &Prefix] {
        let mut lab = Lab::new(Config { max_num_batched_tokens: 100, scheduling_policy: policy, ..with_states(8) });
        lab.add(stem(1, 1, 256, 300, 9));
        assert_eq!(lab.step().chunks, [(1, 100)]);
        lab.serve(stem(1, 2, 256, 300, 9));
        assert_eq!((lab.ended[&2].cached_tokens, lab.ended[&2].computed_tokens), (256, 44 + 8), "{policy:?}");
    }
}

#[test]
fn the_least_recently_used_state_is_evicted() {
    // Each prompt leaves one state. Two slots are left beside the live one.
    let mut lab = Lab::new(Config { max_num_seqs: 1, state_slots: 3, ..plenty(&Fcfs) });
    let prompt = |of: u64, tag: u64| Request { tag, ..ask(of, 40, 1) };
    for (of, tag) in [(1, 1), (2, 2), (1, 3), (3, 4), (1, 5), (2, 6)] {
        lab.serve(prompt(of, tag));
    }
    assert_eq!([1, 2, 3, 4, 5, 6].map(|tag| lab.ended[&tag].cached_tokens), [0, 0, 32, 0, 32, 0]);
    assert_eq!(lab.ended[&6].lost_hit_tokens, 32);
}

#[test]
fn without_a_spare_slot_a_state_becomes_live_without_a_copy() {
    let mut lab = Lab::new(Config { max_num_seqs: 1, state_slots: 1, ..plenty(&Fcfs) });
    lab.add(ask(1, 40, 1));
    assert_eq!(lab.step().saves, [], "the only slot is live");
    lab.finish();
    let mut lab = Lab::new(Config { max_num_seqs: 2, state_slots: 2, ..plenty(&Fcfs) });
    lab.add(ask(1, 40, 1));
    assert_eq!(lab.step().saves, [(1, 32)]);
    lab.finish();
    // Two requests take both slots: the second takes that of the saved state.
    lab.add(ask(2, 40, 9));
    lab.add(Request { tag: 3, ..ask(1, 40, 9) });
    let step = lab.step();
    assert_eq!((step.state_copies.as_slice(), lab.explain(3).cached_tokens), (&[][..], 32));
    lab.finish();
}

#[test]
fn states_go_with_the_blocks_that_they_follow() {
    let mut lab = Lab::new(Config { num_kv_blocks: 11, max_model_len: 160, ..with_states(8) });
    lab.serve(ask(1, 40, 1));
    assert_eq!(lab.scheduler.stats().saved_states, 1);
    lab.serve(ask(2, 150, 1));
    assert_eq!(lab.scheduler.stats().saved_states, 1, "only that of the second is left");
}

#[test]
fn forks_resume_from_the_last_full_block_of_their_prompt() {
    for (prefix_caching, computed) in [(true, 8), (false, 40)] {
        let mut lab = Lab::new(Config { enable_prefix_caching: prefix_caching, ..with_states(4) });
        lab.add(ask(1, 40, 3));
        lab.fork(1, 2);
        lab.fork(1, 3);
        assert_eq!(lab.step().chunks, [(1, 40)]);
        let step = lab.step();
        assert_eq!(step.chunks, [(1, 1), (2, computed), (3, computed)]);
        assert_eq!((step.state_copies.len(), step.copies.len()), (if prefix_caching { 2 } else { 0 }, 0));
        lab.finish();
    }
}

/// Runs two requests of which the second loses its blocks while both grow. Returns its copies to host memory and the tokens that it
/// computes again.
fn preempts(blocks: u32, host_blocks: u32, saved: u32) -> (u32, u64) {
    let config =
        Config { num_kv_blocks: 1 + blocks, max_model_len: 128, max_num_seqs: 2, state_slots: 2 + saved, host_blocks, ..plenty(&Fcfs) };
    let mut lab = Lab::new(config);
    lab.add(ask(1, 40, 80));
    lab.add(ask(2, 40, 80));
    lab.finish();
    let timeline = &lab.ended[&2];
    assert_eq!((timeline.preemptions, timeline.output_tokens), (1, 80));
    (timeline.swaps, timeline.recomputed_tokens)
}

#[test]
fn a_preempted_sequence_resumes_from_its_parked_state_or_from_a_saved_one() {
    assert_eq!(preempts(8, 8, 1), (1, 0), "its state is parked");
    assert_eq!(preempts(8, 8, 0), (0, 64), "no slot is left to park it");
    // The other sequence took its last two of six blocks, and with them the states of its answer. That at the end of its prompt, after
    // 32 tokens, is left.
    assert_eq!(preempts(12, 0, 8), (0, 96 - 32));
    assert_eq!(preempts(12, 0, 0), (0, 96), "no state was saved");
}

#[test]
fn a_request_that_continues_a_held_sequence_resumes_from_its_end_or_from_the_last_state_that_it_keeps() {
    // After 130 tokens, states are saved after 96 tokens, for the prompt, and after 112 and 128. That after 129 is held if there is room.
    let ends = [(130, 129, 8), (130, 128, 4), (129, 128, 8), (128, 112, 8), (120, 112, 8), (112, 96, 8), (97, 96, 8), (96, 0, 8)];
    for (kept, resumed, spare) in ends {
        let mut lab = Lab::new(with_states(spare));
        let held = lab.scheduler.open(&"".into(), &std::sync::Arc::default(), lab.now);
        let first = Request { continues: Some(Continues { held, tokens: 0 }), ..ask(1, 100, 30) };
        lab.add(first.clone());
        lab.finish_requests();
        let mut prompt = next_turn(&first, 0, 2).prompt;
        prompt.truncate(kept);
        lab.add(Request { tag: 2, prompt, continues: Some(Continues { held, tokens: kept as u32 }), ..first });
        lab.finish_requests();
        assert_eq!(lab.ended[&2].cached_tokens, resumed, "{kept} tokens");
    }
}

/// Drafts tokens, of which those other than the answer's are rejected. Returns the tokens that the steps compute until the last token alone
/// is left, and the saves of the first one.
fn verifies(lab: &mut Lab, draft: &[Token]) -> (Vec<u32>, Vec<u32>) {
    lab.draft_tokens(1, draft);
    let first = lab.step();
    let mut computed = vec![first.chunks[0].1];
    while computed.last() != Some(&1) {
        computed.push(lab.step().chunks[0].1);
    }
    (computed, first.saves.iter().map(|save| save.1).collect())
}

#[test]
fn a_sequence_goes_back_to_the_state_before_a_rejected_draft() {
    const OTHER: Token = ANSWER + 1;
    let mut lab = Lab::new(with_states(8));
    lab.add(ask(1, 40, 60));
    lab.step();
    // The state is saved before the draft. The accepted tokens are computed again, with the one after them.
    for (draft, computed) in [
        (&[ANSWER, ANSWER, OTHER][..], vec![4, 3, 1]),
        (&[OTHER, ANSWER], vec![3, 1]),
        (&[ANSWER, ANSWER], vec![3, 1]),
        (&[ANSWER], vec![2, 1]),
    ] {
        let known = lab.explain(1).output_tokens + 40;
        let (found, saves) = verifies(&mut lab, draft);
        assert_eq!((found, saves[0]), (computed, known), "{draft:?}");
    }
    assert_eq!(lab.explain(1).accepted_draft_tokens, 5);
    // 42 + 16 tokens: a draft that is rejected before the end of a block, and one that is rejected after it.
    let at = |lab: &Lab| lab.explain(1).output_tokens + 40;
    assert_eq!(at(&lab), 55);
    assert_eq!(verifies(&mut lab, &[OTHER; 12]), (vec![13, 1], vec![55, 64]));
    assert_eq!(lab.scheduler.stats().saved_states, 2, "the prompt's end and 48 tokens, and no state after tokens that were rejected");
    lab.finish();
    let next = next_turn(&ask(1, 40, 60), 10, 2);
    lab.serve(next);
    assert_eq!(lab.ended[&2].cached_tokens, 96);
}

#[test]
fn nothing_is_drafted_where_no_slot_is_left_for_the_state_before_it() {
    for (spare, computed) in [(0, vec![1]), (1, vec![3, 1])] {
        let mut lab = Lab::new(with_states(spare));
        lab.add(ask(1, 40, 60));
        lab.step();
        assert_eq!(verifies(&mut lab, &[ANSWER, ANSWER]).0, computed);
    }
}

#[test]
fn a_stored_state_is_found_again_after_a_restart() {
    let mut lab = Lab::new(with_states(4));
    let prompt = ask(1, 60, 9);
    lab.serve(prompt.clone());
    let (blocks, states) = (lab.scheduler.stored_blocks(0), lab.scheduler.stored_states());
    // 68 tokens are computed. States are saved at the prompt's last full block and at the answer's.
    assert_eq!((blocks.len(), states.len()), (4, 2));
    assert!(blocks[2..].iter().all(|block| states.iter().any(|state| state.0 == block.content)));
    assert_eq!(lab.scheduler.cached_blocks("", &prompt.prompt), 3);

    let mut lab = Lab::new(with_states(4));
    let restored = lab.scheduler.restore("", &prompt.prompt[..48], lab.now);
    assert_eq!((restored.cached, restored.blocks.len(), restored.state.is_some()), (0, 3, true));
    assert_eq!(lab.scheduler.cached_blocks("", &prompt.prompt), 3);
    let again = lab.scheduler.restore("", &prompt.prompt[..48], lab.now);
    assert_eq!((again.cached, again.blocks.len(), again.state), (3, 0, None), "the state is there");
    lab.add(prompt);
    assert_eq!(lab.step().state_copies.len(), 1);
    lab.finish();
    assert_eq!(lab.ended[&1].cached_tokens, 48);
}

#[test]
fn blocks_without_a_state_get_it_from_storage() {
    let mut lab = Lab::new(with_states(4));
    let prompt = ask(1, 100, 1);
    lab.serve(prompt.clone());
    // The state follows six blocks, and four are asked for.
    assert_eq!(lab.scheduler.cached_blocks("", &prompt.prompt[..64]), 0);
    let restored = lab.scheduler.restore("", &prompt.prompt[..64], lab.now);
    assert_eq!((restored.cached, restored.blocks.len(), restored.state.is_some()), (4, 0, true));
    assert_eq!(lab.scheduler.cached_blocks("", &prompt.prompt[..64]), 4);
}

#[test]
fn no_slot_is_taken_from_a_step_in_flight() {
    let mut scheduler = Scheduler::new(with_states(4)).expect("a sound config");
    scheduler.add(ask(1, 40, 9), 0).expect("it fits");
    let plan = scheduler.plan(0).expect("it can run");
    assert_eq!(scheduler.restore("", &[5; 32], 0), Restored::default());
    scheduler.commit(plan, &[ANSWER as i32], 0, &mut Outputs::default());
    assert_eq!(scheduler.restore("", &[5; 32], 0).blocks.len(), 2);
}

/// The tokens of a request's prompt that are found. The request runs alone until it ends.
fn found(scheduler: &mut Scheduler, request: Request) -> usize {
    let mut found = 0;
    scheduler.add(request, 0).expect("it fits");
    while let Some(plan) = scheduler.plan(0) {
        found += plan.admitted.iter().map(|admitted| admitted.cached_tokens as usize).sum::<usize>();
        scheduler.commit(plan, &[ANSWER as i32], 0, &mut Outputs::default());
    }
    found
}

/// What a model with these sizes keeps of sixteen conversations of 8,000 tokens that take turns: bytes of the saved states, bytes of the KV,
/// and the part that was found of the tokens that each turn repeats. A block of KV has 16 tokens.
fn converses(state_bytes: u64, block_bytes: u64, drops_answers: bool) -> (u64, u64, f64) {
    let state_tokens = (16 * state_bytes).div_ceil(block_bytes) as u32;
    let config = Config { num_kv_blocks: 10_000, max_model_len: 9000, max_num_batched_tokens: 9000, state_tokens, ..with_states(96) };
    let mut scheduler = Scheduler::new(config).expect("a sound config");
    let (mut repeated, mut cached) = (0, 0);
    let mut prompts: Vec<Vec<Token>> = (0..16).map(|of| ask(of, 7000, 1).prompt).collect();
    for turn in 0..6 {
        for prompt in &mut prompts {
            // The template ends with four tokens that begin the answer.
            let user_turn_end = Some(prompt.len() as u32 - 4);
            cached += found(&mut scheduler, Request { prompt: prompt.clone(), user_turn_end, ..ask(1, 1, 60) });
            repeated += if turn > 0 { prompt.len() - 140 } else { 0 };
            if drops_answers {
                prompt.truncate(prompt.len() - 4);
            } else {
                prompt.extend([ANSWER; 60]);
            }
            prompt.extend((0..140).map(|at| 3_000_000 + 1000 * turn + at));
        }
    }
    scheduler.check();
    let kv = prompts.iter().map(|prompt| prompt.len() as u64 / 16 * block_bytes).sum();
    (scheduler.stats().saved_states as u64 * state_bytes, kv, cached as f64 / repeated as f64)
}

#[test]
fn the_states_of_conversations_take_less_memory_than_their_kv_and_are_found() {
    const MIB: f64 = (1 << 20) as f64;
    // A state, and the KV of 8,000 tokens in float16: Granite-4-H-tiny, Qwen3.5-4B, LFM2-8B-A1B.
    for (state, kv) in [(55.4, 62.5), (50.3, 250.0), (0.3, 93.8)] {
        for drops_answers in [false, true] {
            let (states, kv, found) = converses((state * MIB) as u64, (kv * MIB / 500.0) as u64, drops_answers);
            assert!(states < kv, "{} MiB of states, {} MiB of KV", states >> 20, kv >> 20);
            assert!(found >= 0.95, "{found}");
        }
    }
}

/// A conversation whose user asks after 7,200 tokens, with `calls` calls of tools, whose thinking the client returns or not; then the user
/// goes on, and the template drops the calls. Returns the tokens that are found then, and whether each call found the prompt before it but
/// for the beginning of the answer.
fn calls_tools(calls: u32, state_tokens: u32, returns_thinking: bool) -> (usize, bool) {
    let config = Config { num_kv_blocks: 10_000, max_model_len: 16_000, max_num_batched_tokens: 16_000, state_tokens, ..with_states(96) };
    let mut scheduler = Scheduler::new(config).expect("a sound config");
    let asked = ask(1, 7200, 1).prompt;
    let mut prompt = asked.clone();
    let mut all = true;
    for call in 0..=calls {
        let before = prompt.len();
        if call > 0 {
            prompt.extend(if returns_thinking { vec![ANSWER; 200] } else { vec![6; 50] });
            prompt.extend((0..100 + call).map(|at| 3_000_000 + at));
        }
        let turn = prompt.len();
        prompt.extend([5; 6]);
        let found = found(&mut scheduler, Request { prompt: prompt.clone(), user_turn_end: Some(7200), ..ask(1, 1, 200) });
        all &= call == 0 || found >= (before - 12) / 16 * 16;
        prompt.truncate(if returns_thinking { prompt.len() } else { turn });
    }
    let prompt = asked.into_iter().chain([6; 300]).collect();
    let found = found(&mut scheduler, Request { prompt, user_turn_end: None, ..ask(1, 1, 1) });
    scheduler.check();
    (found, all)
}

#[test]
fn the_end_of_the_users_turn_is_found_after_calls_of_tools() {
    for returns_thinking in [true, false] {
        // Qwen3.5-4B and LFM2-8B-A1B with KV in float16 and int8, Qwen3.6-35B-A3B in float16.
        for state_tokens in [1610, 3220, 24, 48, 3150] {
            for calls in 0..9 {
                let found = calls_tools(calls, state_tokens, returns_thinking);
                assert_eq!(found, (7200, true), "{calls} calls, {state_tokens} tokens' worth of KV a state");
            }
        }
        // Granite-4-H-tiny may have one state, which is that of the latest prompt.
        assert_eq!([0, 1, 2].map(|calls| calls_tools(calls, 7094, returns_thinking)), [(7200, true), (0, true), (0, true)]);
    }
}

#[test]
fn a_request_that_fails_leaves_no_state() {
    let mut lab = Lab::new(with_states(8));
    lab.add(ask(1, 40, 30));
    lab.steps(20);
    assert_eq!(lab.scheduler.stats().saved_states, 2);
    lab.fail_next(1);
    lab.step();
    assert_eq!(lab.scheduler.stats().saved_states, 0);
    lab.finish();
}
