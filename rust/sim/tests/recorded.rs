//! A recorded journal in the format of a simulation, with two steps in flight, as on a GPU.

use chairlift_core::{Config, FinishReason, Outputs, ParsedJournal, Recorder, Request, Scheduler, Time, Token};
use chairlift_sim::{Histogram, Sums, recorded};

const BEGINS: Time = 10_000;

fn request(tag: u64, prompt: u32) -> Request {
    Request { tag, prompt: (0..prompt).map(|i| tag as Token * 100 + i).collect(), max_new_tokens: 4, ..Request::default() }
}

#[test]
fn steps_are_timed_one_after_the_other_though_planned_ahead() {
    let core = Scheduler::new(Config { num_blocks: 33, max_tokens: 64, max_seqs: 4, max_model_len: 128, ..Config::default() }).unwrap();
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
    assert!(core.abort(other, at(1500)));
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
    let sums = Sums { busy: 3500, batch: 1000 + 2 * 800 + 2 * 900 + 800, blocks: 3500 + (1500 - 100), most_batch: 2, most_blocks: 2 };
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
