//! A recorded engine in virtual time while it runs, beside some with other settings.

use crate::goes_on::GoesOn;
use crate::job::Job;
use crate::machine::Machine;
use crate::replica::Replica;
use crate::report::Report;
use crate::step_time::StepTime;
use crate::what_if::{Grammars, Input, arrived, forked, set_output};
use chairlift_core::{Call, Config, ConfigError, EndedRequest, Follower, JournalError, Request, Tier, Time};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

/// Microseconds that a request may run before it enters the simulation. Its output then has the predicted length, or the maximum.
const LONGEST_WAIT: Time = 120_000_000;

/// A journal's requests, as they end, through simulated engines: one with the recorded settings and some with others.
///
/// The simulated time follows the recorded time at a distance, because a request can enter only when the length of its output is known.
/// Step durations are those that the recorded engine has learned. Drafts are left out, and so is KV read from storage.
pub struct Shadow {
    follower: Follower,
    /// The engine with the recorded settings, and those with others.
    engines: Vec<Replica>,
    /// The time of the first call, from which the simulated time counts.
    begins: Option<Time>,
    /// What has not entered the simulation, by time and number.
    inputs: BTreeMap<(Time, u64), Input>,
    /// Numbers of `inputs`, and of requests and forks.
    numbers: u64,
    arrivals: u64,
    /// Requests that have not ended, by arrival number, which is also their tag in the engines.
    open: HashMap<u64, Open>,
    /// The arrival numbers of those, by recorded tag.
    by_tag: HashMap<u64, u64>,
    grammars: Grammars,
    recorded: Vec<Recorded>,
    counts: Counts,
}

/// How many requests took part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Requests that entered the simulation.
    pub simulated: u64,
    /// Requests that were left out.
    pub skipped: u64,
}

/// A request as it was recorded. Times count from the first call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recorded {
    /// Its tag in the simulated engines.
    pub tag: u64,
    /// When it could run first.
    pub arrived: Time,
    /// Tokens of its prompt.
    pub prompt_tokens: u32,
    /// Its tenant.
    pub tenant: Arc<str>,
    /// The tenant's name for its session.
    pub session: Option<Arc<str>>,
    /// Its tier.
    pub tier: Tier,
    /// What it had when it ended.
    pub ended: EndedRequest,
}

/// A request that has not ended.
struct Open {
    /// Its key in `inputs`, where it is until it enters.
    key: (Time, u64),
    prompt_tokens: u32,
    tenant: Arc<str>,
    session: Option<Arc<str>>,
    tier: Tier,
}

impl Shadow {
    /// Follows a journal, beside an engine for each of the settings `changed`.
    pub fn new(follower: Follower, changed: &[Config]) -> Result<Self, ConfigError> {
        let machine = Machine::new(StepTime::linear([0.0; 5]));
        let settings = std::iter::once(follower.journal().config).chain(changed.iter().copied());
        let mut shadow = Self {
            engines: settings.map(|config| Replica::new(config, &machine)).collect::<Result<_, _>>()?,
            follower,
            begins: None,
            inputs: BTreeMap::new(),
            numbers: 0,
            arrivals: 0,
            open: HashMap::new(),
            by_tag: HashMap::new(),
            grammars: Grammars::default(),
            recorded: Vec::new(),
            counts: Counts::default(),
        };
        shadow.absorb();
        Ok(shadow)
    }

    /// Reads what was recorded since the last time.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<(), JournalError> {
        self.follower.feed(bytes)?;
        self.absorb();
        Ok(())
    }

    /// Takes the calls, the ends and the step-time model that the follower has read.
    fn absorb(&mut self) {
        if let Some(step_model) = &self.follower.journal().step_model {
            for engine in &mut self.engines {
                engine.set_step_time(StepTime::learned(step_model));
            }
        }
        let (calls, ended) = self.follower.take();
        for (time, call) in calls {
            let begins = *self.begins.get_or_insert(time);
            self.call(time.saturating_sub(begins), begins, call);
        }
        for ended in ended {
            self.end(ended);
        }
    }

    /// Lets at most `requests` whose outputs are known enter, and runs the engines up to the next one. Returns whether more can enter.
    pub fn advance(&mut self, requests: usize) -> bool {
        if self.follower.journal().step_model.is_none() {
            return false;
        }
        let mut goes_on = GoesOn::new(|| true);
        for _ in 0..requests {
            let Some((key, input)) = self.next() else {
                let until = self.inputs.first_key_value().map_or(self.now(), |(&(time, _), _)| time);
                for engine in &mut self.engines {
                    engine.advance(until, &mut goes_on);
                }
                return false;
            };
            for engine in &mut self.engines {
                engine.advance(key.0, &mut goes_on);
                engine.enter(input.clone(), key.0);
            }
            self.counts.simulated += u64::from(matches!(input, Input::Request(_)));
        }
        true
    }

    /// Leaves out the requests that could enter now.
    pub fn skip(&mut self) {
        while let Some((_, input)) = self.next() {
            self.counts.skipped += u64::from(matches!(input, Input::Request(_)));
        }
    }

    /// The time of the last record in microseconds since the first call.
    pub fn now(&self) -> Time {
        self.follower.now().saturating_sub(self.begins.unwrap_or_default())
    }

    /// How many requests took part so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// The results since the last call: those with the recorded settings and with each of the others, and the recorded ones.
    pub fn take(&mut self) -> (Vec<Report>, Vec<Recorded>) {
        let report = |engine: &mut Replica| {
            // Without a router, only this engine takes these.
            engine.take_computed();
            engine.take_report()
        };
        (self.engines.iter_mut().map(report).collect(), std::mem::take(&mut self.recorded))
    }

    fn call(&mut self, time: Time, begins: Time, call: Call) {
        match call {
            Call::Add(arrival) => {
                self.grammars.begin(self.arrivals, arrival.request.preparation);
                let job = arrived(self.follower.journal(), &arrival, begins);
                self.enter(job);
            }
            Call::Fork { parent, tag } => {
                let parent = self.open.get(&parent).and_then(|open| self.inputs.get(&open.key));
                if let Some(Input::Request(job)) = parent {
                    let fork = forked(job, tag, time);
                    self.enter(fork);
                } else {
                    // Its parent entered long ago.
                    self.arrivals += 1;
                    self.counts.skipped += 1;
                }
            }
            Call::Prepare { arrival_number, next } if self.grammars.end(arrival_number, next) => {
                for number in self.family(arrival_number).collect::<Vec<_>>() {
                    self.prepared(number, time);
                }
            }
            Call::NoteSession { tenant, session, event } => {
                self.numbers += 1;
                self.inputs.insert((time, self.numbers), Input::Session(tenant, session, event));
            }
            _ => {}
        }
    }

    fn enter(&mut self, mut job: Job) {
        let number = self.arrivals;
        self.numbers += 1;
        self.arrivals += 1;
        let key = (job.time, self.numbers);
        let tag = std::mem::replace(&mut job.request.tag, number);
        let Request { prompt, tenant, session, tier, .. } = &job.request;
        let (tenant, session) = (Arc::clone(tenant), session.clone());
        self.open.insert(number, Open { key, prompt_tokens: prompt.len() as u32, tenant, session, tier: *tier });
        // Nothing keeps the caller of a recorded engine from using a tag twice. The end of the first such request is unknown then.
        if let Some(earlier) = self.by_tag.insert(tag, number) {
            self.open.remove(&earlier);
        }
        self.inputs.insert(key, Input::Request(Box::new(job)));
    }

    /// A request that waits to enter, and its forks.
    fn family(&self, parent: u64) -> impl Iterator<Item = u64> {
        let waiting = self.inputs.values().filter_map(|input| if let Input::Request(job) = input { Some(&**job) } else { None });
        waiting.filter(move |job| job.request.tag == parent || job.fork_of == Some(parent)).map(|job| job.request.tag)
    }

    /// Lets a request arrive when it was prepared.
    fn prepared(&mut self, number: u64, time: Time) {
        let Some(open) = self.open.get_mut(&number) else { return };
        let Some(Input::Request(mut job)) = self.inputs.remove(&open.key) else { return };
        (job.time, open.key.0) = (time, time);
        self.inputs.insert(open.key, Input::Request(job));
    }

    /// Notes that a request has ended. If it waits to enter, its output is known now.
    fn end(&mut self, ended: EndedRequest) {
        let Some(number) = self.by_tag.remove(&ended.tag) else { return };
        self.grammars.forget(number);
        let Some(Open { key, prompt_tokens, tenant, session, tier }) = self.open.remove(&number) else { return };
        let begins = self.begins.unwrap_or_default();
        if let Some(Input::Request(job)) = self.inputs.get_mut(&key) {
            let end = (ended.output_tokens, Some(ended.finish), ended.time.saturating_sub(begins));
            set_output(job, self.follower.journal(), number, Some(end));
        }
        self.follower.forget(number, prompt_tokens + ended.output_tokens);
        let first_token = ended.first_token.map(|first| first.saturating_sub(begins));
        let ended = EndedRequest { time: ended.time.saturating_sub(begins), first_token, ..ended };
        self.recorded.push(Recorded { tag: number, arrived: key.0, prompt_tokens, tenant, session, tier, ended });
    }

    /// Takes the first input if its output is known, or if it has run for too long.
    fn next(&mut self) -> Option<((Time, u64), Input)> {
        let now = self.now();
        let entry = self.inputs.first_entry()?;
        let key = *entry.key();
        let open = matches!(entry.get(), Input::Request(job) if self.open.contains_key(&job.request.tag));
        if open && now < key.0 + LONGEST_WAIT {
            return None;
        }
        let mut input = entry.remove();
        if let Input::Request(job) = &mut input
            && job.len == 0
        {
            let number = job.request.tag;
            set_output(job, self.follower.journal(), number, None);
        }
        Some((key, input))
    }
}
