//! The use of a model's blocks.

/// The use of a model's blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BlocksUsed {
    /// Blocks that sequences hold.
    pub held: u32,
    /// Blocks that are held or cached.
    pub kept: u32,
    /// Blocks that the running and waiting sequences could use.
    pub wanted: u32,
}
