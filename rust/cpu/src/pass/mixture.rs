//! Runs a mixture of experts: the rows of a step are sorted by expert, so that each expert's weights are read once.

use std::sync::OnceLock;

use super::{Pass, Spare};
use crate::aligned::AlignedVec;
use crate::blocks::Block;
use crate::experts::Mixture;
use crate::gemm::RowGroup;
use crate::linear::{Epilogue, Packed, Rows};
use crate::pool::Worker;
use crate::simd::{Isa, Kernel, Simd};
use crate::unsafe_slice::UnsafeSlice;

/// The most that a mixture of a decoder needs.
#[derive(Clone, Copy, Debug, Default)]
struct Widths {
    /// Number of experts of a token.
    used: usize,
    /// Number of experts.
    experts: usize,
    /// Number of logits of a token.
    logits: usize,
}

impl Widths {
    /// The widths that are enough for all of these mixtures. Zeros if there are none.
    fn of<'m>(mixtures: impl Iterator<Item = &'m Mixture>) -> Self {
        mixtures.fold(Self::default(), |most, mixture| Self {
            used: most.used.max(mixture.choice.used),
            experts: most.experts.max(mixture.experts()),
            logits: most.logits.max(mixture.logits()),
        })
    }
}

/// Buffers that are reused from step to step.
#[derive(Debug, Default)]
pub(crate) struct Buffers {
    rows: Rows,
    /// Inputs of the experts, \[tokens\]\[hidden size\].
    normed: AlignedVec<f32>,
    /// The router's logits, which become scores, \[tokens\]\[logits\].
    logits: AlignedVec<f32>,
    /// The experts of each token in ascending order, and their weights, \[tokens\]\[experts of a token\].
    chosen: AlignedVec<u32>,
    weights: AlignedVec<f32>,
    /// Outputs of the experts, sorted by expert, \[tokens times experts of a token\]\[hidden size\].
    outputs: AlignedVec<f32>,
    /// For each block, its pairs. The first thread that needs them sorts them.
    sorted: Vec<OnceLock<Sorted>>,
}

/// The buffers, shared by all threads.
#[derive(Clone, Copy)]
pub(crate) struct Shared<'a> {
    packed: Packed<'a>,
    normed: UnsafeSlice<'a, f32>,
    logits: UnsafeSlice<'a, f32>,
    chosen: UnsafeSlice<'a, u32>,
    weights: UnsafeSlice<'a, f32>,
    outputs: UnsafeSlice<'a, f32>,
    sorted: &'a [OnceLock<Sorted>],
}

impl Buffers {
    /// Makes room for a step through these blocks of a decoder.
    pub(crate) fn shared(&mut self, isa: Isa, tokens: usize, hidden: usize, blocks: &[Block]) -> Shared<'_> {
        let mixtures = blocks.iter().filter_map(Block::mixture);
        let widths = Widths::of(mixtures.clone());
        let Self { rows, normed, logits, chosen, weights, outputs, sorted } = self;
        let pairs = tokens * widths.used;
        let together = pairs / widths.experts.max(1);
        rows.reserve(isa, pairs, together, mixtures.flat_map(|mixture| [&mixture.gate_up_proj, &mixture.down_proj]));
        normed.reserve(if pairs > 0 { tokens * hidden } else { 0 });
        logits.reserve(tokens * widths.logits);
        chosen.reserve(pairs);
        weights.reserve(pairs);
        outputs.reserve(pairs * hidden);
        sorted.clear();
        sorted.resize_with(if pairs > 0 { blocks.len() } else { 0 }, OnceLock::new);
        Shared {
            packed: rows.packed(isa, pairs, together),
            normed: normed.shared(),
            logits: logits.shared(),
            chosen: chosen.shared(),
            weights: weights.shared(),
            outputs: outputs.shared(),
            sorted,
        }
    }
}

/// A step's pairs of a token and one of its experts, sorted by expert, then by token.
#[derive(Debug)]
struct Sorted {
    /// The rows of each expert that has any.
    groups: Vec<RowGroup>,
    /// The token of each row.
    tokens: Vec<u32>,
    /// The row of each pair, \[tokens\]\[experts of a token\].
    rows: Vec<u32>,
}

impl Sorted {
    /// Sorts the experts of all tokens, \[tokens\]\[`used`\].
    fn new(chosen: &[u32], used: usize, experts: usize) -> Self {
        let mut next = vec![0; experts]; // for each expert, the number of its rows, then where its next row goes
        for &expert in chosen {
            next[expert as usize] += 1;
        }
        let (mut groups, mut start) = (Vec::new(), 0);
        for (expert, next) in next.iter_mut().enumerate() {
            let count = std::mem::replace(next, start);
            groups.extend(RowGroup::split(expert, start..start + count));
            start += count;
        }
        let (mut tokens, mut rows) = (vec![0; chosen.len()], vec![0; chosen.len()]);
        for (pair, &expert) in chosen.iter().enumerate() {
            let row = next[expert as usize];
            next[expert as usize] += 1;
            tokens[row] = (pair / used) as u32;
            rows[pair] = row as u32;
        }
        Self { groups, tokens, rows }
    }
}

/// SAFETY of all blocks below: as for [`Pass`].
impl Pass<'_> {
    /// Runs a mixture of experts, the block at `index`.
    pub(super) fn mix(&self, worker: &mut Worker<'_>, spare: &mut Spare, index: usize, block: &Block, mixture: &Mixture) {
        let Shared { packed, outputs, .. } = self.mixture;
        let (hidden, inner) = (self.config.hidden_size, mixture.expert_inner());
        let sorted = self.route(worker, spare, index, block, mixture);
        let linear = &mut spare.linear;
        let packed = packed.grouped(&sorted.groups);
        packed.pack(worker, self.isa, &mixture.gate_up_proj, linear, |row, out| self.copy_normed(sorted.tokens[row] as usize, out));
        packed.multiply(worker, self.isa, &mixture.gate_up_proj, self.inner, inner, mixture.inner.epilogue(), linear);
        packed.pack(worker, self.isa, &mixture.down_proj, linear, |row, out| {
            // SAFETY: an earlier phase wrote this row (see `Pass`).
            out.copy_from_slice(unsafe { self.inner.read(row * inner, inner) });
        });
        packed.multiply(worker, self.isa, &mixture.down_proj, outputs, hidden, Epilogue::Store, linear);
        if let Some(shared) = &mixture.shared {
            let (mlp, inner) = (&shared.mlp, shared.mlp.width());
            let packed = self.packed;
            packed.pack(worker, self.isa, &mlp.gate_up_proj, linear, |t, out| match &mixture.norms {
                Some(_) => self.read_input(&block.input, t, out),
                None => self.copy_normed(t, out),
            });
            packed.multiply(worker, self.isa, &mlp.gate_up_proj, self.inner, inner, mlp.inner.epilogue(), linear);
            packed.pack(worker, self.isa, &mlp.down_proj, linear, |t, out| {
                // SAFETY: an earlier phase wrote this row (see `Pass`).
                out.copy_from_slice(unsafe { self.inner.read(t * inner, inner) });
            });
            packed.multiply(worker, self.isa, &mlp.down_proj, self.output, hidden, Epilogue::Store, linear);
        }
        self.combine(worker, spare, sorted, block, mixture);
    }

    /// Normalises the states, chooses the experts of each token, and sorts the rows.
    fn route(&self, worker: &mut Worker<'_>, spare: &mut Spare, index: usize, block: &Block, mixture: &Mixture) -> &Sorted {
        let Shared { normed, logits, chosen, weights, sorted, .. } = self.mixture;
        let (hidden, tokens) = (self.config.hidden_size, self.step.input_ids.len());
        let (width, used, experts) = (mixture.logits(), mixture.choice.used, mixture.experts());
        self.packed.pack(worker, self.isa, &mixture.router, &mut spare.linear, |t, out| {
            // SAFETY: an earlier phase wrote this state, and only the index that packs the row writes its copy (see `Pass`).
            let (x, copy) = unsafe { (self.hidden.read(t * hidden, hidden), normed.write(t * hidden, hidden)) };
            if let Some(norms) = &mixture.norms {
                self.normalise(&norms.router, x, out);
                self.normalise(&norms.input, x, copy);
            } else {
                self.read_input(&block.input, t, out);
                copy.copy_from_slice(out);
            }
        });
        self.packed.multiply(worker, self.isa, &mixture.router, logits, width, Epilogue::Store, &mut spare.linear);
        worker.parallel_for(tokens, |t| {
            // SAFETY: only index t uses these rows in this phase (see `Pass`).
            let (logits, chosen, weights) =
                unsafe { (logits.write(t * width, width), chosen.write(t * used, used), weights.write(t * used, used)) };
            mixture.choice.choose(&mut logits[..experts], &mut spare.row, chosen, weights);
        });
        // SAFETY: an earlier phase wrote all experts (see `Pass`). The next phase cannot begin before this is done, so none writes them.
        sorted[index].get_or_init(|| Sorted::new(unsafe { chosen.read(0, tokens * used) }, used, experts))
    }

    /// Copies the experts' input of token `t`.
    fn copy_normed(&self, t: usize, out: &mut [f32]) {
        let hidden = self.config.hidden_size;
        // SAFETY: an earlier phase wrote this row (see `Pass`).
        out.copy_from_slice(unsafe { self.mixture.normed.read(t * hidden, hidden) });
    }

    /// Sums the weighted outputs of each token's experts, in ascending order, and adds the result to the residual stream.
    fn combine(&self, worker: &mut Worker<'_>, spare: &mut Spare, sorted: &Sorted, block: &Block, mixture: &Mixture) {
        let Shared { outputs, logits, weights, .. } = self.mixture;
        let hidden = self.config.hidden_size;
        let (width, used, experts) = (mixture.logits(), mixture.choice.used, mixture.experts());
        let Spare { row: sum, normed, .. } = spare;
        sum.resize(hidden, 0.0);
        normed.resize(hidden, 0.0);
        worker.parallel_for(self.step.input_ids.len(), |t| {
            sum.fill(0.0);
            // SAFETY: earlier phases wrote all of these rows, and only index t writes this row of the residual stream (see `Pass`).
            unsafe {
                let weights = weights.read(t * used, used);
                for (&row, &weight) in sorted.rows[t * used..].iter().zip(weights) {
                    self.isa.run(AddScaled { x: outputs.read(row as usize * hidden, hidden), factor: weight, sum });
                }
                if let Some(norms) = &mixture.norms {
                    self.normalise(&norms.output, sum, normed);
                    sum.copy_from_slice(normed);
                }
                if let Some(shared) = &mixture.shared {
                    let gate = if shared.gated { 1.0 / (1.0 + (-logits.read(t * width + experts, 1)[0]).exp()) } else { 1.0 };
                    let mut output = self.output.read(t * hidden, hidden);
                    if let Some(norms) = &mixture.norms {
                        self.normalise(&norms.shared_output, output, normed);
                        output = normed;
                    }
                    self.isa.run(AddScaled { x: output, factor: gate, sum });
                }
                let state = self.hidden.write(t * hidden, hidden);
                self.add_output(block, sum, normed, state);
            }
        });
    }
}

/// Adds `factor` times `x` to `sum`.
struct AddScaled<'a> {
    x: &'a [f32],
    factor: f32,
    sum: &'a mut [f32],
}

impl Kernel for AddScaled<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { x, factor, sum } = self;
        let whole = sum.len() / S::LANES * S::LANES;
        assert!(x.len() == sum.len());
        for at in (0..whole).step_by(S::LANES) {
            // SAFETY: both slices have at least `S::LANES` numbers from `at` on.
            unsafe {
                let to = sum.as_mut_ptr().add(at);
                s.store(to, s.fma(s.load(x.as_ptr().add(at)), s.splat(factor), s.load(to)));
            }
        }
        for (sum, x) in sum[whole..].iter_mut().zip(&x[whole..]) {
            *sum += x * factor;
        }
    }
}
