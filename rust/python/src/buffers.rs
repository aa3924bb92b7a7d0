//! The step buffers: arrays that Python owns and the core writes.

use chairlift_core as core;
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::cell::Cell;

/// Defines [`StepBuffers`] by the names of its arrays, which the core's have too.
macro_rules! step_buffers {
    (tables: $tables:ident, others: [$($array:ident)*], optional: [$($optional:ident)*]) => {
        /// The arrays of one step, shared with the model runner.
        ///
        /// All are writable, C-contiguous int32; see `chairlift_core::StepBuffers`
        /// for their shapes.
        #[pyclass(frozen, module = "chairlift._core")]
        pub(crate) struct StepBuffers {
            $($array: PyBuffer<i32>,)*
            $tables: PyBuffer<i32>,
            $($optional: Option<PyBuffer<i32>>,)*
            max_blocks: usize,
        }

        #[pymethods]
        impl StepBuffers {
            #[new]
            #[pyo3(signature = (*, $($array,)* $tables, $($optional = None),*))]
            fn new(py: Python<'_>, $($array: PyBuffer<i32>,)* $tables: PyBuffer<i32>, $($optional: Option<PyBuffer<i32>>),*) -> PyResult<Self> {
                let &[_, max_blocks] = $tables.shape() else {
                    return Err(PyValueError::new_err("block_tables must be two-dimensional"));
                };
                let buffers = Self { $($array,)* $tables, $($optional,)* max_blocks };
                let fault = || PyValueError::new_err("step buffers must be writable, C-contiguous int32 arrays");
                buffers.view(py).map(|_| ()).ok_or_else(fault)?;
                Ok(buffers)
            }
        }

        impl StepBuffers {
            /// The arrays for the core. `None` if an array is read-only or strided.
            pub(crate) fn view<'a>(&'a self, py: Python<'a>) -> Option<core::StepBuffers<'a>> {
                Some(core::StepBuffers {
                    $($array: cells(py, &self.$array)?,)*
                    $tables: cells(py, &self.$tables)?,
                    $($optional: self.$optional.as_ref().map_or(Some([].as_slice()), |array| cells(py, array))?,)*
                    max_blocks: self.max_blocks,
                })
            }
        }
    };
}

step_buffers! {
    tables: block_tables,
    others: [input_ids positions slot_mapping query_starts context_lens batch_slots sample_at sample_slots copies],
    optional: [table_writes state_slots state_copies state_saves]
}

impl StepBuffers {
    /// Raises an error if an array is too short for a scheduler with these limits.
    pub(crate) fn check(&self, config: &core::Config) -> PyResult<()> {
        let (tokens, seqs) = (config.max_num_batched_tokens as usize, config.max_num_seqs as usize);
        // The states of sequences need their arrays, the list of table writes is the caller's choice.
        let len = |array: &Option<PyBuffer<i32>>| array.as_ref().map(|array| array.item_count());
        let states = |array| Some(len(array).unwrap_or(0)).filter(|_| config.state_slots > 0);
        let arrays = [
            ("input_ids", Some(self.input_ids.item_count()), tokens),
            ("positions", Some(self.positions.item_count()), tokens),
            ("slot_mapping", Some(self.slot_mapping.item_count()), tokens),
            ("query_starts", Some(self.query_starts.item_count()), seqs + 1),
            ("context_lens", Some(self.context_lens.item_count()), seqs),
            ("batch_slots", Some(self.batch_slots.item_count()), seqs),
            ("sample_at", Some(self.sample_at.item_count()), tokens),
            ("sample_slots", Some(self.sample_slots.item_count()), tokens),
            ("copies", Some(self.copies.item_count()), 2 * seqs),
            ("block_tables", Some(self.block_tables.item_count()), seqs * self.max_blocks),
            ("table_writes", len(&self.table_writes), 2 * seqs * self.max_blocks),
            ("state_slots", states(&self.state_slots), seqs),
            ("state_copies", states(&self.state_copies), 2 * seqs),
            ("state_saves", states(&self.state_saves), 3 * config.state_slots as usize),
        ];
        for (name, have, least) in arrays {
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

/// An array as cells. `None` if it is read-only, strided or empty.
#[expect(deprecated, reason = "sound here: never empty, and only the engine's thread, which holds the GIL now, touches step buffers")]
fn cells<'a>(py: Python<'a>, buffer: &'a PyBuffer<i32>) -> Option<&'a [Cell<i32>]> {
    if buffer.item_count() == 0 { None } else { buffer.as_mut_slice(py) }
}
