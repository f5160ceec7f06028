//! Records of the ring buffer: one byte for HZ, then record after record.
//!
//! The fields of a record are where the program writes them. The event is reported as JSON, which parses to the same
//! event.

use rto_agent_common::event::{COMM_LEN, Event};
use rto_agent_core::{
    policy::{HostFacts, PolicyName},
    testing::HOST,
    wire::events::{EventView, StreamItem},
};

use crate::HZ;

/// Checks records.
pub fn check(data: &[u8]) {
    let Some((first, ring)) = data.split_first() else {
        return;
    };
    let host = HostFacts {
        hz: HZ[usize::from(*first) % HZ.len()],
        ..HOST
    };
    for record in ring.chunks(size_of::<Event>()) {
        let event = Event::from_bytes(record);
        assert_eq!(event.is_some(), record.len() == size_of::<Event>());
        let Some(event) = event else { return };
        assert_eq!(event, field_by_field(record));
        let policy: Option<PolicyName> = (event.arm % 2 == 0).then(PolicyName::unmatched);
        let Some(view) = EventView::of(&event, event.time_ns / 1000, policy, &host) else {
            continue;
        };
        let line = StreamItem::Event(view);
        let text = serde_json::to_string(&line).expect("it can be written");
        assert!(!text.contains('\n'), "one line each: {text}");
        let read: StreamItem = serde_json::from_str(&text).expect("it can be read");
        assert_eq!(read, line);
    }
}

/// The fields of a record by the layout of `rto_agent_common::event::Event`.
fn field_by_field(record: &[u8]) -> Event {
    let word = |at: usize| {
        let bytes = record[at..at + 4].try_into().expect("four bytes");
        u32::from_ne_bytes(bytes)
    };
    let words = |at: usize| [word(at), word(at + 4), word(at + 8), word(at + 12)];
    Event {
        time_ns: u64::from_ne_bytes(record[..8].try_into().expect("eight bytes")),
        local: words(8),
        remote: words(24),
        local_port: word(40),
        remote_port: word(44),
        family: word(48),
        kind: word(52),
        attempt: word(56),
        timer_jiffies: word(60),
        state: word(64),
        arm: word(68),
        generation: word(72),
        direction: word(76),
        pid: word(80),
        comm: record[84..84 + COMM_LEN]
            .try_into()
            .expect("the length of comm"),
        reserved: word(100),
    }
}
