//! Splits the attention of a step into tasks.

use std::ops::Range;

use super::TILE;

/// Target maximum of rows (query tokens times heads of a group) in a task. A task reads its tiles of keys and values once for all of its
/// rows.
const ROWS: usize = 192;

/// Rows of a task below which more tasks would cost more than they give.
const MIN_ROWS: usize = 48;

/// The sequences of a step, and where their keys and values are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sequences<'a> {
    /// Sequence i has the step's tokens from `query_starts[i]` to `query_starts[i + 1]`.
    pub(crate) query_starts: &'a [i32],
    /// Context length of each sequence, including its tokens in the step, which are the last ones.
    pub(crate) context_lens: &'a [i32],
    /// Each sequence's row in `block_tables`.
    pub(crate) rows: &'a [i32],
    /// Block ids in the order of the tokens that they hold, \[rows\]\[`max_blocks`\].
    pub(crate) block_tables: &'a [i32],
    pub(crate) max_blocks: usize,
    /// Number of tokens in a block.
    pub(crate) block_size: usize,
}

/// Some query tokens of one sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) sequence: usize,
    /// Index of the first query token, relative to the sequence's first token in the step.
    pub(super) first: usize,
    pub(super) queries: usize,
}

/// Query tokens of one or more sequences, with some of the query heads that share one KV head, mostly all of them.
#[derive(Clone, Copy, Debug)]
pub(super) struct Task<'a> {
    pub(super) parts: &'a [Part],
    /// The number of tokens, from the start of the context, that have the same blocks in all of these sequences. A multiple of [`TILE`]. 0
    /// if there is only one sequence.
    pub(super) shared: usize,
    /// Index of the group of query heads: that of a KV head, or a part of it.
    pub(super) kv_head: usize,
}

/// The attention tasks of a step. They are the same in every layer.
#[derive(Debug)]
pub(crate) struct Plan<'a> {
    sequences: Sequences<'a>,
    heads: usize,
    group: usize,
    parts: Vec<Part>,
    /// For each task: its parts, shared tokens and KV head.
    tasks: Vec<(Range<usize>, usize, usize)>,
}

impl<'a> Plan<'a> {
    /// Splits a step into tasks for `threads` threads. The longest tasks come first, so that the threads finish at nearly the same time.
    ///
    /// `heads`, the number of query heads, must be a multiple of `kv_heads`, which can be a multiple of a single KV head. Only the queries
    /// are split: one task handles the whole context of a query. Results do not depend on the split.
    pub(crate) fn new(sequences: Sequences<'a>, heads: usize, kv_heads: usize, threads: usize) -> Self {
        let group = heads / kv_heads;
        let most = (ROWS / group).max(1);
        // More and smaller tasks than threads keep the threads busy.
        let busy = |queries: usize| most.min(queries * kv_heads / (4 * threads));
        let mut plan = Self { sequences, heads, group, parts: Vec::new(), tasks: Vec::new() };
        let (mut groups, mut short) = (Vec::new(), Vec::new());
        let each = busy(sequences.query_starts.last().map_or(0, |&end| end as usize)).max(MIN_ROWS / group).max(1);
        for sequence in 0..sequences.context_lens.len() {
            let count = plan.queries(sequence).len();
            if count <= each / 2 {
                short.extend((count > 0).then_some(Part { sequence, first: 0, queries: count }));
                continue;
            }
            for first in (0..count).step_by(each) {
                groups.push((plan.parts.len()..plan.parts.len() + 1, 0));
                plan.parts.push(Part { sequence, first, queries: each.min(count - first) });
            }
        }
        let queries: usize = short.iter().map(|part| part.queries).sum();
        groups.extend(plan.share(short, busy(queries)));
        let cost = |part: &Part| part.queries * (plan.position(part) + part.queries);
        groups.sort_by_cached_key(|(parts, _)| std::cmp::Reverse(plan.parts[parts.clone()].iter().map(cost).sum::<usize>()));
        plan.tasks = groups.iter().flat_map(|(parts, shared)| (0..kv_heads).map(|head| (parts.clone(), *shared, head))).collect();
        plan
    }

    /// Groups sequences whose contexts start with the same blocks, so that one task reads these blocks for up to `most` queries. Adds the
    /// parts to the plan. Returns the groups, and the number of tokens that each shares.
    fn share(&mut self, mut parts: Vec<Part>, most: usize) -> Vec<(Range<usize>, usize)> {
        parts.sort_by(|a, b| self.full_blocks(a).cmp(self.full_blocks(b)));
        let (mut groups, mut start) = (Vec::new(), 0);
        while start < parts.len() {
            let (mut end, mut shared, mut queries) = (start + 1, usize::MAX, parts[start].queries);
            while end < parts.len() {
                queries += parts[end].queries;
                let common = self.common(&parts[end - 1], &parts[end]).min(shared);
                // Reads that the group saves, with this part and without it. Without it the group may share more tokens.
                let (with, without) = ((end - start) * common, (end - start - 1) * shared);
                if queries > most || with <= without {
                    break;
                }
                (end, shared) = (end + 1, common);
            }
            groups.push((self.parts.len() + start..self.parts.len() + end, if end - start > 1 { shared } else { 0 }));
            start = end;
        }
        self.parts.extend(parts);
        groups
    }

    /// Number of tokens, a multiple of [`TILE`], at the start of two contexts that are in the same blocks.
    fn common(&self, a: &Part, b: &Part) -> usize {
        let equal = self.full_blocks(a).iter().zip(self.full_blocks(b)).take_while(|(a, b)| a == b).count();
        equal * self.sequences.block_size / TILE * TILE
    }

    /// The blocks that are full before a part's first query.
    fn full_blocks(&self, part: &Part) -> &'a [i32] {
        let Sequences { rows, block_tables, max_blocks, block_size, .. } = self.sequences;
        &block_tables[rows[part.sequence] as usize * max_blocks..][..self.position(part) / block_size]
    }

    /// Number of tasks.
    pub(crate) fn len(&self) -> usize {
        self.tasks.len()
    }

    /// The task with this index.
    pub(super) fn task(&self, index: usize) -> Task<'_> {
        let (parts, shared, kv_head) = &self.tasks[index];
        Task { parts: &self.parts[parts.clone()], shared: *shared, kv_head: *kv_head }
    }

    /// Number of query heads.
    #[inline(always)]
    pub(super) fn heads(&self) -> usize {
        self.heads
    }

    /// Number of query heads that share a KV head.
    #[inline(always)]
    pub(super) fn group(&self) -> usize {
        self.group
    }

    /// A sequence's tokens in the step.
    fn queries(&self, sequence: usize) -> Range<usize> {
        self.sequences.query_starts[sequence] as usize..self.sequences.query_starts[sequence + 1] as usize
    }

    /// The index of a part's first query token in the step.
    pub(super) fn first_token(&self, part: &Part) -> usize {
        self.queries(part.sequence).start + part.first
    }

    /// The position of a part's first query in its sequence.
    pub(super) fn position(&self, part: &Part) -> usize {
        self.sequences.context_lens[part.sequence] as usize - self.queries(part.sequence).len() + part.first
    }

    /// The block of the token at `position` of a sequence.
    pub(super) fn block(&self, sequence: usize, position: usize) -> usize {
        let Sequences { rows, block_tables, max_blocks, block_size, .. } = self.sequences;
        block_tables[rows[sequence] as usize * max_blocks + position / block_size] as usize
    }
}
