//! Ctrl-C, and a terminal that closes: what was started, mounted and set must not outlive this
//! program.

use std::fs;
use std::future::poll_fn;
use std::process;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::thread;
use std::time::Duration;

use anyhow::{Context, ensure};
use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::time;

/// Exit code that a shell reports after SIGINT.
const EXIT_CODE: i32 = 130;
/// Time for the work to end by itself after the first signal.
const GRACE: Duration = Duration::from_secs(5);

/// Whether the user has interrupted.
static RAISED: AtomicBool = AtomicBool::new(false);

/// Makes SIGINT, SIGTERM and SIGQUIT raise a flag, and end every wait for a VM. SIGHUP does so too,
/// unless it is ignored, as under nohup(1). If the program still runs after [`GRACE`], or at a
/// second signal, everything is undone and the program ends.
///
/// # Errors
/// The signals cannot be caught.
pub fn catch() -> anyhow::Result<()> {
    catch_within(GRACE)
}

fn catch_within(grace: Duration) -> anyhow::Result<()> {
    let runtime = Builder::new_current_thread().enable_all().build().context("signals")?;
    let signals = handlers(&runtime).context("signals")?;
    thread::spawn(move || wait(&runtime, signals, grace));
    Ok(())
}

/// Does nothing unless the flag is raised.
///
/// # Errors
/// The flag is raised.
pub fn check() -> anyhow::Result<()> {
    ensure!(!RAISED.load(Ordering::Relaxed), "interrupted: the VM and the daemon have ended");
    Ok(())
}

fn handlers(runtime: &Runtime) -> std::io::Result<Vec<Signal>> {
    let _inside = runtime.enter();
    let mut kinds = vec![SignalKind::interrupt(), SignalKind::terminate(), SignalKind::quit()];
    let status = fs::read_to_string("/proc/self/status")?;
    if !is_ignored(&status, SignalKind::hangup()) {
        kinds.push(SignalKind::hangup());
    }
    kinds.into_iter().map(signal).collect()
}

/// Whether the process that started this one made it ignore `kind`, by the text of
/// `/proc/PID/status`.
fn is_ignored(status: &str, kind: SignalKind) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    mask.is_some_and(|mask| mask & 1 << (kind.as_raw_value() - 1) != 0)
}

fn wait(runtime: &Runtime, mut signals: Vec<Signal>, grace: Duration) {
    runtime.block_on(any(&mut signals));
    RAISED.store(true, Ordering::Relaxed);
    vmtest::give_up();
    let _ = runtime.block_on(async { time::timeout(grace, any(&mut signals)).await });
    vmtest::undo::everything();
    process::exit(EXIT_CODE);
}

async fn any(signals: &mut [Signal]) {
    poll_fn(|context| {
        let mut each = signals.iter_mut();
        match each.any(|signal| signal.poll_recv(context).is_ready()) {
            true => Poll::Ready(()),
            false => Poll::Pending,
        }
    })
    .await;
}

#[cfg(test)]
mod tests {
    use std::env;
    use std::io::{BufRead, BufReader};
    use std::os::unix::process::CommandExt;
    use std::path::Path;
    use std::process::{Child, Command, Stdio};
    use std::sync::Mutex;

    use rustix::process::{Pid, Signal, kill_process, kill_process_group};
    use vmtest::{Scratch, Undo};

    use super::*;

    /// Environment variable: directory in which [`deaf`] works. Without it `deaf` does nothing.
    const PLACE: &str = "EBB_INTERRUPT_PLACE";
    /// Environment variable: the grace of [`deaf`], in seconds.
    const GRACE_S: &str = "EBB_INTERRUPT_GRACE";

    /// The program that the tests below interrupt, not a test by itself. It has a child and a
    /// directory, and ignores the flag.
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
        let place = Path::new(&place).to_owned();
        let (doing, undone) = (place.join("doing"), place.join("undone"));
        let begun = doing.clone();
        thread::spawn(move || {
            let mut helper = vmtest::undo::helper("sh");
            helper.args(["-c", "touch \"$0\"; sleep 3"]).arg(&doing);
            let (_, _undo) =
                Undo::of(|| helper.status(), |_| move || fs::write(&undone, "").unwrap()).unwrap();
            thread::park();
        });
        vmtest::until("the deed to begin", || begun.exists().then_some(()));
        // Undoing takes its time, as swapoff(8) does.
        fs::write(place.join("swap"), "").unwrap();
        let _swap = Undo::new(move || {
            let mut helper = vmtest::undo::helper("sh");
            helper.args(["-c", "touch begun; sleep 1; rm swap"]).current_dir(&place);
            helper.status().unwrap();
        });
        println!("\nready {pid} {}", scratch.path().display());
        loop {
            thread::sleep(Duration::from_secs(3600));
        }
    }

    /// Starts [`deaf`], and waits until it is ready. Returns the program, the pid of its child and
    /// the path of its directory.
    fn start(place: &Path, grace_s: u32) -> (Child, String, String) {
        let mut command = Command::new(env::current_exe().unwrap());
        command.args(["interrupt::tests::deaf", "--exact", "--nocapture", "--test-threads=1"]);
        command.env(PLACE, place).env(GRACE_S, grace_s.to_string()).stdout(Stdio::piped());
        command.process_group(0);
        let mut program = command.spawn().unwrap();
        let mut lines = BufReader::new(program.stdout.take().unwrap()).lines();
        let ready = lines.find_map(|line| line.ok()?.strip_prefix("ready ").map(str::to_owned));
        let ready = ready.expect("it is ready");
        let (child, directory) = ready.split_once(' ').unwrap();
        (program, child.to_owned(), directory.to_owned())
    }

    /// Sends `signals` to a [`deaf`] program, and checks that it ends and leaves nothing.
    fn end(grace_s: u32, signals: &[Signal]) {
        let place = Scratch::new("ebb-test-").unwrap();
        let (mut program, child, directory) = start(place.path(), grace_s);
        for signal in signals {
            kill_process(Pid::from_child(&program), *signal).unwrap();
        }
        // A terminal sends SIGINT to all processes of the group, also during the undoing.
        let begun = || place.path().join("begun").exists().then_some(());
        vmtest::until("the undoing to begin", begun);
        kill_process_group(Pid::from_child(&program), Signal::INT).unwrap();
        let status = vmtest::until("its end", || program.try_wait().unwrap());
        assert!(!place.path().join("swap").exists(), "its swap area is left");
        assert!(place.path().join("undone").exists(), "what was under way is left");
        assert_eq!(status.code(), Some(EXIT_CODE));
        assert!(!Path::new(&directory).exists(), "its directory is left");
        assert!(!fs::exists(format!("/proc/{child}")).unwrap(), "its child runs");
    }

    #[test]
    fn a_program_that_hears_nothing_ends_and_leaves_nothing() {
        end(1, &[Signal::TERM]);
    }

    #[test]
    fn a_terminal_that_goes_away_leaves_nothing() {
        let status = fs::read_to_string("/proc/self/status").unwrap();
        if is_ignored(&status, SignalKind::hangup()) {
            return eprintln!("SKIPPED: SIGHUP is ignored here");
        }
        end(1, &[Signal::HUP]);
    }

    #[test]
    fn a_process_that_quits_leaves_nothing() {
        end(1, &[Signal::QUIT]);
    }

    #[test]
    fn ignored_signals_stay_ignored() {
        let status = "Name:\tx\nSigIgn:\t0000000000000001\n";
        assert!(is_ignored(status, SignalKind::hangup()));
        assert!(!is_ignored(status, SignalKind::interrupt()));
        assert!(!is_ignored("", SignalKind::hangup()));
    }

    #[test]
    fn a_second_signal_does_not_wait_and_leaves_nothing() {
        end(1_000_000, &[Signal::INT, Signal::TERM]);
    }
}
