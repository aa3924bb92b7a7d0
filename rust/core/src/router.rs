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
    /// The engine with the least product of its requests, this one among them, and the prompt's tokens that it has to
    /// compute (`LMetric`, arXiv 2603.15202).
    LMetric,
}

impl Routing {
    /// Every routing, by name.
    pub const NAMES: [(&'static str, Self); 5] = [
        ("round-robin", Self::RoundRobin),
        ("least-loaded", Self::LeastLoaded),
        ("prefix-aware", Self::PrefixAware),
        ("predicted", Self::Predicted),
        ("lmetric", Self::LMetric),
    ];
}

/// State that a router reads from an engine. A simulation answers from the scheduler, a server from the latest report
/// of the engine.
pub trait EngineView {
    /// The engine's number. It stays the same while other engines come and go.
    fn number(&self) -> u32;

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
    /// The name of the session that it belongs to, if any.
    pub session: Option<u64>,
}

/// What the router has chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chosen {
    /// The engine's index among those that were given.
    pub index: usize,
    /// Prompt tokens that the engine is expected to have in its cache.
    pub cached_tokens: u32,
}

/// Largest lead in requests over the least loaded engine at which an engine still gets a request for its cached prefix.
const MAX_IMBALANCE: usize = 32;

/// Chooses an engine for each request.
///
/// It assumes that an engine has the blocks that it was sent last, up to the size of the caches.
#[derive(Debug)]
pub struct Router {
    routing: Routing,
    next: usize,
    sent: RecentNames,
    sessions: RecentNames,
}

/// Sessions that are remembered at least; twice as many at most.
const SESSIONS: usize = 1 << 16;

impl Router {
    /// Creates a router for engines whose caches have `cached_blocks` blocks in total. Older blocks are assumed to be evicted.
    pub fn new(routing: Routing, cached_blocks: usize) -> Self {
        Self { routing, next: 0, sent: RecentNames::new(cached_blocks), sessions: RecentNames::new(SESSIONS) }
    }

    /// Chooses the engine that gets the request. Panics if `engines` is empty.
    ///
    /// A request of a session goes to the engine of the session's last request, unless that engine has many more requests
    /// than another one. The routing decides on all others.
    pub fn choose<E: EngineView>(&mut self, engines: &[E], request: &RouterRequest<'_>) -> Chosen {
        let least = least_loaded(engines);
        let balanced = |&at: &usize| engines[at].requests() <= engines[least].requests() + MAX_IMBALANCE;
        let home = request.session.and_then(|session| position(engines, self.sessions.get(session)?)).filter(balanced);
        let holder = self.holder(engines, request);
        let index = home.unwrap_or_else(|| match self.routing {
            Routing::RoundRobin => {
                self.next += 1;
                (self.next - 1) % engines.len()
            }
            Routing::LeastLoaded => least,
            Routing::PrefixAware => {
                let long = holder.filter(|(blocks, _)| 2 * blocks >= request.names.len()).map(|(_, engine)| engine);
                long.filter(balanced).unwrap_or(least)
            }
            Routing::Predicted => best(engines, |at| {
                let from = cached_tokens(holder, at, request);
                engines[at].predicted_wait() + engines[at].prefill_time(from, request.prompt_tokens - from)
            }),
            Routing::LMetric => best(engines, |at| {
                let tokens = request.prompt_tokens - cached_tokens(holder, at, request);
                u64::from(tokens) * (engines[at].requests() as u64 + 1)
            }),
        });
        let number = engines[index].number();
        request.names.iter().for_each(|&name| self.sent.insert(name, number));
        if let Some(session) = request.session {
            self.sessions.insert(session, number);
        }
        Chosen { index, cached_tokens: cached_tokens(holder, index, request) }
    }

    /// Forgets what an engine was sent: it has ended, and its cache with it.
    pub fn forget(&mut self, number: u32) {
        self.sent.forget(number);
        self.sessions.forget(number);
    }

    /// Returns how many leading blocks of the prompt one of the engines was sent before, at most, and its index.
    fn holder<E: EngineView>(&self, engines: &[E], request: &RouterRequest<'_>) -> Option<(usize, usize)> {
        let mut names = request.names.iter().enumerate().rev();
        names.find_map(|(at, &name)| Some((at + 1, position(engines, self.sent.get(name)?)?)))
    }
}

fn position<E: EngineView>(engines: &[E], number: u32) -> Option<usize> {
    engines.iter().position(|engine| engine.number() == number)
}

/// The engine of the least `cost`; among equals that with the fewest requests.
fn best<E: EngineView>(engines: &[E], cost: impl Fn(usize) -> u64) -> usize {
    (0..engines.len()).min_by_key(|&at| (cost(at), engines[at].requests())).expect("one at least")
}

fn least_loaded<E: EngineView>(engines: &[E]) -> usize {
    best(engines, |_| 0)
}

/// Prompt tokens that the engine at `at` is expected to have. The last token of a prompt is always computed.
fn cached_tokens(holder: Option<(usize, usize)>, at: usize, request: &RouterRequest<'_>) -> u32 {
    let blocks = holder.filter(|&(_, engine)| engine == at).map_or(0, |(blocks, _)| blocks as u32);
    (blocks * request.name_block).min(request.prompt_tokens.saturating_sub(1))
}

/// The engine that was last sent each name. Keeps the latest `limit` names at least and twice as many at most.
#[derive(Debug)]
struct RecentNames {
    limit: usize,
    new: HashMap<u64, u32>,
    old: HashMap<u64, u32>,
}

impl RecentNames {
    fn new(limit: usize) -> Self {
        Self { limit: limit.max(1), new: HashMap::new(), old: HashMap::new() }
    }

    fn get(&self, name: u64) -> Option<u32> {
        self.new.get(&name).or_else(|| self.old.get(&name)).copied()
    }

    fn insert(&mut self, name: u64, engine: u32) {
        if self.new.len() == self.limit && !self.new.contains_key(&name) {
            self.old = std::mem::take(&mut self.new);
        }
        self.new.insert(name, engine);
    }

    fn forget(&mut self, engine: u32) {
        self.new.retain(|_, &mut of| of != engine);
        self.old.retain(|_, &mut of| of != engine);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_router_remembers_the_latest_names_and_no_more_than_twice_its_limit() {
        let mut sent = RecentNames::new(100);
        for name in 0..10_000 {
            sent.insert(name, name as u32 % 3);
            assert!(sent.new.len() + sent.old.len() <= 200);
            assert_eq!(sent.get(name.saturating_sub(99)), Some(name.saturating_sub(99) as u32 % 3));
        }
        assert_eq!(sent.get(0), None);
        sent.insert(9_990, 7);
        assert_eq!(sent.get(9_990), Some(7), "the latest counts");
    }

    /// Number, requests, microseconds until the engine starts another request, and microseconds per prompt token.
    struct Engine(u32, usize, Time, Time);

    impl EngineView for Engine {
        fn number(&self) -> u32 {
            self.0
        }

        fn requests(&self) -> usize {
            self.1
        }

        fn predicted_wait(&self) -> Time {
            self.2
        }

        fn prefill_time(&self, _: u32, tokens: u32) -> Time {
            self.3 * Time::from(tokens)
        }
    }

    fn request(names: &[u64], session: Option<u64>) -> RouterRequest<'_> {
        RouterRequest { prompt_tokens: 100, names, name_block: 32, session }
    }

    #[test]
    fn predicted_weighs_the_wait_the_machine_and_the_cached_prefix() {
        let mut router = Router::new(Routing::Predicted, 100);
        let mut choose = |engines: [(usize, Time, Time); 3], names: &[u64]| {
            let mut number = 0..;
            let engines = engines.map(|(requests, wait, token)| Engine(number.next().unwrap(), requests, wait, token));
            router.choose(&engines, &request(names, None))
        };
        let chosen = |index, cached_tokens| Chosen { index, cached_tokens };
        assert_eq!(choose([(1, 500, 10), (9, 100, 10), (1, 300, 20)], &[1, 2, 3]), chosen(1, 0), "1,100 against 1,500 and 2,300");
        assert_eq!(choose([(1, 0, 10), (9, 900, 10), (0, 0, 20)], &[1, 2, 3]), chosen(1, 96), "940 with 96 tokens cached, 1,000 without");
        assert_eq!(choose([(1, 0, 10), (9, 900, 10), (0, 0, 20)], &[1, 2, 4]), chosen(0, 0), "1,260 with 64 tokens cached");
        assert_eq!(choose([(2, 0, 10), (1, 0, 10), (2, 0, 10)], &[]), chosen(1, 0), "the least loaded of equals");
    }

    #[test]
    fn lmetric_multiplies_uncached_tokens_and_requests() {
        let mut router = Router::new(Routing::LMetric, 100);
        let engines = |first| [Engine(4, first, 0, 0), Engine(7, 1, 0, 0)];
        assert_eq!(router.choose(&engines(0), &request(&[1, 2], None)).index, 0, "100 against 200");
        assert_eq!(router.choose(&engines(3), &request(&[1, 2], None)), Chosen { index: 0, cached_tokens: 64 }, "144 against 200");
        assert_eq!(router.choose(&engines(6), &request(&[1, 2], None)).index, 1, "252 against 200");
    }

    #[test]
    fn engines_that_have_left_are_not_chosen_and_what_they_were_sent_counts_no_more() {
        for (_, routing) in Routing::NAMES {
            let mut router = Router::new(routing, 100);
            let all = [Engine(0, 5, 50, 1), Engine(1, 0, 0, 1), Engine(2, 5, 50, 1)];
            let home = router.choose(&all, &request(&[1, 2, 3], Some(9))).index as u32;
            let left = || all.iter().filter(|engine| engine.0 != home).map(|one| Engine(one.0, one.1, one.2, one.3)).collect::<Vec<_>>();
            assert_eq!(router.choose(&left(), &request(&[1, 2, 3], Some(9))).cached_tokens, 0, "{routing:?}: the other one has it");
            for engine in &left() {
                router.forget(engine.0);
            }
            assert_eq!(router.choose(&left(), &request(&[1, 2, 3], None)).cached_tokens, 0, "{routing:?}: the caches are gone");
            let again = (0..2).map(|_| router.choose(&left(), &request(&[1, 2, 3], Some(9))).cached_tokens).max();
            assert_eq!(again, Some(96), "{routing:?}: one has it again");
        }
    }

    #[test]
    fn a_session_stays_with_its_engine_unless_that_has_many_more_requests() {
        for (_, routing) in Routing::NAMES {
            let mut router = Router::new(routing, 100);
            let home = router.choose(&[Engine(0, 0, 0, 1), Engine(1, 0, 0, 1)], &request(&[], Some(5))).index;
            let loaded = |requests| [0, 1].map(|at| Engine(at as u32, if at == home { requests } else { 0 }, 0, 1));
            for _ in 0..3 {
                assert_eq!(router.choose(&loaded(MAX_IMBALANCE), &request(&[], Some(5))).index, home, "{routing:?}");
            }
            let moved = (0..2).any(|_| router.choose(&loaded(MAX_IMBALANCE + 1), &request(&[], Some(5))).index != home);
            assert!(moved, "{routing:?}");
        }
    }
}
