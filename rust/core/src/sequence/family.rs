//! A sequence's family: its parent, with which a fork shares the prompt, and the forks that wait for its own prompt.

use super::Sequence;
use super::phase::Phase;
use crate::request::{Request, SeqId};

/// Requests that share the prompt.
#[derive(Debug, Default)]
pub(super) struct Family {
    pub(super) parent: Option<SeqId>,
    /// Forks that wait for this sequence's prompt.
    pub(super) waiting: Vec<SeqId>,
}

impl Sequence {
    /// The request of a fork, with the same prompt.
    pub(crate) fn fork_request(&self, tag: u64) -> Request {
        Request {
            tag,
            prompt: self.tokens[..self.spec.prompt_len as usize].to_vec(),
            stop: self.spec.stop.into_iter().chain(self.spec.more_stops.iter().copied()).collect(),
            preparation: None,
            resumed: None,
            continues: None,
            ..self.spec.request.clone()
        }
    }

    /// Makes the sequence a fork of `parent`. `waits` is set if the parent's prompt is not computed yet.
    pub(crate) fn make_fork(&mut self, parent: SeqId, waits: bool) {
        self.family.parent = Some(parent);
        self.phase = if waits { Phase::WaitingOnParent } else { Phase::New };
    }

    pub(crate) fn parent(&self) -> Option<SeqId> {
        self.family.parent
    }

    /// Forks that wait for this sequence's prompt.
    pub(crate) fn waiting_forks(&self) -> &[SeqId] {
        &self.family.waiting
    }

    pub(crate) fn add_waiting_fork(&mut self, id: SeqId) {
        self.family.waiting.push(id);
    }

    pub(crate) fn take_waiting_forks(&mut self) -> Vec<SeqId> {
        std::mem::take(&mut self.family.waiting)
    }
}
