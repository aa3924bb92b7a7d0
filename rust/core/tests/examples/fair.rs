//! Virtual token counters: service is one unit per prompt token and two per output token, divided by the tenant's weight.

use crate::lab::{Lab, Step, ask, plenty};
use chairlift_core::{Config, Fair, Request, Time, TimelineState};
use std::collections::HashMap;

const PROMPT: u32 = 64;
const NEW: u32 = 32;
const ROWS: u32 = 8;
/// The paper's bound for two tenants that both wait: `2 max(w_p L_in, w_q M)`, with 8 * 32 output tokens in a batch.
const BOUND: f64 = 2.0 * 2.0 * (ROWS * NEW) as f64;

/// Tenants that always have requests waiting, and the service they received.
struct Market {
    lab: Lab,
    tags: u64,
    owner: HashMap<u64, &'static str>,
    service: HashMap<&'static str, u64>,
}

impl Market {
    fn new() -> Self {
        let config = Config { max_num_seqs: ROWS, enable_prefix_caching: false, ..plenty(&Fair) };
        Self { lab: Lab::new(config), tags: 0, owner: HashMap::new(), service: HashMap::new() }
    }

    fn add(&mut self, tenant: &'static str, weight: u32) -> u64 {
        self.tags += 1;
        self.owner.insert(self.tags, tenant);
        self.lab.add(Request { tenant: tenant.into(), weight, ..ask(self.tags, PROMPT, NEW) });
        self.tags
    }

    /// Runs a step with at least ten requests of each tenant waiting.
    fn step(&mut self, tenants: &[(&'static str, u32)]) -> usize {
        for &(tenant, weight) in tenants {
            let waiting = |market: &Self| market.lab.scheduler.tenants().find(|(name, _)| ***name == *tenant).map_or(0, |(_, u)| u.waiting);
            while waiting(self) < 10 {
                self.add(tenant, weight);
            }
        }
        let step = self.lab.step();
        for tag in step.admitted {
            *self.service.entry(self.owner[&tag]).or_default() += u64::from(PROMPT);
        }
        // Every chunk reaches its sequence's end: a step has tokens for more than eight prompts.
        for (tag, _) in &step.chunks {
            *self.service.entry(self.owner[tag]).or_default() += 2;
        }
        step.chunks.len()
    }

    fn of(&self, tenant: &str) -> f64 {
        self.service.get(tenant).copied().unwrap_or_default() as f64
    }
}

#[test]
fn service_follows_weights_and_never_drifts_further_apart_than_the_bound() {
    let mut market = Market::new();
    let mut widest: f64 = 0.0;
    for _ in 0..4000 {
        market.step(&[("a", 1), ("b", 2)]);
        widest = widest.max((market.of("a") - market.of("b") / 2.0).abs());
    }
    assert!(widest <= BOUND, "{widest}");
    // Two thirds and one third, within 5 %.
    let ratio = market.of("b") / market.of("a");
    assert!((1.9..=2.1).contains(&ratio), "{ratio}");
}

#[test]
fn a_long_output_is_charged_as_it_grows() {
    // One tenant's requests are ten times as long, so it must complete a tenth as many.
    let mut lab = Lab::new(Config { max_num_seqs: 1, enable_prefix_caching: false, ..plenty(&Fair) });
    for i in 0..300 {
        lab.add(Request { tenant: "short".into(), ..ask(i, 1, 10) });
        lab.add(Request { tenant: "long".into(), ..ask(1000 + i, 1, 100) });
    }
    let mut ended = 0;
    while ended < 220 {
        lab.step();
        ended = lab.ended.len();
    }
    let long = lab.ended.keys().filter(|tag| **tag >= 1000).count();
    assert!((19..=21).contains(&long), "{long}");
}

#[test]
fn idleness_saves_nothing_up() {
    let mut market = Market::new();
    for _ in 0..500 {
        market.step(&[("a", 1)]);
    }
    // The first tenant was alone for 500 steps. From here on both receive the same service.
    let before = market.of("a");
    assert!(before > 8.0 * BOUND);
    for _ in 0..1000 {
        market.step(&[("a", 1), ("b", 1)]);
        let gap = (market.of("a") - before - market.of("b")).abs();
        assert!(gap <= BOUND, "{gap}");
    }
}

#[test]
fn nor_does_a_pause_of_everybody() {
    let mut market = Market::new();
    for _ in 0..200 {
        market.step(&[("a", 1), ("b", 1)]);
    }
    market.lab.finish();
    market.service.clear();
    // No other request waits when the third tenant first arrives. It is lifted to the tenant that waited last.
    for _ in 0..20 {
        market.add("c", 1);
    }
    for _ in 0..500 {
        market.step(&[("a", 1), ("b", 1), ("c", 1)]);
        let gap = (market.of("a") - market.of("c")).abs();
        assert!(gap <= BOUND, "{gap}");
    }
}

#[test]
fn who_is_alone_has_the_whole_machine() {
    let mut market = Market::new();
    for _ in 0..200 {
        market.step(&[("a", 1), ("b", 1)]);
    }
    let waiting: Vec<u64> = market.owner.iter().filter(|(_, owner)| **owner == "b").map(|(&tag, _)| tag).collect();
    for tag in waiting.into_iter().filter(|tag| !market.lab.ended.contains_key(tag)).collect::<Vec<_>>() {
        market.lab.abort(tag);
    }
    for _ in 0..100 {
        assert_eq!(market.step(&[("a", 1)]), ROWS as usize, "rows are idle while requests wait");
    }
}

#[test]
fn a_tenant_with_one_request_at_a_time_is_served_next() {
    let mut market = Market::new();
    for _ in 0..100 {
        market.step(&[("a", 1), ("b", 1)]);
    }
    for _ in 0..50 {
        let tag = market.add("c", 1);
        let before = market.lab.started.len();
        while !market.lab.started.contains(&tag) {
            market.step(&[("a", 1), ("b", 1)]);
        }
        assert_eq!(market.lab.started[before], tag, "others went first");
        while !market.lab.ended.contains_key(&tag) {
            market.step(&[("a", 1), ("b", 1)]);
        }
    }
}

#[test]
fn what_a_tenant_waits_for_is_a_row_in_its_turn_and_its_share_otherwise() {
    let mut lab = Lab::new(Config { max_num_seqs: 1, ..plenty(&Fair) });
    lab.add(Request { tenant: "a".into(), ..ask(1, 100, 10) });
    lab.step();
    // The second tenant is lifted to the waiting tenant and then goes before it.
    lab.add(Request { tenant: "a".into(), ..ask(2, 100, 10) });
    lab.add(Request { tenant: "b".into(), ..ask(3, 10, 10) });
    lab.finish();
    let waited = |tag: u64, cause: TimelineState| -> Time { lab.ended[&tag].states[cause as usize] };
    assert_eq!(lab.started, [1, 3, 2]);
    // It therefore has the turn for the slot, which becomes free after nine more steps.
    assert_eq!((waited(2, TimelineState::WaitSlots), waited(2, TimelineState::WaitFairness)), (10_000, 9000));
    assert_eq!((waited(3, TimelineState::WaitSlots), waited(3, TimelineState::WaitFairness)), (9000, 0));
}

#[test]
fn a_tenant_with_nothing_takes_rows_of_one_that_has_more_than_twice_as_many_even_then() {
    let mut lab = Lab::new(Config { max_num_seqs: 8, ..plenty(&Fair) });
    (1..=20).for_each(|tag| lab.add(Request { tenant: "a".into(), ..ask(tag, 16 + tag as u32, 1000) }));
    lab.steps(3);
    (101..=105).for_each(|tag| lab.add(Request { tenant: "b".into(), ..ask(tag, 16, 1000) }));
    // Twice 1 is less than 8, and twice 2 is less than 7, but twice 3 is not less than 6. The sequence with the
    // smallest loss is preempted.
    let step = lab.step();
    assert_eq!((step.preempted, step.admitted), (vec![1], vec![101]));
    // Its first prompt puts the new tenant ahead for a moment. It takes no more than its turn.
    assert!(lab.step().preempted.is_empty());
    let steps: Vec<_> = (0..50).map(|_| lab.step()).collect();
    let of = |tags: fn(&Step) -> &Vec<u64>| steps.iter().flat_map(|step| tags(step).clone()).collect::<Vec<_>>();
    assert_eq!((of(|step| &step.preempted), of(|step| &step.admitted)), (vec![2], vec![102]));
    assert_eq!(lab.explain(1).preempted_by, [101]);
    assert_eq!(lab.explain(1).preempted_for, [0, 0, 1, 0], "for fairness");
}

#[test]
fn a_tenants_requests_that_do_not_fit_do_not_hide_those_of_another() {
    // Twenty blocks, ten in use. The other tenant is next in turn and has a hundred requests of 15 blocks.
    let mut lab = Lab::new(Config { num_kv_blocks: 21, ..plenty(&Fair) });
    lab.add(Request { tenant: "a".into(), ..ask(1, 150, 10) });
    lab.step();
    (100..200).for_each(|tag| lab.add(Request { tenant: "b".into(), ..ask(tag, 240, 3) }));
    lab.steps(2);
    lab.add(Request { tenant: "a".into(), ..ask(2, 8, 1) });
    assert_eq!(lab.step().admitted, [2]);
}
