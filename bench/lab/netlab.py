"""The network lab as a context: `with open_lab(Network(rtt_ms=80)) as lab`.

`netlab.sh` builds hosts, routers and lines in network namespaces, `nfqdelay.py` is the delay of the lines.  Namespaces outlive the
process that made them, so a lab is brought down however its block is left; the next lab of the same prefix would remove it as well.
The prefix comes from the process id and a count: two labs of one machine never meet, though their addresses are the same.

Everything here blocks (building takes about a second) and needs no event loop: the lab is built before an event loop starts, or in
a thread.  A command on a host is an argument list that starts with `ip netns exec`, which becomes the command: its process id is the
command's own, and a signal to it hits the command and not a shell around it.

Trouble (`cut`, `black_hole`, `readdress`) is made at the core router or on the host.  To make a peer *vanish*, cut its line before
killing it: the kernel of a killed process still says goodbye for it.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CLIENT", "SERVER", "Lab", "LabFailed", "Network", "needs", "open_lab"]

SCRIPT = Path(__file__).resolve().parent / "netlab.sh"
# The two hosts with public addresses, one router between them.
CLIENT, SERVER = "c", "s"
TOOLS = ("ip", "tc", "iptables", "nft", "python3", "chrt", "sysctl", "setsid")
PACKAGES = "iproute2 iptables nftables util-linux procps python3"
# Building takes a second; a machine at work on something else takes longer, and a lab that hangs must be told from one that is slow.
BUILD_S = 60.0
_numbers = itertools.count()


class LabFailed(Exception):
    """The lab could not be built or changed; the text holds what the tool said."""


@dataclass(frozen=True, slots=True)
class Network:
    """What the lines are like.  Every host has an access line to one core router: a way from host to host crosses two of them.

    rate_mbit: of each access line, each way (None: no limit).  rtt_ms: there and back between two hosts.  loss_percent: of the
    packets that a host sends.  nat_a, nat_b: cone, shift, symmetric or full, for the hosts behind the two home routers.
    public, routers: a world instead of the two homes: p1.. with public addresses, h1.. each behind a router n1.. of that kind,
    all in networks of their own and with addresses that nodes take for global ones.
    """

    rate_mbit: float | None = 200.0
    rtt_ms: float = 80.0
    loss_percent: float = 0.0
    jitter_ms: float = 0.0
    nat_a: str = "cone"
    nat_b: str = "cone"
    hosts_a: int = 1
    hosts_b: int = 1
    public: int = 0
    routers: tuple[str, ...] = ()

    def environment(self) -> dict[str, str]:
        """The settings of `netlab.sh`; a packet there and back crosses four delays."""
        return {
            "RATE": "none" if self.rate_mbit is None else f"{self.rate_mbit:g}mbit",
            "DELAY_MS": f"{self.rtt_ms / 4:g}",
            "JITTER_MS": f"{self.jitter_ms:g}",
            "LOSS": f"{self.loss_percent:g}",
            "NAT_A": self.nat_a,
            "NAT_B": self.nat_b,
            "HOSTS_A": str(self.hosts_a),
            "HOSTS_B": str(self.hosts_b),
            "PUBLIC": str(self.public),
            "ROUTERS": " ".join(self.routers),
        }


def needs() -> str | None:
    """Why no lab can be built here; None if one can."""
    if os.name != "posix" or not Path("/proc/self/ns/net").exists():
        return "the lab needs Linux with network namespaces"
    if os.geteuid() != 0:
        return "the lab needs root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"{', '.join(missing)} missing: apt-get install {PACKAGES}"
    tried = subprocess.run(["ip", "netns", "add", probe := f"probe{os.getpid()}"], capture_output=True, text=True, check=False)
    if tried.returncode:
        return f"network namespaces are refused: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", probe], capture_output=True, check=False)
    return None


class Lab:
    """A lab that is up.  Made by `open_lab`; all methods block, and raise LabFailed with the words of the tool that refused."""

    def __init__(self, prefix: str, network: Network) -> None:
        self.prefix = prefix
        self.network = network

    def exec(self, host: str, *argv: str) -> list[str]:
        """The command line that runs `argv` on a host: s, c, a, b, na, nb, r (and a2.., b2..); of a world p1.., n1.., h1.., r."""
        return ["ip", "netns", "exec", f"{self.prefix}-{host}", *argv]

    def run(self, host: str, *argv: str) -> str:
        """Run a command on a host to its end; returns its stdout."""
        return _run(self.exec(host, *argv))

    def addr(self, host: str) -> str:
        """The address of a host; for na, nb and n1.. the outside address of the home router."""
        return self._script("addr", host).strip()

    def set_congestion(self, name: str) -> None:
        """The default congestion control of c and s, for programs that do not choose their own."""
        for host in (CLIENT, SERVER):
            self.run(host, "sysctl", "-qw", f"net.ipv4.tcp_congestion_control={name}")

    def cut(self, host: str) -> None:
        """Cut the access line of a host (s, c, na, nb, p1.., n1..): nothing passes, nobody is told."""
        self.run("r", "ip", "link", "set", f"r-{host}", "down")

    def mend(self, host: str) -> None:
        """Undo `cut`."""
        self.run("r", "ip", "link", "set", f"r-{host}", "up")

    def black_hole(self, address: str) -> None:
        """Drop everything on the way to an address, silently."""
        self.run("r", "iptables", "-I", "FORWARD", "-d", address, "-j", "DROP")

    def unblock(self, address: str) -> None:
        """Undo `black_hole`."""
        self.run("r", "iptables", "-D", "FORWARD", "-d", address, "-j", "DROP")

    def map_ports(self, number: int) -> None:
        """From now on the router of `number` lets strangers in to ports 20000-20099 of its host, as if its owner had mapped them."""
        router, host = f"n{number}", self.addr(f"h{number}")
        rule = ("iifname", f"w-{router}", "tcp", "dport", "20000-20099", "dnat", "to", host)
        self.run(router, "nft", "add", "rule", "ip", "lab", "pre", *rule)

    def unmap_ports(self, number: int) -> None:
        """Undo `map_ports`.  Of a router that is not `full`, which has its ports mapped from the start."""
        self.run(f"n{number}", "nft", "flush", "chain", "ip", "lab", "pre")

    def answer_strangers(self, number: int) -> None:
        """From now on the router of `number` refuses strangers in words, where home routers are silent.  For good."""
        self.run(f"n{number}", "nft", "flush", "chain", "ip", "lab", "inp")

    def renumber(self, number: int, last: int = 9) -> None:
        """Give the router of `number` another outside address, as a provider does; 2, the one from the start: a reboot.

        Everything that it translated is forgotten with the old address.  Not for routers of the kind `shift`, whose rule names theirs.
        """
        router, network = f"n{number}", self.addr(f"n{number}").rpartition(".")[0]
        self.run(router, "ip", "addr", "flush", "dev", f"w-{router}")
        self.run(router, "ip", "addr", "add", f"{network}.{last}/24", "dev", f"w-{router}")
        self.run(router, "ip", "route", "add", "default", "via", f"{network}.1")

    def readdress_client(self, last: int = 9) -> str:
        """Take the address of `c` away and give it another one, as a provider does; returns it.  Its connections are not told."""
        address = f"198.18.11.{last}"
        self.run(CLIENT, "ip", "addr", "flush", "dev", "w-c")
        self.run(CLIENT, "ip", "addr", "add", f"{address}/24", "dev", "w-c")
        self.run(CLIENT, "ip", "route", "add", "default", "via", "198.18.11.1")
        return address

    def up(self) -> None:
        self._script("up")

    def down(self) -> None:
        self._script("down")

    def _script(self, *arguments: str) -> str:
        return _run([str(SCRIPT), *arguments], {**os.environ, "P": self.prefix, **self.network.environment()})


@contextmanager
def open_lab(network: Network = Network()) -> Iterator[Lab]:
    """A lab for as long as the block lasts.  Raises LabFailed; ask `needs` first."""
    lab = Lab(f"lab{os.getpid()}x{next(_numbers)}", network)
    try:
        lab.up()
        yield lab
    finally:
        lab.down()


def _run(argv: list[str], environment: dict[str, str] | None = None) -> str:
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=BUILD_S, env=environment, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LabFailed(f"{' '.join(argv)}: {error}") from error
    if done.returncode:
        raise LabFailed(f"{' '.join(argv)}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout
