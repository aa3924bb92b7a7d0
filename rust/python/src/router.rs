//! The router between the engines of a server.

use crate::threads::lock;
use chairlift_core::{self as core, BlockHash, BlockHasher, CacheChanges, CacheScope, EngineView, Routing, Time, Token};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::sync::Mutex;

/// An engine: its number, requests, microseconds until it starts another prompt, microseconds for each prompt token, and microseconds that a
/// session which is not active there waits for its turn.
#[derive(FromPyObject)]
struct Engine(u32, usize, Time, f64, Time);

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
        (self.3 * f64::from(tokens)) as Time
    }

    fn turn_wait(&self) -> Time {
        self.4
    }
}

/// The routing of this name.
pub(crate) fn named(routing: &str) -> PyResult<Routing> {
    let names = Routing::NAMES.map(|(_, name)| name).join(", ");
    Routing::from_name(routing).ok_or_else(|| PyValueError::new_err(format!("no such routing: there are {names}")))
}

/// Chooses one of a model's engines for each request: see `chairlift_core::Router`.
#[pyclass(frozen, module = "chairlift._core")]
pub(crate) struct Router {
    chooser: Mutex<core::Router>,
    hasher: BlockHasher,
    block_size: u32,
}

#[pymethods]
impl Router {
    /// `hash_key` and `block_size` are those of the engines' schedulers.
    #[new]
    #[pyo3(signature = (routing, hash_key, block_size, has_states = false))]
    fn new(routing: &str, hash_key: u128, block_size: u32, has_states: bool) -> PyResult<Self> {
        if block_size == 0 {
            return Err(PyValueError::new_err("block_size must be at least 1"));
        }
        let router = core::Router::new(named(routing)?);
        let chooser = Mutex::new(if has_states { router.with_states() } else { router });
        Ok(Self { chooser, hasher: BlockHasher::new(hash_key), block_size })
    }

    /// Returns the index of the chosen engine, the prompt's tokens that it is expected to have, and the request's number.
    #[pyo3(signature = (engines, prompt, salt, session = None, group = ""))]
    fn choose(
        &self,
        engines: Vec<Engine>,
        prompt: Vec<Token>,
        salt: &[u8],
        session: Option<&[u8]>,
        group: &str,
    ) -> PyResult<(usize, u32, u64)> {
        if engines.is_empty() {
            return Err(PyValueError::new_err("no engine to choose from"));
        }
        let request = core::RouterRequest {
            prompt_tokens: prompt.len() as u32,
            names: &self.hasher.names(&CacheScope { group: group.into(), salt: salt.into() }, &prompt, self.block_size as usize),
            block_size: self.block_size,
            session: session.map(|session| self.hasher.root(&CacheScope::salted(session)).to_bits()),
        };
        let chosen = lock(&self.chooser).choose(&engines, &request);
        Ok((chosen.index, chosen.cached_tokens, chosen.number))
    }

    /// Records that a request's prompt is computed, or that it has ended. Unknown numbers are ignored.
    fn computed(&self, request: u64) {
        lock(&self.chooser).computed(request);
    }

    /// Takes a report of `Scheduler.take_cache_changes` of an engine.
    fn cache_changed(&self, engine: u32, added: &[u8], dropped: &[u8]) {
        let [added, dropped] = [added, dropped].map(unpacked);
        lock(&self.chooser).cache_changed(engine, &CacheChanges { added, dropped });
    }

    /// Forgets an engine that has ended.
    fn forget(&self, engine: u32) {
        lock(&self.chooser).forget(engine);
    }
}

/// Block names of little-endian bytes.
fn unpacked(names: &[u8]) -> Vec<BlockHash> {
    let (names, _) = names.as_chunks();
    names.iter().map(|&bytes| BlockHash::from_bits(u64::from_le_bytes(bytes))).collect()
}
