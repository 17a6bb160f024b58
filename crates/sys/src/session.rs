//! Processes that go on whatever happens to the process that started them.

use std::io;
use std::os::unix::process::CommandExt;
use std::process::Command;

/// Makes the program begin a session of its own. Otherwise a program that is stopped when its
/// parent dies is ended by SIGHUP (setpgid(2), orphaned process groups).
pub fn of_its_own(command: &mut Command) -> &mut Command {
    let begin = || match rustix::process::setsid() {
        Ok(_) => Ok(()),
        Err(error) => Err(io::Error::from(error)),
    };
    // SAFETY: between fork and exec the closure makes one system call and allocates nothing: an
    // io::Error holds the errno itself.
    unsafe { command.pre_exec(begin) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Stdio;

    #[test]
    fn a_program_leads_its_session() {
        let mut command = Command::new("sh");
        command.args(["-c", "cut -d ' ' -f 6 /proc/$$/stat; echo $$"]).stdout(Stdio::piped());
        let output = of_its_own(&mut command).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let (session, own) = text.trim().split_once('\n').unwrap();
        assert_eq!(session, own);
    }
}
