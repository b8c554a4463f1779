"""Sends and receives between the ranks of a pipeline.

A channel is a sending rank, a receiving rank and a direction of the model (forward or backward). The messages of a
channel are sent and received in the same order; those of different channels are independent of each other. NCCL matches
messages by their order only, so each channel has a communicator of its own there. Gloo matches them by tags, and sends
from host memory only: tensors on a GPU are copied there and back.

A message of NCCL is a kernel that occupies the device until the other rank has launched its own. Where that could lock
ranks up (`through_host`), messages go through gloo there, too.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwell.parallel.collectives import Collectives
from shardwell.parallel.mesh import pair_group
from shardwell.parallel.traffic import TrafficKind
from shardwell.parallel.transport import Work, lend, wait_all
from shardwell.parallel.waits import Need, Needs

Channel = tuple[int, int, str]  # the sending and the receiving rank along the pipeline, and the direction
_FIRST_TAG, _NUM_TAGS = (1 << 30) + 16, 1 << 20  # of each channel; collectives and links use smaller tags


class PointToPoint:
    """The channels of one rank of a pipeline."""

    def __init__(self, pipe: Collectives, lines: Sequence[Sequence[int]], channels: Sequence[Channel]) -> None:
        """Open the channels. All ranks must call this: `lines` are the global ranks of each pipeline of the job."""
        self._pipe = pipe
        ranks = pipe.rank_group
        own = ranks.global_rank(ranks.rank)
        self.line = list(next(line for line in lines if own in line))
        self.rank = self.line.index(own)
        self._first_tag = {channel: _FIRST_TAG + number * _NUM_TAGS for number, channel in enumerate(channels)}
        self._count: dict[tuple[Channel, bool], int] = {}  # messages so far, sent and received
        self.operation = "a pipeline"  # that waits for messages, for errors
        self._group: dict[Channel, Any] = dict.fromkeys(channels, ranks.group)
        if ranks.backend == "nccl":
            for channel in channels:
                pairs = [[line[channel[0]], line[channel[1]]] for line in lines]
                self._group[channel] = pair_group(own, pairs, ranks.backend)
        self._sending: list[tuple[Any, Tensor, bool, Need]] = []  # with whether it goes through the host
        self._host_group, self._uses_host = ranks.group, False
        if ranks.backend == "nccl" and not ranks.is_simulated:
            self._connect(channels)
            if self.waits_on_device:
                self._host_group = pair_group(own, lines, "gloo")
            opened = [*self._group.values(), self._host_group]
            pipe.links.channels = [group for group in opened if group is not None and group is not ranks.group]

    @property
    def waits_on_device(self) -> bool:
        """Whether a message that is not there yet keeps CUDA from loading a kernel, as NCCL's kernels do."""
        loads_at_start = os.environ.get("CUDA_MODULE_LOADING", "").upper() == "EAGER"
        return not self._pipe.host_drives_progress and not self._pipe.rank_group.is_simulated and not loads_at_start

    @contextlib.contextmanager
    def through_host(self) -> Iterator[None]:
        """Send and receive through host memory inside, where no message occupies the device; all ranks must do so."""
        self._uses_host = True
        try:
            yield
        finally:
            self._uses_host = False

    def _connect(self, channels: Sequence[Channel]) -> None:
        """Connect the communicators, one after the other on all ranks.

        NCCL's hosts connect when a communicator is first used, and wait for each other there. In a batch a rank would
        wait so for one that cannot send before it has got something from this rank.
        """
        for channel in channels:
            number = torch.zeros(1, dtype=torch.int64, device=self._pipe.device.torch_device)
            if self.rank == channel[0]:
                self.send(number, channel)
            elif self.rank == channel[1]:
                self.receive(number, channel, TrafficKind.SETUP).wait()
            self.finish_sends()
            number.tolist()  # the host waits

    def send(self, tensor: Tensor, channel: Channel) -> None:
        """Start to send a contiguous tensor, whose memory must not change before `finish_sends`."""
        if self._pipe.rank_group.is_simulated:
            return
        self._sending = [entry for entry in self._sending if not entry[0].is_completed()]
        by_host = self._pipe.host_drives_progress or self._uses_host
        if by_host and self._pipe.device.is_on_device(tensor):
            tensor = tensor.cpu()  # the host waits for the device, as gloo's collectives do
        sent = lend(tensor) if by_host else tensor
        target, group = self.line[channel[1]], self._group_of(channel)
        tag, need = self._tag(channel, sends=True), self._need(channel, sends=True)
        try:
            work = dist.isend(sent, target, group=group, tag=tag)
        except RuntimeError as error:
            self._pipe.links.raise_cause(error)
        self._sending.append((work, tensor, by_host, need))

    def receive(self, into: Tensor, channel: Channel, kind: TrafficKind = TrafficKind.PIPE) -> Work:
        """Start to receive the next message of a channel."""
        source, group = self.line[channel[0]], self._group_of(channel)
        if self._pipe.rank_group.is_simulated:
            self._pipe.count_message(into.nbytes, source, kind)
            return Work()
        by_host = self._pipe.host_drives_progress or self._uses_host
        place = torch.empty_like(into, device="cpu") if by_host and self._pipe.device.is_on_device(into) else into
        tag, need = self._tag(channel, sends=False), self._need(channel, sends=False)
        try:
            work = dist.irecv(place, source, group=group, tag=tag)
        except RuntimeError as error:
            self._pipe.links.raise_cause(error)
        self._pipe.count_message(into.nbytes, source, kind)
        arrived = Work(partial(self._wait, [work], by_host, [need]))
        return arrived if place is into else arrived.then(partial(into.copy_, place))

    def _group_of(self, channel: Channel) -> Any:
        return self._host_group if self._uses_host else self._group[channel]

    def _wait(self, works: list[Any], by_host: bool, needs: Needs) -> None:
        """Wait for messages: on the host for those that go through it, and raise the cause if a peer has failed."""
        if not by_host or self._pipe.host_drives_progress:
            self._pipe.direct.wait(works, needs)
            return
        links = self._pipe.links
        waits = contextlib.nullcontext() if links.agreement is None else links.agreement.waits.during(needs)
        try:
            with waits:
                wait_all(works, links.poll_failures, links.abandon)
        except RuntimeError as error:
            links.raise_cause(error)

    def finish_sends(self) -> None:
        """Wait until the memory of everything that was sent may be used again."""
        sending, self._sending = self._sending, []
        for by_host in (False, True):
            if those := [one for one in sending if one[2] is by_host]:
                self._wait([work for work, *_ in those], by_host, [need for *_, need in those])

    def _tag(self, channel: Channel, *, sends: bool) -> int:
        number = self._count[channel, sends] = self._count.get((channel, sends), 0) + 1
        if (agreement := self._pipe.agreement) is not None:
            agreement.waits.messages[self._name(channel, sends=sends)] = number
        return self._first_tag[channel] + number % _NUM_TAGS

    def _name(self, channel: Channel, *, sends: bool) -> str:
        source, target, way = channel
        return f"{self.line[source]} {'sends' if sends else 'receives'} {self.line[target]} {way}"

    def _need(self, channel: Channel, *, sends: bool) -> Need:
        """Return what the last message of a channel needs of its other rank: that it is begun there, too."""
        other = self.line[channel[1] if sends else channel[0]]
        what = "until its message is taken by" if sends else f"in {self.operation} for a message of"
        return Need([other], self._name(channel, sends=not sends), self._count[channel, sends], what)
