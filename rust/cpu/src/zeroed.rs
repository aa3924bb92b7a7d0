//! Memory of zeros, which the system provides as it is written and takes back as it is discarded.

use std::ops::{Deref, DerefMut, Range};
use std::ptr::{NonNull, null_mut};
use std::slice::{from_raw_parts, from_raw_parts_mut};

use thiserror::Error;

/// The system refuses memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("the system has no {:.1} GiB of memory for {what}: ask for fewer", *bytes as f64 / f64::from(1 << 30))]
pub struct OutOfMemory {
    /// Requested bytes. `usize::MAX` if the size overflows.
    pub bytes: usize,
    /// What the memory is for.
    pub what: &'static str,
}

/// Zeroed memory that starts at a memory page.
///
/// It is a mapping of its own, because an allocator keeps memory that was freed, and zeroes it when it gives it out again: all of it would
/// then be resident from the start.
pub(crate) struct Zeroed {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: it owns the memory, as a box does.
unsafe impl Send for Zeroed {}
// SAFETY: as above; a shared reference only reads.
unsafe impl Sync for Zeroed {}

impl Zeroed {
    /// Maps `len` bytes for `what`.
    pub(crate) fn new(len: usize, what: &'static str) -> Result<Self, OutOfMemory> {
        if len == 0 {
            return Ok(Self { start: NonNull::dangling(), len });
        }
        let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
        // SAFETY: a new mapping at an address that the system chooses changes no other memory.
        let start = unsafe { libc::mmap(null_mut(), len, access, kind, -1, 0) };
        let start = if start == libc::MAP_FAILED { None } else { NonNull::new(start.cast()) };
        // A slice has at most `isize::MAX` bytes, and no mapping is larger.
        start.map(|start| Self { start, len }).ok_or(OutOfMemory { bytes: len, what })
    }

    /// Returns the memory pages that are wholly in a range of bytes to the system. On Linux they are zeros afterwards. Other systems have no
    /// such call, and there it does nothing.
    pub(crate) fn discard(&mut self, range: Range<usize>) {
        if !cfg!(target_os = "linux") {
            return;
        }
        // SAFETY: it reads a number.
        let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).expect("a positive page size");
        let bytes = &mut self[range];
        let before = bytes.as_ptr().align_offset(page);
        let len = bytes.len().saturating_sub(before) / page * page;
        if len > 0 {
            // SAFETY: the pages are wholly in bytes that are borrowed mutably. The mapping is private and anonymous, so they become zeros,
            // which are valid bytes.
            let result = unsafe { libc::madvise(bytes[before..].as_mut_ptr().cast(), len, libc::MADV_DONTNEED) };
            // It fails only for locked memory, which then stays.
            debug_assert_eq!(result, 0);
        }
    }
}

impl Drop for Zeroed {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: the mapping is of this length, and nothing refers to it any more.
            let result = unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
            debug_assert_eq!(result, 0);
        }
    }
}

impl Deref for Zeroed {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the mapping has `len` bytes, which are initialised. Without a mapping the slice is empty.
        unsafe { from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for Zeroed {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `self` is borrowed mutably.
        unsafe { from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}
