//! More connections than a server takes, and handshakes that nobody completes.

use super::*;
