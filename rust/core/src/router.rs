//! Which of several engines gets a request.

use crate::request::Time;
use std::collections::HashMap;

/// Who gets a request where there are several engines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Routing {
    /// Each in turn.
    #[default]
    RoundRobin,
    /// Who has the fewest requests (join the shortest queue).
    LeastLoaded,
    /// Who was sent the longest beginning of its prompt last, if that is half
    /// of it at least and does not unbalance the load; else the least loaded
    /// (`SGLang`'s cache-aware router, Zheng et al., 2024).
    PrefixAware,
    /// Who should have its prompt computed first, by each engine's own model of step times and what its cache should have.
    Predicted,
}

impl Routing {
    /// Every way, by its name.
    pub const NAMES: [(&'static str, Self); 4] = [
        ("round-robin", Self::RoundRobin),
        ("least-loaded", Self::LeastLoaded),
        ("prefix-aware", Self::PrefixAware),
        ("predicted", Self::Predicted),
    ];
}

/// What a router asks of an engine. A simulation answers for a scheduler, a server for what an engine reported last.
pub trait EngineView {
    /// Requests that it has and that have not ended.
    fn requests(&self) -> usize;

    /// Microseconds until it begins with a request that arrives now, as far as can be told.
    fn predicted_wait(&self) -> Time;

    /// Microseconds that it takes for so many tokens of a prompt, after the first `from`.
    fn prefill_time(&self, from: u32, tokens: u32) -> Time;
}

/// What a router looks at of a request.
#[derive(Clone, Copy, Debug)]
pub struct RouterRequest<'a> {
    /// Tokens of its prompt.
    pub prompt_tokens: u32,
    /// Names of its prompt's blocks, each for all up to its end.
    pub names: &'a [u64],
    /// Tokens of a block that has a name.
    pub name_block: u32,
}

/// Requests by which an engine may be ahead of the least loaded and still get one for its cached prefix.
const MAX_IMBALANCE: usize = 32;

/// Chooses an engine for each request.
#[derive(Debug)]
pub struct Router {
    routing: Routing,
    next: usize,
    sent: RecentNames,
}

impl Router {
    /// A router for engines whose caches have so many blocks together: what was sent before those is not cached any more.
    pub fn new(routing: Routing, cached_blocks: usize) -> Self {
        Self { routing, next: 0, sent: RecentNames::new(cached_blocks) }
    }

    /// The place of the engine that gets the request. Panics if there is none.
    pub fn choose<E: EngineView>(&mut self, engines: &[E], request: &RouterRequest<'_>) -> usize {
        match self.routing {
            Routing::RoundRobin => {
                self.next += 1;
                (self.next - 1) % engines.len()
            }
            Routing::LeastLoaded => least_loaded(engines),
            Routing::PrefixAware => {
                let least = least_loaded(engines);
                let holder = self.holder(request).filter(|(blocks, _)| 2 * blocks >= request.names.len()).map(|(_, engine)| engine);
                let balanced = |&at: &usize| engines[at].requests() <= engines[least].requests() + MAX_IMBALANCE;
                self.send(holder.filter(balanced).unwrap_or(least), request)
            }
            Routing::Predicted => {
                let holder = self.holder(request);
                let cached = |at: usize| holder.filter(|&(_, engine)| engine == at).map_or(0, |(blocks, _)| blocks as u32);
                let time = |at: usize| {
                    // The last token of a prompt is always computed.
                    let from = (cached(at) * request.name_block).min(request.prompt_tokens.saturating_sub(1));
                    engines[at].predicted_wait() + engines[at].prefill_time(from, request.prompt_tokens - from)
                };
                let first = (0..engines.len()).min_by_key(|&at| (time(at), engines[at].requests()));
                self.send(first.expect("one at least"), request)
            }
        }
    }

    /// How many of a prompt's first blocks an engine was sent before, and which one.
    fn holder(&self, request: &RouterRequest<'_>) -> Option<(usize, usize)> {
        request.names.iter().enumerate().rev().find_map(|(at, &name)| Some((at + 1, self.sent.get(name)?)))
    }

    fn send(&mut self, engine: usize, request: &RouterRequest<'_>) -> usize {
        request.names.iter().for_each(|&name| self.sent.insert(name, engine));
        engine
    }
}

fn least_loaded<E: EngineView>(engines: &[E]) -> usize {
    (0..engines.len()).min_by_key(|&at| engines[at].requests()).expect("one at least")
}

/// Which engine was sent a block last, by the block's name: the latest `limit` names at least, and twice as many at most.
#[derive(Debug)]
struct RecentNames {
    limit: usize,
    new: HashMap<u64, usize>,
    old: HashMap<u64, usize>,
}

impl RecentNames {
    fn new(limit: usize) -> Self {
        Self { limit: limit.max(1), new: HashMap::new(), old: HashMap::new() }
    }

    fn get(&self, name: u64) -> Option<usize> {
        self.new.get(&name).or_else(|| self.old.get(&name)).copied()
    }

    fn insert(&mut self, name: u64, engine: usize) {
        if self.new.len() == self.limit && !self.new.contains_key(&name) {
            self.old = std::mem::take(&mut self.new);
        }
        self.new.insert(name, engine);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_router_remembers_the_latest_names_and_no_more_than_twice_its_limit() {
        let mut sent = RecentNames::new(100);
        for name in 0..10_000 {
            sent.insert(name, name as usize % 3);
            assert!(sent.new.len() + sent.old.len() <= 200);
            assert_eq!(sent.get(name.saturating_sub(99)), Some(name.saturating_sub(99) as usize % 3));
        }
        assert_eq!(sent.get(0), None);
        sent.insert(9_990, 7);
        assert_eq!(sent.get(9_990), Some(7), "the latest counts");
    }

    /// Requests, microseconds until it begins with another, and microseconds for a prompt's token.
    struct Engine(usize, Time, Time);

    impl EngineView for Engine {
        fn requests(&self) -> usize {
            self.0
        }

        fn predicted_wait(&self) -> Time {
            self.1
        }

        fn prefill_time(&self, _: u32, tokens: u32) -> Time {
            self.2 * Time::from(tokens)
        }
    }

    #[test]
    fn predicted_weighs_the_wait_the_machine_and_the_cached_prefix() {
        let mut router = Router::new(Routing::Predicted, 100);
        let mut choose =
            |engines: [Engine; 3], names: &[u64]| router.choose(&engines, &RouterRequest { prompt_tokens: 100, names, name_block: 32 });
        assert_eq!(choose([Engine(1, 500, 10), Engine(9, 100, 10), Engine(1, 300, 20)], &[1, 2, 3]), 1, "1,100 against 1,500 and 2,300");
        assert_eq!(
            choose([Engine(1, 0, 10), Engine(9, 900, 10), Engine(0, 0, 20)], &[1, 2, 3]),
            1,
            "940 with 96 tokens cached, 1,000 without"
        );
        assert_eq!(choose([Engine(1, 0, 10), Engine(9, 900, 10), Engine(0, 0, 20)], &[1, 2, 4]), 0, "1,260 with 64 tokens cached");
        assert_eq!(choose([Engine(2, 0, 10), Engine(1, 0, 10), Engine(2, 0, 10)], &[]), 1, "the least loaded of equals");
    }
}
