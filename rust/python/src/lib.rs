//! `chairlift._core`: the scheduler, the simulator and the CPU model for Python. The crate only converts values and
//! locks mutexes. Numbers cross in flat arrays, once per step.

#![allow(clippy::needless_pass_by_value, clippy::too_many_arguments, reason = "Python passes objects of their own, and many keywords")]

mod arbiter;
mod buffers;
mod caches;
mod copied;
mod decoder;
mod encoder;
mod errors;
mod grammar;
mod kv_budget;
mod linear;
mod once;
mod policy;
mod replay;
mod reports;
mod request;
mod router;
mod scheduler;
mod settings;
mod shadow;
mod simulate;
mod simulate_sessions;
mod threads;
mod work;

use pyo3::prelude::*;

#[pymodule]
mod _core {
    #[pymodule_export]
    use crate::arbiter::Arbiter;
    #[pymodule_export]
    use crate::buffers::StepBuffers;
    #[pymodule_export]
    use crate::caches::{KvCache, StateCache};
    #[pymodule_export]
    use crate::decoder::{
        Decoder, DecoderBlock, RecurrentHeads, bf16_products, block_types, byte_products, instruction_sets, matrix_tiles, provide_grid,
    };
    #[pymodule_export]
    use crate::encoder::{Encoder, EncoderBlock, PartialText};
    #[pymodule_export]
    use crate::errors::{EmptyPrompt, NeverFits, NoNewTokens, QueueFull, Rejected, TooLong};
    #[pymodule_export]
    use crate::grammar::{GrammarMatcher, GrammarVocabulary};
    #[pymodule_export]
    use crate::kv_budget::KvBudget;
    #[pymodule_export]
    use crate::linear::{Adapter, Linear, TensorFile};
    #[pymodule_export]
    use crate::policy::{View, add_policy, added_policies, take_policy_failure};
    #[pymodule_export]
    use crate::replay::{replay, step_times, what_if, workload};
    #[pymodule_export]
    use crate::request::request_fields;
    #[pymodule_export]
    use crate::router::Router;
    #[pymodule_export]
    use crate::scheduler::{Outputs, Scheduler, StepPlan};
    #[pymodule_export]
    use crate::settings::settings;
    #[pymodule_export]
    use crate::shadow::{Shadow, journal_settings};
    #[pymodule_export]
    use crate::simulate::{simulate, simulate_models};
    #[pymodule_export]
    use crate::simulate_sessions::simulate_sessions;
    #[pymodule_export]
    use crate::threads::ThreadPool;
    #[pymodule_export]
    use crate::work::{decode_work, max_splits, prefill_work};
    use chairlift_core::{POLICIES, PreemptionReason, Rule, TimelineState};
    use pyo3::prelude::*;
    use pyo3::types::PyTuple;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("NO_TOKEN", chairlift_core::NO_TOKEN)?;
        module.add("CORPUS_BYTES_PER_TOKEN", chairlift_core::CORPUS_BYTES_PER_TOKEN)?;
        module.add("POLICIES", PyTuple::new(module.py(), POLICIES.map(|policy| (policy.name(), policy.help())))?)?;
        module.add("TIMELINE_STATES", PyTuple::new(module.py(), TimelineState::NAMES.map(|(_, name)| name))?)?;
        module.add("SERVING_RULES", PyTuple::new(module.py(), Rule::NAMES.map(|(_, name)| name))?)?;
        module.add("PREEMPTION_REASONS", PyTuple::new(module.py(), PreemptionReason::NAMES.map(|(_, name)| name))?)?;
        module.add("__version__", env!("CARGO_PKG_VERSION"))
    }
}
