//! The instructions that an injected call is made of. They are found in code that the other process
//! runs anyway: nothing is mapped or written there to be executed.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use memchr::memmem;

use crate::process::Vma;

/// `syscall; ret`.
const CALL: &[u8] = &[0x0f, 0x05, 0xc3];
/// `mov $15, %rax; syscall`, as the C libraries spell their return from a signal handler.
const GO_BACK: [&[u8]; 2] =
    [&[0x48, 0xc7, 0xc0, 0x0f, 0, 0, 0, 0x0f, 0x05], &[0xb8, 0x0f, 0, 0, 0, 0x0f, 0x05]];
const CHUNK_BYTES: usize = 64 << 10;
/// The most bytes of code to search: a VMM may have mapped any amount.
const CODE_BYTES: u64 = 64 << 20;

/// The addresses of the instructions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Gadgets {
    /// Makes one system call, and returns to the address on the stack.
    pub call: u64,
    /// Calls rt_sigreturn(2).
    pub go_back: u64,
}

impl Gadgets {
    /// Searches the code of a process for them, in its C library first.
    pub fn find(mappings: &[Vma], memory: &File) -> io::Result<Gadgets> {
        let mut code: Vec<&Vma> = mappings.iter().filter(|vma| is_code(vma)).collect();
        code.sort_by_key(|vma| !vma.name.contains("libc") && !vma.name.contains("musl"));
        let (mut call, mut go_back) = (None, None);
        let mut left = CODE_BYTES;
        for vma in code {
            let mut at = vma.start.0;
            while at < vma.start.0 + vma.bytes && left > 0 {
                let bytes = read_code(memory, vma, at);
                call = call.or_else(|| position(&bytes, CALL).map(|index| at + index));
                let back = || GO_BACK.iter().find_map(|what| position(&bytes, what));
                go_back = go_back.or_else(|| back().map(|index| at + index));
                if let (Some(call), Some(go_back)) = (call, go_back) {
                    return Ok(Gadgets { call, go_back });
                }
                at += CHUNK_BYTES as u64;
                left = left.saturating_sub(CHUNK_BYTES as u64);
            }
        }
        Err(io::Error::other(
            "the process's code has no return from a signal handler, which every C library has: \
             after an injected call, its thread could not return to its work by itself",
        ))
    }

    /// Whether they are still there. For use while a thread of the process is stopped.
    pub fn are_in(&self, mappings: &[Vma], memory: &File) -> bool {
        let is_there = |at: u64, wanted: &[u8]| {
            let mut bytes = vec![0; wanted.len()];
            mappings.iter().any(|vma| is_code(vma) && vma.contains(at))
                && memory.read_exact_at(&mut bytes, at).is_ok()
                && bytes == wanted
        };
        is_there(self.call, CALL) && GO_BACK.iter().any(|what| is_there(self.go_back, what))
    }
}

fn is_code(vma: &Vma) -> bool {
    vma.executable && !vma.writable && vma.name != "[vsyscall]"
}

/// Reads a chunk, and so much of the next that no instruction is cut in two. Empty if it cannot be
/// read.
fn read_code(memory: &File, vma: &Vma, at: u64) -> Vec<u8> {
    let longest = GO_BACK[0].len() as u64;
    let bytes = (vma.start.0 + vma.bytes - at).min(CHUNK_BYTES as u64 + longest);
    let mut code = vec![0; bytes as usize];
    match memory.read_exact_at(&mut code, at) {
        Ok(()) => code,
        Err(_) => Vec::new(),
    }
}

fn position(bytes: &[u8], wanted: &[u8]) -> Option<u64> {
    memmem::find(bytes, wanted).map(|index| index as u64)
}
