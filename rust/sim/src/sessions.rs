//! Sessions in a closed loop: each user runs one recorded session after another, and sends a request when the answer before it has come
//! and the recorded time has passed.

use crate::fleet::Fleet;
use crate::goes_on::GoesOn;
use crate::job::Job;
use crate::machine::Machine;
use crate::random::Random;
use crate::report::Report;
use crate::session::{Session, Turn};
use chairlift_core::{Config, ConfigError, Load, Request, Routing, STOP, SessionEvent, Time, Timeline};
use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::iter::Peekable;
use std::sync::Arc;

/// When all users send their first request, in microseconds after the start.
const START: Time = 60_000_000;
/// Least and most microseconds between two sessions of a user.
const PAUSE: (Time, Time) = (5_000_000, 60_000_000);
/// Microseconds between a request of the main thread and the first of its subagents.
const SPAWN: Time = 500_000;

/// Users of sessions, and for how long they go on.
#[derive(Clone, Debug)]
pub struct ClosedLoop {
    /// The recorded sessions.
    pub sessions: Vec<Session>,
    /// Users, each with one session at a time.
    pub users: u32,
    /// The longest time between an answer and the next request.
    pub longest_think: Time,
    /// When the figures of sessions begin.
    pub warm_up: Time,
    /// When the simulation ends.
    pub until: Time,
    /// Which sessions the users have, and when they begin.
    pub seed: u64,
    /// Tokens of a block of the sessions.
    pub block: u32,
    /// Names of the tenants.
    pub tenants: Vec<Arc<str>>,
}

/// A session's replay, as far as it came after the warm-up.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SessionSeen {
    /// Index of the recorded session.
    pub session: u32,
    /// When its first request after the warm-up was sent.
    pub began: Time,
    /// When its last request ended, or the end of the simulation if one waits.
    pub ended: Time,
    /// Requests that were answered.
    pub turns: u32,
    /// Microseconds that it would have taken alone, with a cache that loses nothing. Its users' times are part of it.
    pub alone: Time,
    /// The longest wait for a first token.
    pub longest_wait: Time,
    /// Whether it came to its end.
    pub complete: bool,
}

/// The results of sessions.
#[derive(Debug)]
pub struct SessionsReport {
    /// A report of each engine.
    pub engines: Vec<Report>,
    /// The replays that sent a request after the warm-up.
    pub sessions: Vec<SessionSeen>,
    /// The mean tokens of all live sessions' contexts after the warm-up. With a cache that loses nothing it is the working set.
    pub context_tokens: u64,
}

/// Simulates users of sessions, and the requests `beside` them in the order of arrival, which get new tags. Asks `goes_on` now and then
/// whether to go on. Panics if there is no session.
pub fn simulate_sessions(
    config: Config,
    users: &ClosedLoop,
    beside: impl Iterator<Item = Job>,
    machine: &Machine,
    engines: usize,
    routing: Routing,
    goes_on: impl FnMut() -> bool,
) -> Result<SessionsReport, ConfigError> {
    let fleet = Fleet::new(config, machine, engines.max(1), routing)?;
    Ok(Users::new(users, machine, fleet, config.max_num_batched_tokens).run(beside.peekable(), &mut GoesOn::new(goes_on)))
}

/// A thread of a session's replay.
#[derive(Clone, Debug, Default)]
struct Thread {
    /// The request that it has sent, or sends next.
    next: usize,
    /// When it was sent, while it is not answered.
    sent: Option<Time>,
    /// Tokens of its context.
    context: u32,
    /// If it is a subagent, microseconds that its requests would have taken alone.
    alone: Time,
}

/// A session's replay.
struct Replay {
    session: usize,
    threads: Vec<Thread>,
    /// Subagents that have not ended.
    subagents: u32,
    seen: SessionSeen,
}

impl Replay {
    /// Adds to the time that a thread would have taken alone. That of the main thread is the session's.
    fn add_alone(&mut self, thread: usize, time: Time) {
        match thread {
            _ if self.seen.began == 0 => {}
            0 => self.seen.alone += time,
            _ => self.threads[thread].alone += time,
        }
    }

    /// Adds the time of the subagents that ran side by side: the longest of theirs.
    fn join_subagents(&mut self) {
        let longest = self.threads.iter_mut().map(|thread| std::mem::take(&mut thread.alone)).max();
        self.seen.alone += longest.unwrap_or(0);
    }
}

struct Users<'a> {
    /// Prompt tokens that are new in each request, by session and thread.
    fresh: Vec<Vec<Vec<u32>>>,
    load: &'a ClosedLoop,
    machine: &'a Machine,
    fleet: Fleet,
    step_tokens: u32,
    draw: Draw,
    replays: Vec<Replay>,
    /// When threads send their next requests: time, number, replay, thread.
    events: BinaryHeap<Reverse<(Time, u64, usize, usize)>>,
    sent: HashMap<u64, (usize, usize)>,
    tags: u64,
    /// Ended and refused requests of each engine that were looked at.
    looked_at: Vec<(usize, usize)>,
    contexts: Contexts,
}

impl<'a> Users<'a> {
    fn new(load: &'a ClosedLoop, machine: &'a Machine, fleet: Fleet, step_tokens: u32) -> Self {
        let mut users = Self {
            fresh: load.sessions.iter().map(|session| session.fresh_tokens(load.block)).collect(),
            load,
            machine,
            looked_at: vec![(0, 0); fleet.reports().count()],
            fleet,
            step_tokens,
            draw: Draw::new(load.seed, load.sessions.len()),
            replays: Vec::new(),
            events: BinaryHeap::new(),
            sent: HashMap::new(),
            tags: 0,
            contexts: Contexts { from: load.warm_up, ..Contexts::default() },
        };
        for _ in 0..load.users {
            let at = users.draw.time(0, START);
            let part = users.draw.random.next();
            users.begin(at, part);
        }
        users
    }

    fn run(mut self, mut beside: Peekable<impl Iterator<Item = Job>>, goes_on: &mut GoesOn<'_>) -> SessionsReport {
        loop {
            let event = self.events.peek().map_or(Time::MAX, |Reverse((at, ..))| *at);
            let next = beside.peek().map_or(Time::MAX, |job| job.time).min(event).min(self.load.until);
            if !goes_on.ask() {
                break;
            }
            if self.fleet.advance_a_step(next) {
                self.take_ended();
            } else if next >= self.load.until {
                break;
            } else if let Some(job) = beside.next_if(|job| job.time <= next) {
                self.send_beside(job);
            } else {
                let Reverse((at, _, replay, thread)) = self.events.pop().expect("it is next");
                self.send(at, replay, thread);
            }
        }
        self.finish()
    }

    fn finish(mut self) -> SessionsReport {
        let until = self.load.until;
        self.contexts.change(until, 0, 0);
        for number in 0..self.replays.len() {
            for thread in 0..self.replays[number].threads.len() {
                // A request that waits at the end has waited for that long.
                let Some(sent) = self.replays[number].threads[thread].sent else { continue };
                let (waits, alone) = (until.saturating_sub(sent), self.alone(number, thread));
                let replay = &mut self.replays[number];
                replay.seen.longest_wait = replay.seen.longest_wait.max(waits);
                replay.seen.ended = until;
                replay.add_alone(thread, alone.min(waits));
            }
            self.replays[number].join_subagents();
        }
        SessionsReport {
            engines: self.fleet.into_reports(),
            sessions: self.replays.iter().map(|replay| replay.seen).filter(|seen| seen.began > 0).collect(),
            context_tokens: self.contexts.mean(until),
        }
    }

    /// Begins a user's next session at `at`, after a part of its main thread.
    fn begin(&mut self, at: Time, part: f64) {
        let session = self.draw.session();
        let recorded = &self.load.sessions[session];
        let mut threads = vec![Thread::default(); recorded.threads.len()];
        threads[0].next = (recorded.threads[0].len() as f64 * part) as usize;
        let seen = SessionSeen { session: session as u32, ..SessionSeen::default() };
        self.replays.push(Replay { session, threads, subagents: 0, seen });
        self.wake(at, self.replays.len() - 1, 0);
    }

    fn wake(&mut self, at: Time, replay: usize, thread: usize) {
        self.tags += 1;
        self.events.push(Reverse((at, self.tags, replay, thread)));
    }

    fn send(&mut self, at: Time, number: usize, thread: usize) {
        let replay = &mut self.replays[number];
        let session = &self.load.sessions[replay.session];
        let turn = &session.threads[thread][replay.threads[thread].next];
        replay.threads[thread].sent = Some(at);
        if at >= self.load.warm_up && replay.seen.began == 0 {
            replay.seen.began = at;
        }
        self.tags += 1;
        let tag = self.tags;
        let tenant = &self.load.tenants[session.tenant as usize];
        let main: Arc<str> = number.to_string().into();
        let request = Request {
            tag,
            prompt: session.prompt(turn, number as u64 + 1, tag, self.load.block),
            max_new_tokens: turn.output,
            stop: vec![STOP],
            tenant: Arc::clone(tenant),
            weight: session.weight,
            tier: session.tier,
            session: Some(if thread == 0 { main.clone() } else { format!("{number}.{thread}").into() }),
            parent_session: (thread > 0).then_some(main),
            ..Request::default()
        };
        self.sent.insert(tag, (number, thread));
        self.fleet.route(Job { time: at, request, len: turn.output, session: Some(number as u64), ..Job::default() });
        self.take_ended();
    }

    /// Sends a request without a session.
    fn send_beside(&mut self, mut job: Job) {
        self.tags += 1;
        job.request.tag = self.tags;
        self.fleet.route(job);
        self.take_ended();
    }

    /// Goes on with the sessions whose requests have ended or were refused.
    fn take_ended(&mut self) {
        let mut ended = Vec::new();
        let mut refused = Vec::new();
        for ((done, declined), report) in self.looked_at.iter_mut().zip(self.fleet.reports()) {
            ended.extend(report.ended[*done..].iter().map(|timeline| (timeline.tag, Answer::of(timeline))));
            refused.extend(report.refused[*declined..].iter().map(|&(tag, _)| tag));
            (*done, *declined) = (report.ended.len(), report.refused.len());
        }
        for (tag, answer) in ended {
            if let Some((replay, thread)) = self.sent.remove(&tag) {
                self.answered(replay, thread, &answer);
            }
        }
        for tag in refused {
            if let Some((replay, thread)) = self.sent.remove(&tag) {
                let at = self.replays[replay].threads[thread].sent.expect("it was sent");
                self.end(at, replay, false);
            }
        }
    }

    /// Microseconds that the request of a thread would take alone.
    fn alone(&self, number: usize, thread: usize) -> Time {
        let replay = &self.replays[number];
        let at = replay.threads[thread].next;
        let turn = &self.load.sessions[replay.session].threads[thread][at];
        self.machine.alone(turn, self.fresh[replay.session][thread][at], self.step_tokens)
    }

    fn answered(&mut self, number: usize, thread: usize, answer: &Answer) {
        let alone = self.alone(number, thread);
        let replay = &mut self.replays[number];
        let session = &self.load.sessions[replay.session];
        let turn = &session.threads[thread][replay.threads[thread].next];
        let now = answer.ended;
        if replay.seen.began > 0 {
            let seen = &mut replay.seen;
            (seen.turns, seen.ended) = (seen.turns + 1, now);
            seen.longest_wait = seen.longest_wait.max(answer.wait);
            replay.add_alone(thread, alone);
        }
        let state = &mut replay.threads[thread];
        let before = std::mem::replace(&mut state.context, turn.prompt + turn.output);
        state.sent = None;
        state.next += 1;
        if thread == 0 && !turn.calls_tool {
            self.fleet.note_session(&self.load.tenants[session.tenant as usize], &number.to_string().into(), SessionEvent::AwaitsUser, now);
        }
        self.contexts.change(now, before, turn.prompt + turn.output);
        self.go_on(now, number, thread);
    }

    /// Lets a thread send its next request, or end.
    fn go_on(&mut self, now: Time, number: usize, thread: usize) {
        let replay = &mut self.replays[number];
        let session = &self.load.sessions[replay.session];
        match session.threads[thread].get(replay.threads[thread].next) {
            Some(turn) if thread == 0 && turn.subagents.1 > 0 => {
                replay.subagents = turn.subagents.1;
                replay.add_alone(0, SPAWN);
                for subagent in turn.subagents.0..turn.subagents.0 + turn.subagents.1 {
                    self.wake(now + SPAWN, number, subagent as usize);
                }
            }
            Some(turn) => self.think(now, turn, number, thread),
            None if thread == 0 => self.end(now, number, true),
            None => {
                let context = std::mem::take(&mut replay.threads[thread].context);
                replay.subagents -= 1;
                let last = replay.subagents == 0;
                self.contexts.change(now, context, 0);
                if last {
                    self.replays[number].join_subagents();
                    let next = &session.threads[0][self.replays[number].threads[0].next];
                    self.think(now, next, number, 0);
                }
            }
        }
    }

    fn think(&mut self, now: Time, turn: &Turn, number: usize, thread: usize) {
        let think = turn.think.min(self.load.longest_think);
        self.replays[number].add_alone(thread, think);
        self.wake(now + think, number, thread);
    }

    /// Ends a session. Its user begins another one after a while.
    fn end(&mut self, now: Time, number: usize, complete: bool) {
        let replay = &mut self.replays[number];
        replay.seen.complete = complete;
        replay.join_subagents();
        let context: u32 = replay.threads.iter_mut().map(|thread| std::mem::take(&mut thread.context)).sum();
        self.sent.retain(|_, (replay, _)| *replay != number);
        self.events.retain(|Reverse((_, _, replay, _))| *replay != number);
        for thread in &mut self.replays[number].threads {
            thread.sent = None;
        }
        self.contexts.change(now, context, 0);
        let pause = self.draw.time(PAUSE.0, PAUSE.1);
        self.begin(now + pause, 0.0);
    }
}

/// Which sessions the users have, and when they begin.
struct Draw {
    random: Random,
    /// The recorded sessions in a random order, of which so many were drawn.
    order: Vec<usize>,
    drawn: usize,
}

impl Draw {
    fn new(seed: u64, sessions: usize) -> Self {
        let mut random = Random::new(seed);
        Self { order: random.order(sessions), random, drawn: 0 }
    }

    /// The next session. All are drawn before one is drawn again.
    fn session(&mut self) -> usize {
        self.drawn += 1;
        self.order[(self.drawn - 1) % self.order.len()]
    }

    /// A time between two others.
    fn time(&mut self, from: Time, to: Time) -> Time {
        from + (self.random.next() * (to - from) as f64) as Time
    }
}

/// The tokens of live contexts over time.
#[derive(Default)]
struct Contexts {
    tokens: u64,
    /// Their sum over time from a time on, in token microseconds.
    sum: u128,
    from: Time,
    /// Until when they were summed.
    until: Time,
}

impl Contexts {
    /// Records that a context has `after` tokens in place of `before`.
    fn change(&mut self, now: Time, before: u32, after: u32) {
        self.sum += u128::from(self.tokens) * u128::from(now.saturating_sub(self.until.max(self.from)));
        self.until = self.until.max(now);
        self.tokens = self.tokens - u64::from(before) + u64::from(after);
    }

    /// The mean tokens until a time.
    fn mean(&self, until: Time) -> u64 {
        (self.sum / u128::from(until.saturating_sub(self.from).max(1))) as u64
    }
}

/// When a request was answered, and how long its first token took.
struct Answer {
    ended: Time,
    wait: Time,
}

impl Answer {
    fn of(timeline: &Timeline) -> Self {
        let first = timeline.first_token.unwrap_or(timeline.ended);
        Self { ended: timeline.ended, wait: first - timeline.arrived }
    }
}

impl Machine {
    /// Microseconds of a request alone, if `fresh` of its prompt tokens are not cached, in steps of at most `step_tokens`.
    fn alone(&self, turn: &Turn, fresh: u32, step_tokens: u32) -> Time {
        let (mut from, mut took) = (turn.prompt - fresh, 0);
        while from < turn.prompt {
            let tokens = step_tokens.min(turn.prompt - from);
            let mut load = Load::default();
            load.add_piece(from, tokens);
            took += self.step.step(&load);
            from += tokens;
        }
        let context = u64::from(turn.prompt) + u64::from(turn.output) / 2;
        took + u64::from(turn.output.saturating_sub(1))
            * self.step.step(&Load { decode_seqs: 1, context_tokens: context, ..Load::default() })
    }
}
