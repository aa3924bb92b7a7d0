//! Routing of requests to one of several engines.

use crate::request::Time;
use std::collections::HashMap;

/// How the router chooses an engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Routing {
    /// Engines in rotation.
    #[default]
    RoundRobin,
    /// The engine with the fewest requests (join the shortest queue).
    LeastLoaded,
    /// The engine that was last sent the longest prefix of the prompt, if the prefix is at least half of the prompt and
    /// the load stays balanced. Otherwise the least loaded engine (`SGLang`'s cache-aware router, Zheng et al., 2024).
    PrefixAware,
    /// The engine predicted to finish the prompt first, by its own step-time model and its expected cache content.
    Predicted,
}

impl Routing {
    /// Every routing, by name.
    pub const NAMES: [(&'static str, Self); 4] = [
        ("round-robin", Self::RoundRobin),
        ("least-loaded", Self::LeastLoaded),
        ("prefix-aware", Self::PrefixAware),
        ("predicted", Self::Predicted),
    ];
}

/// State that a router reads from an engine. A simulation answers from the scheduler, a server from the latest report
/// of the engine.
pub trait EngineView {
    /// Requests of the engine that have not ended.
    fn requests(&self) -> usize;

    /// Predicted microseconds until the engine starts a request that arrives now.
    fn predicted_wait(&self) -> Time;

    /// Predicted microseconds for `tokens` prompt tokens after the first `from`.
    fn prefill_time(&self, from: u32, tokens: u32) -> Time;
}

/// Data that a router reads from a request.
#[derive(Clone, Copy, Debug)]
pub struct RouterRequest<'a> {
    /// Tokens of its prompt.
    pub prompt_tokens: u32,
    /// Names of the prompt's blocks. Each name covers the prompt up to the block's end.
    pub names: &'a [u64],
    /// Tokens per named block.
    pub name_block: u32,
}

/// Largest lead in requests over the least loaded engine at which an engine still gets a request for its cached prefix.
const MAX_IMBALANCE: usize = 32;

/// Chooses an engine for each request.
#[derive(Debug)]
pub struct Router {
    routing: Routing,
    next: usize,
    sent: RecentNames,
}

impl Router {
    /// Creates a router for engines whose caches have `cached_blocks` blocks in total. Older blocks are assumed to be evicted.
    pub fn new(routing: Routing, cached_blocks: usize) -> Self {
        Self { routing, next: 0, sent: RecentNames::new(cached_blocks) }
    }

    /// Returns the index of the engine that gets the request. Panics if `engines` is empty.
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

    /// Returns how many leading blocks of the prompt an engine was sent before, and the index of that engine.
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

/// The engine that was last sent each block, by block name. Keeps the latest `limit` names at least and twice as many at most.
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

    /// Requests, microseconds until the engine starts another request, and microseconds per prompt token.
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
