//! The scheduler's Python interface.

use crate::buffers::StepBuffers;
use crate::copied::Copied;
use crate::errors::{invalid, rejected};
use crate::reports;
use crate::request::{Completion, EngineRequest};
use crate::settings;
use crate::threads::lock;
use chairlift_core as core;
use pyo3::exceptions::{PyKeyError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::MutexExt;
use pyo3::types::{PyBytes, PyDict, PyList};
use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A planned step. `Scheduler.commit` consumes it.
#[pyclass(frozen, module = "chairlift._core")]
pub(crate) struct StepPlan {
    plan: Mutex<Option<Box<core::StepPlan>>>,
    #[pyo3(get)]
    num_tokens: usize,
    #[pyo3(get)]
    num_seqs: usize,
    #[pyo3(get)]
    num_samples: usize,
    #[pyo3(get)]
    num_copies: usize,
    #[pyo3(get)]
    num_table_writes: usize,
    #[pyo3(get)]
    num_state_copies: usize,
    #[pyo3(get)]
    num_state_saves: usize,
    #[pyo3(get)]
    admitted: Vec<Admitted>,
    #[pyo3(get)]
    preempted: Vec<u64>,
    #[pyo3(get)]
    swap_out: Vec<(u32, u32)>,
    #[pyo3(get)]
    swap_in: Vec<(u32, u32)>,
}

impl StepPlan {
    /// The plan, which is there. Raises an error if it was committed, or if a sample has no token.
    fn uncommitted(&self, sampled: &[i32]) -> PyResult<MutexGuard<'_, Option<Box<core::StepPlan>>>> {
        if sampled.len() < self.num_samples {
            let message = format!("sampled has {} tokens, the plan samples {}", sampled.len(), self.num_samples);
            return Err(PyValueError::new_err(message));
        }
        let plan = lock(&self.plan);
        if plan.is_some() { Ok(plan) } else { Err(PyRuntimeError::new_err("this plan was committed before")) }
    }
}

/// (slot, sequence, tag, cached tokens, those that its tenant used before, microseconds queued) of an admitted sequence.
type Admitted = (u32, u64, u64, u32, u32, core::Time);

/// The results of a step: packed arrays of equal length, one entry per token.
#[pyclass(frozen, get_all, module = "chairlift._core")]
pub(crate) struct Outputs {
    tags: Py<PyBytes>,
    tokens: Py<PyBytes>,
    finishes: Py<PyBytes>,
    ended: Py<PyList>,
}

struct Inner {
    core: core::Recorder,
    drafter: Option<core::Drafter>,
    outputs: core::Outputs,
    completion: Completion,
    /// Held sequences by their clients' handles.
    held: HashMap<u64, core::HeldId>,
}

impl Inner {
    /// Adds a request's sequences and appends them to `added`, also if one is refused.
    fn add(
        &mut self,
        request: &EngineRequest,
        mut first: core::Request,
        resumed: Vec<(u32, core::Request)>,
        now: core::Time,
        added: &mut Vec<(u32, core::SeqId)>,
    ) -> PyResult<()> {
        let Self { core, held, .. } = self;
        let now = request.submitted(now);
        if !resumed.is_empty() {
            for (answer, request) in resumed {
                added.push((answer, core.add(request, now).map_err(rejected)?));
            }
            return Ok(());
        }
        if let Some(handle) = request.continues() {
            let id = *held.entry(handle).or_insert_with(|| core.open(&first.tenant, &first.scope, now));
            first.continues = request.continued(id);
        }
        let parent = core.add(first, now).map_err(rejected)?;
        added.push((0, parent));
        let forks = request.fork_tags().zip(1..);
        added.extend(forks.filter_map(|(tag, answer)| Some((answer, core.fork(parent, tag, now)?))));
        Ok(())
    }
}

/// A cached block, its content, the content before it, its tokens, and the group that shares it.
type StoredBlock = (u32, u64, u64, Py<PyBytes>, String);

/// Plans the tokens of each step and the KV blocks that hold them.
#[pyclass(frozen, module = "chairlift._core")]
pub(crate) struct Scheduler(Mutex<Inner>);

impl Scheduler {
    /// Waits without the GIL, because the thread that has the lock may make Python objects.
    fn lock(&self) -> PyResult<MutexGuard<'_, Inner>> {
        let broken = |_: PoisonError<_>| PyRuntimeError::new_err("the scheduler failed earlier and cannot be used");
        Python::attach(|py| self.0.lock_py_attached(py)).map_err(broken)
    }
}

#[pymethods]
impl Scheduler {
    #[new]
    #[pyo3(signature = (*, journal = false, hash_key = 0, draft_tokens = 0, draft_corpus_tokens = 0, end_tokens = Vec::new(),
        tenant_weights = HashMap::new(), tier_weights = HashMap::new(), **settings))]
    fn new(
        py: Python<'_>,
        journal: bool,
        hash_key: u128,
        draft_tokens: usize,
        draft_corpus_tokens: usize,
        end_tokens: Vec<u32>,
        tenant_weights: HashMap<String, u32>,
        tier_weights: HashMap<String, u32>,
        settings: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Self> {
        let given = settings.cloned().unwrap_or_else(|| PyDict::new(py));
        let config = settings::changed(core::Config::default(), &given)?;
        let core = core::Scheduler::keyed(config, hash_key).map_err(invalid)?;
        let core = if journal { core::Recorder::on(core) } else { core::Recorder::off(core) };
        let drafter = (draft_tokens > 0).then(|| core::Drafter::new(draft_tokens, draft_corpus_tokens));
        let completion = Completion { end_tokens, tenant_weights, tier_weights };
        let (outputs, held) = (core::Outputs::default(), HashMap::new());
        Ok(Self(Mutex::new(Inner { core, drafter, outputs, completion, held })))
    }

    /// The numbers of the request's answers that were added, each with its sequence.
    #[pyo3(signature = (request, now, salt = b"".as_slice(), preparation = None))]
    fn add(&self, request: EngineRequest, now: core::Time, salt: &[u8], preparation: Option<&str>) -> PyResult<Vec<(u32, u64)>> {
        let (spent, preparation) = (request.spent()?, preparation.map(preparation_of).transpose()?);
        let mut inner = self.lock()?;
        let first = core::Request { preparation, ..request.request(inner.core.config(), &inner.completion, salt, now)? };
        let resumed = request.resumed(&first, now)?;
        let mut added = Vec::new();
        inner.add(&request, first, resumed, now, &mut added).inspect_err(|_| {
            for &(_, id) in &added {
                inner.core.end(id, core::FinishReason::Abort, now);
            }
        })?;
        let Inner { core, drafter, .. } = &mut *inner;
        let mut drafter = drafter.as_mut().filter(|_| request.verifiable());
        for &(_, id) in &added {
            core.prepared(id, &spent);
            if let Some(drafter) = &mut drafter {
                drafter.watch(id, core);
            }
        }
        Ok(added.into_iter().map(|(answer, id)| (answer, id.to_bits())).collect())
    }

    #[pyo3(signature = (seq, next, now))]
    fn prepare(&self, seq: u64, next: Option<&str>, now: core::Time) -> PyResult<bool> {
        let next = next.map(preparation_of).transpose()?;
        Ok(self.lock()?.core.prepare(core::SeqId::from_bits(seq), next, now))
    }

    fn take_reads(&self) -> PyResult<Vec<u64>> {
        Ok(self.lock()?.core.take_reads())
    }

    fn fork_held(&self, handle: u64, forks: Vec<u64>, now: core::Time) -> PyResult<()> {
        let mut inner = self.lock()?;
        let Inner { core, held, .. } = &mut *inner;
        let Some(&id) = held.get(&handle) else { return Ok(()) };
        held.extend(forks.into_iter().filter_map(|fork| Some((fork, core.fork_held(id, now)?))));
        Ok(())
    }

    fn note_session(&self, tenant: &str, session: String, event: &str, now: core::Time) -> PyResult<bool> {
        let event = core::SessionEvent::from_name(event).ok_or_else(|| PyValueError::new_err("expected awaits_user or ended"))?;
        Ok(self.lock()?.core.note_session(tenant, &session.into(), event, now))
    }

    /// (expected, longest) in milliseconds: see `core::SessionWait`.
    fn session_wait(&self, seq: u64) -> PyResult<Option<(core::Time, core::Time)>> {
        let wait = self.lock()?.core.session_wait(core::SeqId::from_bits(seq));
        Ok(wait.map(|wait| (wait.expected.div_ceil(1000), wait.longest.div_ceil(1000))))
    }

    fn drop_held(&self, handle: u64, now: core::Time) -> PyResult<()> {
        let mut inner = self.lock()?;
        if let Some(id) = inner.held.remove(&handle) {
            inner.core.drop_held(id, now);
        }
        Ok(())
    }

    #[pyo3(signature = (tokens, group = ""))]
    fn cached_blocks(&self, tokens: Copied<i32>, group: &str) -> PyResult<usize> {
        let tokens = unsigned(tokens)?;
        Ok(self.lock()?.core.cached_blocks(group, &tokens))
    }

    #[pyo3(signature = (tokens, now, group = ""))]
    fn restore(&self, tokens: Copied<i32>, now: core::Time, group: &str) -> PyResult<(usize, Vec<u32>, Option<u32>)> {
        let tokens = unsigned(tokens)?;
        let restored = self.lock()?.core.restore(group, &tokens, now);
        Ok((restored.cached, restored.blocks.into_iter().map(|block| block.0).collect(), restored.state.map(|slot| slot.0)))
    }

    fn stored_blocks(&self, py: Python<'_>, after: u64) -> PyResult<Vec<StoredBlock>> {
        let stored = self.lock()?.core.stored_blocks(after);
        let found = stored.iter().map(|block| {
            let tokens = packed(py, &block.tokens, |token| token.to_le_bytes())?;
            Ok((block.id.0, block.content, block.parent, tokens, block.group.to_string()))
        });
        found.collect()
    }

    fn stored_states(&self) -> PyResult<Vec<(u64, u32)>> {
        Ok(self.lock()?.core.stored_states().into_iter().map(|(content, slot)| (content, slot.0)).collect())
    }

    fn record_cache_changes(&self) -> PyResult<()> {
        self.lock()?.core.record_cache_changes();
        Ok(())
    }

    fn remember_users(&self) -> PyResult<()> {
        self.lock()?.core.remember_users();
        Ok(())
    }

    fn take_cache_changes(&self, py: Python<'_>) -> PyResult<(Py<PyBytes>, Py<PyBytes>)> {
        let changes = self.lock()?.core.take_cache_changes();
        let names = |names: &[core::BlockHash]| packed(py, names, |name| name.to_bits().to_le_bytes());
        Ok((names(&changes.added)?, names(&changes.dropped)?))
    }

    fn unused(&self) -> PyResult<f64> {
        Ok(self.lock()?.core.unused())
    }

    /// (held, kept, wanted): see `core::BlocksUsed`.
    fn blocks_used(&self) -> PyResult<(u32, u32, u32)> {
        let used = self.lock()?.core.blocks_used();
        Ok((used.held, used.kept, used.wanted))
    }

    fn set_block_limit(&self, blocks: u32, now: core::Time) -> PyResult<u32> {
        Ok(self.lock()?.core.set_block_limit(blocks, now))
    }

    fn set_upstream_token_time(&self, ns: u64, now: core::Time) -> PyResult<()> {
        self.lock()?.core.set_upstream_token_time(ns, now);
        Ok(())
    }

    fn evict_cached(&self, now: core::Time) -> PyResult<()> {
        self.lock()?.core.evict_cached(now);
        Ok(())
    }

    fn close_queue(&self, closed: bool, now: core::Time) -> PyResult<()> {
        self.lock()?.core.close_queue(closed, now);
        Ok(())
    }

    fn take_given_back(&self) -> PyResult<Vec<u32>> {
        Ok(self.lock()?.core.take_given_back().into_iter().map(|block| block.0).collect())
    }

    fn set_priority(&self, seq: u64, priority: i32, now: core::Time) -> PyResult<bool> {
        Ok(self.lock()?.core.set_priority(core::SeqId::from_bits(seq), priority, now))
    }

    fn next_step(&self) -> PyResult<Option<(core::Time, u32)>> {
        Ok(self.lock()?.core.next_step())
    }

    fn charge_external(&self, tenant: &str, us: core::Time) -> PyResult<()> {
        self.lock()?.core.charge_external(tenant, us);
        Ok(())
    }

    fn take_service(&self) -> PyResult<HashMap<String, core::Time>> {
        let taken = self.lock()?.core.take_service();
        Ok(taken.into_iter().map(|(tenant, us)| (tenant.to_string(), us)).collect())
    }

    fn abort(&self, seq: u64, now: core::Time) -> PyResult<bool> {
        Ok(self.lock()?.core.end(core::SeqId::from_bits(seq), core::FinishReason::Abort, now))
    }

    fn stop(&self, seq: u64, now: core::Time) -> PyResult<bool> {
        Ok(self.lock()?.core.end(core::SeqId::from_bits(seq), core::FinishReason::Stop, now))
    }

    fn fail(&self, seq: u64, now: core::Time) -> PyResult<bool> {
        Ok(self.lock()?.core.end(core::SeqId::from_bits(seq), core::FinishReason::Error, now))
    }

    fn expire<'py>(&self, py: Python<'py>, now: core::Time) -> PyResult<Bound<'py, PyList>> {
        let mut ended = Vec::new();
        self.lock()?.core.expire(now, &mut ended);
        reports::timelines(py, &ended)
    }

    #[pyo3(signature = (buffers, now, forced = Vec::new()))]
    fn plan(
        &self,
        py: Python<'_>,
        buffers: &StepBuffers,
        now: core::Time,
        forced: Vec<(u64, Vec<core::Token>)>,
    ) -> PyResult<Option<StepPlan>> {
        let mut inner = self.lock()?;
        buffers.check(inner.core.config())?;
        let view = buffers.view(py).ok_or_else(|| PyValueError::new_err("the step buffers changed their layout"))?;
        let Inner { core, drafter, .. } = &mut *inner;
        if let Some(drafter) = drafter {
            drafter.propose(core, forced.into_iter().map(|(seq, tokens)| (core::SeqId::from_bits(seq), tokens)));
        }
        let Some(plan) = core.plan(now) else { return Ok(None) };
        let lens = plan.fill(core, &view);
        let admitted =
            plan.admitted.iter().map(|one| (one.slot, one.seq.to_bits(), one.tag, one.cached_tokens, one.own_cached_tokens, one.queued));
        Ok(Some(StepPlan {
            num_tokens: lens.tokens,
            num_seqs: lens.seqs,
            num_samples: lens.samples,
            num_copies: lens.copies,
            num_table_writes: lens.table_writes,
            num_state_copies: lens.state_copies,
            num_state_saves: lens.state_saves,
            admitted: admitted.collect(),
            preempted: plan.preempted.clone(),
            swap_out: plan.swap_out.iter().map(|&(block, host)| (block.0, host)).collect(),
            swap_in: plan.swap_in.iter().map(|&(host, block)| (host, block.0)).collect(),
            plan: Mutex::new(Some(plan)),
        }))
    }

    fn commit(&self, py: Python<'_>, plan: &StepPlan, sampled: Copied<i32>, now: core::Time) -> PyResult<Outputs> {
        let plan = plan.uncommitted(&sampled.0)?.take().expect("it was checked");
        let mut inner = self.lock()?;
        let Inner { core, drafter, outputs, .. } = &mut *inner;
        if let Some(drafter) = drafter {
            drafter.observe(&plan, &sampled.0);
        }
        core.commit(plan, &sampled.0, now, outputs);
        let tokens = &outputs.tokens;
        Ok(Outputs {
            tags: packed(py, tokens, |output| output.tag.to_le_bytes())?,
            tokens: packed(py, tokens, |output| (output.token as i32).to_le_bytes())?,
            finishes: packed(py, tokens, |output| [reports::finish_code(output.finish)])?,
            ended: reports::timelines(py, &outputs.ended)?.unbind(),
        })
    }

    fn may_end(&self, plan: &StepPlan, sampled: Copied<i32>) -> PyResult<bool> {
        let plan = plan.uncommitted(&sampled.0)?;
        Ok(self.lock()?.core.may_end(plan.as_ref().expect("it was checked"), &sampled.0))
    }

    fn read_meter(&self, energy: u64, now: core::Time) -> PyResult<()> {
        self.lock()?.core.read_meter(energy, now);
        Ok(())
    }

    fn tokens(&self, py: Python<'_>, seq: u64) -> PyResult<(Py<PyBytes>, usize)> {
        let inner = self.lock()?;
        let found = inner.core.tokens(core::SeqId::from_bits(seq));
        let (tokens, prompt_len) = found.ok_or_else(|| PyKeyError::new_err("that sequence has ended"))?;
        Ok((packed(py, tokens, |token| token.to_le_bytes())?, prompt_len))
    }

    fn explain<'py>(&self, py: Python<'py>, tag: u64) -> PyResult<Option<Bound<'py, PyDict>>> {
        let inner = self.lock()?;
        let Some(timeline) = inner.core.explain(tag) else { return Ok(None) };
        let dict = reports::timeline(py, &timeline)?;
        dict.set_item("queued_behind", inner.core.ahead(&timeline).iter().map(|(tenant, time)| (&**tenant, *time)).collect::<Vec<_>>())?;
        reports::add(&dict, &inner.core.served_before(&timeline))?;
        if let Some(wait) = inner.core.live(tag).and_then(|id| inner.core.session_wait(id)) {
            dict.set_item("expected_wait_ms", wait.expected.div_ceil(1000))?;
            dict.set_item("max_wait_ms", wait.longest.div_ceil(1000))?;
        }
        Ok(Some(dict))
    }

    fn snapshot<'py>(&self, py: Python<'py>, now: core::Time, max_waiting: usize, max_cells: usize) -> PyResult<Bound<'py, PyDict>> {
        let snapshot = self.lock()?.core.snapshot(now, max_waiting, max_cells);
        reports::snapshot(py, &snapshot)
    }

    fn wake_at(&self) -> PyResult<Option<core::Time>> {
        Ok(self.lock()?.core.wake_at())
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let inner = self.lock()?;
        let stats = reports::stats(py, &inner.core.stats())?;
        if let Some(drafter) = &inner.drafter {
            reports::add(&stats, drafter.stats())?;
        }
        Ok(stats)
    }

    fn usage<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let inner = self.lock()?;
        let (tenants, classes) = (PyDict::new(py), PyDict::new(py));
        for (name, usage) in inner.core.tenants() {
            tenants.set_item(&**name, reports::dict(py, usage)?)?;
        }
        for (priority, usage) in inner.core.classes() {
            classes.set_item(priority, reports::dict(py, usage)?)?;
        }
        let dict = PyDict::new(py);
        dict.set_item("tenants", tenants)?;
        dict.set_item("classes", classes)?;
        Ok(dict)
    }

    fn journal<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let mut bytes = Vec::new();
        self.lock()?.core.take_journal(&mut bytes);
        Ok(PyBytes::new(py, &bytes))
    }

    fn check(&self) -> PyResult<()> {
        self.lock()?.core.check();
        Ok(())
    }
}

fn preparation_of(name: &str) -> PyResult<core::Preparation> {
    core::Preparation::from_name(name).ok_or_else(|| PyValueError::new_err("no such preparation: there are grammar and read_cache"))
}

/// The tokens of an int32 buffer.
fn unsigned(tokens: Copied<i32>) -> PyResult<Vec<u32>> {
    let tokens = tokens.0.into_iter().map(u32::try_from).collect::<Result<_, _>>();
    tokens.map_err(|_| PyValueError::new_err("a token is negative"))
}

/// One fixed-size little-endian field of each item, as `bytes`.
fn packed<T, const N: usize>(py: Python<'_>, items: &[T], field: impl Fn(&T) -> [u8; N]) -> PyResult<Py<PyBytes>> {
    let bytes = PyBytes::new_with(py, items.len() * N, |bytes| {
        bytes.chunks_exact_mut(N).zip(items).for_each(|(bytes, item)| bytes.copy_from_slice(&field(item)));
        Ok(())
    })?;
    Ok(bytes.unbind())
}
