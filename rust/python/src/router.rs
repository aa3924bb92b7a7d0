//! The router between the engines of a server.

use chairlift_core::{self as core, BlockHasher, EngineView, Routing, Time, Token};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::{Mutex, PoisonError};

/// Tokens of a block that the router names. It need not be that of the engines.
const NAME_BLOCK: usize = 16;

/// An engine: its number, requests, microseconds until it starts another prompt, and microseconds for each prompt token.
#[derive(FromPyObject)]
struct Engine(u32, usize, Time, f64);

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
}

/// The routing of this name.
pub(crate) fn named(routing: &str) -> PyResult<Routing> {
    let names = Routing::NAMES.map(|(name, _)| name).join(", ");
    let found = Routing::NAMES.into_iter().find(|&(name, _)| name == routing);
    found.map(|(_, routing)| routing).ok_or_else(|| PyValueError::new_err(format!("no such routing: there are {names}")))
}

/// Chooses one of a model's engines for each request: see `chairlift_core::Router`.
#[pyclass(frozen, module = "chairlift._core")]
pub(crate) struct Router {
    router: Mutex<core::Router>,
    hasher: BlockHasher,
}

#[pymethods]
impl Router {
    #[new]
    fn new(routing: &str, cached_tokens: usize) -> PyResult<Self> {
        let routing = named(routing)?;
        // Clients choose prompts. Without a secret key they could make names collide.
        let [low, high] = [0, 1].map(|part| u128::from(RandomState::new().hash_one(part)));
        let router = Mutex::new(core::Router::new(routing, cached_tokens / NAME_BLOCK));
        Ok(Self { router, hasher: BlockHasher::new(low | high << 64) })
    }

    /// Returns the index of the chosen engine and the prompt's tokens that it is expected to have.
    #[pyo3(signature = (engines, prompt, salt, session = None))]
    #[allow(clippy::needless_pass_by_value)] // types that Python passes
    fn choose(&self, engines: Vec<Engine>, prompt: Vec<Token>, salt: &[u8], session: Option<&[u8]>) -> PyResult<(usize, u32)> {
        if engines.is_empty() {
            return Err(PyValueError::new_err("no engine to choose from"));
        }
        let mut parent = self.hasher.root(salt);
        let names: Vec<u64> = prompt
            .chunks_exact(NAME_BLOCK)
            .map(|block| {
                parent = self.hasher.child(parent, block);
                parent.to_bits()
            })
            .collect();
        let request = core::RouterRequest {
            prompt_tokens: prompt.len() as u32,
            names: &names,
            name_block: NAME_BLOCK as u32,
            session: session.map(|session| self.hasher.root(session).to_bits()),
        };
        let chosen = self.router.lock().unwrap_or_else(PoisonError::into_inner).choose(&engines, &request);
        Ok((chosen.index, chosen.cached_tokens))
    }

    /// Forgets what an engine that has ended was sent.
    fn forget(&self, engine: u32) {
        self.router.lock().unwrap_or_else(PoisonError::into_inner).forget(engine);
    }
}
