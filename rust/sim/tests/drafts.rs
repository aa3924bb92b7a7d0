//! Recorded drafts in a simulation: what they save, and when they are not worth their cost.

use chairlift_core::{Config, DraftSource, FinishReason, Request, Timeline, VerifiedDraft};
use chairlift_sim::{Job, Machine, Report, StepTime, simulate};

const PROMPT: u32 = 16;
const OUTPUT: u32 = 200;
const SOURCE: DraftSource = DraftSource::Text(32);

/// Requests that arrive together. Each draft has eight tokens, of which `accepted` are accepted.
fn jobs(count: u64, accepted: u32) -> Vec<Job> {
    let positions = (PROMPT + 1..PROMPT + OUTPUT).step_by(accepted as usize + 1);
    let drafts: Vec<_> = positions.map(|position| VerifiedDraft { source: SOURCE, position, tokens: 8, accepted }).collect();
    let request = |tag: u64| Request { tag, prompt: vec![7 + tag as u32; PROMPT as usize], max_new_tokens: OUTPUT, ..Request::default() };
    (0..count).map(|tag| Job { request: request(tag), len: OUTPUT, drafts: drafts.clone(), ..Job::default() }).collect()
}

/// A step takes 9 ms and 1 ms for each token.
fn run(draft_tokens: usize, jobs: Vec<Job>) -> Report {
    let config = Config { num_kv_blocks: 2000, max_num_batched_tokens: 1024, max_num_seqs: 64, max_model_len: 512, ..Config::default() };
    let machine = Machine { draft_tokens, ..Machine::new(StepTime::linear([9_000.0, 1_000.0, 1_000.0, 0.0, 0.0])) };
    let report = simulate(config, jobs, &machine).unwrap();
    assert!(report.ended.iter().all(|timeline| (timeline.finish, timeline.output_tokens) == (Some(FinishReason::Length), OUTPUT)));
    report
}

fn drafted(report: &Report) -> (u32, u32) {
    let sum = |of: fn(&Timeline) -> u32| report.ended.iter().map(of).sum();
    (sum(|timeline| timeline.draft_tokens), sum(|timeline| timeline.accepted_draft_tokens))
}

#[test]
fn accepted_tokens_save_their_steps_and_time() {
    let (off, on) = (run(0, jobs(1, 8)), run(8, jobs(1, 8)));
    assert_eq!((off.steps, drafted(&off)), (OUTPUT.into(), (0, 0)));
    let (proposed, accepted) = drafted(&on);
    assert_eq!(on.steps, u64::from(OUTPUT - accepted), "each accepted token saves a step");
    assert!(proposed == accepted && accepted > 140, "{accepted} of {proposed}");
    assert_eq!(off.ended_at - on.ended_at, u64::from(accepted) * 9_000, "a drafted token takes 1 ms, a step of its own 10 ms");
    assert_eq!(on.gaps.buckets().map(|(_, count)| count).sum::<u64>(), u64::from(OUTPUT - 1), "a gap between any two tokens");
    // At most four tokens in a step, from the same recording.
    let four = run(4, jobs(1, 8));
    assert!(four.steps > on.steps && four.steps < off.steps, "{}", four.steps);
    assert_eq!(four.steps, u64::from(OUTPUT - drafted(&four).1));
}

#[test]
fn rejected_tokens_save_nothing_and_are_learned() {
    let (off, on) = (run(0, jobs(1, 0)), run(8, jobs(1, 0)));
    let (proposed, accepted) = drafted(&on);
    assert_eq!((on.steps, accepted), (off.steps, 0));
    assert_eq!(on.ended_at - off.ended_at, u64::from(proposed) * 1_000);
    assert!(proposed > 0 && proposed < 2 * OUTPUT, "{proposed} of {} proposed tokens", 8 * OUTPUT);
}

#[test]
fn a_loaded_machine_proposes_less() {
    let share = |count: u64| f64::from(drafted(&run(8, jobs(count, 4))).0) / count as f64;
    let (alone, loaded) = (share(1), share(64));
    assert!(alone > 100.0 && loaded < alone / 4.0, "{alone} tokens for each request alone, {loaded} among 64");
    let faster = |count: u64| run(0, jobs(count, 4)).ended_at as f64 / run(8, jobs(count, 4)).ended_at as f64;
    let (alone, loaded) = (faster(1), faster(64));
    assert!(alone > 1.8 && (0.97..1.1).contains(&loaded), "{alone} times as fast alone, {loaded} among 64");
}
