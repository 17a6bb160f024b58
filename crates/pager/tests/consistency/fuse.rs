//! Points where a daemon can be killed: in the middle of what it does.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::mpsc::Sender;

/// Burns a little at each point. When it has burnt down, the thread that is there stops for ever,
/// as one of a process that was killed: its locks stay locked, what it knew is lost.
pub struct Fuse {
    left: AtomicI64,
    blown: AtomicBool,
    tell: Mutex<Option<Sender<String>>>,
}

impl Fuse {
    pub fn new() -> Fuse {
        Fuse { left: AtomicI64::new(0), blown: AtomicBool::new(false), tell: Mutex::new(None) }
    }

    /// Blows at the `points`th point from now on, and tells which thread was there.
    pub fn light(&self, points: i64, tell: Sender<String>) {
        *self.tell.lock().unwrap() = Some(tell);
        self.left.store(points, Ordering::SeqCst);
    }

    /// Puts the fuse out. `true`: it had not blown, and will not.
    pub fn put_out(&self) -> bool {
        self.left.store(0, Ordering::SeqCst);
        !self.blown.load(Ordering::SeqCst)
    }

    pub fn point(&self) {
        if self.left.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.blown.store(true, Ordering::SeqCst);
            let thread = std::thread::current().name().unwrap_or_default().to_owned();
            if let Some(tell) = &*self.tell.lock().unwrap() {
                let _ = tell.send(thread);
            }
        }
        while self.blown.load(Ordering::SeqCst) {
            std::thread::park();
        }
    }
}
