//! Executes instructions as the kernel's interpreter does (`___bpf_prog_run()`, Linux 6.12), and counts them. An
//! instruction that the compiler does not emit for this object is an error.

use std::ops::Range;

use anyhow::{Context as _, bail, ensure};
use aya_obj::generated::{
    BPF_ADD, BPF_ALU, BPF_ALU64, BPF_AND, BPF_ARSH, BPF_ATOMIC, BPF_B, BPF_CALL, BPF_DIV, BPF_DW,
    BPF_EXIT, BPF_H, BPF_IMM, BPF_JA, BPF_JEQ, BPF_JGE, BPF_JGT, BPF_JLE, BPF_JLT, BPF_JMP,
    BPF_JMP32, BPF_JNE, BPF_JSET, BPF_JSGE, BPF_JSGT, BPF_JSLE, BPF_JSLT, BPF_LD, BPF_LDX, BPF_LSH,
    BPF_MEM, BPF_MOD, BPF_MOV, BPF_MUL, BPF_NEG, BPF_OR, BPF_PSEUDO_CALL, BPF_PSEUDO_MAP_FD,
    BPF_PSEUDO_MAP_VALUE, BPF_RSH, BPF_ST, BPF_STX, BPF_SUB, BPF_W, BPF_X, BPF_XOR, bpf_insn,
};

/// More instructions than any path has: a program that reaches this number does not terminate.
const MOST_INSTRUCTIONS: usize = 100_000;
/// Stack of a function; the kernel's `MAX_BPF_STACK`.
const STACK_BYTES: usize = 512;
/// Depth of nested calls; the kernel's `MAX_CALL_FRAMES`.
const FRAMES: usize = 8;
/// The register that points to the end of the function's stack.
const FRAME_POINTER: usize = 10;

/// The memory of a program: regions, each at a multiple of 4 GiB. An access outside of a region is an error.
#[derive(Clone, Default)]
pub(super) struct Memory(Vec<Vec<u8>>);

impl Memory {
    /// Adds a region; returns its address.
    pub(super) fn add(&mut self, bytes: Vec<u8>) -> u64 {
        self.0.push(bytes);
        (self.0.len() as u64) << 32
    }

    pub(super) fn bytes(&self, address: u64, len: usize) -> anyhow::Result<&[u8]> {
        let (region, range) = place(address, len)?;
        let bytes = self.0.get(region).and_then(|bytes| bytes.get(range));
        bytes.with_context(|| format!("no {len} bytes at {address:#x}"))
    }

    pub(super) fn bytes_mut(&mut self, address: u64, len: usize) -> anyhow::Result<&mut [u8]> {
        let (region, range) = place(address, len)?;
        let bytes = self.0.get_mut(region);
        let bytes = bytes.and_then(|bytes| bytes.get_mut(range));
        bytes.with_context(|| format!("no {len} bytes at {address:#x}"))
    }

    /// Loads a little-endian number of `len` bytes.
    pub(super) fn load(&self, address: u64, len: usize) -> anyhow::Result<u64> {
        let mut number = [0; 8];
        number[..len].copy_from_slice(self.bytes(address, len)?);
        Ok(u64::from_le_bytes(number))
    }

    pub(super) fn store(&mut self, address: u64, len: usize, number: u64) -> anyhow::Result<()> {
        let bytes = self.bytes_mut(address, len)?;
        bytes.copy_from_slice(&number.to_le_bytes()[..len]);
        Ok(())
    }
}

/// The region of an address, and the range in it.
fn place(address: u64, len: usize) -> anyhow::Result<(usize, Range<usize>)> {
    let region = usize::try_from(address >> 32)?;
    let at = usize::try_from(low(address))?;
    let region = region.checked_sub(1).context("a null pointer")?;
    Ok((region, at..at + len))
}

/// The kernel functions that a program uses.
pub(super) trait Helpers {
    /// Calls the helper with this number (`enum bpf_func_id`).
    fn call(&mut self, number: i32, args: [u64; 5], memory: &mut Memory) -> anyhow::Result<u64>;
    /// The address of a map's value, for instructions that load it as a constant (`BPF_PSEUDO_MAP_VALUE`).
    fn map_value(&self, map: i32) -> anyhow::Result<u64>;
}

/// Runs a program until it exits; returns the number of instructions. (A 16-byte instruction counts once.)
pub(super) fn run(
    program: &[bpf_insn],
    context: u64,
    memory: &mut Memory,
    helpers: &mut dyn Helpers,
) -> anyhow::Result<usize> {
    let stack = memory.add(vec![0; FRAMES * STACK_BYTES]);
    let mut registers = [0; FRAME_POINTER + 1];
    registers[1] = context;
    registers[FRAME_POINTER] = stack + STACK_BYTES as u64;
    let mut run = Run {
        program,
        at: 0,
        registers,
        callers: Vec::new(),
    };
    for count in 1..=MOST_INSTRUCTIONS {
        let at = run.at;
        let ended = run
            .step(memory, helpers)
            .with_context(|| format!("instruction {at}"))?;
        if ended {
            return Ok(count);
        }
    }
    bail!("no end after {MOST_INSTRUCTIONS} instructions")
}

struct Run<'a> {
    program: &'a [bpf_insn],
    at: usize,
    registers: [u64; FRAME_POINTER + 1],
    /// For each caller: where it continues, and its saved registers r6 to r10.
    callers: Vec<(usize, [u64; 5])>,
}

impl Run<'_> {
    /// Executes one instruction; returns whether the program has ended.
    fn step(&mut self, memory: &mut Memory, helpers: &mut dyn Helpers) -> anyhow::Result<bool> {
        let instruction = *self.program.get(self.at).context("beyond the program")?;
        self.at += 1;
        let code = u32::from(instruction.code);
        let (class, operation, size) = (code & 0x07, code & 0xf0, code & 0x18);
        let (dst, src) = (
            usize::from(instruction.dst_reg()),
            usize::from(instruction.src_reg()),
        );
        let immediate = i64::from(instruction.imm).cast_unsigned();
        let operand = if code & BPF_X == 0 {
            immediate
        } else {
            self.registers[src]
        };
        let (wide, offset) = (
            class == BPF_ALU64 || class == BPF_JMP,
            i64::from(instruction.off),
        );
        let field = |base: usize| self.registers[base].wrapping_add_signed(offset);
        match class {
            BPF_ALU | BPF_ALU64 => {
                ensure!(offset == 0, "signed arithmetic");
                self.registers[dst] = alu(operation, wide, self.registers[dst], operand)?;
            }
            BPF_JMP if operation == BPF_EXIT => return Ok(self.leave()),
            BPF_JMP if operation == BPF_CALL => self.call(instruction, memory, helpers)?,
            BPF_JMP if operation == BPF_JA => self.jump(offset)?,
            BPF_JMP | BPF_JMP32 => {
                if holds(operation, wide, self.registers[dst], operand)? {
                    self.jump(offset)?;
                }
            }
            BPF_LD if code == BPF_LD | BPF_IMM | BPF_DW => {
                let upper = *self.program.get(self.at).context("cut short")?;
                self.at += 1;
                let upper = upper.imm.cast_unsigned();
                self.registers[dst] = match u32::from(instruction.src_reg()) {
                    0 => u64::from(upper) << 32 | low(immediate),
                    BPF_PSEUDO_MAP_FD => immediate,
                    BPF_PSEUDO_MAP_VALUE => helpers.map_value(instruction.imm)? + u64::from(upper),
                    other => bail!("a constant of kind {other}"),
                };
            }
            BPF_LDX if code & 0xe0 == BPF_MEM => {
                self.registers[dst] = memory.load(field(src), bytes(size))?;
            }
            BPF_ST if code & 0xe0 == BPF_MEM => {
                memory.store(field(dst), bytes(size), immediate)?;
            }
            BPF_STX if code & 0xe0 == BPF_MEM => {
                memory.store(field(dst), bytes(size), self.registers[src])?;
            }
            BPF_STX if code & 0xe0 == BPF_ATOMIC && immediate == u64::from(BPF_ADD) => {
                let (address, size) = (field(dst), bytes(size));
                let sum = memory
                    .load(address, size)?
                    .wrapping_add(self.registers[src]);
                memory.store(address, size, sum)?;
            }
            _ => bail!("unknown: {code:#x}"),
        }
        Ok(false)
    }

    fn jump(&mut self, offset: i64) -> anyhow::Result<()> {
        let to = isize::try_from(offset)?;
        self.at = self
            .at
            .checked_add_signed(to)
            .context("before the program")?;
        Ok(())
    }

    fn call(
        &mut self,
        instruction: bpf_insn,
        memory: &mut Memory,
        helpers: &mut dyn Helpers,
    ) -> anyhow::Result<()> {
        let [_, a, b, c, d, e, saved @ ..] = self.registers;
        match u32::from(instruction.src_reg()) {
            0 => self.registers[0] = helpers.call(instruction.imm, [a, b, c, d, e], memory)?,
            BPF_PSEUDO_CALL => {
                self.callers.push((self.at, saved));
                ensure!(self.callers.len() < FRAMES, "too many functions");
                self.registers[FRAME_POINTER] += STACK_BYTES as u64;
                self.jump(instruction.imm.into())?;
            }
            other => bail!("a call of kind {other}"),
        }
        Ok(())
    }

    /// Returns from a function; the result is whether it was the program itself.
    fn leave(&mut self) -> bool {
        let Some((at, saved)) = self.callers.pop() else {
            return true;
        };
        self.at = at;
        self.registers[6..].copy_from_slice(&saved);
        false
    }
}

/// Number of bytes that an instruction loads or stores.
fn bytes(size: u32) -> usize {
    match size {
        BPF_B => 1,
        BPF_H => 2,
        BPF_W => 4,
        _ => 8,
    }
}

/// The lower half of a register.
const fn low(register: u64) -> u64 {
    register & 0xffff_ffff
}

/// A register, or its lower half, as a signed number.
const fn signed(wide: bool, register: u64) -> i64 {
    if wide {
        register.cast_signed()
    } else {
        (register << 32).cast_signed() >> 32
    }
}

fn alu(operation: u32, wide: bool, a: u64, b: u64) -> anyhow::Result<u64> {
    let (a, b, bits) = if wide {
        (a, b, 64)
    } else {
        (low(a), low(b), 32)
    };
    let shift = b % bits;
    let result = match operation {
        BPF_ADD => a.wrapping_add(b),
        BPF_SUB => a.wrapping_sub(b),
        BPF_MUL => a.wrapping_mul(b),
        BPF_DIV => a.checked_div(b).unwrap_or(0),
        BPF_MOD => a.checked_rem(b).unwrap_or(a),
        BPF_OR => a | b,
        BPF_AND => a & b,
        BPF_XOR => a ^ b,
        BPF_LSH => a << shift,
        BPF_RSH => a >> shift,
        BPF_ARSH => (signed(wide, a) >> shift).cast_unsigned(),
        BPF_NEG => a.wrapping_neg(),
        BPF_MOV => b,
        _ => bail!("arithmetic {operation:#x}"),
    };
    Ok(if wide { result } else { low(result) })
}

fn holds(operation: u32, wide: bool, a: u64, b: u64) -> anyhow::Result<bool> {
    let (a, b) = if wide { (a, b) } else { (low(a), low(b)) };
    let (signed_a, signed_b) = (signed(wide, a), signed(wide, b));
    Ok(match operation {
        BPF_JEQ => a == b,
        BPF_JNE => a != b,
        BPF_JGT => a > b,
        BPF_JGE => a >= b,
        BPF_JLT => a < b,
        BPF_JLE => a <= b,
        BPF_JSET => a & b != 0,
        BPF_JSGT => signed_a > signed_b,
        BPF_JSGE => signed_a >= signed_b,
        BPF_JSLT => signed_a < signed_b,
        BPF_JSLE => signed_a <= signed_b,
        _ => bail!("condition {operation:#x}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn register_halves_are_truncated_and_extended() {
        let minus_one = u64::MAX;
        for (operation, wide, a, b, result) in [
            (BPF_ADD, true, minus_one, 2, 1),
            (BPF_ADD, false, minus_one, 2, 1),
            (BPF_SUB, false, 0, 1, 0xffff_ffff),
            (BPF_MOV, false, 0, minus_one, 0xffff_ffff),
            (BPF_ARSH, true, 1 << 63, 63, minus_one),
            (BPF_ARSH, false, 1 << 31, 31, 0xffff_ffff),
            (BPF_RSH, false, minus_one, 33, 0x7fff_ffff),
            (BPF_DIV, true, 7, 0, 0),
            (BPF_MOD, true, 7, 0, 7),
        ] {
            assert_eq!(
                alu(operation, wide, a, b).unwrap(),
                result,
                "{operation:#x}"
            );
        }
        assert!(holds(BPF_JGT, true, minus_one, 0).unwrap());
        assert!(holds(BPF_JSLT, true, minus_one, 0).unwrap());
        assert!(holds(BPF_JSLT, false, 0xffff_ffff, 0).unwrap());
        assert!(!holds(BPF_JSLT, true, 0xffff_ffff, 0).unwrap());
    }

    #[test]
    fn access_beyond_memory_is_an_error() {
        let mut memory = Memory::default();
        let (first, second) = (memory.add(vec![0; 8]), memory.add(vec![1; 4]));
        memory.store(first + 4, 4, 0x0403_0201).unwrap();
        assert_eq!(memory.load(first, 8).unwrap(), 0x0403_0201_0000_0000);
        assert_eq!(memory.load(second, 2).unwrap(), 0x0101);
        for (address, len) in [(0, 1), (first + 1, 8), (second + 4, 1), (second - 1, 1)] {
            assert!(memory.load(address, len).is_err(), "{address:#x}");
        }
    }
}
