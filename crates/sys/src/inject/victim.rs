//! A process that tests inject calls into, and that notices whatever they leave behind. It keeps
//! values in its registers, on its stack and in its signal mask through system calls, and checks
//! them after each.

use std::arch::global_asm;
use std::io::Write;
use std::os::fd::RawFd;

use crate::mapping::Mapping;
use crate::ram_file::RamFile;

/// The data of a round. The assembly below knows its fields by their offsets.
#[repr(C)]
struct Round {
    /// The system call's number. `u64::MAX`: no call, but a loop of `arguments[0]` turns.
    number: u64,
    arguments: [u64; 6],
    has_avx: u64,
    vectors: [u8; 512],
    vectors_after: [u8; 512],
    general_after: [u64; 16],
    red_zone_after: [u64; 16],
    control: u32,
    control_after: u32,
    control_usual: u32,
}

const _: () = assert!(std::mem::offset_of!(Round, vectors_after) == 576);
const _: () = assert!(std::mem::offset_of!(Round, general_after) == 1088);
const _: () = assert!(std::mem::offset_of!(Round, red_zone_after) == 1216);
const _: () = assert!(std::mem::offset_of!(Round, control) == 1344);

// Fills the registers and the red zone, makes the call or runs the loop, and stores what is in the
// registers and the red zone then.
global_asm!(
    ".globl ebb_victim_round",
    "ebb_victim_round:",
    "push rbx; push rbp; push r12; push r13; push r14; push r15; push rdi",
    "ldmxcsr [rdi + 1344]",
    "cmp qword ptr [rdi + 56], 0",
    "je 2f",
    ".irp i,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15",
    "vmovups ymm\\i, [rdi + 64 + 32 * \\i]",
    ".endr",
    "jmp 3f",
    "2:",
    ".irp i,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15",
    "movups xmm\\i, [rdi + 64 + 32 * \\i]",
    ".endr",
    "3:",
    ".irp i,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16",
    "mov qword ptr [rsp - 8 * \\i], 0x51000000 + \\i",
    ".endr",
    "mov rax, [rdi]; mov rsi, [rdi + 16]; mov rdx, [rdi + 24]",
    "mov r10, [rdi + 32]; mov r8, [rdi + 40]; mov r9, [rdi + 48]; mov rdi, [rdi + 8]",
    "mov rbx, 0x10b; mov rbp, 0x105; mov r12, 0x10c; mov r13, 0x10d; mov r14, 0x10e",
    "mov r15, 0x10f",
    "cmp rax, -1",
    "je 4f",
    "syscall",
    "jmp 6f",
    "4: mov r11, rdi; mov rcx, 0x1234567; stc",
    "5: dec r11; jnz 5b",
    "mov rax, 0; adc rax, rcx",
    "6: mov rcx, [rsp]",
    "mov [rcx + 1088], rax; mov [rcx + 1096], rbx; mov [rcx + 1104], rbp",
    "mov [rcx + 1112], rdi; mov [rcx + 1120], rsi; mov [rcx + 1128], rdx",
    "mov [rcx + 1136], r8; mov [rcx + 1144], r9; mov [rcx + 1152], r10",
    "mov [rcx + 1160], r12; mov [rcx + 1168], r13; mov [rcx + 1176], r14",
    "mov [rcx + 1184], r15",
    ".irp i,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16",
    "mov r11, [rsp - 8 * \\i]",
    "mov [rcx + 1208 + 8 * \\i], r11",
    ".endr",
    "cmp qword ptr [rcx + 56], 0",
    "je 7f",
    ".irp i,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15",
    "vmovups [rcx + 576 + 32 * \\i], ymm\\i",
    ".endr",
    "vzeroupper",
    "jmp 8f",
    "7:",
    ".irp i,0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15",
    "movups [rcx + 576 + 32 * \\i], xmm\\i",
    ".endr",
    "8:",
    "stmxcsr [rcx + 1348]",
    "ldmxcsr [rcx + 1352]",
    "pop rdi; pop r15; pop r14; pop r13; pop r12; pop rbp; pop rbx",
    "ret",
);

unsafe extern "C" {
    fn ebb_victim_round(round: *mut Round);
}

/// The call that a victim repeats, and what it returns.
struct Habit {
    number: libc::c_long,
    arguments: [u64; 6],
    result: i64,
    /// How long it sleeps. Written anew before each round: the kernel writes the time left there,
    /// or does not begin such a call again.
    sleep: *mut libc::timespec,
}

/// Length in bytes of its mapping of a shared memfd, which it does not touch.
pub(super) const SHARED_BYTES: u64 = 16 << 10;

/// The names of what victims can do.
pub(super) const HABITS: [&str; 5] = ["ppoll", "nanosleep", "futex", "read", "spin"];

const SLEEP: libc::timespec = libc::timespec { tv_sec: 0, tv_nsec: 5_000_000 };
static WORD: u32 = 7;
static ALL_BUT_ONE: u64 = !(1 << (libc::SIGUSR1 - 1));

fn habit(name: &str) -> Habit {
    let place = Box::leak(Box::new(SLEEP)) as *mut libc::timespec;
    let sleep = place as u64;
    let (number, arguments, result) = match name {
        "ppoll" => (libc::SYS_ppoll, [0, 0, sleep, (&raw const ALL_BUT_ONE) as u64, 8, 0], 0),
        "nanosleep" => (libc::SYS_nanosleep, [sleep, 0, 1, 2, 3, 4], 0),
        "futex" => {
            let result = -i64::from(libc::ETIMEDOUT);
            (libc::SYS_futex, [(&raw const WORD) as u64, 0, 7, sleep, 5, 6], result)
        }
        "read" => {
            let room = Box::leak(Box::new(0u64));
            (libc::SYS_read, [timer() as u64, room as *mut u64 as u64, 8, 1, 2, 3], 8)
        }
        _ => (-1, [5_000_000, 1, 2, 3, 4, 5], 0x1234568),
    };
    Habit { number, arguments, result, sleep: place }
}

/// Returns a timer that can be read every 5 ms.
fn timer() -> RawFd {
    let every = libc::itimerspec { it_interval: SLEEP, it_value: SLEEP };
    // SAFETY: a new descriptor, and a struct that outlives the call.
    unsafe {
        let timer = libc::timerfd_create(libc::CLOCK_MONOTONIC, 0);
        assert!(timer >= 0 && libc::timerfd_settime(timer, 0, &every, std::ptr::null_mut()) == 0);
        timer
    }
}

/// Returns the signals that this thread blocks.
fn held_back() -> u64 {
    let mut now = 0u64;
    // SAFETY: the kernel writes the eight bytes of a signal set.
    let got = unsafe {
        let (none, size) = (std::ptr::null::<u64>(), 8);
        libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_BLOCK, none, &raw mut now, size)
    };
    assert_eq!(got, 0);
    now
}

fn set_signal_stack() {
    let room = Box::leak(vec![0u8; 64 << 10].into_boxed_slice());
    let (ss_sp, ss_size) = (room.as_mut_ptr().cast(), room.len());
    let stack = libc::stack_t { ss_sp, ss_flags: 0, ss_size };
    // SAFETY: the stack was leaked for this.
    assert_eq!(unsafe { libc::sigaltstack(&stack, std::ptr::null_mut()) }, 0);
}

/// Returns the signal stack that is set: (address, bytes).
fn signal_stack() -> (usize, usize) {
    // SAFETY: a struct of integers and a pointer, which the kernel fills.
    unsafe {
        let mut now: libc::stack_t = std::mem::zeroed();
        assert_eq!(libc::sigaltstack(std::ptr::null(), &mut now), 0);
        (now.ss_sp as usize, now.ss_size)
    }
}

fn hold_back(signals: &[i32]) {
    // SAFETY: a set of signals made here.
    unsafe {
        let mut set: libc::sigset_t = std::mem::zeroed();
        signals.iter().for_each(|&signal| assert_eq!(libc::sigaddset(&mut set, signal), 0));
        assert_eq!(libc::pthread_sigmask(libc::SIG_BLOCK, &set, std::ptr::null_mut()), 0);
    }
}

fn check(round: &Round, habit: &Habit) {
    let [rax, rbx, rbp, rdi, rsi, rdx, r8, r9, r10, r12, r13, r14, r15, ..] = round.general_after;
    assert_eq!(rax as i64, habit.result, "the call's result");
    assert_eq!([rdi, rsi, rdx, r10, r8, r9], habit.arguments, "the call's arguments");
    assert_eq!([rbx, rbp, r12, r13, r14, r15], [0x10b, 0x105, 0x10c, 0x10d, 0x10e, 0x10f]);
    let red_zone: Vec<u64> = (1..=16).map(|word| 0x5100_0000 + word).collect();
    assert_eq!(round.red_zone_after.as_slice(), red_zone, "the red zone");
    let bytes = if round.has_avx == 1 { 32 } else { 16 };
    let (before, _) = round.vectors.as_chunks::<32>();
    let (after, _) = round.vectors_after.as_chunks::<32>();
    for (register, (before, after)) in before.iter().zip(after).enumerate() {
        assert_eq!(before[..bytes], after[..bytes], "vector register {register}");
    }
    assert_eq!(round.control & !0x3f, round.control_after & !0x3f, "MXCSR");
}

/// Makes a victim of this very program, which is started again with `EBB_VICTIM`. It runs before
/// `main`, which would start a thread for each test while calls are injected into the first one.
#[used]
#[unsafe(link_section = ".init_array")]
static BEFORE_MAIN: extern "C" fn() = {
    extern "C" fn before_main() {
        match std::env::var("EBB_VICTIM").as_deref() {
            Ok("vfork") => with_its_first_thread_away(),
            Ok(name) => victim(name),
            Err(_) => return,
        }
        std::process::exit(0);
    }
    before_main
};

/// Makes the first thread wait for a child that shares its memory: there no tracer can stop it.
fn with_its_first_thread_away() {
    extern "C" fn child(_: *mut libc::c_void) -> i32 {
        // SAFETY: two system calls without memory.
        unsafe {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            libc::pause()
        }
    }
    std::thread::spawn(|| {
        victim("read");
        std::process::exit(0);
    });
    let stack = Box::leak(vec![0u64; 8192].into_boxed_slice());
    let flags = libc::CLONE_VM | libc::CLONE_VFORK | libc::SIGCHLD;
    // SAFETY: the child has a stack of its own, whose end this is, and uses no more memory.
    unsafe {
        let end = stack.as_mut_ptr().add(stack.len());
        libc::clone(child, end.cast(), flags, std::ptr::null_mut());
    }
}

/// Tells that a signal with a handler arrived.
extern "C" fn on_signal(_: i32) {
    // SAFETY: write(2) of one byte.
    unsafe { libc::write(1, b"!".as_ptr().cast(), 1) };
}

/// Repeats rounds until its standard input ends. Prints `#` after each round.
fn victim(name: &str) {
    hold_back(&[libc::SIGWINCH, libc::SIGUSR2]);
    // SAFETY: a handler that makes one system call.
    unsafe { libc::signal(libc::SIGUSR1, on_signal as *const () as libc::sighandler_t) };
    let file = RamFile::create("victim", SHARED_BYTES).unwrap();
    let _shared = Mapping::new(&file, 0, SHARED_BYTES).unwrap();
    set_signal_stack();
    let (mask, stack) = (held_back(), signal_stack());
    let habit = habit(name);
    let has_avx = u64::from(std::is_x86_feature_detected!("avx"));
    let mut round = Round {
        number: habit.number as u64,
        arguments: habit.arguments,
        has_avx,
        vectors: std::array::from_fn(|index| index as u8 ^ 0x5a),
        vectors_after: [0; 512],
        general_after: [0; 16],
        red_zone_after: [0; 16],
        control: 0x5f80,
        control_after: 0,
        control_usual: 0x1f80,
    };
    while !is_over() {
        // SAFETY: `habit.sleep` was leaked for this. The assembly above reads and writes within
        // `round`, and preserves what a C function has to preserve.
        unsafe {
            habit.sleep.write(SLEEP);
            ebb_victim_round(&mut round);
        }
        check(&round, &habit);
        assert_eq!(held_back(), mask, "the signal mask");
        assert_eq!(signal_stack(), stack, "the signal stack");
        std::io::stdout().write_all(b"#").and_then(|()| std::io::stdout().flush()).unwrap();
    }
}

/// Whether nobody has the other end of the standard input any more.
fn is_over() -> bool {
    let mut input = libc::pollfd { fd: 0, events: 0, revents: 0 };
    // SAFETY: one pollfd, which outlives the call.
    let ready = unsafe { libc::poll(&mut input, 1, 0) };
    ready > 0 && input.revents & libc::POLLHUP != 0
}
