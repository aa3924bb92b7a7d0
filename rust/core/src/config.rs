//! The limits a scheduler works within.

use crate::ConfigError;

/// Limits, fixed for the life of a scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Blocks in the KV cache, the scratch block 0 included.
    pub num_blocks: u32,
    /// Tokens in a block.
    pub block_size: u32,
    /// Tokens in a step.
    pub max_tokens: u32,
    /// Sequences in a step, and rows of the step buffers.
    pub max_seqs: u32,
    /// Longest prompt plus output.
    pub max_model_len: u32,
    /// Whether sequences share the blocks of equal beginnings.
    pub prefix_caching: bool,
    /// Blocks that stay free when a sequence is admitted beside others, so
    /// that the running ones can grow instead of preempting each other.
    pub watermark: u32,
}

impl Config {
    /// The blocks that sequences can hold: all but the scratch block.
    pub fn usable_blocks(&self) -> u32 {
        self.num_blocks - 1
    }

    /// The length of a sequence's block table at its longest.
    pub fn max_blocks_per_seq(&self) -> u32 {
        self.max_model_len.div_ceil(self.block_size)
    }

    pub(crate) fn check(&self) -> Result<(), ConfigError> {
        let at_least =
            |name, value: u32, least: u32| if value < least { Err(ConfigError::TooSmall { name, value, least }) } else { Ok(()) };
        at_least("num_blocks", self.num_blocks, 2)?;
        at_least("block_size", self.block_size, 1)?;
        at_least("max_tokens", self.max_tokens, 1)?;
        at_least("max_seqs", self.max_seqs, 1)?;
        at_least("max_model_len", self.max_model_len, 1)?;
        // Cache slots and buffer entries are 32-bit signed on the model's side.
        let slots = u64::from(self.num_blocks) * u64::from(self.block_size);
        for (name, value) in
            [("num_blocks * block_size", slots), ("max_model_len", self.max_model_len.into()), ("max_tokens", self.max_tokens.into())]
        {
            if value > i32::MAX as u64 {
                return Err(ConfigError::TooLarge { name, value, most: i32::MAX as u64 });
            }
        }
        Ok(())
    }
}
