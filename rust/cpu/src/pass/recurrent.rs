//! Runs a recurrent layer: each thread takes channels of a sequence's convolution, and then heads of a sequence.

use super::{Pass, Spare};
use crate::blocks::Block;
use crate::linear::Epilogue;
use crate::pool::Worker;
use crate::recurrent::{Convolve, Form, GatedNorm, Heads, Recurrent, RecurrentKind, Rule, advance};
use crate::state::{Chunks, States};

/// Channels of a convolution that a thread computes at once.
const CHANNELS: usize = 64;

/// The states of a step, shared by all threads.
#[derive(Clone, Copy)]
pub(crate) struct Recurrence<'a> {
    pub(crate) states: States<'a>,
    pub(crate) chunks: &'a Chunks,
}

/// SAFETY of all blocks below: as for [`Pass`]. The slots that a step writes are distinct.
impl Pass<'_> {
    /// Runs a recurrent layer.
    pub(super) fn recur(&self, worker: &mut Worker<'_>, spare: &mut Spare, block: &Block, recurrent: &Recurrent) {
        let width = recurrent.in_proj.matrix.outs;
        let recurrence = self.recurrence.expect("a step of a model with recurrent layers has states");
        self.pack_input(worker, spare, &block.input, &recurrent.in_proj, None, None);
        self.multiply(worker, spare, &recurrent.in_proj, None, self.qkv, width, Epilogue::Store);
        self.convolve(worker, recurrence, recurrent);
        match &recurrent.kind {
            RecurrentKind::Convolution => {
                let hidden = self.config.hidden_size;
                self.add(worker, spare, block, &recurrent.out_proj, None, |t, out| {
                    // SAFETY: an earlier phase wrote this row (see `Pass`).
                    out.copy_from_slice(unsafe { self.qkv.read(t * width + 2 * hidden, hidden) });
                });
            }
            RecurrentKind::Heads(heads) => {
                self.advance(worker, spare, recurrence, recurrent.layer, heads);
                let offsets = heads.offsets();
                self.add(worker, spare, block, &recurrent.out_proj, None, |t, out| {
                    // SAFETY: earlier phases wrote these rows (see `Pass`).
                    let [outputs, gate] =
                        unsafe { [offsets.values, offsets.gates].map(|offset| self.qkv.read(t * width + offset, heads.width())) };
                    out.copy_from_slice(outputs);
                    let gate_first = matches!(heads.rule, Rule::Space { .. });
                    let (weight, group, eps) = (&heads.norm, heads.norm_group, self.config.rms_norm_eps);
                    self.isa.run(GatedNorm { x: out, gate, weight, group, eps, gate_first });
                });
            }
        }
    }

    /// Computes the convolutions of a layer.
    fn convolve(&self, worker: &mut Worker<'_>, Recurrence { states, chunks }: Recurrence<'_>, recurrent: &Recurrent) {
        let hidden = self.config.hidden_size;
        let (convolved, stride) = (recurrent.convolved(hidden), recurrent.in_proj.matrix.outs);
        let (all, pieces) = (convolved.len(), convolved.len().div_ceil(CHANNELS));
        let form = match recurrent.kind {
            RecurrentKind::Convolution => Form::Gated(2 * hidden),
            RecurrentKind::Heads(_) => Form::Swish,
        };
        worker.parallel_for(chunks.chunks.len() * pieces, |task| {
            let chunk = &chunks.chunks[task / pieces];
            let first = task % pieces * CHANNELS;
            let channels = first..all.min(first + CHANNELS);
            let columns = |slot: usize| {
                let state = states.columns(slot, recurrent.layer);
                (0..states.shape.columns).map(move |column| state + column * all + first)
            };
            if chunk.start == 0 {
                for column in columns(chunk.slot) {
                    // SAFETY: only this task uses these channels of the state in this phase (see `Pass`).
                    unsafe { states.numbers.write(column, channels.len()) }.fill(0.0);
                }
            }
            for (tokens, saves) in chunks.segments(chunk) {
                self.isa.run(Convolve {
                    taps: &recurrent.taps,
                    bias: recurrent.bias.as_deref(),
                    all,
                    channels: channels.clone(),
                    form,
                    rows: self.qkv,
                    first: convolved.start,
                    stride,
                    tokens,
                    states: states.numbers,
                    state: states.columns(chunk.slot, recurrent.layer),
                });
                for &(_, slot) in saves {
                    for (from, to) in columns(chunk.slot).zip(columns(slot)) {
                        // SAFETY: the slots that a step writes are distinct, and no other task uses these channels.
                        unsafe { states.copy(from, to, channels.len()) };
                    }
                }
            }
        });
    }

    /// Computes the recurrences of a layer's heads.
    fn advance(&self, worker: &mut Worker<'_>, spare: &mut Spare, recurrence: Recurrence<'_>, layer: usize, heads: &Heads) {
        let Recurrence { states, chunks } = recurrence;
        worker.parallel_for(chunks.chunks.len() * heads.count, |task| {
            let (chunk, head) = (&chunks.chunks[task / heads.count], task % heads.count);
            let offset = |slot: usize| states.matrix(slot, layer, head);
            // SAFETY: only this task uses this head's state and values. No task writes keys, queries, steps and betas in this phase.
            unsafe {
                let state = states.numbers.write(offset(chunk.slot), states.shape.matrix);
                if chunk.start == 0 {
                    state.fill(0.0);
                }
                for (tokens, saves) in chunks.segments(chunk) {
                    advance(self.isa, heads, head, self.qkv, tokens, state, &mut spare.recurrence);
                    for &(_, slot) in saves {
                        states.numbers.write(offset(slot), state.len()).copy_from_slice(state);
                    }
                }
            }
        });
    }
}
