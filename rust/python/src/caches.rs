//! The memory of sequences between steps: keys and values in blocks, and recurrent states in slots.

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
pub(crate) struct KvCache {
    pub(crate) parts: Mutex<Vec<cpu::cache::KvCache>>,
    blocks: usize,
    host_blocks: usize,
    /// Bytes of a block in all parts.
    block_bytes: usize,
}

impl KvCache {
    /// Raises `ValueError` unless all these blocks and host blocks exist.
    fn check(&self, mut blocks: impl Iterator<Item = u32>, mut host_blocks: impl Iterator<Item = u32>) -> PyResult<()> {
        if let Some(block) = blocks.find(|&block| block as usize >= self.blocks) {
            return Err(PyValueError::new_err(format!("there is no block {block}")));
        }
        match host_blocks.find(|&block| block as usize >= self.host_blocks) {
            Some(block) => Err(PyValueError::new_err(format!("there is no host block {block}"))),
            None => Ok(()),
        }
    }
}

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
            cpu::cache::KvCache::new(shape, kv_dtype_of(dtype)?, host_blocks).map_err(no_memory)
        });
        let parts: Vec<_> = made.collect::<PyResult<_>>()?;
        let block_bytes = parts.iter().map(cpu::cache::KvCache::block_bytes).sum();
        Ok(Self { parts: Mutex::new(parts), blocks, host_blocks, block_bytes })
    }

    /// Copies whole blocks, pair (from, to) by pair.
    fn copy(&self, py: Python<'_>, pairs: Vec<(u32, u32)>) -> PyResult<()> {
        self.check(pairs.iter().flat_map(|&(from, to)| [from, to]), [].into_iter())?;
        py.detach(|| lock(&self.parts).iter_mut().for_each(|part| part.copy(&pairs)));
        Ok(())
    }

    /// Copies blocks to the host pool (block, host block), then blocks from it (host block, block).
    fn swap(&self, py: Python<'_>, outs: Vec<(u32, u32)>, ins: Vec<(u32, u32)>) -> PyResult<()> {
        let blocks = outs.iter().map(|out| out.0).chain(ins.iter().map(|into| into.1));
        self.check(blocks, outs.iter().map(|out| out.1).chain(ins.iter().map(|into| into.0)))?;
        py.detach(|| lock(&self.parts).iter_mut().for_each(|part| part.swap(&outs, &ins)));
        Ok(())
    }

    /// Returns the bytes of a block.
    fn read<'py>(&self, py: Python<'py>, block: u32) -> PyResult<Bound<'py, PyBytes>> {
        self.check([block].into_iter(), [].into_iter())?;
        PyBytes::new_with(py, self.block_bytes, |mut rest| {
            py.detach(|| {
                for part in lock(&self.parts).iter() {
                    part.read(block, rest.split_off_mut(..part.block_bytes()).expect("the sum of these"));
                }
            });
            Ok(())
        })
    }

    /// Returns the memory of blocks to the system.
    fn discard(&self, py: Python<'_>, blocks: Vec<u32>) -> PyResult<()> {
        self.check(blocks.iter().copied(), [].into_iter())?;
        py.detach(|| lock(&self.parts).iter_mut().for_each(|part| part.discard(&blocks)));
        Ok(())
    }

    /// Overwrites a block with bytes of `read`.
    fn write(&self, py: Python<'_>, block: u32, bytes: PyBuffer<u8>) -> PyResult<()> {
        self.check([block].into_iter(), [].into_iter())?;
        let bytes = bytes.to_vec(py)?;
        if bytes.len() != self.block_bytes {
            return Err(PyValueError::new_err(format!("a block has {} bytes, not {}", self.block_bytes, bytes.len())));
        }
        py.detach(|| {
            let mut rest = bytes.as_slice();
            for part in lock(&self.parts).iter_mut() {
                part.write(block, rest.split_off(..part.block_bytes()).expect("the sum of these"));
            }
        });
        Ok(())
    }
}

/// A `MemoryError` with the message of an error.
pub(crate) fn no_memory(error: cpu::OutOfMemory) -> PyErr {
    PyMemoryError::new_err(error.to_string())
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
