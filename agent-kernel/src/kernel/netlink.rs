//! Blocking netlink requests (Documentation/userspace-api/netlink/intro.rst, Linux 6.12). Each uses
//! a new socket, because the agent makes only a few.

use std::{io, net::IpAddr};

use netlink_packet_core::{
    DecodeError, DefaultNla, Emitable as _, NLA_HEADER_SIZE, NLM_F_ACK, NLM_F_CREATE, NLM_F_DUMP,
    NLM_F_EXCL, NLM_F_REQUEST, NetlinkDeserializable, NetlinkHeader, NetlinkMessage,
    NetlinkPayload, NetlinkSerializable, NlasIterator,
};
pub use netlink_sys::protocols::{NETLINK_ROUTE, NETLINK_SOCK_DIAG};
use netlink_sys::{Socket, SocketAddr};

/// Address families as netlink encodes them.
pub const AF_INET: u8 = 2;
/// The same for IPv6.
pub const AF_INET6: u8 = 10;

/// NLMSG_ALIGNTO.
const ALIGNMENT: usize = 4;

/// A message after the netlink header: the family's own header, and attributes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// `nlmsghdr.nlmsg_type`.
    kind: u16,
    pub(super) bytes: Vec<u8>,
}

impl Message {
    /// A message of this type, with the family's header, whose length must be a multiple of four,
    /// and these attributes.
    pub fn new(kind: u16, header: &[u8], attributes: &[DefaultNla]) -> Self {
        let mut bytes = header.to_vec();
        bytes.resize(header.len() + attributes.buffer_len(), 0);
        attributes.emit(&mut bytes[header.len()..]);
        Self { kind, bytes }
    }
}

impl NetlinkSerializable for Message {
    fn message_type(&self) -> u16 {
        self.kind
    }

    fn buffer_len(&self) -> usize {
        self.bytes.len()
    }

    fn serialize(&self, buffer: &mut [u8]) {
        buffer.copy_from_slice(&self.bytes);
    }
}

impl NetlinkDeserializable for Message {
    type Error = DecodeError;

    fn deserialize(header: &NetlinkHeader, payload: &[u8]) -> Result<Self, DecodeError> {
        Ok(Self {
            kind: header.message_type,
            bytes: payload.to_vec(),
        })
    }
}

/// Encodes an address for netlink: its family and its octets.
pub(super) fn octets(address: IpAddr) -> (u8, Vec<u8>) {
    match address {
        IpAddr::V4(address) => (AF_INET, address.octets().to_vec()),
        IpAddr::V6(address) => (AF_INET6, address.octets().to_vec()),
    }
}

/// The value of the first attribute of this type.
pub fn find(attributes: &[u8], kind: u16) -> Option<&[u8]> {
    let mut all = NlasIterator::new(attributes).flatten();
    let found = all.find(|attribute| attribute.kind() == kind)?;
    found
        .into_inner()
        .get(NLA_HEADER_SIZE..found.length().into())
}

/// Requests all objects of a type. Calls `each` with the family's header and the attributes of each
/// answer.
pub fn dump(protocol: isize, request: Message, each: impl FnMut(&[u8])) -> io::Result<()> {
    transact(protocol, NLM_F_DUMP, request, each)
}

/// Requests one object; otherwise like [`dump`].
pub(super) fn get(protocol: isize, request: Message, each: impl FnMut(&[u8])) -> io::Result<()> {
    transact(protocol, NLM_F_ACK, request, each)
}

/// The route that the kernel uses to an address, as `struct rtmsg` and attributes (rtnetlink(7)).
pub fn route_to(address: IpAddr) -> io::Result<Vec<u8>> {
    let (family, octets) = octets(address);
    let prefix = if address.is_ipv4() { 32 } else { 128 };
    let header = [family, prefix, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
    let destination = DefaultNla::new(libc::RTA_DST, octets);
    let request = Message::new(libc::RTM_GETROUTE, &header, &[destination]);
    let mut route = Vec::new();
    get(NETLINK_ROUTE, request, |answer| route = answer.to_vec())?;
    Ok(route)
}

/// Creates or changes an object.
pub(super) fn set(protocol: isize, request: Message) -> io::Result<()> {
    transact(
        protocol,
        NLM_F_ACK | NLM_F_CREATE | NLM_F_EXCL,
        request,
        |_| {},
    )
}

/// Sends a request, and receives until the kernel's last answer.
fn transact(
    protocol: isize,
    flags: u16,
    request: Message,
    mut each: impl FnMut(&[u8]),
) -> io::Result<()> {
    let mut socket = Socket::new(protocol)?;
    socket.bind_auto()?;
    socket.connect(&SocketAddr::new(0, 0))?;
    let mut message = NetlinkMessage::new(
        NetlinkHeader::default(),
        NetlinkPayload::InnerMessage(request),
    );
    message.header.flags = NLM_F_REQUEST | flags;
    message.finalize();
    let mut bytes = vec![0; message.buffer_len()];
    message.serialize(&mut bytes);
    socket.send(&bytes, 0)?;
    loop {
        let (datagram, _) = socket.recv_from_full()?;
        if !read_messages(&datagram, &mut each)? {
            return Ok(());
        }
    }
}

/// Reads the messages of one datagram. Returns whether more will follow.
fn read_messages(mut datagram: &[u8], each: &mut impl FnMut(&[u8])) -> io::Result<bool> {
    while !datagram.is_empty() {
        let message = NetlinkMessage::<Message>::deserialize(datagram).map_err(io::Error::other)?;
        match message.payload {
            NetlinkPayload::InnerMessage(answer) => each(&answer.bytes),
            NetlinkPayload::Done(done) if done.code == 0 => return Ok(false),
            NetlinkPayload::Done(done) => return Err(io::Error::from_raw_os_error(-done.code)),
            NetlinkPayload::Error(ack) if ack.code.is_none() => return Ok(false),
            NetlinkPayload::Error(error) => return Err(error.to_io()),
            _ => {}
        }
        let length = usize::try_from(message.header.length).unwrap_or(usize::MAX);
        let next = length.checked_next_multiple_of(ALIGNMENT);
        datagram = next
            .and_then(|next| datagram.get(next..))
            .unwrap_or_default();
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use netlink_packet_core::{DoneMessage, ErrorMessage};

    use super::*;

    fn bytes(payload: NetlinkPayload<Message>) -> Vec<u8> {
        let mut message = NetlinkMessage::new(NetlinkHeader::default(), payload);
        message.finalize();
        let mut bytes = vec![0; message.buffer_len()];
        message.serialize(&mut bytes);
        bytes.resize(bytes.len().next_multiple_of(ALIGNMENT), 0);
        bytes
    }

    fn error(errno: i32) -> Vec<u8> {
        let mut message = ErrorMessage::default();
        message.code = std::num::NonZeroI32::new(-errno);
        message.header = vec![0; 16];
        bytes(NetlinkPayload::Error(message))
    }

    fn done(errno: i32) -> Vec<u8> {
        let mut message = DoneMessage::default();
        message.code = -errno;
        bytes(NetlinkPayload::Done(message))
    }

    /// The messages read from these datagrams, and the result.
    fn hear(datagram: &[u8]) -> (Vec<Vec<u8>>, Result<bool, Option<i32>>) {
        let mut answers = Vec::new();
        let ends = read_messages(datagram, &mut |answer: &[u8]| answers.push(answer.to_vec()));
        (answers, ends.map_err(|e| e.raw_os_error()))
    }

    #[test]
    fn attributes_follow_the_header() {
        let attributes = [
            DefaultNla::new(1, vec![7; 5]),
            DefaultNla::new(2, vec![8; 4]),
        ];
        let message = Message::new(24, &[9; 4], &attributes);
        let mut expected = vec![9; 4];
        for (kind, value, padding) in [(1u16, vec![7; 5], 3), (2, vec![8; 4], 0)] {
            expected.extend(u16::try_from(4 + value.len()).unwrap().to_ne_bytes());
            expected.extend(kind.to_ne_bytes());
            expected.extend(value);
            expected.resize(expected.len() + padding, 0);
        }
        assert_eq!(message.bytes, expected);
    }

    #[test]
    fn datagram_with_several_messages_is_parsed() {
        let answer = |byte| {
            bytes(NetlinkPayload::InnerMessage(Message::new(
                24,
                &[byte; 5],
                &[],
            )))
        };
        let two = [answer(1), answer(2)].concat();
        let both = vec![vec![1; 5], vec![2; 5]];
        assert_eq!(hear(&two), (both.clone(), Ok(true)));
        for (end, how) in [
            (done(0), Ok(false)),
            (error(0), Ok(false)),
            (done(libc::EOPNOTSUPP), Err(Some(libc::EOPNOTSUPP))),
            (error(libc::EPERM), Err(Some(libc::EPERM))),
        ] {
            assert_eq!(hear(&[two.clone(), end].concat()), (both.clone(), how));
        }
    }

    #[test]
    fn malformed_netlink_message_is_an_error() {
        assert_eq!(hear(&[1, 2, 3]).1, Err(None));
        // The length exceeds the datagram.
        let mut cut = done(0);
        cut[0] = 200;
        assert_eq!(hear(&cut).1, Err(None));
    }
}
