"""Sends and receives between the ranks of a pipeline.

A channel is a sending rank, a receiving rank and a direction of the model (forward or backward). The messages of a
channel are sent and received in the same order; those of different channels are independent of each other. NCCL matches
messages by their order only, so each channel has a communicator of its own there. Gloo matches them by tags, and sends
from host memory only: tensors on a GPU are copied there and back.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwell.parallel.collectives import Collectives
from shardwell.parallel.mesh import pair_group
from shardwell.parallel.traffic import TrafficKind
from shardwell.parallel.transport import Work, lend

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
        self._group: dict[Channel, Any] = dict.fromkeys(channels, ranks.group)
        if ranks.backend == "nccl":
            for channel in channels:
                pairs = [[line[channel[0]], line[channel[1]]] for line in lines]
                self._group[channel] = pair_group(own, pairs, ranks.backend)
        self._sending: list[tuple[Any, Tensor]] = []
        if ranks.backend == "nccl" and not ranks.is_simulated:
            self._connect(channels)

    @property
    def waits_on_device(self) -> bool:
        """Whether a message that is not there yet occupies the device, as NCCL's kernels do."""
        return not self._pipe.host_drives_progress and not self._pipe.rank_group.is_simulated

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
        self._sending = [(work, kept) for work, kept in self._sending if not work.is_completed()]
        if self._is_through_host(tensor):
            tensor = tensor.cpu()  # the host waits for the device, as gloo's collectives do
        sent = lend(tensor) if self._pipe.host_drives_progress else tensor
        target, group = self.line[channel[1]], self._group[channel]
        try:
            work = dist.isend(sent, target, group=group, tag=self._tag(channel, sends=True))
        except RuntimeError as error:
            self._pipe.links.raise_cause(error)
        self._sending.append((work, tensor))

    def receive(self, into: Tensor, channel: Channel, kind: TrafficKind = TrafficKind.PIPE) -> Work:
        """Start to receive the next message of a channel."""
        source, group = self.line[channel[0]], self._group[channel]
        if self._pipe.rank_group.is_simulated:
            self._pipe.count_message(into.nbytes, source, kind)
            return Work()
        place = torch.empty_like(into, device="cpu") if self._is_through_host(into) else into
        try:
            work = dist.irecv(place, source, group=group, tag=self._tag(channel, sends=False))
        except RuntimeError as error:
            self._pipe.links.raise_cause(error)
        self._pipe.count_message(into.nbytes, source, kind)
        arrived = Work(partial(self._pipe.direct.wait, [work]))
        return arrived if place is into else arrived.then(partial(into.copy_, place))

    def _is_through_host(self, tensor: Tensor) -> bool:
        return self._pipe.host_drives_progress and self._pipe.device.is_on_device(tensor)

    def finish_sends(self) -> None:
        """Wait until the memory of everything that was sent may be used again."""
        sending, self._sending = self._sending, []
        if sending:
            self._pipe.direct.wait([work for work, _ in sending])

    def _tag(self, channel: Channel, *, sends: bool) -> int:
        number = self._count[channel, sends] = self._count.get((channel, sends), 0) + 1
        return self._first_tag[channel] + number % _NUM_TAGS
