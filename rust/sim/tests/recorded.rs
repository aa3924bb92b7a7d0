//! A recorded journal in the format of a simulation, with two steps in flight, as on a GPU.

use chairlift_core::{Config, Continues, FinishReason, Outputs, ParsedJournal, Recorder, Request, Scheduler, SessionEvent, Time, Token};
use chairlift_sim::{Histogram, Machine, StepTime, Sums, jobs, recorded, what_if};
use std::sync::Arc;

const BEGINS: Time = 10_000;

fn request(tag: u64, prompt: u32) -> Request {
    Request { tag, prompt: (0..prompt).map(|i| tag as Token * 100 + i).collect(), max_new_tokens: 4, ..Request::default() }
}

#[test]
fn steps_are_timed_one_after_the_other_though_planned_ahead() {
    let core =
        Scheduler::new(Config { num_kv_blocks: 33, max_num_batched_tokens: 64, max_num_seqs: 4, max_model_len: 128, ..Config::default() })
            .unwrap();
    let mut core = Recorder::on(core);
    let mut outputs = Outputs::default();
    let at = |time: Time| BEGINS + time;
    // The first request runs alone from 0. The second's prompt is in the step planned at 100, which begins when the
    // first step ends, at 1000.
    core.add(request(1, 5), at(0)).unwrap();
    let first = core.plan(at(0)).unwrap();
    let other = core.add(request(2, 7), at(50)).unwrap();
    let second = core.plan(at(100)).unwrap();
    core.commit(first, &[9], at(1000), &mut outputs);
    let third = core.plan(at(1050)).unwrap();
    // The caller cancels it while its prompt is computed. It is still in that step and the next, but holds no blocks.
    assert!(core.end(other, FinishReason::Abort, at(1500)));
    core.commit(second, &[9, 9], at(1800), &mut outputs);
    let fourth = core.plan(at(1850)).unwrap();
    core.commit(third, &[9, 9], at(2700), &mut outputs);
    assert!(core.plan(at(2750)).is_none());
    core.commit(fourth, &[9], at(3500), &mut outputs);
    assert!(core.is_idle());
    let mut journal = Vec::new();
    core.take_journal(&mut journal);

    let (replayed, report) = recorded(&ParsedJournal::read(&journal).unwrap()).unwrap();
    assert_eq!(replayed.differs_at, None);
    let of = |times: &[Time]| {
        let mut histogram = Histogram::default();
        for &time in times {
            histogram.add(time);
        }
        histogram
    };
    assert_eq!(report.step_times, of(&[1000, 800, 900, 800]));
    assert_eq!(report.gaps, of(&[800, 900, 800]));
    let sums = Sums { busy: 3500, batch: 1000 + 2 * 800 + 2 * 900 + 800, blocks: 3500 + (1500 - 100), max_batch: 2, max_blocks: 2 };
    assert_eq!(report.utilization.sums(), sums);
    assert_eq!((report.steps, report.chunks, report.ended_at), (4, 6, 3500));
    let reported: Vec<_> = report
        .ended
        .iter()
        .map(|timeline| (timeline.tag, timeline.arrived, timeline.first_token, timeline.ended, timeline.finish))
        .collect();
    assert_eq!(reported, [(2, 50, None, 1500, Some(FinishReason::Abort)), (1, 0, Some(1000), 3500, Some(FinishReason::Length))]);
    assert_eq!(report.longest_gaps, [0, 900]);
}

#[test]
fn a_deadline_before_the_first_call_has_passed_in_the_simulation_too() {
    let config = Config { num_kv_blocks: 33, max_num_batched_tokens: 64, max_num_seqs: 4, max_model_len: 128, ..Config::default() };
    let mut core = Recorder::on(Scheduler::new(config).unwrap());
    // The request waited elsewhere for longer than it may take.
    core.add(Request { deadline: Some(BEGINS - 5), ttft_deadline: Some(BEGINS + 5), ..request(1, 5) }, BEGINS).unwrap();
    let mut journal = Vec::new();
    core.take_journal(&mut journal);
    let journal = ParsedJournal::read(&journal).unwrap();
    let [job] = &jobs(&journal, &journal.replay().unwrap())[..] else { panic!("one request was added") };
    assert_eq!((job.request.deadline, job.request.ttft_deadline), (Some(0), Some(5)));
}

#[test]
fn sessions_that_said_that_they_end_let_the_next_begin_in_a_simulated_run_too() {
    let config = Config { num_kv_blocks: 41, max_num_batched_tokens: 32, max_num_seqs: 4, max_model_len: 128, ..Config::default() };
    let config = Config { block_size: 4, ..config };
    let mut core = Recorder::on(Scheduler::new(config).unwrap());
    let (mut outputs, mut now, tenant) = (Outputs::default(), BEGINS, Arc::from("t"));
    for number in 0..6 {
        let session: Arc<str> = format!("s{number}").into();
        for turn in 0..3 {
            let scheduling = Request { tenant: Arc::clone(&tenant), session: Some(Arc::clone(&session)), ..Request::default() };
            let prompt = vec![1000 + number as Token; 60 + 15 * turn as usize];
            core.add(Request { tag: 3 * number + turn, prompt, max_new_tokens: 8, ..scheduling }, now).unwrap();
            while !core.is_idle() {
                let plan = core.plan(now).expect("a request that can run");
                now += 2000 + 1000 * Time::from(plan.load.prefill_tokens);
                let sampled = vec![5; plan.chunks.iter().filter(|chunk| chunk.samples).count()];
                core.commit(plan, &sampled, now, &mut outputs);
            }
            now += 50_000;
        }
        core.note_session(&tenant, &session, SessionEvent::Ended, now);
    }
    let mut bytes = Vec::new();
    core.take_journal(&mut bytes);
    let journal = ParsedJournal::read(&bytes).unwrap();
    let (replayed, report) = recorded(&journal).unwrap();
    let machine = Machine::new(StepTime::learned(replayed.scheduler.model()));
    let simulated = what_if(config, &journal, &replayed, &machine, || true).unwrap();
    let [recorded, simulated] = [report, simulated].map(|report| *report.ttft(|_| true).last().unwrap());
    assert!(simulated < 2 * recorded, "{simulated} µs to a first token, {recorded} µs recorded");
}

#[test]
fn a_simulated_run_finds_as_much_in_the_cache_as_the_recorded_one_with_held_sequences() {
    let config = Config { num_kv_blocks: 65, max_num_batched_tokens: 64, max_num_seqs: 4, max_model_len: 512, ..Config::default() };
    let mut core = Recorder::on(Scheduler::new(config).unwrap());
    let (mut outputs, mut now) = (Outputs::default(), BEGINS);
    let held = core.open(&"".into(), &Arc::default(), now);
    let mut prompt: Vec<Token> = (100..130).collect();
    let mut known = 0;
    for tag in 0..6 {
        let continues = Some(Continues { held, tokens: known });
        core.add(Request { tag, prompt: prompt.clone(), max_new_tokens: 8, continues, ..Request::default() }, now).unwrap();
        while let Some(plan) = core.plan(now) {
            now += 1000;
            core.commit(plan, &[9], now, &mut outputs);
        }
        // The answer, and then the next turn.
        prompt.extend([9; 8]);
        known = prompt.len() as u32;
        prompt.extend((0..20).map(|at| 1000 * (tag as Token + 1) + at));
    }
    assert!(core.drop_held(held, now) && core.is_idle());
    let mut bytes = Vec::new();
    core.take_journal(&mut bytes);
    let journal = ParsedJournal::read(&bytes).unwrap();

    let (replayed, report) = recorded(&journal).unwrap();
    let machine = Machine::new(StepTime::linear([1000.0, 0.0, 0.0, 0.0, 0.0]));
    let simulated = what_if(config, &journal, &replayed, &machine, || true).unwrap();
    let [recorded, simulated] = [report, simulated].map(|report| report.stats.unwrap().counters);
    assert_eq!(recorded.prefix_queries, simulated.prefix_queries);
    // A held sequence has its last block too, which is not full, and all but the last token of its answer.
    let blocks = recorded.prefix_hits.abs_diff(simulated.prefix_hits).div_ceil(16);
    assert!(simulated.prefix_hits > 0 && blocks <= 5, "{} tokens recorded, {} simulated", recorded.prefix_hits, simulated.prefix_hits);
}
