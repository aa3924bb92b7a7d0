//! The number types that kernels may share and reinterpret as bytes.

/// A number type for which every bit pattern is a valid value.
///
/// # Safety
///
/// Every bit pattern is a valid value of the type, and the type has no padding bytes.
pub(crate) unsafe trait Pod: Copy + Send + Sync + 'static {}

// SAFETY: every bit pattern is a number.
unsafe impl Pod for f32 {}
// SAFETY: as above.
unsafe impl Pod for i8 {}
// SAFETY: as above.
unsafe impl Pod for u8 {}
// SAFETY: as above.
unsafe impl Pod for u16 {}
// SAFETY: as above.
unsafe impl Pod for i16 {}
// SAFETY: as above.
unsafe impl Pod for i32 {}
// SAFETY: as above.
unsafe impl Pod for u32 {}
