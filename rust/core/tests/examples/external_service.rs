//! Tenants' shares of the time of two models, between which an arbiter chooses.

use crate::lab::{Cost, Lab, ask, plenty};
use chairlift_core::{
    Arbiter, Config, Fair, Fcfs, MAX_CHARGED_EXTERNAL, NO_TOKEN, Outputs, ParsedJournal, Recorder, Request, Scheduler, Time,
};
use std::collections::HashMap;

const PROMPT: u32 = 64;
const NEW: u32 = 32;
const ROWS: u32 = 4;
/// Interval at which the models tell each other their tenants' service.
const INTERVAL: Time = 100_000;
/// A large and a small model: microseconds per step, per prompt token and per decoding sequence.
const COSTS: [Cost; 2] = [Cost(20_000, 200, 2000), Cost(2000, 50, 500)];

/// Two models. The tenant `x` sends requests to both, `y` only to the second one.
struct Engine {
    arbiter: Arbiter,
    labs: [Lab; 2],
    now: Time,
    shared_at: Time,
    /// Whether the models tell each other their tenants' service.
    shares: bool,
    tags: u64,
    owner: HashMap<u64, &'static str>,
    /// Engine time of each tenant.
    time: HashMap<&'static str, f64>,
}

impl Engine {
    fn new(shares: bool) -> Self {
        let config = Config { max_num_seqs: ROWS, enable_prefix_caching: false, ..plenty(&Fair) };
        let lab = |cost| {
            let mut lab = Lab::new(config);
            (lab.cost, lab.check_every) = (cost, 64);
            lab
        };
        let mut arbiter = Arbiter::default();
        (0..2).for_each(|model| arbiter.add(model, 1, 0, None));
        let (owner, time) = (HashMap::new(), HashMap::new());
        Self { arbiter, labs: COSTS.map(lab), now: 0, shared_at: 0, shares, tags: 0, owner, time }
    }

    fn add(&mut self, model: usize, tenant: &'static str, weight: u32) {
        self.tags += 1;
        self.owner.insert(self.tags, tenant);
        self.labs[model].now = self.now;
        self.labs[model].add(Request { tenant: tenant.into(), weight, ..ask(self.tags, PROMPT, NEW) });
        self.arbiter.ready(model as u32, self.now);
    }

    /// Keeps ten requests of a tenant waiting at a model.
    fn flood(&mut self, model: usize, tenant: &'static str, weight: u32) {
        let tenants =
            |engine: &Self| engine.labs[model].scheduler.tenants().find(|(name, _)| ***name == *tenant).map_or(0, |(_, u)| u.waiting);
        while tenants(self) < 10 {
            self.add(model, tenant, weight);
        }
    }

    /// Runs the step that the arbiter chooses, if a model has work, and divides its time among the tenants.
    fn step(&mut self) {
        let Some(model) = self.arbiter.choose(self.now) else {
            self.now += 1000;
            return;
        };
        let (lab, cost) = (&mut self.labs[model as usize], COSTS[model as usize]);
        lab.now = self.now;
        let step = lab.step();
        let took = lab.now - self.now;
        for (tag, len) in &step.chunks {
            let own = if *len > 1 { cost.1 * Time::from(*len) } else { cost.2 };
            *self.time.entry(self.owner[tag]).or_default() += own as f64 + cost.0 as f64 / step.chunks.len() as f64;
        }
        self.now = lab.now;
        self.arbiter.charge(model, took, self.now);
        if lab.scheduler.is_idle() {
            self.arbiter.idle(model);
        }
        if self.shares && self.now - self.shared_at >= INTERVAL {
            self.shared_at = self.now;
            let services = self.labs.each_mut().map(|lab| lab.scheduler.take_service());
            for (from, lab) in self.labs.iter_mut().enumerate() {
                services[1 - from].iter().for_each(|(tenant, us)| lab.scheduler.charge_external(tenant, *us));
            }
        }
    }

    fn of(&self, tenant: &str) -> f64 {
        self.time.get(tenant).copied().unwrap_or_default()
    }
}

/// Microseconds by which a tenant may miss its share in `time`.
fn bound(time: Time) -> f64 {
    // The paper's bound: twice the service of a full batch. A request takes a row's part of its steps.
    let request = |cost: Cost| cost.1 * Time::from(PROMPT) + Time::from(NEW) * (cost.2 + cost.0 / Time::from(ROWS)) + cost.0;
    let batch = 2 * Time::from(ROWS) * request(COSTS[1]);
    // The arbiter's bound for two models with steps of at most 52 ms, and the steps of an interval.
    let arbiter = 2 * (100_000 + 52_000);
    // One request of the other tenant per MAX_CHARGED_EXTERNAL.
    let rounds = (time / MAX_CHARGED_EXTERNAL + 1) * request(COSTS[1]);
    (batch + arbiter + INTERVAL + 52_000 + rounds) as f64
}

/// The part of the time that `y` gets in a minute during which `x` floods both models with this weight.
fn part_of_y(shares: bool, weight: u32) -> (f64, f64) {
    let mut engine = Engine::new(shares);
    while engine.now < 60_000_000 {
        engine.flood(0, "x", weight);
        engine.flood(1, "x", weight);
        engine.flood(1, "y", 1);
        engine.step();
    }
    let all = engine.of("x") + engine.of("y");
    assert!((all - engine.now as f64).abs() < 1.0, "all the time is divided");
    (engine.of("y") / all, bound(engine.now) / all)
}

#[test]
fn a_tenant_that_floods_two_models_takes_no_time_from_one_that_uses_one() {
    let (part, bound) = part_of_y(true, 1);
    assert!(bound < 0.05, "{bound}");
    assert!((0.5 - bound..0.5 + bound).contains(&part), "{part}, may miss {bound}");
    // Each scheduler by itself would halve the second model's half.
    let (alone, _) = part_of_y(false, 1);
    assert!((0.25 - bound..0.25 + bound).contains(&alone), "{alone}");
}

#[test]
fn weights_count_over_both_models() {
    // x has the first model's half, and three times as much as y in all: a quarter of the time from the second model.
    let (part, bound) = part_of_y(true, 3);
    assert!((0.25 - bound..0.25 + bound).contains(&part), "{part}, may miss {bound}");
}

#[test]
fn little_external_service_is_charged_by_its_time() {
    // x sends a request to the first model every four seconds, which takes about a sixth of the time. The tenants share all
    // of it alike, although the first model's tokens take much longer than the second's.
    let mut engine = Engine::new(true);
    let mut next = 0;
    while engine.now < 60_000_000 {
        if engine.now >= next {
            next += 4_000_000;
            engine.add(0, "x", 1);
        }
        engine.flood(1, "x", 1);
        engine.flood(1, "y", 1);
        engine.step();
    }
    let first = engine.labs[0].scheduler.stats().counters.step_us as f64 / engine.now as f64;
    assert!((0.12..0.25).contains(&first), "{first}");
    let (part, bound) = (engine.of("y") / engine.now as f64, bound(engine.now) / engine.now as f64);
    assert!((0.5 - bound..0.5 + bound).contains(&part), "{part}, may miss {bound}");
}

#[test]
fn a_tenant_with_more_than_its_share_at_other_engines_is_served_after_a_bounded_time() {
    let mut lab = Lab::new(Config { max_num_seqs: 1, enable_prefix_caching: false, ..plenty(&Fair) });
    lab.check_every = 64;
    (0..200).for_each(|tag| lab.add(Request { tenant: "y".into(), ..ask(tag, 10, 100) }));
    lab.steps(2000);
    lab.add(Request { tenant: "x".into(), ..ask(1000, 10, 100) });
    while !lab.started.contains(&1000) {
        lab.scheduler.charge_external("x", 1_000_000);
        lab.step();
    }
    // The model is all y's until y has had ten seconds, up to a request's tenth of a second.
    let waited = lab.now - 2_000_000;
    assert!((MAX_CHARGED_EXTERNAL - 200_000..MAX_CHARGED_EXTERNAL + 200_000).contains(&waited), "{waited}");
}

#[test]
fn service_is_reported_once_and_by_its_time() {
    let mut lab = Lab::new(Config { enable_prefix_caching: false, ..plenty(&Fair) });
    lab.add(Request { tenant: "a".into(), ..ask(1, 10, 95) });
    lab.add(Request { tenant: "b".into(), weight: 2, ..ask(2, 10, 95) });
    lab.scheduler.charge_external("a", 7);
    lab.finish();
    // 95 steps of a millisecond gave two tenants the same service, and b is charged half of it.
    let service: HashMap<_, _> = lab.scheduler.take_service().into_iter().collect();
    assert_eq!(service, HashMap::from([("a".into(), 47_500), ("b".into(), 23_750)]));
    lab.scheduler.charge_external("a", 1000);
    assert!(lab.scheduler.take_service().is_empty(), "external service is not service here");
    let mut fcfs = Lab::new(plenty(&Fcfs));
    fcfs.serve(ask(1, 10, 10));
    assert!(fcfs.scheduler.take_service().is_empty());
}

#[test]
fn the_service_of_embeddings_is_reported_by_its_time() {
    let mut scheduler = Scheduler::new(Config { enable_prefix_caching: false, ..plenty(&Fair) }).expect("a sound config");
    for tag in 0..10 {
        scheduler.add(Request { tenant: "a".into(), ..ask(tag, 10, 1) }, 0).expect("it fits");
    }
    let plan = scheduler.plan(0).expect("all run");
    scheduler.commit(plan, &[NO_TOKEN; 10], 50_000, &mut Outputs::default());
    assert_eq!(scheduler.take_service(), [("a".into(), 50_000)]);
}

#[test]
fn a_journal_has_the_external_service() {
    let config = Config { max_num_seqs: 1, enable_prefix_caching: false, ..plenty(&Fair) };
    let mut recorder = Recorder::on(Scheduler::new(config).expect("a sound config"));
    let (mut outputs, mut order) = (Outputs::default(), Vec::new());
    for tag in 0..6 {
        let tenant = ["x", "y"][usize::from(tag % 2 == 1)].into();
        recorder.add(Request { tenant, ..ask(tag, 8, 4) }, tag).expect("it fits");
    }
    for now in 6.. {
        let Some(plan) = recorder.plan(now * 1000) else { break };
        order.extend(plan.admitted.iter().map(|admitted| admitted.tag));
        let sampled = vec![7; plan.chunks.len()];
        recorder.commit(plan, &sampled, now * 1000 + 900, &mut outputs);
        recorder.charge_external("x", 50_000);
    }
    assert_eq!(order, [0, 1, 3, 5, 2, 4], "all of y before the next of x");
    let mut bytes = Vec::new();
    recorder.take_journal(&mut bytes);
    let replayed = ParsedJournal::read(&bytes).expect("a sound journal").replay().expect("a sound config");
    assert_eq!((replayed.differs_at, replayed.ended.len()), (None, 6));
}
