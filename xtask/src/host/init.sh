#!/bin/sh
# The first program. Container runtimes call pivot_root(2), which requires that the root is a mount point. rootfs is
# not, so it is mounted again over itself.
mount --bind / /mnt
cd /mnt || exit
mount --move . /
exec chroot . /lib/systemd/systemd
