//! The shared words and their memory orderings: a thread that reads a change sees all that the
//! writer did before it.

use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

#[cfg(not(loom))]
pub use core::sync::atomic::{AtomicU16, AtomicU32, AtomicU64};
#[cfg(loom)]
pub use loom::sync::atomic::{AtomicU16, AtomicU32, AtomicU64};

/// One shared word.
pub(crate) trait Atom {
    type Value: Copy;

    fn get(&self) -> Self::Value;

    /// Reads the word as a hint: the value may be old.
    fn peek(&self) -> Self::Value;

    /// Writes the word. Either nobody else writes it now, or it is a hint.
    fn set(&self, value: Self::Value);

    /// Replaces `old` by `next`, or returns the current value if it is not `old`.
    fn replace(&self, old: Self::Value, next: Self::Value) -> Result<(), Self::Value>;

    /// Changes the word by `next` until that succeeds, and returns the value from before. Returns
    /// `None` if `next` wants no change. A failed attempt means that another thread has succeeded.
    fn change(
        &self,
        mut next: impl FnMut(Self::Value) -> Option<Self::Value>,
    ) -> Option<Self::Value> {
        let mut seen = self.get();
        loop {
            match self.replace(seen, next(seen)?) {
                Ok(()) => return Some(seen),
                Err(now) => seen = now,
            }
        }
    }
}

macro_rules! atom {
    ($atomic:ty, $value:ty) => {
        impl Atom for $atomic {
            type Value = $value;

            #[inline(always)]
            fn get(&self) -> $value {
                self.load(Acquire)
            }

            #[inline(always)]
            fn peek(&self) -> $value {
                self.load(Relaxed)
            }

            #[inline(always)]
            fn set(&self, value: $value) {
                self.store(value, Release);
            }

            #[inline(always)]
            fn replace(&self, old: $value, next: $value) -> Result<(), $value> {
                self.compare_exchange(old, next, AcqRel, Acquire).map(|_| ())
            }
        }
    };
}

atom!(AtomicU16, u16);
atom!(AtomicU32, u32);
atom!(AtomicU64, u64);
