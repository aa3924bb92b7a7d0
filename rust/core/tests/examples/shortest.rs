//! Least work left first. A running sequence is preempted only if the gain exceeds the cost.

use crate::lab::{Cost, Lab, ask, plenty};
use chairlift_core::{Config, Request, Shortest};

fn one_row() -> Config {
    Config { max_num_seqs: 1, ..plenty(&Shortest) }
}

#[test]
fn the_order_is_by_prediction_or_by_what_may_be_generated() {
    let mut lab = Lab::new(one_row());
    lab.add(ask(1, 10, 2));
    lab.step();
    lab.add(ask(2, 10, 100));
    lab.add(ask(3, 10, 50));
    lab.add(Request { predicted_tokens: Some(10), ..ask(4, 10, 200) });
    // A prediction beyond `max_new_tokens` has no further effect.
    lab.serve(Request { predicted_tokens: Some(1000), ..ask(5, 10, 70) });
    assert_eq!(lab.started, [1, 4, 3, 5, 2]);
}

#[test]
fn a_long_prompt_is_work_too() {
    // A prompt token takes 100 us and a step 1 ms: 2000 prompt and 5 output tokens are 205 ms, 10 and 100 are 101 ms.
    let mut lab = Lab::taught(one_row(), Cost(1000, 100, 0));
    lab.cost = Cost(1000, 0, 0);
    lab.add(ask(1, 1, 40));
    lab.steps(35);
    lab.add(ask(2, 2000, 5));
    lab.add(ask(3, 10, 100));
    lab.finish();
    assert_eq!(lab.started, [1, 3, 2]);
}

#[test]
fn who_has_more_than_twice_as_much_before_it_makes_way() {
    // A thousand tokens, of which 999 are left when the others arrive: 999 ms against 2 * 480 and 2 * 520.
    for (new, preempts) in [(480, true), (520, false)] {
        let mut lab = Lab::taught(one_row(), Cost(1000, 0, 0));
        lab.add(ask(1, 10, 1000));
        lab.step();
        lab.add(ask(2, 10, new));
        let step = lab.step();
        assert_eq!(step.preempted, if preempts { vec![1] } else { vec![] }, "for one of {new}");
        assert_eq!(step.chunks, if preempts { [(2, 10)] } else { [(1, 1)] });
        lab.finish();
        assert_eq!(lab.ended[&1].preemptions, u32::from(preempts));
    }
}

#[test]
fn what_the_preempted_one_has_to_compute_again_counts_as_cost() {
    // It takes 430 ms to recompute 4000 prompt tokens of 100 us and the generated tokens. The remaining second is less
    // than twice the sum of 430 ms and 200 ms.
    let mut lab = Lab::taught(one_row(), Cost(1000, 100, 0));
    for (prompt, preempts) in [(4000, false), (100, true)] {
        let tag = u64::from(prompt);
        lab.add(ask(tag, prompt, 1300));
        lab.step_until_started(tag);
        while lab.explain(tag).output_tokens < 300 {
            lab.step();
        }
        lab.add(ask(tag + 1, 10, 200));
        assert_eq!(lab.step().preempted, if preempts { vec![tag] } else { vec![] }, "with a prompt of {prompt}");
        lab.finish();
    }
}

#[test]
fn a_long_request_starts_within_its_ageing_bound_and_ends_though_short_ones_keep_coming() {
    let mut lab = Lab::taught(Config { queue_ageing: 50_000, ..one_row() }, Cost(1000, 0, 0));
    let mut tag = 100;
    lab.add(ask(50, 8, 5));
    lab.step();
    lab.add(ask(1, 8, 500));
    let from = lab.now;
    while !lab.ended.contains_key(&1) {
        while lab.scheduler.stats().waiting < 4 {
            tag += 1;
            lab.add(ask(tag, 8, 5));
        }
        lab.step();
        assert!(lab.now < from + 2_000_000, "never ends: {:?}", lab.explain(1));
    }
    let queued = lab.ended[&1].queued();
    assert!((50_000..=56_000).contains(&queued), "{queued}");
}
