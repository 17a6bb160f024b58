//! A panic in one of a VM's threads: it ends that thread, and so the service of what the thread had
//! locked and of the fault that it served. Nobody can say how far the thread came, so the VM must
//! be recovered, as after the daemon's death.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::OnceLock;

/// Returns the text of a panic.
pub fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or("it panicked").to_owned()
}

/// The function that is told of panics in one VM's threads.
#[derive(Default)]
pub struct Panics(OnceLock<Box<dyn Fn(String) + Send + Sync>>);

impl Panics {
    /// Sets the function that is told of a panic in a thread of this VM, with the panic's text.
    /// Takes effect once.
    pub fn on_panic(&self, tell: impl Fn(String) + Send + Sync + 'static) {
        // A second function would only be told of the same.
        let _ = self.0.set(Box::new(tell));
    }

    /// Runs all that a thread does for this VM. `None`: the thread has panicked, and the function
    /// set by [`Panics::on_panic`] was told.
    ///
    /// All locks of the thread are free again, and nothing under them is used any more. By the rule
    /// of recovery, a page that is there wins over its word, and a hole is what its word says.
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
