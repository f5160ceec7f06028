#!/bin/sh
# The first program. Container runtimes call pivot_root(2), which wants a root that is mounted on something: rootfs is
# mounted on nothing, so that it is mounted once more, over itself.
mount --bind / /mnt
cd /mnt || exit
mount --move . /
exec chroot . /lib/systemd/systemd
