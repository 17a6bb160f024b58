//! Instructions and registers of any content: `rip, rcx, rdi, rsi, rflags, fs, fault |
//! size of code | code`.

use ebb_inspect::{CodeSize, Registers, Segment, Stopped, WriteIntent};
use ebb_units::Gpa;

const SIZES: [CodeSize; 4] =
    [CodeSize::Bits64, CodeSize::Bits64, CodeSize::Bits32, CodeSize::Bits16];

/// Runs one input.
pub fn run(data: &[u8]) {
    let Some((words, code)) = data.split_first_chunk::<57>() else { return };
    let (numbers, size) = words.as_chunks::<8>();
    let [rip, rcx, rdi, rsi, rflags, fs, fault] =
        std::array::from_fn(|index| u64::from_le_bytes(numbers[index]));
    let segment = |base| Segment { base, limit: fs as u32 };
    let registers = Registers {
        rip,
        rcx,
        rdi,
        rsi,
        rflags,
        code_size: SIZES[usize::from(size[0]) % SIZES.len()],
        cs: segment(0),
        ds: segment(fs >> 20),
        es: segment(fs >> 40),
        fs: segment(fs),
        gs: segment(!fs),
        ss: segment(0),
    };
    let stopped = Stopped { code, registers, translate: |va| Some(Gpa(va)) };
    if stopped.overwrites_page(fault) {
        // Only repeated stores of at most 8 bytes get here. The first of them touches the page.
        assert!(code.contains(&0xf3) && rcx >= 512);
        let code_size = stopped.registers.code_size;
        if code_size == CodeSize::Bits64 && !code.contains(&0x67) {
            assert!((rdi & !0xfff).abs_diff(fault & !0xfff) <= 4096);
        }
    }
}
