//! Prefixes of sessions' requests are read from storage in their turns.

use crate::lab::{Cost, Lab, ask, plenty};
use chairlift_core::{Config, Fair, Fcfs, Preparation, Request, Time, TimelineState, Token};
use std::collections::HashMap;

/// Prompt tokens of a turn: 75 blocks with its output, so that one context fits into the cache and two do not.
const PROMPT: u32 = 1190;
const WHOLE: u32 = PROMPT / 16 * 16;
const FOREVER: Time = 1 << 50;

/// A scheduler, and storage that has the contexts of the sessions that were served.
struct Stored {
    lab: Lab,
    /// Sessions of the requests, by tag.
    sessions: HashMap<u64, u64>,
    /// Microseconds to read a block. None if storage has lost them.
    each: Option<Time>,
}

impl Stored {
    /// A step takes a millisecond, and as much more for each prompt token: a context takes 1.2 s.
    fn new(each: Option<Time>) -> Self {
        let config = Config { num_kv_blocks: 101, max_num_seqs: 8, max_session_wait: FOREVER, ..plenty(&Fcfs) };
        Self { lab: Lab::taught(config, Cost(1000, 1000, 10)), sessions: HashMap::new(), each }
    }

    fn add(&mut self, tag: u64, session: u64) {
        self.sessions.insert(tag, session);
        self.lab.add(turn(tag, session));
    }

    /// Reads what the scheduler asks for, and runs a step or waits.
    fn go_on(&mut self) {
        for tag in self.lab.scheduler.take_reads() {
            let session = self.sessions[&tag];
            let was_served = self.lab.ended.keys().any(|ended| self.sessions.get(ended) == Some(&session));
            if let Some(each) = self.each.filter(|_| was_served) {
                let prompt = &turn(tag, session).prompt[..WHOLE as usize];
                let missing = prompt.len() / 16 - self.lab.scheduler.cached_blocks("", prompt);
                self.lab.now += each * missing as Time;
                self.lab.scheduler.restore("", prompt, self.lab.now);
            }
            self.lab.prepare(tag, None);
        }
        if self.lab.try_step().is_none()
            && let Some(at) = self.lab.scheduler.wake_at()
        {
            self.lab.now = at;
        }
    }

    fn finish(&mut self) {
        while !self.lab.scheduler.is_idle() {
            self.go_on();
        }
    }

    fn spent(&self, tag: u64, state: TimelineState) -> Time {
        self.lab.explain(tag).states[state as usize]
    }
}

/// A turn of the session with this number, whose prompt is the same in each turn.
fn turn(tag: u64, session: u64) -> Request {
    let prompt = (0..PROMPT).map(|at| if at == 0 { 3_000_000 + session as Token } else { 10 }).collect();
    Request { prompt, session: Some(session.to_string().into()), preparation: Some(Preparation::ReadCache), ..ask(tag, 1, 10) }
}

#[test]
fn a_parked_session_s_prefix_is_read_when_its_turn_has_come() {
    let mut world = Stored::new(Some(1000));
    for (tag, session) in [(1, 1), (2, 2)] {
        world.add(tag, session);
        world.finish();
    }
    // Session 2 is active. While the request of session 1 waits, the turns of session 2 find all of theirs.
    world.add(3, 1);
    assert_eq!(world.lab.scheduler.take_reads(), []);
    for tag in 4..8 {
        world.add(tag, 2);
        while !world.lab.ended.contains_key(&tag) {
            world.go_on();
        }
        assert_eq!((world.lab.ended[&tag].cached_tokens, world.spent(tag, TimelineState::ReadCache)), (WHOLE, 0));
    }
    assert!(!world.lab.started.contains(&3));
    world.finish();
    let (timeline, read) = (&world.lab.ended[&3], world.spent(3, TimelineState::ReadCache));
    assert_eq!(timeline.cached_tokens, WHOLE);
    assert!(world.spent(3, TimelineState::WaitSession) > 0 && (10_000..=75_000).contains(&read), "{read}: {timeline:?}");
    assert_eq!(timeline.queued(), timeline.started.expect("it ran") - timeline.arrived, "the wait for the turn is a part of it");
}

#[test]
fn a_tenant_is_told_of_its_own_tokens_that_storage_brings_back() {
    let mut world = Stored::new(Some(1000));
    world.lab.scheduler.remember_users();
    for (tag, session) in [(1, 1), (2, 2), (3, 1), (4, 2)] {
        world.add(tag, session);
        world.finish();
    }
    let told = |world: &Stored, tag| (world.lab.ended[&tag].cached_tokens, world.lab.ended[&tag].own_cached_tokens);
    assert_eq!([3, 4].map(|tag| told(&world, tag)), [(WHOLE, WHOLE); 2]);
    assert!([3, 4].iter().all(|&tag| world.spent(tag, TimelineState::ReadCache) > 0));
    // Another tenant sends the prompt of session 1, most of which is on disk.
    world.sessions.insert(5, 1);
    world.lab.add(Request { tenant: "another".into(), session: None, ..turn(5, 1) });
    world.finish();
    assert_eq!(told(&world, 5), (WHOLE, 0));
    assert!(world.spent(5, TimelineState::ReadCache) > 0);
}

#[test]
fn reads_that_are_quick_make_turns_shorter() {
    let takes = |each| {
        let mut world = Stored::new(Some(each));
        let began = world.lab.now;
        for (tag, session) in (1..17).zip([1, 2].into_iter().cycle()) {
            world.add(tag, session);
            world.finish();
        }
        world.lab.now - began
    };
    // A block is computed in 16 ms.
    let [slow, quick] = [16_000, 500].map(takes);
    assert!(3 * quick < slow, "{quick} and {slow} us");
}

#[test]
fn a_read_that_finds_nothing_leaves_the_turns_as_they_are() {
    let mut world = Stored::new(None);
    let mut waited = Vec::new();
    for (tag, session) in (1..9).zip([1, 2].into_iter().cycle()) {
        world.add(tag, session);
        world.finish();
        waited.push(world.spent(tag, TimelineState::WaitSession));
    }
    // Turns last for five times the time to compute a context, of which the session's own takes one.
    assert!(waited[2..].iter().all(|&waited| waited > 3 * 1_200_000), "{waited:?}");
}

#[test]
fn reads_that_are_slower_than_computing_are_given_up() {
    // A block is computed in 16 ms, and read in 64 ms.
    let mut world = Stored::new(Some(64_000));
    for (tag, session) in (1..17).zip([1, 2].into_iter().cycle()) {
        world.add(tag, session);
        world.finish();
    }
    let read: Vec<u64> = (1..17).filter(|&tag| world.spent(tag, TimelineState::ReadCache) > 0).collect();
    assert!(matches!(read[..], [3] | [3, 4]), "{read:?}");
    assert!((5..17).all(|tag| world.spent(tag, TimelineState::WaitSession) > 0));
}

#[test]
fn tenants_keep_their_shares_while_prefixes_are_read() {
    let config = Config { num_kv_blocks: 201, max_num_seqs: 8, max_session_wait: FOREVER, ..plenty(&Fair) };
    let mut world = Stored { lab: Lab::taught(config, Cost(20_000, 1000, 10)), ..Stored::new(Some(2000)) };
    world.lab.check_every = 100;
    // Tenant a has five sessions, and tenant b, of twice the weight, has three. Each always has a request.
    let mut busy: HashMap<u64, u64> = HashMap::new();
    for _ in 0..20_000 {
        for session in 1..9 {
            if busy.get(&session).is_none_or(|tag| world.lab.ended.contains_key(tag)) {
                let tag = world.sessions.len() as u64 + 1;
                let (tenant, weight) = if session < 6 { ("a", 1) } else { ("b", 2) };
                busy.insert(session, tag);
                world.sessions.insert(tag, session);
                world.lab.add(Request { tenant: tenant.into(), weight, ..turn(tag, session) });
            }
        }
        world.go_on();
    }
    let served = |tenant: &str| {
        let of = world.lab.ended.values().filter(|timeline| *timeline.tenant == *tenant);
        of.map(|timeline| f64::from(timeline.prompt_tokens - timeline.cached_tokens + 2 * timeline.output_tokens)).sum::<f64>()
    };
    let ratio = served("b") / served("a");
    assert!((1.9..2.1).contains(&ratio), "{ratio}");
    assert!((1..world.sessions.len() as u64 / 2).any(|tag| world.spent(tag, TimelineState::ReadCache) > 0));
}

#[test]
fn requests_without_a_session_are_read_as_they_arrive() {
    let mut world = Stored::new(Some(1000));
    for tag in 1..3 {
        world.lab.add(Request { session: None, ..turn(tag, tag) });
    }
    assert_eq!(world.lab.scheduler.take_reads(), [1, 2]);
    assert_eq!(world.lab.scheduler.take_reads(), []);
    world.lab.prepare(1, None);
    world.lab.abort(2);
    world.finish();
}

#[test]
fn a_request_that_ends_while_it_waits_or_is_read_is_not_read() {
    let mut world = Stored::new(Some(1000));
    world.add(1, 1);
    world.finish();
    for tag in 2..4 {
        world.add(tag, tag);
    }
    world.lab.abort(2);
    world.lab.abort(3);
    assert_eq!(world.lab.scheduler.take_reads(), []);
    world.finish();
    // One that ends before the caller asks.
    world.lab.add(Request { session: None, ..turn(6, 6) });
    world.lab.abort(6);
    assert_eq!(world.lab.scheduler.take_reads(), []);
    // The fork of a request that ends before its turn is read itself.
    world.add(4, 4);
    world.lab.fork(4, 5);
    world.sessions.insert(5, 4);
    world.lab.abort(4);
    assert_eq!(world.lab.scheduler.take_reads(), [5]);
    world.lab.prepare(5, None);
    world.finish();
    assert!(world.lab.started.contains(&5));
}
