//! The shared words, and the orderings that hold for all of them: what a
//! thread did before it changed a word is seen by whoever reads that change.

use core::sync::atomic::Ordering::{AcqRel, Acquire, Relaxed, Release};

#[cfg(not(loom))]
pub use core::sync::atomic::{AtomicU16, AtomicU32, AtomicU64};
#[cfg(loom)]
pub use loom::sync::atomic::{AtomicU16, AtomicU32, AtomicU64};

/// One shared word.
pub(crate) trait Atom {
    type Value: Copy;

    fn get(&self) -> Self::Value;

    /// A hint: may be old.
    fn peek(&self) -> Self::Value;

    /// Nobody else writes it now, or it is a hint.
    fn set(&self, value: Self::Value);

    /// What it was becomes `next`, or tells what it is instead.
    fn replace(&self, old: Self::Value, next: Self::Value) -> Result<(), Self::Value>;

    /// Changes it by `next` until that holds or `next` wants no change. A
    /// failure means that another thread has succeeded.
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
