//! Patches calls of kernel functions in the compiled object: see [`kfunc`].

use rto_agent_common::kfunc;

/// The object with these BTF ids in its calls of the functions of [`kfunc`], in the same order.
/// Without ids, the calls return null.
pub fn resolved(object: &[u8], ids: Option<[u32; 2]>) -> Vec<u8> {
    let mut object = object.to_vec();
    let numbers = [kfunc::CAST_TO_KERN_CTX, kfunc::RDONLY_CAST];
    for (index, number) in numbers.into_iter().enumerate() {
        let [n0, n1, n2, n3] = number.to_le_bytes();
        let [code, regs, ..] = kfunc::CALL;
        let call = [code, regs, 0, 0, n0, n1, n2, n3];
        // Instructions are aligned, because sections are.
        for instruction in object.as_chunks_mut::<8>().0 {
            if *instruction == call {
                match ids {
                    Some(ids) => instruction[4..].copy_from_slice(&ids[index].to_le_bytes()),
                    None => *instruction = kfunc::NULL,
                }
            }
        }
    }
    object
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::datapath::OBJECT;

    fn calls(object: &[u8], number: u32) -> usize {
        let is_call = |i: &&[u8; 8]| i[..4] == kfunc::CALL && i[4..] == number.to_le_bytes();
        object.as_chunks().0.iter().filter(is_call).count()
    }

    #[test]
    fn calls_of_kernel_functions_are_found_and_replaced() {
        let numbers = [kfunc::CAST_TO_KERN_CTX, kfunc::RDONLY_CAST];
        let before = numbers.map(|number| calls(OBJECT, number));
        assert!(before.iter().all(|count| *count > 0), "{before:?}");
        let with = resolved(OBJECT, Some([1001, 1002]));
        assert_eq!([1001, 1002].map(|number| calls(&with, number)), before);
        let without = resolved(OBJECT, None);
        for object in [&with, &without] {
            assert_eq!(numbers.map(|number| calls(object, number)), [0, 0]);
            assert_eq!(object.len(), OBJECT.len());
        }
    }
}
