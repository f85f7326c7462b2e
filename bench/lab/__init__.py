"""Several internet hosts on one machine: what only a kernel can show is measured and tested here."""

from bench.lab.netlab import CLIENT, SERVER, Lab, LabFailed, Network, needs, open_lab

__all__ = ["CLIENT", "SERVER", "Lab", "LabFailed", "Network", "needs", "open_lab"]
