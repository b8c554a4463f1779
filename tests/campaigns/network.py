"""Two hosts that run a job, and a third one of somebody else: network namespaces on this machine."""

from __future__ import annotations

from benchmarks.hosts import ADDRESSES, Hosts, HostsError, _holder

STRANGER = 2  # the host of somebody else; 0 and 1 run the job


class Network(Hosts):
    """The hosts of `benchmarks/hosts.py`, and a third one that reaches both."""

    def _hold(self) -> None:
        super()._hold()
        command = ["unshare", "--net"]
        if self._enter:
            command = ["nsenter", "--target", str(self._holders[0].pid), *self._enter, *command]
        self._holders.append(_holder(command))

    def _join(self) -> None:
        super()._join()
        self._call(STRANGER, ["ip", "link", "set", "lo", "up"])
        for host, address in enumerate(ADDRESSES):
            name, there, here = f"way{host}", f"10.78.{host}.1", f"10.78.{host}.9"
            peer = str(self._holders[host].pid)
            self._call(STRANGER, ["ip", "link", "add", name, "type", "veth", "peer", "name", name, "netns", peer])
            for where, own in ((host, there), (STRANGER, here)):
                self._call(where, ["ip", "address", "add", f"{own}/24", "dev", name])
                self._call(where, ["ip", "link", "set", name, "up"])
            self._call(STRANGER, ["ip", "route", "add", f"{address}/32", "via", there])


def why_no_network() -> str | None:
    """Why there can be no such hosts here, or None."""
    try:
        with Network():
            return None
    except HostsError as refusal:
        return str(refusal)
