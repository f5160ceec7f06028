#!/bin/bash -e
# Mounts the disk with the programs, for containerd and the kubelet: the root file system is in memory.
modprobe virtio_pci || true
modprobe virtio_blk
mkdir -p /node
mount -t ext4 /dev/vda /node
