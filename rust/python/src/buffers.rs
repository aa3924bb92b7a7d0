//! The step buffers: arrays that Python owns and the core writes.

use chairlift_core as core;
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::cell::Cell;

/// The arrays of one step, shared with the model runner.
///
/// All are writable, C-contiguous int32; see `chairlift_core::StepBuffers`
/// for their shapes.
#[pyclass(frozen, module = "chairlift._core")]
pub(crate) struct StepBuffers {
    input_ids: PyBuffer<i32>,
    positions: PyBuffer<i32>,
    slot_mapping: PyBuffer<i32>,
    query_starts: PyBuffer<i32>,
    context_lens: PyBuffer<i32>,
    batch_slots: PyBuffer<i32>,
    sample_at: PyBuffer<i32>,
    sample_slots: PyBuffer<i32>,
    copies: PyBuffer<i32>,
    block_tables: PyBuffer<i32>,
    table_writes: Option<PyBuffer<i32>>,
    state_slots: Option<PyBuffer<i32>>,
    state_copies: Option<PyBuffer<i32>>,
    state_saves: Option<PyBuffer<i32>>,
    max_blocks: usize,
}

#[pymethods]
impl StepBuffers {
    #[new]
    #[pyo3(signature = (*, input_ids, positions, slot_mapping, query_starts, context_lens, batch_slots, sample_at, sample_slots, copies, block_tables,
        table_writes = None, state_slots = None, state_copies = None, state_saves = None))]
    fn new(
        py: Python<'_>,
        input_ids: PyBuffer<i32>,
        positions: PyBuffer<i32>,
        slot_mapping: PyBuffer<i32>,
        query_starts: PyBuffer<i32>,
        context_lens: PyBuffer<i32>,
        batch_slots: PyBuffer<i32>,
        sample_at: PyBuffer<i32>,
        sample_slots: PyBuffer<i32>,
        copies: PyBuffer<i32>,
        block_tables: PyBuffer<i32>,
        table_writes: Option<PyBuffer<i32>>,
        state_slots: Option<PyBuffer<i32>>,
        state_copies: Option<PyBuffer<i32>>,
        state_saves: Option<PyBuffer<i32>>,
    ) -> PyResult<Self> {
        let &[_, max_blocks] = block_tables.shape() else {
            return Err(PyValueError::new_err("block_tables must be two-dimensional"));
        };
        let buffers = Self {
            input_ids,
            positions,
            slot_mapping,
            query_starts,
            context_lens,
            batch_slots,
            sample_at,
            sample_slots,
            copies,
            block_tables,
            table_writes,
            state_slots,
            state_copies,
            state_saves,
            max_blocks,
        };
        buffers.view(py).map(|_| ()).ok_or_else(|| PyValueError::new_err("step buffers must be writable, C-contiguous int32 arrays"))?;
        Ok(buffers)
    }
}

impl StepBuffers {
    /// The arrays for the core. `None` if an array is read-only or strided.
    pub(crate) fn view<'a>(&'a self, py: Python<'a>) -> Option<core::StepBuffers<'a>> {
        Some(core::StepBuffers {
            input_ids: cells(py, &self.input_ids)?,
            positions: cells(py, &self.positions)?,
            slot_mapping: cells(py, &self.slot_mapping)?,
            query_starts: cells(py, &self.query_starts)?,
            context_lens: cells(py, &self.context_lens)?,
            batch_slots: cells(py, &self.batch_slots)?,
            sample_at: cells(py, &self.sample_at)?,
            sample_slots: cells(py, &self.sample_slots)?,
            copies: cells(py, &self.copies)?,
            block_tables: cells(py, &self.block_tables)?,
            table_writes: optional_cells(py, self.table_writes.as_ref())?,
            state_slots: optional_cells(py, self.state_slots.as_ref())?,
            state_copies: optional_cells(py, self.state_copies.as_ref())?,
            state_saves: optional_cells(py, self.state_saves.as_ref())?,
            max_blocks: self.max_blocks,
        })
    }

    /// Raises an error if an array is too short for a scheduler with these limits.
    pub(crate) fn check(&self, config: &core::Config) -> PyResult<()> {
        let (tokens, seqs) = (config.max_num_batched_tokens as usize, config.max_num_seqs as usize);
        let wanted = [
            ("input_ids", &self.input_ids, tokens),
            ("positions", &self.positions, tokens),
            ("slot_mapping", &self.slot_mapping, tokens),
            ("query_starts", &self.query_starts, seqs + 1),
            ("context_lens", &self.context_lens, seqs),
            ("batch_slots", &self.batch_slots, seqs),
            ("sample_at", &self.sample_at, tokens),
            ("sample_slots", &self.sample_slots, tokens),
            ("copies", &self.copies, 2 * seqs),
            ("block_tables", &self.block_tables, seqs * self.max_blocks),
        ];
        for (name, buffer, least) in wanted {
            if buffer.item_count() < least {
                return Err(PyValueError::new_err(format!("{name} has {} entries, needs {least}", buffer.item_count())));
            }
        }
        let len = |buffer: &Option<PyBuffer<i32>>| buffer.as_ref().map(|buffer| buffer.item_count());
        // The states of sequences need their arrays, the list of table writes is the caller's choice.
        let states = |buffer| Some(len(buffer).unwrap_or(0)).filter(|_| config.state_slots > 0);
        let optional = [
            ("table_writes", len(&self.table_writes), 2 * seqs * self.max_blocks),
            ("state_slots", states(&self.state_slots), seqs),
            ("state_copies", states(&self.state_copies), 2 * seqs),
            ("state_saves", states(&self.state_saves), 3 * config.state_slots as usize),
        ];
        for (name, have, least) in optional {
            if let Some(have) = have.filter(|&have| have < least) {
                return Err(PyValueError::new_err(format!("{name} has {have} entries, needs {least}")));
            }
        }
        if self.max_blocks < config.max_blocks_per_seq() as usize {
            let (have, need) = (self.max_blocks, config.max_blocks_per_seq());
            return Err(PyValueError::new_err(format!("block_tables has rows of {have} blocks, needs {need}")));
        }
        Ok(())
    }
}

/// Like [`cells`], but an array that does not exist is empty.
fn optional_cells<'a>(py: Python<'a>, buffer: Option<&'a PyBuffer<i32>>) -> Option<&'a [Cell<i32>]> {
    buffer.map_or(Some(&[]), |buffer| cells(py, buffer))
}

/// An array as cells. `None` if it is read-only, strided or empty.
#[expect(deprecated, reason = "sound here: never empty, and only the engine's thread, which holds the GIL now, touches step buffers")]
fn cells<'a>(py: Python<'a>, buffer: &'a PyBuffer<i32>) -> Option<&'a [Cell<i32>]> {
    if buffer.item_count() == 0 { None } else { buffer.as_mut_slice(py) }
}
