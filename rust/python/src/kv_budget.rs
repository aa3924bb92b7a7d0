//! The division of KV bytes among models.

use chairlift_core as core;
use pyo3::prelude::*;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Divides bytes for KV blocks among models: see `chairlift_core::KvBudget`.
#[pyclass(frozen, module = "chairlift._core")]
pub(crate) struct KvBudget(Mutex<core::KvBudget>);

impl KvBudget {
    fn lock(&self) -> MutexGuard<'_, core::KvBudget> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl KvBudget {
    #[new]
    fn new() -> Self {
        Self(Mutex::default())
    }

    #[pyo3(signature = (model, *, block_bytes, state_bytes, least, most))]
    fn add(&self, model: u32, block_bytes: u64, state_bytes: u64, least: u32, most: u32) {
        self.lock().add(model, block_bytes, state_bytes, least, most);
    }

    fn remove(&self, model: u32) {
        self.lock().remove(model);
    }

    fn promised(&self) -> u64 {
        self.lock().promised()
    }

    fn report(&self, model: u32, held: u32, kept: u32, wanted: u32) {
        self.lock().report(model, core::BlocksUsed { held, kept, wanted });
    }

    fn set(&self, model: u32, limit: u32) {
        self.lock().set(model, limit);
    }

    fn is_short(&self) -> bool {
        self.lock().is_short()
    }

    fn shrink(&self) -> Vec<(u32, u32)> {
        self.lock().shrink()
    }

    fn grow(&self) -> Vec<(u32, u32)> {
        self.lock().grow()
    }
}
