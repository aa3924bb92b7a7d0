//! The memory of sequences between steps: keys and values in blocks, and recurrent states in slots.

#![allow(clippy::needless_pass_by_value, reason = "arguments are made of Python's objects for each call")]

use std::sync::Mutex;

use chairlift_cpu as cpu;
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::{PyMemoryError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::threads::lock;

/// The states of all recurrent layers, in slots.
#[pyclass(frozen, module = "chairlift._core")]
pub(crate) struct StateCache(pub(crate) Mutex<cpu::state::StateCache>);

#[pymethods]
impl StateCache {
    /// Bytes of a slot.
    #[getter]
    fn slot_bytes(&self) -> usize {
        lock(&self.0).shape().bytes()
    }

    /// Returns the bytes of a slot.
    fn read<'py>(&self, py: Python<'py>, slot: u32) -> Bound<'py, PyBytes> {
        PyBytes::new(py, lock(&self.0).read(slot))
    }

    /// Overwrites a slot with bytes of `read`, the state after `position` tokens.
    fn write(&self, py: Python<'_>, slot: u32, position: usize, state: PyBuffer<u8>) -> PyResult<()> {
        let state = state.to_vec(py)?;
        let mut cache = lock(&self.0);
        if state.len() != cache.shape().bytes() {
            return Err(PyValueError::new_err("the bytes are not those of a state"));
        }
        cache.write(slot, position, &state);
        Ok(())
    }

    /// Copies states, pair (from, to) by pair.
    fn copy(&self, py: Python<'_>, pairs: Vec<(u32, u32)>) {
        py.detach(|| lock(&self.0).copy(&pairs));
    }
}

/// The keys and values of all layers, in blocks. Each part has the layers with the same heads.
#[pyclass(frozen, module = "chairlift._core")]
pub(crate) struct KvCache(pub(crate) Mutex<Vec<cpu::cache::KvCache>>);

#[pymethods]
impl KvCache {
    #[new]
    #[pyo3(signature = (*, parts, blocks, block_size, dtype, host_blocks=0))]
    fn new(
        parts: Vec<(usize, usize, usize, Option<usize>)>,
        blocks: usize,
        block_size: usize,
        dtype: &str,
        host_blocks: usize,
    ) -> PyResult<Self> {
        let made = parts.into_iter().map(|(layers, kv_heads, head_dim, latent)| {
            if [layers, blocks, kv_heads, block_size, head_dim].contains(&0) {
                return Err(PyValueError::new_err("a cache has at least one of everything"));
            }
            if latent.is_some_and(|latent| !(1..=head_dim).contains(&latent)) {
                return Err(PyValueError::new_err("a value that is a part of its key is no longer than it"));
            }
            if dtype == "bfloat16" && (block_size % 2 == 1 || head_dim % 2 == 1) {
                return Err(PyValueError::new_err("a cache in bfloat16 has an even block size and an even head size"));
            }
            let shape = cpu::cache::KvShape { layers, blocks, kv_heads, block_size, head_dim, latent };
            let cache = cpu::cache::KvCache::new(shape, kv_dtype_of(dtype)?, host_blocks);
            cache.map_err(|error| PyMemoryError::new_err(error.to_string()))
        });
        Ok(Self(Mutex::new(made.collect::<PyResult<_>>()?)))
    }

    /// Copies whole blocks, pair (from, to) by pair.
    fn copy(&self, py: Python<'_>, pairs: Vec<(u32, u32)>) {
        py.detach(|| lock(&self.0).iter_mut().for_each(|part| part.copy(&pairs)));
    }

    /// Copies blocks to the host pool (block, host block), then blocks from it (host block, block).
    fn swap(&self, py: Python<'_>, outs: Vec<(u32, u32)>, ins: Vec<(u32, u32)>) {
        py.detach(|| lock(&self.0).iter_mut().for_each(|part| part.swap(&outs, &ins)));
    }

    /// Returns the bytes of a block.
    fn read<'py>(&self, py: Python<'py>, block: u32) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &lock(&self.0).iter().flat_map(|part| part.read(block)).collect::<Vec<_>>())
    }

    /// Returns the memory of blocks to the system.
    fn discard(&self, py: Python<'_>, blocks: Vec<u32>) {
        py.detach(|| lock(&self.0).iter_mut().for_each(|part| part.discard(&blocks)));
    }

    /// Overwrites a block with bytes of `read`.
    #[allow(clippy::needless_pass_by_value)] // a type that Python passes
    fn write(&self, py: Python<'_>, block: u32, bytes: PyBuffer<u8>) -> PyResult<()> {
        let bytes = bytes.to_vec(py)?;
        let mut rest = bytes.as_slice();
        for part in lock(&self.0).iter_mut() {
            let (own, others) = rest.split_at(part.block_bytes());
            part.write(block, own);
            rest = others;
        }
        Ok(())
    }
}

fn kv_dtype_of(name: &str) -> PyResult<cpu::cache::KvDType> {
    match name {
        "float32" => Ok(cpu::cache::KvDType::F32),
        "float16" => Ok(cpu::cache::KvDType::F16),
        "bfloat16" => Ok(cpu::cache::KvDType::Bf16),
        "int8" => Ok(cpu::cache::KvDType::Int8),
        _ => Err(PyValueError::new_err(format!("KV cannot be kept as {name:?}"))),
    }
}
