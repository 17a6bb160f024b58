//! Code that breaks a rule of V-Probe's paper (section 4.2), or that Ebb does not translate.

use ebb_vprobe::*;
use testkit::vprobe::{PAGE_FREE, PAGE_ORDER};

/// `mov eax, [rdi]`
const LOAD: [u8; 2] = [0x8b, 0x07];
const NOP: u8 = 0x90;
const RET: u8 = 0xc3;
/// `xor eax, eax`
const ZERO: [u8; 2] = [0x31, 0xc0];

fn size(bytes: u16) -> PageSize {
    PageSize::new(bytes).expect("a size that metadata may have")
}

fn helper(code: &[u8]) -> Result<Helper, Refusal> {
    Helper::new(Kind::PageFree, code, size(64))
}

/// Returns why the instruction is refused between a load of eax and a ret.
fn cause_of(instruction: &[u8]) -> Cause {
    let code = [&LOAD[..], instruction, &[RET]].concat();
    let refusal = helper(&code).expect_err("refused");
    assert_eq!(refusal.offset, LOAD.len(), "{refusal}");
    refusal.cause
}

/// Returns why the whole code is refused, and at which byte.
fn refusal_of(code: &[u8]) -> (Cause, usize) {
    let refusal = helper(code).expect_err("refused");
    (refusal.cause, refusal.offset)
}

#[test]
fn rule_1_other_registers_are_not_used_and_rdi_is_only_read() {
    let others: [&[u8]; 10] = [
        &[0x8b, 0x0f],             // mov ecx, [rdi]
        &[0x8b, 0x06],             // mov eax, [rsi]
        &[0x44, 0x8b, 0x07],       // mov r8d, [rdi]
        &[0x89, 0xc7],             // mov edi, eax
        &[0x48, 0x83, 0xc7, 0x08], // add rdi, 8
        &[0x40, 0xfe, 0xc7],       // inc dil
        &[0xd3, 0xe0],             // shl eax, cl
        &[0x0f, 0xa2],             // cpuid
        &[0x66, 0x0f, 0x6e, 0xc0], // movd xmm0, eax
        &[0x58],                   // pop rax
    ];
    for code in others {
        assert_eq!(cause_of(code), Cause::Registers, "{code:x?}");
    }
}

#[test]
fn rule_2_only_the_metadata_is_read() {
    let outside: [&[u8]; 9] = [
        &[0x0f, 0xb6, 0x47, 0x40],             // movzx eax, byte [rdi+64]
        &[0x8b, 0x47, 0x3d],                   // mov eax, [rdi+61]
        &[0x48, 0x3b, 0x47, 0x39],             // cmp rax, [rdi+57]
        &[0x0f, 0xb6, 0x47, 0xff],             // movzx eax, byte [rdi-1]
        &[0x8b, 0x87, 0x00, 0x00, 0x00, 0x80], // mov eax, [rdi-2^31]
        &[0x8b, 0x87, 0xff, 0xff, 0xff, 0x7f], // mov eax, [rdi+2^31-1]
        &[0x8b, 0x00],                         // mov eax, [rax]
        &[0x8b, 0x05, 0x00, 0x00, 0x00, 0x00], // mov eax, [rip]
        &[0x48, 0xa1, 0x00, 0, 0, 0, 0, 0x80, 0xff, 0xff], // mov rax, [0xffff800000000000]
    ];
    for code in outside {
        assert_eq!(cause_of(code), Cause::Reads, "{code:x?}");
    }
}

#[test]
fn rule_3_no_memory_is_written() {
    let stores: [&[u8]; 8] = [
        &[0x89, 0x07],             // mov [rdi], eax
        &[0xc6, 0x47, 0x10, 0x00], // mov byte [rdi+16], 0
        &[0x83, 0x07, 0x01],       // add dword [rdi], 1
        &[0xf0, 0x83, 0x07, 0x01], // lock add dword [rdi], 1
        &[0x0f, 0x94, 0x07],       // sete [rdi]
        &[0x87, 0x07],             // xchg [rdi], eax
        &[0x50],                   // push rax
        &[0xf3, 0x48, 0xab],       // rep stosq
    ];
    for code in stores {
        assert_eq!(cause_of(code), Cause::Writes, "{code:x?}");
    }
}

#[test]
fn rule_4_the_next_instruction_follows_and_needs_no_privilege() {
    let others: [&[u8]; 12] = [
        &[0xeb, 0x00],                   // jmp
        &[0x74, 0x00],                   // je
        &[0xe3, 0x00],                   // jrcxz
        &[0xff, 0xe0],                   // jmp rax
        &[0xe8, 0x00, 0x00, 0x00, 0x00], // call
        &[0xff, 0x17],                   // call [rdi]
        &[0xcc],                         // int3
        &[0x0f, 0x05],                   // syscall
        &[0x0f, 0x0b],                   // ud2
        &[0xf4],                         // hlt
        &[0x0f, 0x30],                   // wrmsr
        &[0xec],                         // in al, dx
    ];
    for code in others {
        assert_eq!(cause_of(code), Cause::Flow, "{code:x?}");
    }
}

#[test]
fn rule_5_the_code_ends_with_its_only_ret() {
    assert_eq!(refusal_of(&[]), (Cause::Return, 0));
    assert_eq!(refusal_of(&LOAD), (Cause::Return, 2));
    assert_eq!(refusal_of(&[0x8b, 0x07, RET, NOP]), (Cause::Return, 2));
    assert_eq!(refusal_of(&[0x8b, 0x07, RET, RET]), (Cause::Return, 2));
    // ret 8, rep ret, retf
    for code in [&[0xc2, 0x08, 0x00][..], &[0xf3, 0xc3], &[0xcb]] {
        assert_eq!(refusal_of(code), (Cause::Return, 0), "{code:x?}");
    }
}

#[test]
fn rule_6_the_code_is_shorter_than_64_bytes() {
    let with = |nops| [&ZERO[..], &vec![NOP; nops], &[RET]].concat();
    assert_eq!(with(60).len(), MAX_CODE_BYTES);
    helper(&with(60)).unwrap();
    assert_eq!(refusal_of(&with(61)), (Cause::Length, 63));
    assert_eq!(refusal_of(&with(5000)), (Cause::Length, 63));
    // The last instruction begins within the limit.
    let mut code = with(59);
    code.truncate(61);
    code.extend([0x0f, 0xb6, 0xc0, RET]); // movzx eax, al
    assert_eq!(refusal_of(&code), (Cause::Length, 61));
}

#[test]
fn a_refusal_names_rule_byte_and_instruction() {
    let refusal = helper(&[0x8b, 0x47, 0x30, 0x89, 0x07, RET]).unwrap_err();
    let instruction = "mov [rdi], eax".to_owned();
    assert_eq!(refusal, Refusal { cause: Cause::Writes, offset: 3, instruction });
    let text = "rule 3: no memory may be written: `mov [rdi], eax` at byte 3";
    assert_eq!(refusal.to_string(), text);
    assert_eq!(refusal.cause.rule(), Some(3));
    let end = helper(&LOAD).unwrap_err().to_string();
    assert!(end.starts_with("rule 5: ") && end.ends_with(": `end of the code` at byte 2"), "{end}");
}

#[test]
fn an_instruction_that_no_rule_forbids_may_lack_a_translation() {
    let others: [&[u8]; 14] = [
        &[0x89, 0xf8],                   // mov eax, edi
        &[0x48, 0x39, 0xf8],             // cmp rax, rdi
        &[0x48, 0x8d, 0x47, 0x08],       // lea rax, [rdi+8]
        &[0x8d, 0x04, 0x25, 1, 0, 0, 0], // lea eax, [1]
        &[0x8b, 0x04, 0x07],             // mov eax, [rdi+rax]
        &[0x67, 0x8b, 0x07],             // mov eax, [edi]
        &[0x65, 0x8b, 0x07],             // mov eax, gs:[rdi]
        &[0xf3, 0x8b, 0x07],             // mov with a prefix that means nothing
        &[0x0f, 0xbc, 0x07],             // bsf eax, [rdi]
        &[0x0f, 0xaf, 0x07],             // imul eax, [rdi]
        &[0x0f, 0xa3, 0xc0],             // bt eax, eax
        &[0xc1, 0xe0, 0x00],             // shl eax, 0
        &[0xc1, 0xe0, 0x20],             // shl eax, 32, which is 0
        &[0x66, 0xc1, 0xe0, 0x10],       // shl ax, 16
    ];
    for code in others {
        assert_eq!(cause_of(code), Cause::NotSupported, "{code:x?}");
        assert_eq!(cause_of(code).rule(), None);
    }
}

#[test]
fn unknown_instructions_are_refused() {
    assert_eq!(cause_of(&[0x06]), Cause::Unknown);
    assert_eq!(refusal_of(&[0x8b, 0x07, 0x8b, 0x47]), (Cause::Unknown, 2));
}

#[test]
fn nothing_undefined_is_read() {
    // rax as it was at the call.
    assert_eq!(refusal_of(&[RET]), (Cause::Undefined, 0));
    assert_eq!(refusal_of(&[0x83, 0xe0, 0x01, RET]), (Cause::Undefined, 0)); // and eax, 1
    assert_eq!(refusal_of(&[0x8a, 0x07, 0x0f, 0xb6, 0xc4, RET]), (Cause::Undefined, 2));
    // Flags as they were at the call: sete al, adc eax, 0.
    assert_eq!(refusal_of(&[0x0f, 0x94, 0xc0, RET]), (Cause::Undefined, 0));
    assert_eq!(cause_of(&[0x83, 0xd0, 0x00]), Cause::Undefined);
    // What shl eax, 2 and bt eax, 3 leave open: seto al, sets al, setp al.
    assert_eq!(refusal_of(&[0x8b, 7, 0xc1, 0xe0, 2, 0x0f, 0x90, 0xc0, RET]).0, Cause::Undefined);
    for setcc in [0x90, 0x98, 0x9a] {
        let code = [0x8b, 0x07, 0x85, 0xc0, 0x0f, 0xba, 0xe0, 0x03, 0x0f, setcc, 0xc0, RET];
        assert_eq!(refusal_of(&code), (Cause::Undefined, 8), "{setcc:x}");
    }
}

#[test]
fn a_part_of_rax_suffices_for_page_free_alone() {
    let code = [0x8a, 0x07, RET];
    helper(&code).unwrap();
    let refusal = Helper::new(Kind::PageOrder, &code, size(64)).unwrap_err();
    assert_eq!((refusal.cause, refusal.offset), (Cause::Undefined, 2));
}

#[test]
fn zero_needs_no_defined_register() {
    // xor eax, eax; sub eax, eax; cmp byte [rdi], 1 and sbb eax, eax.
    for code in [&ZERO[..], &[0x29, 0xc0], &[0x80, 0x3f, 0x01, 0x19, 0xc0]] {
        let code = [code, &[RET]].concat();
        Helper::new(Kind::PageOrder, &code, size(64)).unwrap();
    }
}

#[test]
fn reads_reach_to_the_last_byte() {
    let inside: [&[u8]; 4] = [
        &[0x0f, 0xb6, 0x47, 0x3f],                   // movzx eax, byte [rdi+63]
        &[0x8b, 0x47, 0x3c],                         // mov eax, [rdi+60]
        &[0x48, 0x8b, 0x47, 0x38],                   // mov rax, [rdi+56]
        &[0x48, 0x8b, 0x87, 0x38, 0x00, 0x00, 0x00], // the same
    ];
    for code in inside {
        helper(&[code, &[RET]].concat()).unwrap();
    }
    for (bytes, is_inside) in [(40, false), (48, true), (56, true)] {
        assert_eq!(Helper::new(Kind::PageOrder, &PAGE_ORDER, size(bytes)).is_ok(), is_inside);
        assert_eq!(Helper::new(Kind::PageFree, &PAGE_FREE, size(bytes)).is_ok(), bytes == 56);
    }
}

#[test]
fn metadata_has_whole_words() {
    for bytes in [0, 1, 7, 12, 63, 65, 520, u16::MAX] {
        assert_eq!(PageSize::new(bytes), None, "{bytes}");
    }
    for bytes in [8, 56, 64, 512] {
        assert_eq!(size(bytes).words() * 8, usize::from(bytes));
    }
}
