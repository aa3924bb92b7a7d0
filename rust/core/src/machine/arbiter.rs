//! Chooses which of several models runs the next step.
//!
//! Start-time fair queueing (Goyal et al., SIGCOMM'96) over the models' step times. Each model has a virtual time that
//! grows by its service divided by its weight, and the ready model with the least virtual time goes first. A model that
//! becomes ready starts at the least virtual time of the ready ones of its priority, so that idleness earns nothing. It
//! goes before those with the same virtual time that have run since they became ready, so it waits for one step only.
//!
//! Among several models that have not run since they became ready, the one goes first whose next step has the least
//! predicted time for each request that it begins, divided by the weight. A short step so waits for no long one, and the
//! mean wait is short. Such a model also goes before the least served one if it would be the less served of the two
//! after both had run (the earliest virtual finish time, as in WFQ). For that, steps count for at most [`MAX_LEAD`].
//!
//! Three rules come before the shares:
//!
//! - A model that waited for [`MAX_WAIT`] goes first. With n ready models and steps of at most L, no model waits longer
//!   than `MAX_WAIT` + n·L.
//! - A model of a more urgent priority goes before the others.
//! - A model that would miss its ITL target if the least served model went first goes before it, as long as it has had
//!   at most [`MAX_LEAD`] more service than its share.
//!
//! While two models of equal priority and weights v, w stay ready, their services divided by their weights differ by at
//! most 2·(`MAX_LEAD` + L)/min(v, w), beside the steps that the first rule gives.

use crate::request::Time;
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// Longest wait of a ready model, in microseconds, before it goes first.
pub const MAX_WAIT: Time = 1_000_000;
/// Most microseconds of service ahead of its share that a model can get for its ITL target.
pub const MAX_LEAD: Time = 100_000;
/// Units of virtual time per microsecond at weight 1. Weights up to this value divide it with little rounding error.
const UNIT: u64 = 1 << 12;

#[derive(Debug)]
struct Model {
    weight: u64,
    priority: i32,
    itl: Option<Time>,
    virtual_time: u64,
    /// Since when it is ready and has not run; `None` while it is idle.
    waiting_since: Option<Time>,
    /// Whether it has run since it became ready.
    ran: bool,
    /// Predicted microseconds of its next step: those of its last one, if the caller expects nothing else.
    next_step: Time,
    /// Requests whose first step that is, and at least 1.
    begins: u32,
}

impl Model {
    /// Virtual time of `us` microseconds of service.
    fn virtual_of(&self, us: Time) -> u64 {
        us * UNIT / self.weight
    }

    /// Its virtual time after the next step. Longer steps count as ones of [`MAX_LEAD`].
    fn finish(&self) -> u64 {
        self.virtual_time + self.virtual_of(self.next_step.min(MAX_LEAD))
    }

    /// Virtual time of the next step for each request that it begins.
    fn each(&self) -> u64 {
        self.virtual_of(self.next_step) / u64::from(self.begins)
    }
}

/// Chooses which of several models runs the next step. Models have numbers that the caller gives.
#[derive(Debug, Default)]
pub struct Arbiter {
    models: BTreeMap<u32, Model>,
}

impl Arbiter {
    /// Adds an idle model, or replaces the one with this number. Lower priorities go first. `itl` is the longest time
    /// in microseconds that should pass between two steps.
    pub fn add(&mut self, model: u32, weight: u32, priority: i32, itl: Option<Time>) {
        let weight = u64::from(weight.max(1));
        self.models
            .insert(model, Model { weight, priority, itl, virtual_time: 0, waiting_since: None, ran: false, next_step: 0, begins: 1 });
    }

    /// Removes a model, if it is known.
    pub fn remove(&mut self, model: u32) {
        self.models.remove(&model);
    }

    /// Records that a model has work. No effect if it had some already.
    pub fn ready(&mut self, model: u32, now: Time) {
        let Some(priority) = self.models.get(&model).filter(|known| known.waiting_since.is_none()).map(|known| known.priority) else {
            return;
        };
        let rivals = || self.models.values().filter(|one| one.priority == priority);
        let least = rivals().filter(|one| one.waiting_since.is_some()).map(|one| one.virtual_time).min();
        // When all were idle, nobody is owed anything.
        let start = least.or_else(|| rivals().map(|one| one.virtual_time).max()).unwrap_or(0);
        if let Some(known) = self.models.get_mut(&model) {
            known.waiting_since = Some(now);
            known.ran = false;
            known.virtual_time = known.virtual_time.max(start);
        }
    }

    /// Records that a model has no work.
    pub fn idle(&mut self, model: u32) {
        if let Some(known) = self.models.get_mut(&model) {
            known.waiting_since = None;
        }
    }

    /// Predicts that the model's next step takes `us` microseconds and is the first of `begins` requests. Holds until the
    /// step is charged.
    pub fn expect(&mut self, model: u32, us: Time, begins: u32) {
        if let Some(known) = self.models.get_mut(&model) {
            known.next_step = us;
            known.begins = begins.max(1);
        }
    }

    /// The model whose step is next; `None` if none is ready.
    pub fn choose(&self, now: Time) -> Option<u32> {
        let (oldest, _, since) = self.waiting().min_by_key(|&(_, _, since)| since)?;
        if now.saturating_sub(since) >= MAX_WAIT {
            return Some(oldest);
        }
        let urgent = self.waiting().map(|(_, one, _)| one.priority).min()?;
        let rivals = || self.waiting().filter(|(_, one, _)| one.priority == urgent);
        let (served_least, least, _) = rivals().min_by_key(|&(_, one, since)| (one.virtual_time, one.ran, since))?;
        let newcomers =
            rivals().filter(|(_, one, _)| !one.ran && (one.virtual_time == least.virtual_time || one.finish() <= least.finish()));
        let fair = newcomers.min_by_key(|&(_, one, since)| (one.each(), since)).map_or(served_least, |(model, ..)| model);
        let due = rivals().filter_map(|(model, one, since)| {
            let by = since + one.itl?;
            let late = now + least.next_step + one.next_step > by;
            (late && one.virtual_time <= least.virtual_time + one.virtual_of(MAX_LEAD)).then_some((by, Reverse(model)))
        });
        Some(due.min().map_or(fair, |(_, Reverse(model))| model))
    }

    /// Charges a step of `us` microseconds, predicted or measured, that ended at `now`.
    pub fn charge(&mut self, model: u32, us: Time, now: Time) {
        if let Some(known) = self.models.get_mut(&model) {
            known.virtual_time += known.virtual_of(us);
            known.next_step = us;
            known.begins = 1;
            known.ran = true;
            known.waiting_since = known.waiting_since.map(|_| now);
        }
    }

    /// The ready models, and since when each waits.
    fn waiting(&self) -> impl Iterator<Item = (u32, &Model, Time)> {
        self.models.iter().filter_map(|(&number, model)| Some((number, model, model.waiting_since?)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs steps until `until`, each of the length that `step` gives; returns the order.
    fn run(arbiter: &mut Arbiter, now: &mut Time, until: Time, step: impl Fn(u32) -> Time) -> Vec<u32> {
        let mut order = Vec::new();
        while *now < until {
            let model = arbiter.choose(*now).expect("a ready model");
            *now += step(model);
            arbiter.charge(model, step(model), *now);
            order.push(model);
        }
        order
    }

    fn ready(models: &[(u32, i32, Option<Time>)]) -> Arbiter {
        let mut arbiter = Arbiter::default();
        for (number, &(weight, priority, itl)) in (0..).zip(models) {
            arbiter.add(number, weight, priority, itl);
            arbiter.ready(number, 0);
        }
        arbiter
    }

    #[test]
    fn time_is_shared_by_weight_and_not_steps() {
        let mut arbiter = ready(&[(1, 0, None), (3, 0, None)]);
        let order = run(&mut arbiter, &mut 0, 10_000_000, |model| [50_000, 10_000][model as usize]);
        let first = order.iter().filter(|&&model| model == 0).count() as u64 * 50_000;
        assert!(first.abs_diff(2_500_000) <= 50_000, "{first}");
    }

    #[test]
    fn idleness_earns_nothing() {
        let mut arbiter = ready(&[(1, 0, None), (1, 0, None)]);
        let mut now = 0;
        arbiter.idle(1);
        run(&mut arbiter, &mut now, 5_000_000, |_| 10_000);
        arbiter.ready(1, now);
        let end = now + 100_000;
        let order = run(&mut arbiter, &mut now, end, |_| 10_000);
        assert_eq!(order.iter().filter(|&&model| model == 1).count(), 5, "{order:?}");
    }

    #[test]
    fn a_newcomer_waits_for_one_step() {
        let mut arbiter = ready(&[(1, 0, None), (1, 0, None)]);
        let mut now = 0;
        arbiter.idle(1);
        for _ in 0..10 {
            let end = now + 50_000;
            run(&mut arbiter, &mut now, end, |_| 10_000);
            arbiter.ready(1, now);
            assert_eq!(arbiter.choose(now), Some(1));
            arbiter.charge(1, 2_000, now + 2_000);
            arbiter.idle(1);
            now += 2_000;
        }
    }

    #[test]
    fn a_short_step_goes_before_long_ones_that_became_ready_with_it() {
        let mut arbiter = ready(&[(1, 0, None); 4]);
        // The third step answers three requests, in 40 ms each.
        for (model, us, begins) in [(0, 100_000, 1), (1, 50_000, 1), (2, 120_000, 3), (3, 10_000, 1)] {
            arbiter.expect(model, us, begins);
        }
        let mut order = Vec::new();
        for now in 0..4 {
            let model = arbiter.choose(now).expect("a ready model");
            arbiter.charge(model, 10_000, now);
            arbiter.idle(model);
            order.push(model);
        }
        assert_eq!(order, [3, 2, 1, 0]);
    }

    #[test]
    fn a_weight_counts_among_those_that_became_ready_together() {
        let mut arbiter = ready(&[(1, 0, None), (4, 0, None)]);
        arbiter.expect(0, 30_000, 1);
        arbiter.expect(1, 100_000, 1);
        assert_eq!(arbiter.choose(0), Some(1));
    }

    #[test]
    fn short_steps_go_before_a_long_one_within_their_share_only() {
        // Two models have one request of 10 ms after the other. The third has a step of 200 ms, which counts as one of 100 ms.
        let mut arbiter = ready(&[(1, 0, None); 3]);
        let mut now = 0;
        let waited = loop {
            arbiter.expect(0, 200_000, 1);
            let model = arbiter.choose(now).expect("a ready model");
            if model == 0 {
                break now;
            }
            now += 10_000;
            arbiter.charge(model, 10_000, now);
            arbiter.idle(model);
            arbiter.ready(model, now);
        };
        assert_eq!(waited, 2 * MAX_LEAD);
    }

    #[test]
    fn the_urgent_goes_first_and_the_other_once_a_second() {
        let mut arbiter = ready(&[(1, 1, None), (1, 0, None)]);
        let order = run(&mut arbiter, &mut 0, 5 * (MAX_WAIT + 10_000), |_| 10_000);
        assert_eq!(order.iter().filter(|&&model| model == 0).count(), 5);
    }

    #[test]
    fn a_target_moves_a_model_ahead_within_its_share() {
        // Steps of 80 ms beside steps of 5 ms that should come every 100 ms. Equal weights would allow several in a row.
        let mut arbiter = ready(&[(4, 0, None), (1, 0, Some(100_000))]);
        let (mut now, mut last, mut longest) = (0, 0, 0);
        while now < 3_000_000 {
            let model = arbiter.choose(now).expect("a ready model");
            let us = [80_000, 5_000][model as usize];
            now += us;
            arbiter.charge(model, us, now);
            if model == 1 {
                longest = longest.max(now - last);
                last = now;
            }
        }
        assert!(longest <= 100_000, "{longest}");
        // One that can only meet its target with more than its share gets its share.
        let mut arbiter = ready(&[(1, 0, None), (1, 0, Some(10_000))]);
        let order = run(&mut arbiter, &mut 0, 10_000_000, |_| 40_000);
        let second = order.iter().filter(|&&model| model == 1).count() as u64 * 40_000;
        assert!(second <= 5_000_000 + MAX_LEAD + 40_000, "{second}");
    }
}
