//! Ctrl-C: what was started, mounted and set must not outlive us.

use std::process;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use anyhow::{Context, ensure};
use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time;

/// What a shell reports after SIGINT.
const EXIT_CODE: i32 = 130;
/// Whoever works has so much time to come to its end by itself.
const GRACE: Duration = Duration::from_secs(5);

/// The user has had enough.
static RAISED: AtomicBool = AtomicBool::new(false);

/// From now on SIGINT and SIGTERM raise a flag, and whoever waits for a VM gives up. Who has not
/// ended [`GRACE`] later, or at a second signal, is ended: what there is to be undone is undone
/// first.
///
/// # Errors
/// No handler is to be had.
pub fn catch() -> anyhow::Result<()> {
    catch_within(GRACE)
}

fn catch_within(grace: Duration) -> anyhow::Result<()> {
    let runtime = Builder::new_current_thread().enable_all().build().context("signals")?;
    let signals = handlers(&runtime).context("signals")?;
    thread::spawn(move || wait(&runtime, signals, grace));
    Ok(())
}

/// Goes on unless the flag is raised.
///
/// # Errors
/// It is.
pub fn check() -> anyhow::Result<()> {
    ensure!(!RAISED.load(Ordering::Relaxed), "interrupted: the VM and the daemon are gone");
    Ok(())
}

fn handlers(runtime: &Runtime) -> std::io::Result<[Signal; 2]> {
    let _inside = runtime.enter();
    Ok([signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?])
}

fn wait(runtime: &Runtime, mut signals: [Signal; 2], grace: Duration) {
    runtime.block_on(either(&mut signals));
    RAISED.store(true, Ordering::Relaxed);
    vmtest::give_up();
    let _ = runtime.block_on(async { time::timeout(grace, either(&mut signals)).await });
    vmtest::undo::everything();
    process::exit(EXIT_CODE);
}

async fn either([one, other]: &mut [Signal; 2]) {
    tokio::select! {
        _ = one.recv() => (),
        _ = other.recv() => (),
    }
}

#[cfg(test)]
mod tests {
    use std::env;
    use std::fs;
    use std::io::{BufRead, BufReader};
    use std::path::Path;
    use std::process::{Child, Command, Stdio};
    use std::sync::Mutex;

    use rustix::process::{Pid, Signal, kill_process};
    use vmtest::{Scratch, Undo};

    use super::*;

    /// Tell the program below where it is to work, and how long it may.
    const PLACE: &str = "EBB_INTERRUPT_PLACE";
    const GRACE_S: &str = "EBB_INTERRUPT_GRACE";

    /// Not a test by itself: a program that has a child and a directory, and hears nothing.
    #[test]
    fn deaf() {
        let (Some(place), Ok(grace)) = (env::var_os(PLACE), env::var(GRACE_S)) else { return };
        catch_within(Duration::from_secs(grace.parse().unwrap())).unwrap();
        let scratch = Scratch::new_in("ebb-test-", Path::new(&place)).unwrap();
        let child = Command::new("sleep").arg("1000").stdout(Stdio::null()).spawn().unwrap();
        let (pid, child) = (child.id(), Mutex::new(child));
        let _child = Undo::processes(move || {
            let mut child = child.lock().unwrap();
            child.kill().unwrap();
            child.wait().unwrap();
        });
        println!("\nready {pid} {}", scratch.path().display());
        loop {
            thread::sleep(Duration::from_secs(3600));
        }
    }

    /// That program, once it is ready, its child and its directory.
    fn start(place: &Path, grace_s: u32) -> (Child, String, String) {
        let mut command = Command::new(env::current_exe().unwrap());
        command.args(["interrupt::tests::deaf", "--exact", "--nocapture", "--test-threads=1"]);
        command.env(PLACE, place).env(GRACE_S, grace_s.to_string()).stdout(Stdio::piped());
        let mut program = command.spawn().unwrap();
        let mut lines = BufReader::new(program.stdout.take().unwrap()).lines();
        let ready = lines.find_map(|line| line.ok()?.strip_prefix("ready ").map(str::to_owned));
        let ready = ready.expect("it is ready");
        let (child, directory) = ready.split_once(' ').unwrap();
        (program, child.to_owned(), directory.to_owned())
    }

    /// Sends it these signals; it ends and leaves nothing.
    fn end(grace_s: u32, signals: &[Signal]) {
        let place = Scratch::new("ebb-test-").unwrap();
        let (mut program, child, directory) = start(place.path(), grace_s);
        for signal in signals {
            kill_process(Pid::from_child(&program), *signal).unwrap();
        }
        let status = vmtest::until("its end", || program.try_wait().unwrap());
        assert_eq!(status.code(), Some(EXIT_CODE));
        assert!(!Path::new(&directory).exists(), "its directory is left");
        assert!(!fs::exists(format!("/proc/{child}")).unwrap(), "its child runs");
    }

    #[test]
    fn a_program_that_hears_nothing_ends_and_leaves_nothing() {
        end(1, &[Signal::TERM]);
    }

    #[test]
    fn a_second_signal_does_not_wait_and_leaves_nothing() {
        end(1_000_000, &[Signal::INT, Signal::TERM]);
    }
}
