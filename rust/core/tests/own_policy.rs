//! A policy that is defined outside of the crate, in one file.

use chairlift_core::{Candidate, Config, Outputs, Policy, Request, Rules, Scheduler, Time};

/// Last come, first served.
#[derive(Debug)]
struct Lifo;

impl Policy for Lifo {
    fn name(&self) -> &'static str {
        "lifo"
    }

    fn help(&self) -> &'static str {
        "the last to arrive"
    }

    fn rules(&self) -> Rules {
        Rules { ranked: true, ..Rules::default() }
    }

    fn rank(&self, request: &Candidate) -> u64 {
        Time::MAX - request.arrived
    }
}

/// The order in which five requests start that wait for one slot. Each arrives a microsecond after the one before and takes 2 ms.
fn started(ageing: Time) -> Vec<u64> {
    let mut scheduler =
        Scheduler::new(Config { scheduling_policy: &Lifo, max_num_seqs: 1, queue_ageing: ageing, ..Config::default() }).unwrap();
    for tag in 0..5 {
        let request = Request { tag, prompt: vec![tag as u32; 8], max_new_tokens: 2, ..Request::default() };
        scheduler.add(request, tag).unwrap();
    }
    let (mut started, mut now, mut outputs) = (Vec::new(), 10, Outputs::default());
    while let Some(plan) = scheduler.plan(now) {
        started.extend(plan.admitted.iter().map(|admitted| admitted.tag));
        let sampled = vec![7; plan.chunks.iter().filter(|chunk| chunk.samples).count()];
        now += 1000;
        scheduler.commit(plan, &sampled, now, &mut outputs);
        scheduler.check();
    }
    started
}

#[test]
fn it_orders_the_queue() {
    assert_eq!(started(1_000_000), [4, 3, 2, 1, 0]);
}

#[test]
fn it_cannot_keep_a_request_waiting_for_longer_than_the_ageing() {
    assert_eq!(started(1500), [4, 0, 1, 2, 3]);
}
