//! Routing of requests to one of several engines.

use self::engine_cache::EngineCache;
use self::sessions::Sessions;
use crate::memory::{BlockHash, CacheChanges};
use crate::request::{Time, named_enum};
use rustc_hash::FxHashMap;

mod engine_cache;
mod sessions;

named_enum! {
    /// How the router chooses an engine.
    #[derive(Default)]
    pub enum Routing {
        /// Engines in rotation.
        #[default]
        RoundRobin = "round-robin",
        /// The engine with the fewest requests (join the shortest queue).
        LeastLoaded = "least-loaded",
        /// The engine that has the longest prefix of the prompt, if the prefix is at least half of the prompt and the load
        /// stays balanced. Otherwise the least loaded engine (`SGLang`'s cache-aware router, Zheng et al., 2024).
        PrefixAware = "prefix-aware",
        /// The engine predicted to finish the prompt first, by its own step-time model and what its cache has.
        Predicted = "predicted",
        /// The engine with the least product of its requests, this one among them, and the prompt's tokens that it has to
        /// compute (`LMetric`, arXiv 2603.15202).
        LMetric = "lmetric",
    }
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

    /// Predicted microseconds that a session waits for its turn if it is not active there.
    fn turn_wait(&self) -> Time;
}

/// Data that a router reads from a request.
#[derive(Clone, Copy, Debug)]
pub struct RouterRequest<'a> {
    /// Tokens of its prompt.
    pub prompt_tokens: u32,
    /// Names of the prompt's full blocks, as the engines' caches name them. Empty if engines share no prefixes.
    pub names: &'a [BlockHash],
    /// Tokens per block.
    pub block_size: u32,
    /// The name of the session that it belongs to, if any.
    pub session: Option<u64>,
}

/// What the router has chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chosen {
    /// The engine's index among those that were given.
    pub index: usize,
    /// Prompt tokens that the engine is expected to have in its cache when it begins with the prompt.
    pub cached_tokens: u32,
    /// The request's number, for [`Router::computed`].
    pub number: u64,
}

/// Largest lead in requests over the least loaded engine at which an engine still gets a request for its cached prefix.
const MAX_IMBALANCE: usize = 32;

/// Chooses an engine for each request.
///
/// It knows from their reports which blocks engines have cached. The blocks of a prompt that is sent to an engine count as
/// cached there until the prompt is computed, so that prompts with equal beginnings that arrive together are sent to one
/// engine.
///
/// ```
/// use chairlift_core::{EngineView, Router, RouterRequest, Routing, Time};
///
/// struct Engine(u32, usize);
///
/// impl EngineView for Engine {
///     fn number(&self) -> u32 {
///         self.0
///     }
///
///     fn requests(&self) -> usize {
///         self.1
///     }
///
///     fn predicted_wait(&self) -> Time {
///         0
///     }
///
///     fn prefill_time(&self, _from: u32, tokens: u32) -> Time {
///         tokens.into()
///     }
///
///     fn turn_wait(&self) -> Time {
///         0
///     }
/// }
///
/// let mut router = Router::new(Routing::LeastLoaded);
/// let request = RouterRequest { prompt_tokens: 100, names: &[], block_size: 16, session: None };
/// let chosen = router.choose(&[Engine(1, 8), Engine(2, 3)], &request);
/// assert_eq!(chosen.index, 1);
/// ```
#[derive(Debug)]
pub struct Router {
    routing: Routing,
    /// Whether the model has recurrent states.
    has_states: bool,
    next: usize,
    /// By the engines' numbers.
    caches: FxHashMap<u32, EngineCache>,
    /// The engine and the blocks' names of prompts that are not computed, by the requests' numbers.
    coming: FxHashMap<u64, (u32, Vec<BlockHash>)>,
    requests: u64,
    sessions: Sessions,
}

/// Sessions that are remembered at least; twice as many at most.
const SESSIONS: usize = 1 << 16;

impl Router {
    /// Creates a router that knows no engine.
    pub fn new(routing: Routing) -> Self {
        let (caches, coming) = (FxHashMap::default(), FxHashMap::default());
        Self { routing, has_states: false, next: 0, caches, coming, requests: 0, sessions: Sessions::new(SESSIONS) }
    }

    /// The router of engines whose model has recurrent states, which report only the blocks after which one is saved.
    #[must_use]
    pub fn with_states(self) -> Self {
        Self { has_states: true, ..self }
    }

    /// Chooses the engine that gets the request. Panics if `engines` is empty. Call [`computed`](Self::computed) when
    /// the prompt is computed, or the request has ended.
    ///
    /// A request of a session goes to the engine of the session's last request, unless that engine has many more requests
    /// than another one, or lets it wait so long that another one is predicted to finish the prompt sooner although it has
    /// less of it cached. The routing decides on all others.
    pub fn choose<E: EngineView>(&mut self, engines: &[E], request: &RouterRequest<'_>) -> Chosen {
        let least = least_loaded(engines);
        let balanced = |&at: &usize| engines[at].requests() <= engines[least].requests() + MAX_IMBALANCE;
        let home = request.session.and_then(|session| position(engines, self.sessions.get(session)?)).filter(balanced);
        let prefixes: Vec<usize> = engines.iter().map(|engine| self.prefix(engine.number(), request.names)).collect();
        // The last token of a prompt is always computed.
        let cached = |at: usize| (prefixes[at] as u32 * request.block_size).min(request.prompt_tokens.saturating_sub(1));
        // An engine that has lost most of a session's context has parked it.
        let turn =
            |at: usize| if request.session.is_some() && 2 * cached(at) < request.prompt_tokens { engines[at].turn_wait() } else { 0 };
        let waits = |at: usize| engines[at].predicted_wait() + turn(at);
        let finishes = |at: usize| waits(at) + engines[at].prefill_time(cached(at), request.prompt_tokens - cached(at));
        let soonest = || best(engines, finishes);
        let of_session = home.map(|home| match soonest() {
            // Predictions of equal engines differ a little: that alone moves no session.
            other if waits(home) > 0 && finishes(other) < finishes(home) => other,
            _ => home,
        });
        let index = of_session.unwrap_or_else(|| match self.routing {
            Routing::RoundRobin => {
                self.next += 1;
                (self.next - 1) % engines.len()
            }
            Routing::LeastLoaded => least,
            Routing::PrefixAware => {
                let longest = best(engines, |at| u64::MAX - prefixes[at] as u64);
                Some(longest).filter(|&at| 2 * prefixes[at] >= request.names.len()).filter(balanced).unwrap_or(least)
            }
            Routing::Predicted => soonest(),
            Routing::LMetric => best(engines, |at| u64::from(request.prompt_tokens - cached(at)) * (engines[at].requests() as u64 + 1)),
        });
        let engine = engines[index].number();
        self.caches.entry(engine).or_default().expect(request.names);
        if let Some(session) = request.session {
            self.sessions.insert(session, engine);
        }
        self.requests += 1;
        self.coming.insert(self.requests, (engine, request.names.to_vec()));
        Chosen { index, cached_tokens: cached(index), number: self.requests }
    }

    /// Records that the prompt of a request is computed, or that the request has ended. Unknown numbers are ignored.
    pub fn computed(&mut self, request: u64) {
        if let Some((engine, names)) = self.coming.remove(&request) {
            self.caches.entry(engine).or_default().settle(&names);
        }
    }

    /// Takes an engine's report of what its cache has gained and lost.
    pub fn cache_changed(&mut self, engine: u32, changes: &CacheChanges) {
        self.caches.entry(engine).or_default().change(changes);
    }

    /// Forgets an engine that has ended, and its cache with it.
    pub fn forget(&mut self, engine: u32) {
        self.caches.remove(&engine);
        self.coming.retain(|_, &mut (of, _)| of != engine);
        self.sessions.forget(engine);
    }

    fn prefix(&self, engine: u32, names: &[BlockHash]) -> usize {
        self.caches.get(&engine).map_or(0, |cache| cache.prefix(names, self.has_states))
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

#[cfg(test)]
mod tests {
    use super::*;

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

        /// Engines whose number is odd have parked sessions.
        fn turn_wait(&self) -> Time {
            if self.0 % 2 == 1 { 5000 } else { 0 }
        }
    }

    fn names(names: &[u64]) -> Vec<BlockHash> {
        names.iter().map(|&name| BlockHash::from_bits(name)).collect()
    }

    fn request(names: &[BlockHash], session: Option<u64>) -> RouterRequest<'_> {
        RouterRequest { prompt_tokens: 100, names, block_size: 32, session }
    }

    /// Lets an engine report blocks that it has cached and dropped.
    fn report(router: &mut Router, engine: u32, added: &[u64], dropped: &[u64]) {
        router.cache_changed(engine, &CacheChanges { added: names(added), dropped: names(dropped) });
    }

    #[test]
    fn predicted_weighs_the_wait_the_machine_and_the_cached_prefix() {
        let mut router = Router::new(Routing::Predicted);
        report(&mut router, 1, &[1, 2, 3], &[]);
        let mut choose = |engines: [(usize, Time, Time); 3], prompt: &[u64]| {
            let mut number = 0..;
            let engines = engines.map(|(requests, wait, token)| Engine(number.next().unwrap(), requests, wait, token));
            let chosen = router.choose(&engines, &request(&names(prompt), None));
            router.computed(chosen.number);
            (chosen.index, chosen.cached_tokens)
        };
        assert_eq!(choose([(1, 500, 10), (9, 900, 10), (1, 300, 20)], &[1, 2, 3]), (1, 96), "940 against 1,500 and 2,300");
        assert_eq!(choose([(1, 0, 10), (9, 900, 10), (0, 0, 20)], &[1, 2, 3]), (1, 96), "940 with 96 tokens cached, 1,000 without");
        assert_eq!(choose([(1, 0, 10), (9, 900, 10), (0, 0, 20)], &[1, 2, 4]), (0, 0), "1,260 with 64 tokens cached");
        assert_eq!(choose([(2, 0, 10), (1, 0, 10), (2, 0, 10)], &[]), (1, 0), "the least loaded of equals");
    }

    #[test]
    fn what_engines_report_counts_and_what_they_were_sent_until_it_is_computed() {
        let mut router = Router::new(Routing::PrefixAware);
        let engines = [Engine(4, 1, 0, 0), Engine(7, 0, 0, 0)];
        let prompt = names(&[1, 2, 3]);
        let prompt = request(&prompt, None);
        report(&mut router, 4, &[1, 2, 3], &[]);
        let chosen = |router: &mut Router| {
            let chosen = router.choose(&engines, &prompt);
            router.computed(chosen.number);
            (chosen.index, chosen.cached_tokens)
        };
        assert_eq!(chosen(&mut router), (0, 96), "it was not sent here, and is there");
        report(&mut router, 4, &[], &[3]);
        assert_eq!(chosen(&mut router), (0, 64), "the last block was evicted");
        report(&mut router, 4, &[], &[1]);
        assert_eq!(chosen(&mut router), (1, 0), "without the first block the others are of no use");
        let (first, second) = (router.choose(&engines, &prompt), router.choose(&engines, &prompt));
        assert_eq!([first, second].map(|chosen| chosen.cached_tokens), [0, 96], "it will be computed there");
        router.computed(first.number);
        assert_eq!(router.choose(&engines, &prompt).cached_tokens, 96, "another prompt with these blocks is not computed");
    }

    #[test]
    fn with_states_a_prompt_goes_where_the_deepest_one_is() {
        let mut router = Router::new(Routing::PrefixAware).with_states();
        let engines = [Engine(4, 1, 0, 0), Engine(7, 0, 0, 0)];
        let prompt = names(&[1, 2, 3]);
        // The blocks before a state are there and not reported.
        report(&mut router, 4, &[2], &[]);
        report(&mut router, 7, &[1], &[]);
        let chosen = |router: &mut Router| {
            let chosen = router.choose(&engines, &request(&prompt, None));
            router.computed(chosen.number);
            (chosen.index, chosen.cached_tokens)
        };
        assert_eq!(chosen(&mut router), (0, 64));
        report(&mut router, 7, &[3], &[]);
        assert_eq!(chosen(&mut router), (1, 96));
        report(&mut router, 7, &[], &[3]);
        assert_eq!(chosen(&mut router), (0, 64), "the state was evicted");
    }

    #[test]
    fn lmetric_multiplies_uncached_tokens_and_requests() {
        let mut router = Router::new(Routing::LMetric);
        report(&mut router, 4, &[1, 2], &[]);
        let prompt = names(&[1, 2]);
        let mut choose = |first| router.choose(&[Engine(4, first, 0, 0), Engine(7, 1, 0, 0)], &request(&prompt, None));
        assert_eq!((choose(3).index, choose(3).cached_tokens), (0, 64), "144 against 200");
        assert_eq!(choose(6).index, 1, "252 against 200");
    }

    #[test]
    fn engines_that_have_left_are_not_chosen_and_what_they_had_counts_no_more() {
        for (routing, _) in Routing::NAMES {
            let mut router = Router::new(routing);
            let prompt = names(&[1, 2, 3]);
            let all = [Engine(0, 5, 50, 1), Engine(1, 0, 0, 1), Engine(2, 5, 50, 1)];
            let first = router.choose(&all, &request(&prompt, Some(9)));
            report(&mut router, first.index as u32, &[1, 2, 3], &[]);
            let left: Vec<_> = all.into_iter().filter(|engine| engine.0 != first.index as u32).collect();
            assert_eq!(router.choose(&left, &request(&prompt, Some(9))).cached_tokens, 0, "{routing:?}: the other one has it");
            for engine in &left {
                router.forget(engine.0);
            }
            assert_eq!(router.choose(&left, &request(&prompt, None)).cached_tokens, 0, "{routing:?}: the caches are gone");
            router.forget(first.index as u32);
            router.computed(first.number);
            assert!(router.caches.values().all(|cache| cache.prefix(&prompt[1..], false) == 0 || cache.prefix(&prompt, false) == 3));
        }
    }

    #[test]
    fn a_session_moves_where_its_prompt_is_finished_sooner_although_it_is_computed_there() {
        for (routing, _) in Routing::NAMES {
            let mut router = Router::new(routing);
            let prompt = names(&[1, 2, 3]);
            // It begins in the only engine, which then has 96 of 100 tokens.
            router.choose(&[Engine(1, 0, 0, 10)], &request(&prompt, Some(9)));
            let mut engine = |wait| {
                let engines = [Engine(0, 1, 0, 10), Engine(1, 1, wait, 10), Engine(2, 1, 100, 10)];
                router.choose(&engines, &request(&prompt, Some(9))).index
            };
            assert_eq!(engine(960), 1, "{routing:?}: 1,000 here and there");
            assert_eq!(engine(961), 0, "{routing:?}: the first of the others");
            assert_eq!(engine(0), 0, "{routing:?}: it stays there");
            let engines = [Engine(0, 0, 0, 11), Engine(1, 0, 0, 10)];
            assert_eq!(router.choose(&engines, &request(&[], Some(9))).index, 0, "{routing:?}: it would begin at once");
            // Without its blocks it is parked, and waits for 5,000 beside the time to compute them.
            let (mut router, lost) = (Router::new(routing), names(&[]));
            router.choose(&[Engine(1, 0, 0, 10)], &request(&lost, Some(9)));
            let engines = |wait| [Engine(0, 1, wait, 10), Engine(1, 1, 0, 10)];
            assert_eq!(router.choose(&engines(5000), &request(&lost, Some(9))).index, 1, "{routing:?}");
            assert_eq!(router.choose(&engines(4999), &request(&lost, Some(9))).index, 0, "{routing:?}");
        }
    }

    #[test]
    fn a_session_stays_with_its_engine_unless_that_has_many_more_requests() {
        for (routing, _) in Routing::NAMES {
            let mut router = Router::new(routing);
            let home = router.choose(&[Engine(0, 0, 0, 1), Engine(2, 0, 0, 1)], &request(&[], Some(5))).index;
            let loaded = |requests| [0, 1].map(|at| Engine(2 * at as u32, if at == home { requests } else { 0 }, 0, 1));
            for _ in 0..3 {
                assert_eq!(router.choose(&loaded(MAX_IMBALANCE), &request(&[], Some(5))).index, home, "{routing:?}");
            }
            let moved = (0..2).any(|_| router.choose(&loaded(MAX_IMBALANCE + 1), &request(&[], Some(5))).index != home);
            assert!(moved, "{routing:?}");
        }
    }
}
