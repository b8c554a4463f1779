"""ZeRO-Offload and ZeRO-Infinity: everything that is stored below the device, in host memory or on NVMe disks."""
