//! Which helpers a loaded program calls.

use std::{fs, sync::OnceLock};

use super::bpf;

/// Whether a program sets the callback flags of sockets; `None` if the kernel does not show its addresses to this
/// process (`kernel.kptr_restrict`). A program that sets them by bpf_setsockopt() (Linux 6.12) is not recognised.
pub fn sets_callbacks(id: u32) -> Option<bool> {
    static NUMBER: OnceLock<Option<i32>> = OnceLock::new();
    let number = (*NUMBER.get_or_init(|| {
        let symbols = fs::read_to_string("/proc/kallsyms").ok()?;
        call_number(&symbols, "bpf_sock_ops_cb_flags_set")
    }))?;
    let instructions = bpf::translated(id).ok()?;
    Some(instructions.iter().any(|code| is_call(*code, number)))
}

/// The number in the call of a helper, after the verifier has translated it (`do_misc_fixups()`, Linux
/// 6.18): its address relative to `__bpf_call_base`.
fn call_number(symbols: &str, helper: &str) -> Option<i32> {
    let address = |wanted: &str| {
        let found = symbols
            .lines()
            .find_map(|line| line.strip_suffix(wanted)?.strip_suffix(' '));
        let (address, _) = found?.split_once(' ')?;
        u64::from_str_radix(address, 16).ok().filter(|a| *a != 0)
    };
    let distance = address(helper)?.wrapping_sub(address("__bpf_call_base")?);
    i32::try_from(distance.cast_signed()).ok()
}

/// `struct bpf_insn` is a byte with the operation, one with the registers, an offset and the immediate value.
fn is_call(instruction: u64, number: i32) -> bool {
    // BPF_JMP | BPF_CALL, of a helper (the source register is 0).
    const CALL: u64 = 0x85;
    instruction & 0xf0ff == CALL && instruction >> 32 == u64::from(number.cast_unsigned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SYMBOLS: &str = "ffffffff81000000 T _text\n\
        ffffffff81200000 T __bpf_call_base\n\
        ffffffff81100000 t ____bpf_sock_ops_cb_flags_set\n\
        ffffffff81c00010 T bpf_sock_ops_cb_flags_set\n";

    #[test]
    fn call_number_is_relative_to_call_base() {
        let number = |symbols| call_number(symbols, "bpf_sock_ops_cb_flags_set");
        assert_eq!(number(SYMBOLS), Some(0xa0_0010));
        // Without the privilege all addresses are 0.
        assert_eq!(number("0000000000000000 T __bpf_call_base\n"), None);
    }

    #[test]
    fn only_calls_of_the_helper_are_found() {
        let call = |registers: u64, number: u64| 0x85 | registers << 8 | number << 32;
        assert!(is_call(call(0, 7), 7));
        assert!(!is_call(call(0, 8), 7));
        // A call of a function of the program itself.
        assert!(!is_call(call(0x10, 7), 7));
        assert!(!is_call(0x95 | 7 << 32, 7));
    }
}
