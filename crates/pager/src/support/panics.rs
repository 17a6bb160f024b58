//! A panic in one of a VM's threads: it ends that thread, and with it the service of what it
//! held and of the fault that it served. Nobody can say how far it came, so the VM is to be
//! taken up anew, as after the daemon's death.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;

/// What a panic said.
pub fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or("it panicked").to_owned()
}

/// Who is told of panics in one VM's threads.
#[derive(Default)]
pub struct Panics(OnceLock<Box<dyn Fn(String) + Send + Sync>>);

impl Panics {
    /// Who is told that a thread of this VM has panicked, and what it said.
    pub fn on_panic(&self, tell: impl Fn(String) + Send + Sync + 'static) {
        // A second one would only be told of the same.
        let _ = self.0.set(Box::new(tell));
    }

    /// Runs all that a thread does for this VM; none: it has panicked, and whoever is to know
    /// was told.
    ///
    /// What it held is free again, and nothing of it is used any more: by the rule of recovery
    /// a page that is there wins over its word, and a hole is what its word says.
    pub fn catch<T>(&self, run: impl FnOnce() -> T) -> Option<T> {
        let result = catch_unwind(AssertUnwindSafe(run));
        let tell = |panic: Box<dyn Any + Send>| {
            let text = panic_text(&*panic);
            match self.0.get() {
                Some(tell) => tell(text),
                None => tracing::error!("a thread of a VM has panicked: {text}"),
            }
        };
        result.map_err(tell).ok()
    }
}
