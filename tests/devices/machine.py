"""Device files and sysfs entries of machines that are not here, below a folder.

Sources: /dev names and /sys/devices/virtual/neuron_device of aws-neuron-driver; the vendor file of
every PCI device behind /sys/class/infiniband (Linux, ABI documents sysfs-class-infiniband
and sysfs-bus-pci); DMI product_name holds the instance type on EC2.
"""

from __future__ import annotations


def put(path, text=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def efa(root, count=1, vendor="0x1d0f"):
    for number in range(count):
        put(root / f"sys/class/infiniband/rdmap{number}s0/device/vendor", f"{vendor}\n")


def instance(root, kind):
    put(root / "sys/devices/virtual/dmi/id/product_name", f"{kind}\n")


def trn2(root, devices=16, adapters=16):
    for number in range(devices):
        put(root / f"dev/neuron{number}")
    efa(root, adapters)
    instance(root, "trn2.48xlarge")
    return root


def p5en(root, devices=8, adapters=16):
    for number in range(devices):
        put(root / f"dev/nvidia{number}")
    efa(root, adapters)
    instance(root, "p5en.48xlarge")
    return root


def maps(root, *ranges):
    """/proc/self/maps with these (start, end) ranges (proc(5))."""
    lines = [f"{start:x}-{end:x} rw-s 00000000 00:06 331 /dev/neuron0" for start, end in ranges]
    put(root / "proc/self/maps", "\n".join(lines) + "\n")
