//! A panic in one of the threads that serve a VM or its devices: it ends that thread, and so the
//! service of what the thread had locked and of what it served. Nobody can say how far the thread
//! came, so the VM must be recovered, as after the daemon's death.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Returns the text of a panic.
pub fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or("it panicked").to_owned()
}

type Tell = dyn Fn(String) + Send + Sync;

/// The function that is told of panics in the threads of one VM, or of one device.
#[derive(Default)]
pub struct Panics(Mutex<State>);

#[derive(Default)]
struct State {
    tell: Option<Arc<Tell>>,
    /// The text of the first panic that came before there was a function.
    untold: Option<String>,
}

impl Panics {
    /// Sets the function that is told of a panic in one of the threads, with the panic's text.
    /// Takes effect once. A panic that came before is told at once.
    pub fn on_panic(&self, tell: impl Fn(String) + Send + Sync + 'static) {
        let tell: Arc<Tell> = Arc::new(tell);
        let mut state = self.state();
        if state.tell.is_some() {
            // A second function would only be told of the same.
            return;
        }
        state.tell = Some(Arc::clone(&tell));
        let untold = state.untold.take();
        drop(state);
        if let Some(text) = untold {
            tell(text);
        }
    }

    /// Runs all that a thread does. `None`: the thread has panicked, and the function set by
    /// [`Panics::on_panic`] was told.
    ///
    /// All locks of the thread are free again, and nothing under them is used any more. By the rule
    /// of recovery, a page that is there wins over its word, and a hole is what its word says.
    pub fn catch<T>(&self, run: impl FnOnce() -> T) -> Option<T> {
        let result = catch_unwind(AssertUnwindSafe(run));
        result.map_err(|panic| self.tell(&*panic)).ok()
    }

    /// Tells of a panic that somebody else has caught.
    pub fn tell(&self, panic: &(dyn Any + Send)) {
        let text = panic_text(panic);
        let mut state = self.state();
        match state.tell.clone() {
            Some(tell) => {
                drop(state);
                tell(text);
            }
            None => state.untold = state.untold.take().or(Some(text)),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // It is whole between any two statements that change it.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn every_panic_is_told_also_one_that_came_too_early() {
        let (panics, (told, texts)) = (Panics::default(), channel());
        assert_eq!(panics.catch(|| 7), Some(7));
        assert_eq!(panics.catch(|| panic!("the first")), None::<()>);
        let tell = move |text| told.send(text).expect("the test waits for it");
        panics.on_panic(tell);
        assert_eq!(texts.try_recv().as_deref(), Ok("the first"));
        assert_eq!(panics.catch(|| panic!("number {}", 2)), None::<()>);
        assert_eq!(texts.try_recv().as_deref(), Ok("number 2"));
        panics.on_panic(|_| unreachable!("there is a function already"));
        assert_eq!(panics.catch(|| panic!("the third")), None::<()>);
        assert_eq!(texts.try_recv().as_deref(), Ok("the third"));
        assert!(texts.try_recv().is_err());
    }
}
