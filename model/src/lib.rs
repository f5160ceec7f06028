//! Pure arithmetic of TCP retransmission schedules as the Linux kernel runs them.
