#!/bin/bash -e
# The disk, with the programs, for containerd and the kubelet: the file system that the machine boots with is in memory.
modprobe virtio_pci || true
modprobe virtio_blk
mkdir -p /node
mount -t ext4 /dev/vda /node
