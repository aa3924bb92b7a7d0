//! Over any interval, busy models share time by their weights, no ready model waits beyond the bound, and the same calls
//! give the same choices, whatever lengths the caller predicts for the steps.

use chairlift_core::{Arbiter, MAX_LEAD, MAX_WAIT, Time};
use proptest::prelude::*;

/// Longest step, in microseconds.
const LONGEST: Time = 120_000;

#[derive(Clone, Debug)]
enum Op {
    /// Steps, with these lengths by model.
    Steps(Vec<Time>, u8),
    /// A model becomes ready or idle.
    Ready(usize, bool),
    /// Time in which nothing runs.
    Pause(Time),
    /// A prediction, right or wrong, of a model's next step and of the requests that it begins.
    Expect(usize, Time, u32),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (prop::collection::vec(1..=LONGEST, 5), 1..60u8).prop_map(|(lengths, count)| Op::Steps(lengths, count)),
        3 => (0..5usize, prop::bool::weighted(0.7)).prop_map(|(model, ready)| Op::Ready(model, ready)),
        1 => (0..2_000_000u64).prop_map(Op::Pause),
        3 => (0..5usize, 0..5_000_000u64, 0..100u32).prop_map(|(model, us, begins)| Op::Expect(model, us, begins)),
    ]
}

#[derive(Clone, Copy, Debug)]
struct Seen {
    weight: u32,
    priority: i32,
    itl: Option<Time>,
    /// Since when it is ready, and since when it has not run.
    ready: Option<Time>,
    waiting: Time,
    service: Time,
    /// Service of steps that it got for its wait.
    aged: Time,
}

fn model() -> impl Strategy<Value = Seen> {
    (1..9u32, 0..2i32, prop::option::of(1_000..300_000u64)).prop_map(|(weight, priority, itl)| Seen {
        weight,
        priority,
        itl,
        ready: None,
        waiting: 0,
        service: 0,
        aged: 0,
    })
}

/// Runs a scenario. Returns the choices, and checks waits and shares on the way.
fn run(mut models: Vec<Seen>, ops: &[Op]) -> Vec<u32> {
    let mut arbiter = Arbiter::default();
    for (number, model) in (0..).zip(&models) {
        arbiter.add(number, model.weight, model.priority, model.itl);
    }
    let (mut now, mut chosen) = (0, Vec::new());
    // Services when two models were last both ready for the first time, by pair.
    let mut starts = vec![vec![None; models.len()]; models.len()];
    for op in ops {
        match op {
            Op::Pause(time) => {
                // The engine is not idle while a model is ready.
                if models.iter().all(|model| model.ready.is_none()) {
                    now += time;
                }
            }
            &Op::Ready(number, ready) => {
                let number = number % models.len();
                if ready != models[number].ready.is_some() {
                    models[number].ready = ready.then_some(now);
                    models[number].waiting = now;
                    starts[number].fill(None);
                    for row in &mut starts {
                        row[number] = None;
                    }
                }
                if ready { arbiter.ready(number as u32, now) } else { arbiter.idle(number as u32) }
            }
            &Op::Expect(number, us, begins) => arbiter.expect((number % models.len()) as u32, us, begins),
            Op::Steps(lengths, count) => {
                for _ in 0..*count {
                    let Some(number) = arbiter.choose(now) else {
                        assert!(models.iter().all(|model| model.ready.is_none()), "a ready model is never left out");
                        break;
                    };
                    chosen.push(number);
                    step(&mut models, number as usize, lengths[number as usize], &mut now);
                    arbiter.charge(number, lengths[number as usize], now);
                    check_shares(&models, &mut starts);
                }
            }
        }
    }
    chosen
}

fn step(models: &mut [Seen], number: usize, length: Time, now: &mut Time) {
    let waits = models.iter().filter(|model| model.ready.is_some()).map(|model| *now - model.waiting);
    let longest = waits.max().expect("a ready model");
    assert!(longest <= MAX_WAIT + models.len() as Time * LONGEST, "a model waits for {longest} µs");
    let model = &mut models[number];
    assert!(model.ready.is_some(), "an idle model is never chosen");
    if *now - model.waiting >= MAX_WAIT {
        model.aged += length;
    }
    *now += length;
    model.service += length;
    model.waiting = *now;
}

/// The bound on shares that the module states, for every pair of models of one priority.
fn check_shares(models: &[Seen], starts: &mut [Vec<Option<(Time, Time)>>]) {
    let aged = models.iter().map(|model| model.aged).sum::<Time>();
    for (i, one) in models.iter().enumerate() {
        for (j, other) in models.iter().enumerate().skip(i + 1) {
            if one.ready.is_none() || other.ready.is_none() || one.priority != other.priority {
                continue;
            }
            let (first, second) = *starts[i][j].get_or_insert((one.service, other.service));
            let of = |now: Time, start: Time, weight: u32| (now - start) as f64 / f64::from(weight);
            let apart = (of(one.service, first, one.weight) - of(other.service, second, other.weight)).abs();
            let bound = 2.0 * (MAX_LEAD + LONGEST + aged) as f64 / f64::from(one.weight.min(other.weight));
            assert!(apart <= bound, "{apart} µs apart, at most {bound}: {one:?} {other:?}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3_000, failure_persistence: None, ..ProptestConfig::default() })]
    #[test]
    fn shares_follow_weights_and_no_model_starves(
        models in prop::collection::vec(model(), 2..6),
        ops in prop::collection::vec(op(), 1..60),
    ) {
        let first = run(models.clone(), &ops);
        prop_assert_eq!(first, run(models, &ops));
    }
}
