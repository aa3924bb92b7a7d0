//! KV in host memory: that of swapped sequences, and evicted blocks of sessions.

use super::super::block::{BlockId, BlockTable};
use super::super::hash::BlockHash;
use super::{Grant, Kv, SeqBlocks};
use crate::request::Token;

impl Kv {
    /// Estimates the leading blocks of a waiting sequence that it can share now, those that it can share once blocks are read back from host
    /// memory, and the number of the latter.
    pub(crate) fn on_device_and_host(&mut self, blocks: &SeqBlocks) -> (usize, usize, usize) {
        let found = self.estimate(blocks, 0, &mut None).len();
        let (usable, kept) = (self.usable(&blocks.names, found), self.kept_after(&blocks.names, found));
        (usable, if kept > 0 { found + kept } else { usable }, kept)
    }

    /// Number of blocks in host memory that continue the first `found` of these names and that a sequence can share then: in a model with
    /// states, which stay on the device, those up to the last one with a state.
    fn kept_after(&self, names: &[BlockHash], found: usize) -> usize {
        let kept = self.pool.kept_after(found, names);
        if !self.states.exists() {
            return kept;
        }
        self.resumable(names[found..found + kept].iter().map(|&name| self.pool.kept_content(name)))
    }

    /// Reads evicted blocks that a waiting sequence can share back from host memory into free cached blocks, at most `most` in this plan.
    /// Appends the copies to `reads`, and calls `on_name` for each block. Returns whether none is left, or the number of free blocks
    /// required as an error.
    pub(crate) fn read_back(
        &mut self,
        blocks: &mut SeqBlocks,
        tokens: &[Token],
        (grant, most): (Grant, usize),
        reads: &mut Vec<(u32, BlockId)>,
        on_name: impl FnMut(BlockHash),
    ) -> Result<bool, usize> {
        self.name(blocks, tokens);
        let mut found = std::mem::take(&mut self.spare);
        let names = &blocks.names[..(tokens.len() - 1) / self.block_size as usize];
        let chain = self.pool.find(&blocks.scope, names, tokens, &mut found);
        let kept = self.kept_after(names, found.len());
        let (needed, most) = (self.needed(&found, grant), most.min(kept));
        let mut read = 0;
        if kept > 0 && needed <= grant.room {
            let mut table = BlockTable::default();
            table.set_owner(blocks.table.owner());
            for &block in &found {
                self.pool.share(&mut table, block);
            }
            read = self.pool.read_back(&mut table, chain, (names, tokens), (most, grant.step), reads, on_name);
            self.pool.release(&mut table);
        }
        self.recycle(found);
        if kept > 0 && needed > grant.room { Err(needed) } else { Ok(read == kept || read < most) }
    }

    /// Allocates device blocks for the KV of a swapped sequence, starting with cached blocks. Returns the number of
    /// free blocks required as an error. Appends copies from host memory to `swap_in`. The sequence keeps the host
    /// blocks until [`end_swap`](Self::end_swap).
    pub(crate) fn swap_in(
        &mut self,
        blocks: &mut SeqBlocks,
        tokens: &[Token],
        swapped_tokens: u32,
        grant: Grant,
        swap_in: &mut Vec<(u32, BlockId)>,
    ) -> Result<(), usize> {
        let mut found = std::mem::take(&mut self.spare);
        if self.sharing {
            self.name(blocks, tokens);
            let whole = (swapped_tokens / self.block_size) as usize;
            blocks.chain = self.pool.find(&blocks.scope, &blocks.names[..whole], tokens, &mut found);
        }
        if self.states.exists() {
            blocks.set_contents(self.contents(&found));
        }
        let shared = found.len();
        self.share(blocks, found, grant, 0)?;
        self.fill_up(blocks, grant.blocks);
        swap_in.extend(blocks.host.iter().zip(blocks.table.ids()).skip(shared).map(|(&host, &block)| (host, block)));
        Ok(())
    }

    /// Plans copies of a sequence's computed KV to host memory, and keeps its state. Panics if there is too little
    /// [room](Self::host_room).
    pub(crate) fn swap_out(&mut self, blocks: &mut SeqBlocks, computed: u32) {
        let used = computed.div_ceil(self.block_size) as usize;
        blocks.host.extend(blocks.table.ids()[..used].iter().map(|&block| self.pool.copy_to_host(block)));
        self.park_state(blocks);
    }

    /// Releases the host blocks of a sequence that was swapped in.
    pub(crate) fn end_swap(&mut self, blocks: &mut SeqBlocks) {
        self.pool.release_host(&mut blocks.host);
    }
}
